"""Instances of two ranks on two GPUs, each process with a context on its own device alone.
`tests/services/worker/kv/vllm/test_two_engines.py` runs the same on a CPU.
"""

from pathlib import Path

import pytest
import torch

from tests.gpu.engines import PAIRS, SHARE

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs two CUDA devices; torch sees {torch.cuda.device_count()}"
)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("pair", PAIRS)
async def test_between_ranks_and_stages(pair: str, tmp_path: Path) -> None:
    """float32 by an attention backend that has it; pipeline stages schedule as vLLM has them do by default."""
    from tests.services.worker.kv.vllm.two_engines import hand_overs, show
    from tests.tiny_models import make_llama

    source, target = ({"async_scheduling": None, **each} if "pp" in each else each for each in PAIRS[pair])
    options = {"dtype": "float32", "attention_backend": "TRITON_ATTN", **SHARE}
    found = await hand_overs(make_llama(tmp_path), "cuda", source=source, target=target, lossy=False, **options)
    print(f"\n{pair}: {show(found)}")
    assert found.distinct > 100
    assert found.one_by_one == found.back == found.of
    assert found.at_once == [found.of] * len(found.at_once)
    assert found.pulls == {"ok": found.wanted}
    assert found.zeroed < found.of / 2
    assert found.prefixes == [True, True]
    assert 0 < found.cached <= 600
    assert found.strays == []
