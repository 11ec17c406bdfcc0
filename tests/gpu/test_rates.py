"""Transfer rates of a GPU, printed. `tests/services/worker/kv/test_rates.py` runs the same on a CPU."""

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TOKENS = 4096  # 256 MiB


def test_rates() -> None:
    from tests.gpu.rates import measure, show

    rates = measure("cuda", TOKENS)
    print(f"\n{torch.cuda.get_device_name()}\n{show(rates)}")
    assert rates["export"] > 0.5 * rates["plain copy to the host"]
    assert rates["end to end int4"] > rates["end to end"]  # a fast bus carries raw KV faster than it is coded
