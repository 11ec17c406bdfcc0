"""Two instances of a cluster file on one GPU. `tests/e2e/test_shared_device.py` runs the same on a CPU."""

from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(1200),
]


async def test_a_prefill_and_a_decode_instance_share_a_gpu(tmp_path: Path) -> None:
    from tests.gpu.shared_device import NEW_TOKENS, PROMPTS, two_instances

    served = await two_instances(tmp_path, torch.cuda.get_device_name())
    assert [len(answer) for answer in served.first] == [NEW_TOKENS] * len(PROMPTS)
    assert served.second == served.first
    assert served.pulled == [True] * (2 * len(PROMPTS))
