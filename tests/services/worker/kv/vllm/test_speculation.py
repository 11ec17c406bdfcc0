"""Speculative decoding where prompts are computed, where tokens are, and on both sides: the tokens are those of an
engine without it, and KV is pulled as between plain engines.
"""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine_client import Engine, emptied, handed_over, identical
from tests.tiny_models import make_eagle, make_llama, make_mtp

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TOKENS = 16


def prompts() -> list[list[int]]:
    """Phrases that return, which n-grams find: of 1 to some hundred tokens, and ends around those of blocks."""
    phrase = [7, 300, 41, 299, 12, 180, 33]
    return [(phrase * 80)[:length] for length in (1, 2, 32, 33, 64, 300)]


async def try_all(model: Path, speculations: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What each engine has drafted for prompts of its own. Then it computes prompts for the plain engine and for
    another one, and tokens for both.
    """
    texts, names = prompts(), list(speculations)
    plain = Engine("plain", model, dtype="float32")
    engines = {
        name: Engine(name, model, dtype="float32", block_size=(32, 64)[at % 2], speculative_config=speculation)
        for at, (name, speculation) in enumerate(speculations.items())
    }
    async with AsyncExitStack() as entered:
        for engine in (plain, *engines.values()):
            await entered.enter_async_context(engine)
        references = [await plain.generate(text, TOKENS) for text in texts]
        counts = {}
        for name, engine in engines.items():
            assert [await engine.generate(text, TOKENS) for text in texts] == references, name
            counts[name] = await engine.ask("levels")
        pairs = [(plain, each) for each in engines.values()] + [(each, plain) for each in engines.values()]
        pairs += [(engines[name], engines[names[at - 1]]) for at, name in enumerate(names) if len(names) > 1]
        for source, target in pairs:
            for engine in (source, target):
                await engine.ask("reset")
            target.events.clear()
            outputs = [await handed_over(source, target, text, new_tokens=TOKENS) for text in texts]
            assert identical(outputs, references) == len(texts), (source.name, target.name)
            assert await target.pulls(len(texts)) == {"ok": len(texts)}
            await emptied(target)
        for engine in engines.values():
            await engine.ask("reset")
            await engine.ask("fault", zero=True, corrupt=False)
            zeroed = [await handed_over(plain, engine, text, new_tokens=TOKENS) for text in texts]
            assert identical(zeroed, references) < len(texts), engine.name
    return counts


async def test_tokens_are_those_without_drafts_whatever_drafts_either_side_has(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "model")
    speculations: dict[str, dict[str, Any]] = {
        "ngram": {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        "eagle": {"method": "eagle", "model": str(make_eagle(tmp_path / "eagle", model))},
        "draft": {"method": "draft_model", "model": str(model)},
    }
    tokens = {"num_speculative_tokens": 3}
    counts = await try_all(model, {name: each | tokens for name, each in speculations.items()})
    assert all(each["drafted"] > 0 for each in counts.values())
    assert counts["ngram"]["accepted"] > 0
    assert counts["draft"]["accepted"] > 0.5 * counts["draft"]["drafted"]


async def test_tokens_are_those_without_a_layer_that_predicts_more_of_them(tmp_path: Path) -> None:
    counts = await try_all(make_mtp(tmp_path / "model"), {"mtp": {"method": "mtp", "num_speculative_tokens": 1}})
    assert counts["mtp"]["drafted"] > 0
