"""Real engines whose KV memory holds a few prompts, and a store in host memory for what leaves it: prompts that come
again get the tokens of an engine that has computed them, and with zeros in the place of what is loaded, others.
"""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine_client import NEW_TOKENS, Engine, emptied, exporting, identical, importing, prompts
from benchmarks.model_families import FAMILIES, make_model
from tests.tiny_models import make_eagle, make_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LENGTHS = (300, 500, 777, 1000, 1100, 1200)
BLOCK = 48 << 10


class Trial:
    """An engine with a tier, a plain one, and the plain one's answers to `texts`."""

    def __init__(self, model: Path, *, slots: int, blocks: int, block_bytes: int, **options: Any) -> None:
        """slots, blocks: how many the store and the engine's memory hold."""
        options = {"dtype": "float32", "kv_cache_memory_bytes": blocks * block_bytes, **options}
        ranks = options.get("tp", 1) * options.get("pp", 1)
        plain = {name: value for name, value in options.items() if name != "kv_cache_memory_bytes"}
        self.e = Engine("e", model, host_kv_bytes=slots * block_bytes, **options)
        self.plain = Engine("plain", model, **plain)
        self.limit_bytes = slots * block_bytes * ranks
        self.texts = prompts(lengths=LENGTHS)
        self.references: list[list[int]] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Trial":
        for engine in (self.e, self.plain):
            self._stack.callback(engine.kill)
        try:
            for engine in (self.e, self.plain):
                await self._stack.enter_async_context(engine)
        except BaseException:
            await self._stack.aclose()
            raise
        self.references = [await self.plain.generate(text, NEW_TOKENS) for text in self.texts]
        assert len({token for reference in self.references for token in reference}) > 30
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def round(self) -> tuple[int, int]:
        """All prompts, one after the other: how many answers are those of the plain engine, and the tokens that came
        from the store.
        """
        before = await self.host()
        outputs = [await self.e.generate(text, NEW_TOKENS) for text in self.texts]
        return identical(outputs, self.references), (await self.host())["served_tokens"] - before["served_tokens"]

    async def host(self) -> dict[str, Any]:
        return await self.e.ask("host")


async def test_what_left_the_cache_is_loaded_and_not_computed(tmp_path: Path) -> None:
    model = make_llama(tmp_path)
    async with Trial(model, slots=400, blocks=64, block_bytes=BLOCK) as trial:
        every = len(trial.texts)
        print(await trial.e.ask("levels"))
        print(await trial.round(), await trial.host())
        print(await trial.round(), await trial.host())
        outputs = await asyncio.gather(*(trial.e.generate(text, NEW_TOKENS) for text in trial.texts))
        print(identical(outputs, trial.references), await trial.host())
        await trial.e.ask("fault", zero=True, corrupt=False)
        print(await trial.round(), every)
        await trial.e.ask("fault", zero=False, corrupt=False)
