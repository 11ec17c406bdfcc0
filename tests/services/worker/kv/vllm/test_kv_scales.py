"""Hand-overs between real engines of checkpoints that request KV in fp8, with static scales of K and V for each layer.

vLLM's CPU attention stores K and V divided by these scales and reads them multiplied, as devices do.
"""

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.engine_client import emptied, handed_over, identical
from services.cluster_monitor.registry import check
from services.worker.engines.vllm_start import engine_config
from services.worker.identity import fingerprint, precision_of
from services.worker.kv.rank_messages import PullEnded
from shared.errors import Incompatible, InvalidRequest
from tests.services.fake_worker import FIT, make_info
from tests.services.worker.kv.vllm.test_components import Trio
from tests.services.worker.test_settings import settings
from tests.tiny_models import make_llama, with_kv_scales

SCALES = [(0.05, 0.02), (0.3, 0.03), (0.02, 0.5)]
WIDE = {"kv_cache_dtype": "bfloat16"}  # KV in the precision of the model, whatever the checkpoint requests


def checkpoint(folder: Path, form: str = "llm-compressor", layers: int = 3) -> Path:
    base = make_llama(folder / "base", layers=layers)
    return with_kv_scales(folder / form, base, SCALES[:layers], form=form)


async def alike(trio: Trio) -> int:
    """How many of the answers' first three tokens are the plain engine's. The importer computes the last token of each
    prompt and what follows it, from pulled KV; the plain engine has the same type of KV.
    """
    await trio.forget()
    outputs = [await handed_over(trio.p, trio.d, text) for text in trio.texts]
    assert await trio.d.pulls(len(trio.texts)) == {"ok": len(trio.texts)}
    pairs = zip(outputs, trio.references, strict=True)
    return sum(output[at] == reference[at] for output, reference in pairs for at in range(3))


async def unscaled(trio: Trio) -> int:
    """As `alike`, with transfers that know no scales."""
    for engine in (trio.p, trio.d):
        await engine.ask("unscale")
    return await alike(trio)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("form", "dtype"), [("llm-compressor", "float32"), ("ModelOpt", "bfloat16")])
async def test_kv_with_the_checkpoints_scales_is_handed_over_as_it_is(tmp_path: Path, form: str, dtype: str) -> None:
    async with Trio(checkpoint(tmp_path, form), {}, {}, dtype=dtype) as trio:
        assert (trio.p.kv_dtype, trio.d.kv_dtype) == ("float8_e4m3fn", "float8_e4m3fn")
        outputs = [await handed_over(trio.p, trio.d, text) for text in trio.texts]
        assert identical(outputs, trio.references) == len(trio.texts)
        assert await trio.d.pulls(len(trio.texts)) == {"ok": len(trio.texts)}
        longest = [event for event in trio.d.events if isinstance(event, PullEnded)][-1]
        assert longest.wire_bytes == 1000 * 3 * 2 * 2 * 32  # a byte for each value
        await trio.forget()
        texts, references = trio.texts[2:], trio.references[2:]
        splits = [(1, len(text) // 3, len(text) - 1)[at % 3] for at, text in enumerate(texts)]
        outputs = [
            await handed_over(trio.p, trio.d, text, split=split) for text, split in zip(texts, splits, strict=True)
        ]
        assert identical(outputs, references) == len(texts)
        await emptied(trio.p)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_peer_with_more_bits_stores_what_the_importer_would(tmp_path: Path) -> None:
    """K and V of a first layer do not depend on how KV is stored: converted, they are those of the importer itself."""
    async with Trio(checkpoint(tmp_path, layers=1), WIDE, {}, dtype="bfloat16") as trio:
        assert (trio.p.kv_dtype, trio.d.kv_dtype) == ("bfloat16", "float8_e4m3fn")
        outputs = [await handed_over(trio.p, trio.d, text) for text in trio.texts]
        assert identical(outputs, trio.references) == len(trio.texts)
        assert await unscaled(trio) < len(trio.texts)  # of three times as many


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("wide_exports", [True, False])
async def test_conversions_use_the_checkpoints_scales(tmp_path: Path, wide_exports: bool) -> None:
    source, target = (WIDE, {}) if wide_exports else ({}, WIDE)
    async with Trio(checkpoint(tmp_path), source, target, dtype="bfloat16") as trio:
        assert {trio.p.kv_dtype, trio.d.kv_dtype} == {"bfloat16", "float8_e4m3fn"}
        assert await alike(trio) >= 20  # of 42; 39 and 27 were seen
        assert await unscaled(trio) <= 10  # 4 were seen


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_ranks_store_kv_as_the_checkpoint_requests(tmp_path: Path) -> None:
    """vLLM finds out in processes of their own, and the engine's is not told."""
    two = {"tp": 2}
    async with Trio(checkpoint(tmp_path), two, two, dtype="float32") as trio:
        assert (trio.p.kv_dtype, trio.d.kv_dtype) == ("float8_e4m3fn", "float8_e4m3fn")
        outputs = [await handed_over(trio.p, trio.d, text) for text in trio.texts]
        assert identical(outputs, trio.references) == len(trio.texts)
        assert await trio.d.pulls(2 * len(trio.texts)) == {"ok": 2 * len(trio.texts)}


@pytest.mark.parametrize("form", ["llm-compressor", "ModelOpt"])
def test_a_checkpoint_that_requests_kv_in_fp8_is_served_as_it_is(tmp_path: Path, form: str) -> None:
    model = str(checkpoint(tmp_path, form))
    made = settings(model=model, max_model_len=512)
    assert engine_config(made, {}, None).cache_config.cache_dtype in ("auto", "fp8_e4m3")
    assert precision_of(made) == ""
    base = str(tmp_path / "base")
    if form == "llm-compressor":  # as `weights` of another model: the weights themselves are as they were
        assert precision_of(settings(model=base, weights=model)) == f"unquantised-{fingerprint(model)[:8]}"


def test_dynamic_scales_are_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    model = checkpoint(tmp_path)
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config.replace('"dynamic": false', '"dynamic": true'))
    with pytest.raises(InvalidRequest, match="stored in fp8 with dynamic scales"):
        engine_config(settings(model=str(model), max_model_len=512), {}, None)
    engine_config(settings(model=str(model), max_model_len=512, engine_args=WIDE), {}, None)


@pytest.mark.parametrize("name", ["self_attn.k_scale", "self_attn.v_proj.v_scale", "self_attn.v_cache.scale"])
def test_other_scales_are_another_model(tmp_path: Path, name: str) -> None:
    """Although samples of the weights are the same."""
    folders = [tmp_path / "one", tmp_path / "same", tmp_path / "other"]
    for folder, scale in zip(folders, (0.5, 0.5, 0.25), strict=True):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        rest = {"a.weight": torch.zeros(700_000), "z.weight": torch.zeros(700_000)}  # the scale is between two samples
        save_file(rest | {f"model.layers.0.{name}": torch.tensor([scale])}, folder / "model.safetensors")
    one, same, other = (fingerprint(str(folder)) for folder in folders)
    assert one == same
    assert one != other
    first, second = (
        make_info(f"p{at}", "tcp://127.0.0.1:2", compatibility=msgspec.structs.replace(FIT, fingerprint=each))
        for at, each in enumerate((one, other))
    )
    with pytest.raises(Incompatible, match="fingerprint"):
        check(second, [first])
