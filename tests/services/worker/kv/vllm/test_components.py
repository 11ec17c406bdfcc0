"""Hand-overs between real engines of models whose layers keep something else than K and V of all tokens: windows, a
latent, a recurrent state. What is pulled is counted, and a component that is zeroed changes the answers.
"""

import asyncio
import uuid
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine_client import (
    NEW_TOKENS,
    Engine,
    emptied,
    exporting,
    handed_over,
    identical,
    importing,
    prompts,
    resumed,
)
from benchmarks.model_families import FAMILIES, make_model
from services.worker.kv.rank_messages import PullEnded
from tests.tiny_models import make_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LENGTHS = (1, 2, 31, 33, 63, 64, 65, 100, 129, 200, 300, 511, 600, 1000)
# vLLM makes the blocks of a model with states as large as a state: here of 544 and 576 tokens. It computes prompts in
# chunks of whole blocks, so that longer ones differ in their last bits already.
STATE_LENGTHS = (*LENGTHS[:12], 535, 544)
MEMORY = {"kv_cache_memory_bytes": 64 << 20}


class Trio:
    """A plain engine, an exporter and an importer of another block size, and the plain one's answers to `texts`."""

    def __init__(
        self,
        model: Path,
        source: dict[str, Any],
        target: dict[str, Any],
        lengths: tuple[int, ...] = LENGTHS,
        **options: Any,
    ) -> None:
        options = MEMORY | options
        ranks = {name: value for name, value in target.items() if name in ("tp", "kv_cache_dtype")}
        self.plain = Engine("plain", model, connector=False, block_size=64, **options, **ranks)
        self.p = Engine("p", model, block_size=32, **options, **source)
        self.d = Engine("d", model, block_size=64, **options, **target)
        self.texts = prompts(lengths=lengths)
        self.references: list[list[int]] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Trio":
        engines = (self.plain, self.p, self.d)
        for engine in engines:
            self._stack.callback(engine.kill)  # also where another one does not start
        for engine in engines:
            await self._stack.enter_async_context(engine)
        self.references = [await self.plain.generate(text, NEW_TOKENS) for text in self.texts]
        assert len({token for reference in self.references for token in reference}) > 50  # not degenerate
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def forget(self) -> None:
        """Nothing is cached, and the events so far are gone."""
        for engine in (self.p, self.d):
            await engine.ask("reset")
            engine.events.clear()

    async def carried(self, text: list[int], *, back: bool = False) -> list[int]:
        """The exporter's own first token, and the importer's after it."""
        source, target = (self.d, self.p) if back else (self.p, self.d)
        transfer_id = uuid.uuid4().hex
        first = await source.generate(text, 1, exporting(transfer_id))
        handle = source.handle(transfer_id, len(text))
        return first + await target.generate(text + first, NEW_TOKENS - 1, importing(handle))

    async def all_carried(self, *, back: bool = False) -> int:
        """How many answers are the plain engine's, one after the other: each with its KV pulled."""
        target = self.p if back else self.d
        await self.forget()
        outputs = [await self.carried(text, back=back) for text in self.texts]
        count = len(self.texts) * len(target.endpoints)
        assert await target.pulls(count) == {"ok": count}
        return identical(outputs, self.references)

    async def recomputed(self) -> int:
        """How many answers are the plain engine's when what is pulled is corrupt: the prompt is computed again, and
        with it the first token, which the plain engine is therefore given as the last one of the prompt.
        """
        await self.p.ask("fault", zero=False, corrupt=True)
        await self.forget()
        outputs = [await self.carried(text) for text in self.texts]
        assert set(await self.d.pulls(len(self.texts) * len(self.d.endpoints))) == {"checksum"}
        await self.p.ask("fault", zero=False, corrupt=False)
        await self.plain.ask("reset")  # it must not continue a cached prefix either
        firsts = [reference[:1] for reference in self.references]
        plain = [
            first + await self.plain.generate(text + first, NEW_TOKENS - 1)
            for text, first in zip(self.texts, firsts, strict=True)
        ]
        return identical(outputs, plain)

    async def zeroed(self, kind: str) -> int:
        """How many answers are still the plain engine's when that kind of component is zeroed."""
        await self.d.ask("fault", zero=True, corrupt=False, kind=kind)
        same = await self.all_carried()
        await self.d.ask("fault", zero=False, corrupt=False)
        return same


