"""Hand-overs of requests for LoRA adapters between real engines: answers are those of a plain vLLM with the same
adapter, and KV of another adapter is refused and computed again.
"""

import asyncio
import uuid
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine_client import NEW_TOKENS, Engine, emptied, exporting, identical, importing, prompts
from services.worker.kv import KvFault
from services.worker.kv.rank_messages import Stats
from shared.model.adapters import LoraSection
from tests.tiny_models import make_adapter, make_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LENGTHS = (1, 31, 32, 33, 65, 129, 300, 600)


Adapter = tuple[str, int, str]  # name, the number that the engines know it by, folder


class Adapters:
    """Three engines with two adapters, and the plain one's answers by adapter; "" is the base model."""

    def __init__(
        self, folder: Path, source: dict[str, Any] | None = None, target: dict[str, Any] | None = None
    ) -> None:
        model = make_llama(folder / "model")
        names = ("one", "two")
        folders = {name: str(make_adapter(folder / name, model, seed=seed)) for seed, name in enumerate(names)}
        lora = LoraSection(adapters=folders)
        self.digests = {"": "", **lora.digests()}
        numbered = enumerate(folders.items(), start=1)
        self.given: dict[str, Adapter | None] = {"": None, **{name: (name, at, path) for at, (name, path) in numbered}}
        self.texts = prompts(lengths=LENGTHS)
        self.plainly: dict[str, list[list[int]]] = {}
        options: dict[str, Any] = {
            "dtype": "float32",
            "enable_lora": True,
            "max_loras": 2,
            "max_lora_rank": lora.rank(),
        }
        options["extra"] = {"adapters": lora.digests()}
        self.plain = Engine("plain", model, block_size=64, connector=False, **options)
        self.p = Engine("p", model, block_size=32, **options, **source)
        self.d = Engine("d", model, block_size=64, **options, **target)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Adapters":
        engines = (self.plain, self.p, self.d)
        for engine in engines:
            self._stack.callback(engine.kill)  # also where another one does not start
        for engine in engines:
            await self._stack.enter_async_context(engine)
        for name, adapter in self.given.items():
            self.plainly[name] = [await self.plain.generate(text, NEW_TOKENS, adapter=adapter) for text in self.texts]
        for at in range(len(self.texts)):
            assert len({tuple(answers[at]) for answers in self.plainly.values()}) == len(self.given)  # three models
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def forget(self) -> None:
        """Nothing is cached, and the events so far are gone."""
        for engine in (self.p, self.d):
            await engine.ask("reset")
            engine.events.clear()

    async def carried(self, text: list[int], adapter: str, computed_by: str | None = None) -> list[int]:
        """The prompt's KV by `computed_by`, the same adapter by default; the answer by `adapter`."""
        source = adapter if computed_by is None else computed_by
        transfer_id, digest = uuid.uuid4().hex, self.digests[source]
        await self.p.generate(text, 1, exporting(transfer_id, adapter=digest), adapter=self.given[source])
        handle = self.p.handle(transfer_id, len(text), adapter=digest)
        return await self.d.generate(text, NEW_TOKENS, importing(handle), adapter=self.given[adapter])

    async def all_carried(self) -> None:
        """Requests of the base model and of both adapters at once get the plain answers, with KV that was pulled."""
        await self.forget()
        pairs = [(text, adapter) for text in self.texts for adapter in self.given]
        answers = await asyncio.gather(*(self.carried(*pair) for pair in pairs))
        expected = [self.plainly[adapter][self.texts.index(text)] for text, adapter in pairs]
        assert identical(answers, expected) == len(pairs)
        count = len(pairs) * len(self.d.endpoints)
        assert await self.d.pulls(count) == {"ok": count}


async def test_transferred_kv_never_crosses_adapters(tmp_path: Path) -> None:
    async with Adapters(tmp_path, {}, {}) as adapters:
        p, d, texts, plainly = adapters.p, adapters.d, adapters.texts, adapters.plainly
        for adapter, expected in plainly.items():
            await adapters.forget()
            assert identical([await adapters.carried(text, adapter) for text in texts], expected) == len(texts)
            assert await d.pulls(len(texts)) == {"ok": len(texts)}
        await adapters.all_carried()
        for computed_by, adapter in (("one", "two"), ("one", ""), ("", "one")):
            await adapters.forget()
            answers = [await adapters.carried(text, adapter, computed_by) for text in texts]
            assert identical(answers, plainly[adapter]) == len(texts)
            assert await d.pulls(len(texts)) == {KvFault.ADAPTER.value: len(texts)}

        # The comparison is what keeps them apart: with a handle that names another adapter, answers are wrong.
        await adapters.forget()
        transfer_id, text, digests, given = uuid.uuid4().hex, texts[-1], adapters.digests, adapters.given
        await p.generate(text, 1, exporting(transfer_id, adapter=digests["one"]), adapter=given["one"])
        renamed = p.handle(transfer_id, len(text), adapter=digests["two"])
        assert await d.generate(text, NEW_TOKENS, importing(renamed), adapter=given["two"]) != plainly["two"][-1]
        # KV under the name of another adapter than its own is not even staged.
        await asyncio.gather(emptied(p), emptied(d))
        for adapter, staged in (("two", False), ("one", True)):
            await p.generate(text, 1, exporting(uuid.uuid4().hex, adapter=digests[adapter]), adapter=given["one"])
            assert any(rank.staged_bytes for rank in await p.control.call(Stats())) == staged


async def test_adapters_between_ranks_and_stages(tmp_path: Path) -> None:
    async with Adapters(tmp_path, {"tp": 2}, {"pp": 2}) as adapters:
        await adapters.all_carried()
