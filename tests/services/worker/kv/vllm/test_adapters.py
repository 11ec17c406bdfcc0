"""Hand-overs of requests for LoRA adapters between real engines: answers are those of a plain vLLM with the same
adapter, and KV of another adapter is refused and computed again.
"""

import asyncio
import uuid
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from services.worker.kv import KvFault
from services.worker.kv.rank_messages import Stats
from shared.model.adapters import LoraSection
from tests.services.worker.kv.vllm.engine_client import (
    NEW_TOKENS,
    Engine,
    emptied,
    exporting,
    identical,
    importing,
    prompts,
)
from tests.tiny_models import make_adapter, make_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LENGTHS = (1, 31, 32, 33, 65, 129, 300, 600)


async def test_transferred_kv_never_crosses_adapters(tmp_path: Path) -> None:
    model = make_llama(tmp_path / "model")
    folders = {name: str(make_adapter(tmp_path / name, model, seed=seed)) for seed, name in enumerate(("one", "two"))}
    lora = LoraSection(adapters=folders)
    digests = {"": "", **lora.digests()}
    options = {"dtype": "float32", "enable_lora": True, "max_loras": 2, "max_lora_rank": lora.rank()}
    given = {"": None} | {name: (name, number, at) for number, (name, at) in enumerate(folders.items(), start=1)}
    extra = {"adapters": lora.digests()}

    def engine(name: str, block_size: int, *, connector: bool = True) -> Engine:
        return Engine(name, model, block_size=block_size, connector=connector, extra=extra, **options)

    engines = engine("plain", 64, connector=False), engine("p", 32), engine("d", 64)
    async with AsyncExitStack() as stack:
        for each in engines:
            stack.callback(each.kill)
        plain, p, d = [await stack.enter_async_context(each) for each in engines]
        texts = prompts(lengths=LENGTHS)

        async def carried(text: list[int], adapter: str, computed_by: str | None = None) -> list[int]:
            """The prompt's KV by `computed_by`, the same adapter by default; the answer by `adapter`."""
            source = adapter if computed_by is None else computed_by
            transfer_id, digest = uuid.uuid4().hex, digests[source]
            kv = exporting(transfer_id, adapter=digest)
            await p.generate(text, 1, kv, adapter=given[source])
            handle = p.handle(transfer_id, len(text), adapter=digest)
            return await d.generate(text, NEW_TOKENS, importing(handle), adapter=given[adapter])

        async def forget() -> None:
            for each in (p, d):
                await each.ask("reset")
                each.events.clear()

        plainly = {
            adapter: [await plain.generate(text, NEW_TOKENS, adapter=request) for text in texts]
            for adapter, request in given.items()
        }
        for at in range(len(texts)):
            assert len({tuple(answers[at]) for answers in plainly.values()}) == len(given)  # three models

        for adapter, expected in plainly.items():
            await forget()
            assert identical([await carried(text, adapter) for text in texts], expected) == len(texts)
            assert await d.pulls(len(texts)) == {"ok": len(texts)}

        await forget()  # all at once: requests of the base model and of both adapters share steps
        pairs = [(text, adapter) for text in texts for adapter in given]
        answers = await asyncio.gather(*(carried(*pair) for pair in pairs))
        assert identical(answers, [plainly[adapter][texts.index(text)] for text, adapter in pairs]) == len(pairs)
        assert await d.pulls(len(pairs)) == {"ok": len(pairs)}

        for computed_by, adapter in (("one", "two"), ("one", ""), ("", "one")):
            await forget()
            answers = [await carried(text, adapter, computed_by) for text in texts]
            assert identical(answers, plainly[adapter]) == len(texts)
            assert await d.pulls(len(texts)) == {KvFault.ADAPTER.value: len(texts)}

        # The adapter is what the comparison rests on: with a handle that hides it, answers are wrong.
        await forget()
        transfer_id, text = uuid.uuid4().hex, texts[-1]
        await p.generate(text, 1, exporting(transfer_id, adapter=digests["one"]), adapter=given["one"])
        hidden = p.handle(transfer_id, len(text), adapter=digests["two"])
        wrong = await d.generate(text, NEW_TOKENS, importing(hidden), adapter=given["two"])
        assert wrong != plainly["two"][-1]
        # KV under the name of another adapter than its own is not even staged.
        await asyncio.gather(emptied(p), emptied(d))
        for adapter, staged in (("two", False), ("one", True)):
            await p.generate(text, 1, exporting(uuid.uuid4().hex, adapter=digests[adapter]), adapter=given["one"])
            assert any(rank.staged_bytes for rank in await p.control.call(Stats())) == staged