async def test_windows_are_handed_over_as_far_as_they_are_read(tmp_path: Path) -> None:
    async with Trio(make_model(FAMILIES["Gemma-3"], tmp_path), {}, {}, dtype="float32") as trio:
        every = len(trio.texts)
        assert await trio.all_carried() == every
        # 3 of 4 layers have K and V of 2 heads of 32 in float32 for 63 tokens only.
        longest = [event for event in trio.d.events if isinstance(event, PullEnded)][-1]
        row = 2 * 2 * 32 * 4
        assert (longest.tokens, longest.wire_bytes) == (1000, (1000 + 3 * 63) * row)
        assert await trio.all_carried(back=True) == every
        await trio.forget()
        outputs = await asyncio.gather(*(trio.carried(text) for text in trio.texts))
        assert identical(outputs, trio.references) == every
        for part in (1, 3, 5):  # of the prompt, before and within the window of its end
            await trio.forget()
            texts = [text for text in trio.texts if len(text) >= 31]
            splits = [max(1, len(text) * part // 5 - 1) for text in texts]
            outputs = [
                await handed_over(trio.p, trio.d, text, split=split) for text, split in zip(texts, splits, strict=True)
            ]
            assert identical(outputs, trio.references[-len(texts) :]) == len(texts)
            assert set(await trio.d.pulls(len(texts))) == {"ok"}
        await trio.forget()
        for tokens in (600, 900):  # of the second, the importer has the beginning in its cache
            text = trio.texts[-1][:tokens]
            assert await trio.carried(text) == await trio.plain.generate(text, NEW_TOKENS)
        assert [event.tokens for event in trio.d.events if isinstance(event, PullEnded)] == [600, 900 - 576]
        assert await trio.recomputed() == every
        assert await trio.zeroed("heads") < every / 2
        await asyncio.gather(emptied(trio.p), emptied(trio.d))


async def test_windows_between_ranks_and_stages(tmp_path: Path) -> None:
    source, target = {"pp": 2}, {"tp": 2}
    async with Trio(make_model(FAMILIES["Gemma-3"], tmp_path), source, target, dtype="float32") as trio:
        assert await trio.all_carried() == len(trio.texts)
        assert await trio.all_carried(back=True) == len(trio.texts)
        await asyncio.gather(emptied(trio.p), emptied(trio.d))


@pytest.mark.parametrize(
    ("family", "kind", "lengths"), [("DeepSeek-V2", "latent", LENGTHS), ("Qwen3-Next", "state", STATE_LENGTHS)]
)
async def test_a_latent_and_a_state_are_handed_over(
    family: str, kind: str, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    """In bfloat16, in which these kernels compute: what shares a batch or a chunk makes a difference, so answers are
    compared one after the other, with chunks as long as the longest prompt.
    """
    model = make_model(FAMILIES[family], tmp_path)
    async with Trio(model, {}, {}, lengths, dtype="bfloat16", max_num_batched_tokens=1024) as trio:
        every = len(trio.texts)
        assert await trio.all_carried() == every
        assert await trio.all_carried(back=True) == every
        await trio.forget()
        for text, reference in zip(trio.texts, trio.references, strict=True):
            assert await resumed(trio.p, trio.d, text, reference[:1]) == reference[1:]
        assert await trio.d.pulls(every) == {"ok": every}
        assert await trio.zeroed(kind) < every / 2
        if kind == "state":  # a state cannot be continued after the last token of a prompt that is computed again
            await trio.forget()
            assert await handed_over(trio.p, trio.d, trio.texts[-1]) == trio.references[-1]
            assert await trio.d.pulls() == {"invalid_request": 1}
            assert await trio.zeroed("heads") < every
        assert await trio.recomputed() == every
        await asyncio.gather(emptied(trio.p), emptied(trio.d))


async def test_a_state_between_ranks(tmp_path: Path) -> None:
    """From two ranks, each with half of the heads, to one. Across ranks sums are rounded in another order."""
    options: dict[str, Any] = {"dtype": "bfloat16", "max_num_batched_tokens": 1024}
    async with Trio(make_model(FAMILIES["Qwen3-Next"], tmp_path), {"tp": 2}, {}, STATE_LENGTHS, **options) as trio:
        outputs = [await trio.carried(text) for text in trio.texts]
        assert await trio.d.pulls(len(trio.texts)) == {"ok": len(trio.texts)}
        first = sum(output[1] == reference[1] for output, reference in zip(outputs, trio.references, strict=True))
        assert first > len(trio.texts) / 2
        await trio.d.ask("fault", zero=True, corrupt=False, kind="state")
        await trio.forget()
        outputs = [await trio.carried(text) for text in trio.texts]
        zeroed = sum(output[1] == reference[1] for output, reference in zip(outputs, trio.references, strict=True))
        assert zeroed < first / 2


@pytest.mark.parametrize("stored", ["fp8", "fp8_e5m2"])
async def test_eight_bits_are_handed_over_as_they_are(tmp_path: Path, stored: str) -> None:
    eight_bit = {"kv_cache_dtype": stored}
    async with Trio(make_llama(tmp_path), eight_bit, eight_bit, dtype="bfloat16") as trio:
        assert await trio.all_carried() == len(trio.texts)
        longest = [event for event in trio.d.events if isinstance(event, PullEnded)][-1]
        assert longest.wire_bytes == 1000 * 3 * 2 * 2 * 32  # a byte for each value
        assert await trio.all_carried(back=True) == len(trio.texts)
        assert await trio.zeroed("heads") < len(trio.texts) / 2
        await asyncio.gather(emptied(trio.p), emptied(trio.d))


@pytest.mark.parametrize(("source", "target"), [("fp8", "auto"), ("auto", "fp8")])
async def test_eight_bits_are_converted_for_a_peer_with_more_and_back(tmp_path: Path, source: str, target: str) -> None:
    """With random weights, what eight bits lose changes most tokens soon; without the KV none is the same."""
    there, here = {"kv_cache_dtype": source}, {"kv_cache_dtype": target}
    async with Trio(make_llama(tmp_path), there, here, dtype="bfloat16") as trio:
        alike = []
        for zero in (False, True):
            await trio.d.ask("fault", zero=zero, corrupt=False)
            await trio.forget()
            outputs = [await trio.carried(text) for text in trio.texts]
            assert await trio.d.pulls(len(trio.texts)) == {"ok": len(trio.texts)}
            pairs = zip(outputs, trio.references, strict=True)
            alike.append(sum(output[at] == reference[at] for output, reference in pairs for at in (1, 2, 3)))
        converted, zeroed = alike
        assert zeroed <= 1
        assert converted >= 5  # of 42
