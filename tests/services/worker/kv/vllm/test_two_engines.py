"""What `make gpu-check` runs with two engines on a GPU, on the CPU."""

from pathlib import Path

import pytest

from tests.services.worker.kv.vllm.two_engines import hand_overs, show

pytestmark = [pytest.mark.slow, pytest.mark.alone]


async def test_two_engines_that_schedule_asynchronously_hand_over_the_plain_ones_tokens(tmp_path: Path) -> None:
    found = await hand_overs(tmp_path, "cpu", dtype="float32")
    print(show(found))
    assert found.asynchronous
    assert found.distinct > 100
    assert found.one_by_one == found.back == found.of
    assert found.at_once == [found.of] * len(found.at_once)
    assert found.pulls == {"ok": found.wanted}
    assert found.zeroed < found.of / 2
    assert found.lossy["int8"] > 0.5
