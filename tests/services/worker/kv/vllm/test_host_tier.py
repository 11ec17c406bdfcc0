"""Real engines whose KV memory holds a few prompts, and a store in host memory for what leaves it, some with a disk
behind it: prompts that come again get the tokens of an engine that has computed them, and with zeros in the place of
what is loaded, others.
"""

import asyncio
import os
import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine_client import NEW_TOKENS, Engine, emptied, exporting, identical, importing, prompts
from benchmarks.model_families import FAMILIES, make_model
from services.worker.kv.disk_store import rank_file, step_bytes
from services.worker.kv.rank_messages import PullEnded
from tests.tiny_models import make_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LENGTHS = (300, 500, 777, 1000, 1100, 1200)
BLOCK = 48 << 10


class Trial:
    """An engine with a tier, a plain one, and the plain one's answers to `texts`."""

    def __init__(
        self,
        model: Path,
        *,
        slots: int,
        blocks: int,
        block_bytes: int,
        disk: tuple[Path, int] | None = None,
        **options: Any,
    ) -> None:
        """slots, blocks: how many the store and the engine's memory hold. disk: a folder, and how many the file of
        each rank holds.
        """
        options = {"dtype": "float32", "kv_cache_memory_bytes": blocks * block_bytes, **options}
        ranks = options.get("tp", 1) * options.get("pp", 1)
        plain = {name: value for name, value in options.items() if name != "kv_cache_memory_bytes"}
        tier: dict[str, Any] = {"host_kv_bytes": slots * block_bytes}
        if disk is not None:
            tier |= {"disk_folder": disk[0], "disk_kv_bytes": disk[1] * step_bytes(block_bytes)}
        self.e = Engine("e", model, **tier, **options)
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

    async def imports(self) -> None:
        """What another instance has of the longest prompt is imported behind what the store has of it, and not at all
        where the store has more.
        """
        text, reference = self.texts[-1], self.references[-1]
        for tokens, outcome in ((len(text), "ok"), (100, "cached")):
            for other in self.texts[:-1]:  # it leaves the cache
                await self.e.generate(other, 1)
            await self.plain.generate(text[:tokens], 1, exporting(f"of {tokens} {self.e.name}"))
            before, pulls = await self.host(), await self.e.pulls(0)
            handle = self.plain.handle(f"of {tokens} {self.e.name}", tokens)
            assert await self.e.generate(text, NEW_TOKENS, importing(handle)) == reference
            assert await self.e.pulls(pulls.total() + 1) - pulls == {outcome: 1}
            assert (await self.host())["served_tokens"] > before["served_tokens"]
        pulled = [event.tokens for event in self.e.events if isinstance(event, PullEnded)]
        assert 0 < pulled[0] < 64 > pulled[1] == 0
        await emptied(self.plain)

    async def exports(self) -> None:
        """A prompt of which the cache has at most the beginning is exported from the store too."""
        text, reference = self.texts[-1], self.references[-1]
        for other in self.texts[:-1]:
            await self.e.generate(other, 1)
        before = await self.host()
        handle = await self.e.export(text[:-1])  # of an engine that computes nothing
        assert len(text) - 64 < handle.tokens < len(text)
        self.plain.events.clear()
        assert (await self.plain.ask("reset"))["ok"]
        assert await self.plain.generate(text, NEW_TOKENS, importing(handle)) == reference
        assert await self.plain.pulls() == {"ok": len(self.plain.endpoints)}
        await emptied(self.e)
        if before["disk"]["limit_bytes"]:
            assert (await self.disk())["read_blocks"] > before["disk"]["read_blocks"]
        else:
            assert await self.host() == before

    async def host(self) -> dict[str, Any]:
        return await self.e.ask("host")

    async def disk(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.host())["disk"]
        return found


