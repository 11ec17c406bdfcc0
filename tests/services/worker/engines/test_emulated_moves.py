"""The emulated engine exports what it holds, lets requests go, and goes on with those of others."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest

from services.worker.engines.base import CacheExport, EngineRequest, Left, failure
from services.worker.engines.emulated import EmulatedEngine
from services.worker.engines.emulated_tokens import token_at
from shared.domain.job import Generation, JobView
from shared.domain.kv import KvHandle, TransferOutcome, TransferReport
from shared.errors import InvalidRequest
from shared.wire.messages import TokenStep
from tests.services.worker.engines.test_emulated import engine, finish, settings

BLOCK = 32
PROMPT = list(range(1, 101))  # three whole blocks
OUTPUT = 90
LONG = 3500


def request(name: str = "a", output: int = OUTPUT, prompt: list[int] = PROMPT) -> EngineRequest:
    return EngineRequest(name, JobView(name, len(prompt), output), prompt, Generation(b"", 1.0), output)


def resumed(name: str, tokens: list[int], handle: KvHandle | None, output: int = OUTPUT) -> EngineRequest:
    """The request goes on behind these tokens of its answer."""
    return msgspec.structs.replace(
        request(name, output), forced_tokens=list(tokens), resumes=True, import_from=handle, state=b""
    )


def handle(start: int, tokens: int, transfer_id: str = "t") -> KvHandle:
    return KvHandle(transfer_id, "d9", 1, "f", (), tokens, "bfloat16", start=start)


@dataclass
class Staging:
    """Room for an export, and what was announced of it."""

    rooms: list[bool] = field(default_factory=lambda: [True])  # of each question; the last one stays
    announced: list[int] = field(default_factory=list)

    def export(self, start: int = 0) -> CacheExport:
        return CacheExport("t", start, self.announced.append, self._has_room)

    def _has_room(self) -> bool:
        assert self.announced, "the tokens are announced before the room is needed"
        return self.rooms.pop(0) if len(self.rooms) > 1 else self.rooms[0]


class Stream:
    """What a request's sink gets."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.reason = ""

    def __call__(self, step: TokenStep) -> None:
        assert not self.reason
        self.tokens += step.tokens
        self.reason = step.finish_reason


async def until(fact: Callable[[], bool]) -> None:
    """Looks in each turn of the loop: an engine does not take two steps in one."""
    async with asyncio.timeout(60):
        while not fact():
            await asyncio.sleep(0)


async def test_whole_blocks_of_a_prompt_are_exported_as_far_as_the_cache_has_them() -> None:
    async with engine() as running:
        await finish(running, request("a", 1, PROMPT))
        longer = request("b", 1, [*PROMPT[:70], 7, 7, 7])
        for asked, start, held in ((request(), 0, 96), (request(), 64, 96), (request(), 96, 0), (longer, 0, 64)):
            staging = Staging()
            assert await running.export_cached(asked, staging.export(start)) == held
            assert staging.announced == ([held - start] if held else [])
        exact = request("c", 1, PROMPT[:96])
        assert await running.export_cached(exact, Staging().export()) == 96, "also the block with its last token"
        salted = msgspec.structs.replace(request(), generation=Generation(b"", 1.0, "other"))
        assert await running.export_cached(salted, Staging().export()) == 0


async def test_an_engine_without_a_prefix_cache_exports_nothing_from_it() -> None:
    async with engine(emulated_prefix_cache=False) as running:
        await finish(running, request("a", 1))
        assert await running.export_cached(request(), Staging().export()) == 0


