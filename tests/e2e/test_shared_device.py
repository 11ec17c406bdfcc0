"""What `make gpu-check` runs with two instances of a cluster file on one GPU, on the CPU."""

from pathlib import Path

import pytest

from tests.gpu.shared_device import NEW_TOKENS, PROMPTS, two_instances

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


async def test_a_prefill_and_a_decode_instance_share_a_device(tmp_path: Path) -> None:
    served = await two_instances(tmp_path, "cpu")
    assert [len(answer) for answer in served.first] == [NEW_TOKENS] * len(PROMPTS)
    assert served.second == served.first
    assert served.pulled == [True] * (2 * len(PROMPTS))