async def test_what_left_the_cache_is_loaded_and_not_computed(tmp_path: Path) -> None:
    async with Trial(make_llama(tmp_path), slots=400, blocks=64, block_bytes=BLOCK) as trial:
        every, tokens = len(trial.texts), sum(map(len, trial.texts))
        assert await trial.round() == (every, 0)
        same, served = await trial.round()
        assert same == every
        assert served > 0.9 * tokens
        before = await trial.host()
        assert 0 < before["held_bytes"] < before["limit_bytes"] == trial.limit_bytes
        assert (before["stored_blocks"], before["evicted_blocks"]) == (before["held_bytes"] // BLOCK, 0)
        outputs = await asyncio.gather(*(trial.e.generate(text, NEW_TOKENS) for text in trial.texts))
        assert identical(outputs, trial.references) == every
        assert (await trial.host())["served_tokens"] > before["served_tokens"]
        salted = await trial.e.generate(trial.texts[0], NEW_TOKENS, salt="of another caller")
        after = await trial.host()
        assert salted == trial.references[0]
        await trial.imports()
        await trial.exports()
        await trial.e.ask("fault", zero=True, corrupt=False)
        same, served = await trial.round()
        assert same < every / 2
        assert served > 0
        await trial.e.ask("fault", zero=False, corrupt=False)
        assert (await trial.e.ask("reset"))["ok"]
        assert (await trial.host())["held_bytes"] == 0 < after["held_bytes"]
        assert await trial.round() == (every, 0)


async def test_a_full_store_gives_the_same_tokens(tmp_path: Path) -> None:
    async with Trial(make_llama(tmp_path), slots=40, blocks=64, block_bytes=BLOCK) as trial:
        for _ in range(2):
            same, _ = await trial.round()
            assert same == len(trial.texts)
        host = await trial.host()
        assert host["held_bytes"] == host["limit_bytes"]
        assert host["evicted_blocks"] == host["stored_blocks"] - 40
        for at in (3, 4, 3, 4):  # together a little longer than the engine's memory
            assert await trial.e.generate(trial.texts[at], NEW_TOKENS) == trial.references[at]
        assert (await trial.host())["served_tokens"] > host["served_tokens"]


async def test_windows_are_loaded_beside_full_attention(tmp_path: Path) -> None:
    """Asynchronous scheduling: a step is scheduled, and blocks leave for it, while the one before computes."""
    model = make_model(FAMILIES["Gemma-3"], tmp_path)
    async with Trial(model, slots=800, blocks=108, block_bytes=16 << 10, async_scheduling=True) as trial:
        every = len(trial.texts)
        assert (await trial.round())[0] == every
        same, served = await trial.round()
        assert same == every
        assert served > 0.5 * sum(map(len, trial.texts))
        outputs = await asyncio.gather(*(trial.e.generate(text, NEW_TOKENS) for text in trial.texts))
        assert identical(outputs, trial.references) == every
        await trial.imports()
        await trial.exports()
        await trial.e.ask("fault", zero=True, corrupt=False)
        assert (await trial.round())[0] < every


async def test_each_rank_has_its_part(tmp_path: Path) -> None:
    async with Trial(make_llama(tmp_path), slots=400, blocks=64, block_bytes=BLOCK // 2, tp=2) as trial:
        every = len(trial.texts)
        assert await trial.round() == (every, 0)
        same, served = await trial.round()
        assert same == every
        assert served > 0.9 * sum(map(len, trial.texts))
        assert (await trial.host())["limit_bytes"] == trial.limit_bytes


async def test_a_model_with_states_has_no_tier(tmp_path: Path) -> None:
    engine = Engine(
        "e", make_model(FAMILIES["Qwen3-Next"], tmp_path), host_kv_bytes=1 << 20, kv_cache_memory_bytes=64 << 20
    )
    with pytest.raises(RuntimeError, match=r"host_kv_bytes: .*: leave it out"):
        async with engine:
            pass


async def test_what_left_host_memory_comes_back_from_the_disk(tmp_path: Path) -> None:
    (folder := tmp_path / "disk" / "e").parent.mkdir()
    async with Trial(make_llama(tmp_path), slots=80, blocks=64, block_bytes=BLOCK, disk=(folder, 400)) as trial:
        every, tokens = len(trial.texts), sum(map(len, trial.texts))
        assert await trial.round() == (every, 0)
        first = await trial.disk()
        assert (first["held_bytes"], first["limit_bytes"]) == (first["written_blocks"] * BLOCK, 400 * BLOCK)
        same, served = await trial.round()
        disk = await trial.disk()
        assert same == every
        assert served > 0.9 * tokens
        assert disk["read_blocks"] > 0.5 * tokens / 32
        outputs = await asyncio.gather(*(trial.e.generate(text, NEW_TOKENS) for text in trial.texts))
        assert identical(outputs, trial.references) == every
        for other in trial.texts[:-1]:
            await trial.e.generate(other, 1)
        disk, handle = await trial.disk(), await trial.plain.export(trial.texts[-1][:-1])
        assert await trial.e.generate(trial.texts[-1], NEW_TOKENS, importing(handle)) == trial.references[-1]
        assert await trial.e.pulls() == {"ok": 1}
        assert (await trial.disk())["read_blocks"] == disk["read_blocks"]  # it was under way from another instance
        await trial.exports()
        async with asyncio.TaskGroup() as group:  # and of one that does
            group.create_task(trial.e.generate(trial.texts[0], NEW_TOKENS))
            exported = group.create_task(trial.e.export(trial.texts[-2][:-1]))
        assert exported.result().tokens > len(trial.texts[-2]) - 64
        await trial.e.ask("fault", zero=True, corrupt=False)
        assert (await trial.round())[0] < every / 2
        await trial.e.ask("fault", zero=False, corrupt=False)
        assert (await trial.e.ask("reset"))["ok"]
        assert (await trial.disk())["held_bytes"] == 0

        assert await trial.round() == (every, 0)
        file, disk = rank_file(folder, 0), await trial.disk()
        assert (disk["lost_blocks"], disk["fault"]) == (0, "")
        damaged(file, BLOCK)
        (same, less), now = await trial.round(), await trial.disk()
        assert same == every
        assert less < served
        assert now["lost_blocks"] > 0
        os.truncate(file, 0)
        (same, _), disk = await trial.round(), await trial.disk()
        assert same == every
        assert disk["lost_blocks"] > now["lost_blocks"]
        shutil.rmtree(folder)
        (same, served), disk = await trial.round(), await trial.disk()
        assert same == every
        assert served > 0  # from host memory
        assert disk["held_bytes"] == 0
        assert disk["fault"].endswith("the file was removed")
        assert "the disk tier is switched off" in trial.e.log.read_text()
        assert (await trial.round())[0] == every


async def test_a_full_disk_gives_the_same_tokens(tmp_path: Path) -> None:
    """Each rank has its own file. The disk holds less than all prompts."""
    (folder := tmp_path / "disk" / "e").parent.mkdir()
    async with Trial(
        make_llama(tmp_path), slots=80, blocks=64, block_bytes=BLOCK // 2, disk=(folder, 50), tp=2
    ) as trial:
        assert sorted(folder.iterdir()) == [rank_file(folder, rank) for rank in (0, 1)]
        for _ in range(3):
            assert (await trial.round())[0] == len(trial.texts)
        disk = await trial.disk()
        assert disk["held_bytes"] == disk["limit_bytes"] == 50 * BLOCK
        assert disk["evicted_blocks"] > 0 < disk["read_blocks"]
        assert (disk["lost_blocks"], disk["fault"]) == (0, "")
        damaged(rank_file(folder, 1), BLOCK // 2)
        assert (await trial.round())[0] == len(trial.texts)
        assert (await trial.disk())["lost_blocks"] > 0


async def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    more: dict[str, Any] = {"disk_kv_bytes": 1 << 20, "disk_folder": tmp_path / "not mounted" / "e"}
    engine = Engine("e", make_llama(tmp_path), host_kv_bytes=1 << 20, **more)
    with pytest.raises(RuntimeError, match=r"disk_kv_folder: there is no folder .*not mounted: make it, or mount it"):
        async with engine:
            pass


def damaged(file: Path, block_bytes: int) -> None:
    """Change a byte of each other block."""
    with file.open("r+b") as opened:
        for at in range(0, file.stat().st_size, 2 * step_bytes(block_bytes)):
            opened.seek(at + step_bytes(block_bytes) // 2)
            byte = opened.read(1)[0]
            opened.seek(-1, os.SEEK_CUR)
            opened.write(bytes([byte ^ 1]))