async def test_a_running_request_is_exported_as_far_as_it_is_computed_and_goes_on() -> None:
    async with engine() as running:
        whole, stream = (await finish(running, request("other")))["other"], Stream()
        running.submit(request(), stream)
        assert await running.export_running("a", Staging().export()) == 0, "nothing is computed"
        await until(lambda: len(stream.tokens) >= 5)
        staging, given = Staging(), len(stream.tokens)
        assert await running.export_running("a", staging.export(40)) == len(PROMPT) + given - 1
        assert staging.announced == [len(PROMPT) + given - 1 - 40]
        await until(lambda: bool(stream.reason))
        assert stream.tokens == whole
        assert await running.export_running("a", Staging().export()) == 0, "it has ended"


async def test_an_export_waits_until_it_has_room() -> None:
    async with engine() as running:
        await finish(running, request("a", 1))
        staging = Staging([False, False, True])
        exporting = asyncio.create_task(running.export_cached(request(), staging.export()))
        while len(staging.rooms) > 2:
            await asyncio.sleep(0)
        running.wake()
        while len(staging.rooms) > 1:
            await asyncio.sleep(0)
        assert not exporting.done()
        running.wake()
        assert await asyncio.wait_for(exporting, 10) == 96
        assert staging.announced == [96]


async def test_a_request_leaves_in_the_middle_with_all_its_tokens_and_frees_its_blocks() -> None:
    async with engine() as running:
        free, stream, staging = running.stats().free_blocks, Stream(), Staging()
        running.submit(request(), stream)
        await until(lambda: len(stream.tokens) >= 5)
        left = await running.leave("a", staging.export(32))
        given = len(stream.tokens)
        assert left == Left(len(PROMPT) + given - 1, b"")
        assert staging.announced == [left.tokens - 32]
        await until(lambda: running.stats().free_blocks == free)
        await finish(running, request("b", 5))
        assert (len(stream.tokens), stream.reason) == (given, ""), "its sink is not called again"
        assert await running.leave("a", Staging().export()) is None
        assert running.stats().running == 0


@pytest.mark.parametrize("prompt_s", [0.0, 0.01])
async def test_a_request_that_has_computed_nothing_or_a_part_of_its_prompt_leaves_too(prompt_s: float) -> None:
    async with engine(emulated_prefill_s_per_token=prompt_s) as running:
        stream = Stream()
        running.submit(request(), stream)
        if prompt_s:
            await until(lambda: running.stats().running == 1)
        left = await running.leave("a", Staging().export())
        assert left is not None
        assert left.tokens == (64 if prompt_s else 0), "one chunk"
        assert stream.tokens == []


async def test_a_request_whose_leave_was_cancelled_stays() -> None:
    async with engine() as running:
        stream = Stream()
        running.submit(request(output=20), stream)
        await until(lambda: bool(stream.tokens))
        leaving = asyncio.create_task(running.leave("a", Staging().export()))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await until(lambda: bool(stream.reason))
        assert len(stream.tokens) == 20


async def test_of_two_that_let_a_request_leave_one_has_it() -> None:
    async with engine() as running:
        stream = Stream()
        running.submit(request(), stream)
        await until(lambda: bool(stream.tokens))
        both = await asyncio.gather(*(running.leave("a", Staging().export()) for _ in range(2)))
        assert sorted(left is None for left in both) == [False, True]


