"""What a decode instance tells of a stream whose KV blocks were taken back for others."""

import asyncio

import msgspec
import pytest

from services.worker.engines.base import EngineStats
from services.worker.jobs import decode as decode_side
from shared.domain.instance import Role
from shared.domain.job import JobView
from shared.domain.rates import UNKNOWN_STEPS, Rates
from shared.policy.overload import Beside, pause_s
from shared.wire.messages import Pause, TokenStep
from tests.services.control_plane import until
from tests.services.fake_worker import make_info
from tests.services.worker.jobs.sides import Side, decode_request


async def test_a_stream_that_loses_its_blocks_tells_how_long_that_is_expected_to_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_side, "PAUSE_NEWS_S", 0.01)
    side = Side(Role.DECODE)
    request = msgspec.structs.replace(decode_request(), tell_pauses=True)
    task = await side.decode(request)
    side.engine.enter()
    side.engine.requests[-1].preempted()  # a prompt without a token is no stream: its client sees no pause
    side.engine.enter()
    await asyncio.sleep(0)  # the engine's word is taken in the next turn of the loop
    side.engine.step(TokenStep([5], ""))
    side.engine.requests[-1].preempted()
    items = side.call.items

    def pauses() -> list[Pause]:
        return [item.pause for item in items if item.pause is not None]

    await until(lambda: len(pauses()) >= 2, "it is told again")
    assert [item.tokens for item in items] == [[5], *[[] for _ in pauses()]]
    assert all(pause.expected_s > 0.0 and not pause.computing for pause in pauses())
    side.engine.enter()
    await until(lambda: pauses()[-1].computing, "it is computed again")
    (job,) = side._decode._active.values()
    assert job.repeat is None, "nothing more is told of a pause that is over"
    side.engine.step(TokenStep([6], "stop"))
    await task


async def test_a_caller_that_does_not_know_pauses_is_told_of_none() -> None:
    side = Side(Role.DECODE)
    task = await side.decode(decode_request())
    side.engine.enter()
    side.engine.step(TokenStep([5], ""))
    side.engine.requests[-1].preempted()
    side.engine.enter()
    await asyncio.sleep(0)
    side.engine.step(TokenStep([6], "stop"))
    await task
    assert [item.tokens for item in side.call.items] == [[5], [6]]


async def test_a_pause_is_expected_to_end_with_the_jobs_that_have_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs of three tokens, one block each, where there is one block."""
    side = Side(Role.DECODE)
    side.info = make_info("d0", "tcp://a:1", block_size=32, total_blocks=1, rates=Rates(step=UNKNOWN_STEPS))
    monkeypatch.setattr(side.engine, "stats", lambda: EngineStats(total_blocks=1))
    tasks = []
    for name, answer in (("runs", 16), ("paused", 8)):
        job = JobView(name, 3, answer, started=True)
        request = msgspec.structs.replace(decode_request(), job=job, tell_pauses=True)
        tasks.append(await side.decode(request))
        await until(lambda: len(side.engine.requests) == len(tasks), "it is there")
        side.engine.enter()
    side.engine.requests[-1].preempted()
    await until(lambda: bool(side.call.items), "the pause is told")
    (item,) = side.call.items
    alone_s = pause_s(Beside.of([], 32), 32, 3, 8, 32, UNKNOWN_STEPS, side.info.chunk_size)
    assert item.pause.expected_s > 16 * UNKNOWN_STEPS.decode_s(1, 3) > alone_s
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
