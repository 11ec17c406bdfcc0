"""Speculative decoding where prompts are computed, where tokens are, and on both sides: the tokens are those of an
engine without it, and KV is pulled as between plain engines.
"""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine_client import Engine, emptied, handed_over, identical
from tests.tiny_models import make_eagle, make_llama, make_mtp

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TOKENS = 24
KINDS = ("ngram", "own draft", "other draft", "eagle", "mtp")


def prompts() -> list[list[int]]:
    """Phrases that return, which n-grams find: of 1 to some hundred tokens, and ends around those of blocks."""
    phrase = [7, 300, 41, 299, 12, 180, 33]
    return [(phrase * 80)[:length] for length in (1, 2, 31, 32, 33, 64, 100, 300, 500)]


def speculation(kind: str, folder: Path, model: Path) -> dict[str, Any]:
    if kind == "mtp":
        return {"method": "mtp", "num_speculative_tokens": 1}
    if kind == "eagle":
        return {"method": "eagle", "num_speculative_tokens": 3, "model": str(make_eagle(folder / "eagle", model))}
    if kind == "ngram":
        return {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    draft = model if kind == "own draft" else make_llama(folder / "draft", kv_heads=4, seed=9)
    return {"method": "draft_model", "num_speculative_tokens": 3, "model": str(draft)}


@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_are_those_without_it(kind: str, tmp_path: Path) -> None:
    model, texts = (make_mtp if kind == "mtp" else make_llama)(tmp_path / "model"), prompts()
    drafts: dict[str, Any] = {"speculative_config": speculation(kind, tmp_path, model)}
    plain = Engine("plain", model, dtype="float32")
    one = Engine("one", model, dtype="float32", **drafts)
    other = Engine("other", model, dtype="float32", block_size=64, **drafts)
    async with AsyncExitStack() as entered:
        for engine in (plain, one, other):
            await entered.enter_async_context(engine)
        references = [await plain.generate(text, TOKENS) for text in texts]
        for source, target in ((plain, one), (one, plain), (one, other)):
            for engine in (source, target):
                await engine.ask("reset")
            target.events.clear()
            outputs = [await handed_over(source, target, text, new_tokens=TOKENS) for text in texts]
            assert identical(outputs, references) == len(texts), (source.name, target.name)
            assert await target.pulls(len(texts)) == {"ok": len(texts)}
            await emptied(target)
        drafted = [await engine.ask("levels") for engine in (one, other)]
        assert all(each["drafted"] > 0 for each in drafted)
        assert all(each["accepted"] <= each["drafted"] for each in drafted)
        if kind in ("ngram", "own draft"):
            assert all(each["accepted"] > 0 for each in drafted)
        await other.ask("reset")
        await other.ask("fault", zero=True, corrupt=False)
        zeroed = [await handed_over(one, other, text, new_tokens=TOKENS) for text in texts]
        assert identical(zeroed, references) < len(texts)
