"""Models of other shapes than Llama's, and attention backends that lay KV out in ways of their own, on one GPU: KV goes
from an instance with one of them to an instance with another. `tests/services/worker/kv/vllm/test_two_engines.py` runs
the same models on a CPU.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.engines import BACKENDS, SHARE

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"), pytest.mark.timeout(900)]


async def test_qwen3_hands_over_the_plain_engines_tokens(tmp_path: Path) -> None:
    from tests.services.worker.kv.vllm.two_engines import hand_overs, show
    from tests.tiny_models import make_qwen3

    options = {"dtype": "float32", "attention_backend": "TRITON_ATTN", **SHARE}
    found = await hand_overs(make_qwen3(tmp_path), "cuda", **options)
    print(f"\nQwen3, float32: {show(found)}")
    assert found.one_by_one == found.back == found.of
    assert found.pulls == {"ok": found.wanted}
    assert found.zeroed < found.of / 2
    assert found.prefixes == [True, True]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
async def test_backends_understand_each_others_kv(kind: str, backend: str, tmp_path: Path) -> None:
    """From vLLM's own choice of a backend to this one, whose blocks of 128 tokens it may divide, in bfloat16. Tokens
    may differ where two are about as likely: most first ones must be the same, and few with zeroed KV.
    """
    from tests.services.worker.kv.vllm.two_engines import hand_overs, refused_backend, show
    from tests.tiny_models import make_gpt_oss, make_qwen3

    model = make_qwen3(tmp_path, full=True) if kind == "qwen3" else make_gpt_oss(tmp_path)
    target: dict[str, Any] = {"attention_backend": backend, "block_size": 128}
    try:
        found = await hand_overs(model, "cuda", target=target, lossy=False, dtype="bfloat16", **SHARE)
    except RuntimeError as error:
        pytest.skip(f"{backend} on {torch.cuda.get_device_name()}: {refused_backend(error)}")
    print(f"\n{kind}, {backend}: {show(found)}")
    single = 0 if kind == "qwen3" else found.pulls["cached"]  # prompts of one token, of which windows import nothing
    assert found.pulls["ok"] == found.wanted - single
    assert found.first > 0.5
    assert found.zeroed < found.of / 2
    assert 0 < found.cached <= 600
    assert found.strays == []