async def test_an_answer_that_moves_in_rounds_between_two_engines_is_the_answer_of_one() -> None:
    """As a migration does: what is computed is copied while the request runs, and the tail when it has left. The answer
    is so long that it does not end meanwhile.
    """
    async with engine() as first, engine() as second:
        stream, here, there = Stream(), first, second
        here.submit(request("0", LONG), stream)
        tails, pulled = [], []
        for at in range(1, 8):
            await until(lambda want=10 * at: len(stream.tokens) >= want)  # type: ignore[misc]
            copied = 0
            for _ in range(2):
                start, copied = copied, await here.export_running(str(at - 1), Staging().export(copied))
                copied = copied // BLOCK * BLOCK or start
                sequence = [*PROMPT, *stream.tokens][: copied + 1]
                pull = msgspec.structs.replace(request("pull", 1, sequence), first_token_only=True)
                await finish(there, msgspec.structs.replace(pull, import_from=handle(start, copied)))
            left = await here.leave(str(at - 1), Staging().export(copied))
            assert left is not None
            assert left.tokens in (0, len(PROMPT) + len(stream.tokens) - 1), "0: no more than was copied"
            tail = handle(copied, left.tokens, f"tail {at}") if left.tokens else None
            if tail is not None:
                tails.append((TransferOutcome.PULLED, tail.tokens - copied))
                there.link.expect(tail.transfer_id)
                pulled.append((there, tail.transfer_id))
            there.submit(resumed(str(at), stream.tokens, tail, LONG), stream)
            here, there = there, here
        given = len(stream.tokens)
        await until(lambda: len(stream.tokens) >= given + 10)
        here.abort("7")
        assert stream.tokens == [token_at(len(PROMPT) + at) for at in range(len(stream.tokens))]
        reports = [engine.link.known(transfer_id) for engine, transfer_id in pulled]
        assert [report and (report.outcome, report.tokens) for report in reports] == tails


async def _resume(running: EmulatedEngine, start: int, tokens: int) -> tuple[list[int], TransferReport]:
    answer = [token_at(at) for at in range(len(PROMPT), len(PROMPT) + 30)]
    running.link.expect("t")
    given = await finish(running, resumed("b", answer, handle(start, tokens), 40))
    report = running.link.known("t")
    assert report is not None
    return given["b"], report


REST = [token_at(at) for at in range(130, 140)]


async def test_a_resumed_request_imports_what_its_cache_does_not_hold() -> None:
    async with engine() as running:
        await finish(running, request("a", 1))
        tokens, report = await _resume(running, 64, 129)
        assert (tokens, report.outcome) == (REST, TransferOutcome.PULLED)
        assert report.tokens == 129 - 96
        assert (running.stats().prompt_tokens, running.stats().hit_tokens) == (100 + 130, 96)


async def test_kv_that_begins_behind_what_the_cache_holds_is_of_no_use() -> None:
    async with engine() as running:
        await finish(running, request("a", 1))
        before = running.steps.page("d0", 1, 0, 1000).next
        tokens, report = await _resume(running, 97, 129)
        assert (tokens, report.outcome, report.tokens, report.wire_bytes) == (REST, TransferOutcome.RECOMPUTED, 0, 0)
        assert "first 97 tokens" in report.error
        computed = [step.prefill for step in running.steps.page("d0", 1, before, 1000).steps if step.prefill]
        assert computed == [((34, 96),)], "all that is not cached"


@pytest.mark.parametrize("tokens", [0, 50, 100, 129])
async def test_a_resumed_request_computes_what_no_handle_has(tokens: int) -> None:
    async with engine() as running:
        given, _ = await _resume(running, 0, tokens)
        assert given == REST


async def test_a_stop_token_ends_a_resumed_answer_where_it_would_have_ended() -> None:
    stops = Generation(msgspec.msgpack.encode({"stop_token_ids": [token_at(135)]}), 1.0)
    answer = [token_at(at) for at in range(100, 130)]
    async with engine() as running:
        again = msgspec.structs.replace(resumed("b", answer, None), generation=stops)
        assert (await finish(running, again))["b"] == [token_at(at) for at in range(130, 136)]


@pytest.mark.parametrize(
    ("answered", "output", "why"),
    [(20, 20, "an answer of at most 20 tokens cannot go on: it has 20"), (60, 90, "must fit in 128 tokens of KV")],
)
async def test_a_request_that_cannot_go_on_is_refused(answered: int, output: int, why: str) -> None:
    running, steps = EmulatedEngine(settings(kv_cache_bytes=4 * 32 * 131_072)), list[TokenStep]()
    await running.start()
    running.submit(resumed("b", [1] * answered, None, output), steps.append)
    await running.close()
    error = failure("job", steps[0])
    assert isinstance(error, InvalidRequest)
    assert why in error.message
