"""What `make gpu-check` runs with engines on GPUs, on the CPU: the same functions, models and checks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tests.gpu.engines import BACKENDS, PAIRS, SHARE
from tests.services.worker.kv.vllm.two_engines import Found, hand_overs, refused_backend, show, strays_of
from tests.tiny_models import make_gpt_oss, make_llama, make_qwen3


def exact(found: Found, *, single: int = 0) -> None:
    """Greedy tokens of a plain engine, and each KV pulled. `single`: hand-overs of a prompt of one token to an engine
    with windows, which computes the last token of a prompt again and therefore imports nothing.
    """
    print(show(found))
    assert found.distinct > 100
    assert found.one_by_one == found.back == found.resumed == found.of
    assert found.at_once == [found.of] * len(found.at_once)
    nothing = {"cached": single} if single else {}
    assert found.pulls == {"ok": found.wanted - single, **nothing}
    assert found.zeroed < found.of / 2
    assert found.prefixes == [True, True]
    assert 0 < found.cached <= 600
    assert found.strays == []


@pytest.mark.slow
async def test_a_model_with_windows_and_experts_is_handed_over_with_asynchronous_scheduling(tmp_path: Path) -> None:
    found = await hand_overs(make_gpt_oss(tmp_path), "cpu", dtype="float32")
    exact(found, single=9)  # one in each round
    assert found.asynchronous
    assert found.lossy["int8"] > 0.5


@pytest.mark.slow
async def test_between_ranks_and_stages(tmp_path: Path) -> None:
    """Without asynchronous scheduling, which vLLM's CPU backend cannot do with pipeline stages."""
    source, target = ({**each, "async_scheduling": False} for each in PAIRS["tp2 to pp2"])
    exact(await hand_overs(make_llama(tmp_path), "cpu", source=source, target=target, lossy=False, dtype="float32"))


def rank(pid: int, own: int | None, *contexts: int) -> dict[str, Any]:
    return {"pid": pid, "own": own, "contexts": list(contexts)}


def test_contexts_on_devices_of_others_are_found() -> None:
    ranks = [rank(11, 0, 0), rank(12, 1, 0, 1)]
    assert strays_of("p", {"engine": rank(10, None), "ranks": ranks}) == [
        "process 12 of p, whose device is 1, has a context on device 0"
    ]
    assert strays_of("p", {"engine": rank(10, None, 0), "ranks": ranks[:1]}) == [
        "process 10 of p, whose device is None, has a context on device 0"
    ]
    assert strays_of("d", {"engine": rank(10, None, 1), "ranks": [rank(10, 1, 1)]}) == []  # the one rank is the engine


def test_a_backend_that_a_gpu_lacks_is_told_from_an_engine_that_fails() -> None:
    log = "ValueError: Selected backend AttentionBackendEnum.FLASHINFER is not valid for this configuration. Reason: "
    error = RuntimeError(f"d died: …\n{log}['sink setting not supported']\nmore")
    assert refused_backend(error) == "['sink setting not supported']"
    with pytest.raises(RuntimeError, match="out of memory"):
        refused_backend(RuntimeError("d died: CUDA out of memory"))


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize(("make", "architecture"), [(make_qwen3, "Qwen3"), (make_gpt_oss, "GptOss")])
def test_vllm_accepts_the_arguments_of_each_check(
    make: Callable[[Path], Path], architecture: str, backend: str | None, tmp_path: Path
) -> None:
    """Its own parser and configuration; which backend a device has is known there alone."""
    arguments = {**SHARE, "skip_tokenizer_init": True, "max_model_len": 1280, "block_size": 128}
    config = EngineArgs(model=str(make(tmp_path)), attention_backend=backend, **arguments).create_engine_config()
    assert config.model_config.architecture == f"{architecture}ForCausalLM"
    assert config.attention_config.backend == (AttentionBackendEnum[backend] if backend else None)


def test_the_whole_qwen3_has_the_kv_of_qwen3_0_6b(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.tiny_models.save_random", lambda config, path, *_: config.save_pretrained(path) or path)
    config = EngineArgs(model=str(make_qwen3(tmp_path, full=True)), skip_tokenizer_init=True).create_model_config()
    shape = config.get_total_num_hidden_layers(), config.get_total_num_kv_heads(), config.get_head_size()
    assert shape == (28, 8, 128)
