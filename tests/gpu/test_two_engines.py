"""A prefill and a decode instance on one GPU, beside a plain one. `tests/services/worker/kv/vllm/test_two_engines.py`
runs the same on a CPU.
"""

from pathlib import Path

import pytest
import torch

from tests.gpu.engines import SHARE
from tests.services.worker.kv.vllm.two_engines import hand_overs, show
from tests.tiny_models import make_llama

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(torch.version.cuda is None and torch.version.hip is None, reason="needs torch for a GPU"),
]


async def test_tokens_are_those_of_a_plain_engine(tmp_path: Path) -> None:
    """float32 by an attention backend that has it: what shares a batch makes no difference then."""
    found = await hand_overs(make_llama(tmp_path), "cuda", dtype="float32", attention_backend="TRITON_ATTN", **SHARE)
    print(f"\nfloat32: {show(found)}")
    assert found.asynchronous
    assert found.distinct > 100
    assert found.one_by_one == found.back == found.resumed == found.of
    assert found.at_once == [found.of] * len(found.at_once)
    assert found.pulls == {"ok": found.wanted}
    assert found.zeroed < found.of / 2
    assert found.lossy["int8"] > 0.5
    assert found.prefixes == [True, True]
    assert 0 < found.cached <= 600
    assert found.strays == []


async def test_as_it_serves(tmp_path: Path) -> None:
    """bfloat16, vLLM's own choice of attention, CUDA graphs. Tokens may differ where two are about as likely, since a
    prompt that is computed here and its last token alone go through unlike kernels: most must be the same.
    """
    model = make_llama(tmp_path, head_dim=128)
    found = await hand_overs(model, "cuda", dtype="bfloat16", enforce_eager=False, **SHARE)
    print(f"\nbfloat16: {show(found)}")
    assert found.asynchronous
    assert found.pulls == {"ok": found.wanted}
    assert found.zeroed < found.of / 2
    assert found.one_by_one > found.of / 2
