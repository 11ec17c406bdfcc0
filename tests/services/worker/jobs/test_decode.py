"""The decode side: queued prompts, refusals for want of room, and pauses."""

import asyncio
import time
from typing import Any, cast

import msgspec
import pytest

from services.worker.engines.base import EngineStats, StepLog
from services.worker.jobs import decode as decode_side
from services.worker.kv import holds_exact_kv, may_import
from shared.domain.instance import Promised, Role
from shared.domain.job import Generation, JobView
from shared.domain.kv import Codec, KvHandle
from shared.domain.prompt import packed
from shared.domain.rates import UNKNOWN_STEPS, Rates
from shared.errors import Conflict, NoRoom, NotFound, WrongRole
from shared.policy.overload import Beside, pause_s
from shared.wire.messages import (
    DECODE,
    DRAIN,
    EXPECT,
    MOVE,
    RELEASE,
    DecodeRequest,
    DrainRequest,
    ExpectRequest,
    Leave,
    LeaveCause,
    MoveRequest,
    Pause,
    PrefetchRequest,
    ReleaseRequest,
    TokenStep,
)
from shared.wire.rpc_server import ServerCall
from tests.services.control_plane import until
from tests.services.fake_worker import make_info
from tests.services.worker.jobs.sides import Call, Side, decode_request, prefill_request


async def test_prompts_that_a_decode_instance_has_to_compute_count_as_queued_until_their_first_token() -> None:
    side = Side(Role.DECODE)
    handle = KvHandle("t1", "p0", 1, "fp", (), 2, "bfloat16")
    for given, queued, tokens in ((None, 1, 2), (handle, 0, 0)):  # the last token is the first decode's
        task = await side.decode(decode_request(given))
        assert (side.decodes.queued, side.decodes.queued_tokens) == (queued, tokens)
        side.engine.step(TokenStep([5], ""))
        assert (side.decodes.queued, side.decodes.queued_tokens) == (0, 0)
        side.engine.step(TokenStep([6], "stop"))
        await task


async def test_what_an_instance_is_known_to_hold_of_a_prompt_does_not_count_as_queued() -> None:
    computes, decodes = Side(Role.PREFILL), Side(Role.DECODE)
    task = await computes.prefill(prefill_request(50, saved=32))
    assert (computes.prefills.queued, computes.prefills.queued_tokens) == (1, 18)
    request = msgspec.structs.replace(decode_request(), saved=1)
    other = await decodes.decode(request)
    assert (decodes.decodes.queued, decodes.decodes.queued_tokens) == (1, 1)
    for side in (computes, decodes):
        side.engine.step(TokenStep([42], "length"))
    await task
    await other


async def test_what_is_computed_of_a_prompt_does_not_count_as_queued() -> None:
    computes, decodes = Side(Role.PREFILL), Side(Role.DECODE)
    tasks = [await computes.prefill(prefill_request(50, saved=32)), await computes.prefill(prefill_request(50))]
    tasks.append(await decodes.decode(decode_request()))
    first, second = (request.request_id for request in computes.engine.requests)
    for partly, queued in ({first: 32, second: 16}, 18 + 34), ({first: 40, second: 50}, 10), ({"other": 7}, 18 + 50):
        computes.engine.partly = partly
        assert (computes.prefills.queued, computes.prefills.queued_tokens) == (2, queued)
    assert (decodes.decodes.queued, decodes.decodes.queued_tokens) == (1, 2)
    decodes.engine.partly = {decodes.engine.requests[0].request_id: 1}
    assert (decodes.decodes.queued, decodes.decodes.queued_tokens) == (1, 1)
    assert max(decodes.decodes.kv_ahead(0, 0)) == 3 + 8
    await cancelled(*tasks)


async def test_a_decode_that_has_left_another_instance_goes_on_after_its_known_tokens() -> None:
    """Their KV counts as held here, and no step repeats them."""
    side = Side(Role.DECODE)
    given = {"known": packed([7, 8, 9]), "resumes": True, "state": b"state"}
    for tokens, queued in ((5, 0), (4, 1), (0, 5)):  # of the six the last one is the next decode's
        handle = KvHandle("t1", "p0", 1, "fp", (), tokens, "bfloat16") if tokens else None
        task = await side.decode(msgspec.structs.replace(decode_request(handle), **given))
        assert (side.decodes.queued_tokens, side.decodes.context_tokens) == (queued, 6)
        side.engine.step(TokenStep([7], ""))
        side.engine.step(TokenStep([6], "stop"))
        await task
    request = side.engine.requests[-1]
    assert (request.forced_tokens, request.resumes, request.state) == ([7, 8, 9], True, b"state")
    assert [item.tokens for item in side.call.items] == [[7], [6]] * 3


async def test_a_decode_that_goes_on_here_has_used_a_part_of_its_answer() -> None:
    """Its answer of 8 tokens is to find room, of which it has 3."""
    side = Side(Role.DECODE)
    task = await side.decode(msgspec.structs.replace(decode_request(), known=packed([7, 8, 9]), resumes=True))
    assert max(side.decodes.kv_ahead(0, 0)) == 3 + 8
    side.engine.step(TokenStep([6], "stop"))
    await task


async def test_prompts_count_as_queued_until_they_are_computed_and_the_wait_ends_when_the_engine_takes_them() -> None:
    side = Side(Role.PREFILL)
    task = await side.prefill(prefill_request(5))
    assert (side.prefills.queued, side.prefills.queued_tokens) == (1, 5)
    await asyncio.sleep(0.01)
    side.engine.enter()
    entered_s = time.time()
    side.engine.enter()  # preempted, and taken again
    side.engine.step(TokenStep([42], "length"))
    reply = await task
    assert (side.prefills.queued, side.prefills.queued_tokens) == (0, 0)
    assert reply.started_s - reply.queued_s >= 0.009
    assert reply.started_s <= entered_s


async def test_jobs_that_share_a_prefix_hold_its_blocks_once() -> None:
    """Two prompts of three tokens whose blocks hold four tokens together: each counts for two."""
    side = Side(Role.DECODE)
    assert side.decodes.kv_ahead(0, 0) == ()
    tasks = []
    for _ in range(2):
        tasks.append(await side.decode(msgspec.structs.replace(decode_request(), saved=2)))
    assert (side.decodes.context_tokens, side.decodes.queued_tokens) == (6, 0)
    assert side.decodes.kv_ahead(6, 0)[0] == 2 * (3 + 8)
    assert side.decodes.kv_ahead(4, 0)[0] == 2 * (2 + 8)
    assert side.decodes.kv_ahead(0, 0)[0] == 2 * (3 + 8), "nothing is known of blocks"
    await cancelled(*tasks)


async def cancelled(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


COMING = Promised(mark=7, decode_tokens=3, answer_tokens=8, lead_steps=2)


def expecting(side: Side, transfer_id: str, promised: Promised = COMING, peer: bytes = b"gateway", **more: Any) -> None:
    side.handlers[EXPECT](ExpectRequest(transfer_id, promised, **more), cast(ServerCall, Call(peer)))


async def test_what_is_bound_to_it_shows_until_it_comes_is_released_or_its_gateway_is_gone() -> None:
    side = Side(Role.DECODE)
    for transfer_id in ("comes", "released", "of another"):
        expecting(side, transfer_id, peer=transfer_id.encode())
    assert side.decodes.promised == (COMING,) * 3
    task = await side.decode(decode_request(side.port.handle("comes", 3, Codec.RAW)))
    assert (len(side.decodes.promised), side.decodes.active) == (2, 1)
    await side.handlers[RELEASE](ReleaseRequest(["released"]), cast(ServerCall, side.call))
    assert len(side.decodes.promised) == 1
    await side.decodes.drop_of(b"of another")
    assert side.decodes.promised == ()
    side.engine.step(TokenStep([1], "length"))
    await task


async def test_what_never_comes_is_forgotten_with_its_time() -> None:
    side = Side(Role.DECODE)
    expecting(side, "late", keep_s=-1.0)
    expecting(side, "in time")
    assert len(side.decodes.promised) == 1


def _sized(tokens: int, *, if_room: bool = True) -> DecodeRequest:
    """A job that takes so many of the 64 tokens that the instance has."""
    prompt = packed(range(tokens - 8))
    return DecodeRequest(JobView("job", tokens - 8, 8), prompt, Generation(b"", 1.0), if_room=if_room)


async def _refused(side: Side, request: DecodeRequest) -> None:
    async with asyncio.timeout(5):
        await side.decodes.decode(request, cast(ServerCall, side.call))


async def test_a_job_is_refused_where_its_answer_finds_no_room_beside_those_that_decode() -> None:
    side = Side(Role.DECODE)
    tasks = [await side.decode(_sized(32)), await side.decode(_sized(22))]
    with pytest.raises(NoRoom, match="d0: the answers that decode there come to 54 tokens of KV, and the job to 11; "):
        await _refused(side, _sized(11))
    assert (side.decodes.active, side.roles.inflight, side.roles.accepted.__len__()) == (2, 2, 2)
    tasks.append(await side.decode(_sized(10)))
    tasks.append(await side.decode(_sized(11, if_room=False)))  # it is to wait there
    await cancelled(*tasks)
    tasks = [await side.decode(_sized(100))]  # alone: whatever it needs
    await cancelled(*tasks)


async def test_room_that_an_answer_leaves_is_there_from_the_next_heartbeat_on() -> None:
    side = Side(Role.DECODE)
    first, second = await side.decode(_sized(32)), await side.decode(_sized(22))
    await cancelled(second)
    with pytest.raises(NoRoom):
        await _refused(side, _sized(30))
    side.decodes.kv_ahead(0, 0)
    third = await side.decode(_sized(30))
    await cancelled(first, third)


async def test_a_prefetch_outlives_a_refusal_for_lack_of_room() -> None:
    """The job returns if no other instance has room."""
    side = Side(Role.DECODE)
    task = await side.decode(_sized(60))
    expecting(side, "t")
    handle = side.port.handle("t", 3, Codec.RAW)
    await side.decodes.prefetch(PrefetchRequest(handle, keep_s=77.0), cast(ServerCall, side.call))
    with pytest.raises(NoRoom):
        await _refused(side, msgspec.structs.replace(_sized(10), handle=handle))
    assert (side.port.accepted_ids, side.port.dropped, side.decodes.promised) == ([], [], ())
    other = await side.decode(msgspec.structs.replace(_sized(10, if_room=False), handle=handle))
    assert (side.port.accepted_ids, side.port.dropped) == (["t"], [])
    await cancelled(task, other)


async def test_without_a_seat_there_is_no_room_either() -> None:
    side = Side(Role.DECODE)
    side.info = msgspec.structs.replace(side.info, max_seqs=1)
    task = await side.decode(_sized(10))
    with pytest.raises(NoRoom, match="all 1 seats are taken"):
        await _refused(side, _sized(10))
    await cancelled(task)


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
    (job,) = side.decodes._active.values()
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
    alone_s = pause_s(Beside.from_jobs([], 32), 32, 3, 8, 32, UNKNOWN_STEPS, side.info.chunk_size)
    assert item.pause.expected_s > 16 * UNKNOWN_STEPS.decode_s(1, 3) > alone_s
    await cancelled(*tasks)


def migrating(job_id: str = "job") -> DecodeRequest:
    """A request whose gateway migrates it."""
    request = decode_request()
    view = msgspec.structs.replace(request.job, job_id=job_id)
    return msgspec.structs.replace(request, job=view, tell_leaves=True)


def leaves(side: Side) -> list[Leave]:
    return [item.leave for item in side.call.items if item.leave is not None]


async def test_an_operator_moves_a_job_and_it_decodes_on_until_its_gateway_does_so() -> None:
    side = Side(Role.DECODE)
    moved, other = await side.decode(migrating("moved")), await side.decode(migrating("other"))
    call = cast(ServerCall, Call())
    await side.handlers[MOVE](MoveRequest("moved"), call)
    await side.handlers[MOVE](MoveRequest("moved", "d1"), call)
    assert leaves(side) == [Leave(LeaveCause.OPERATOR, ""), Leave(LeaveCause.OPERATOR, "d1")]
    assert not any(item.tokens or item.finish_reason for item in side.call.items)
    side.engine.step(TokenStep([5], ""))
    assert side.call.items[-1].tokens == [5]
    assert not moved.done()
    await cancelled(moved, other)


async def test_a_prefill_instance_decodes_the_tokens_that_it_is_to_keep() -> None:
    side = Side(Role.PREFILL)
    side.engine.steps = StepLog()
    with pytest.raises(WrongRole):
        await side.handlers[DECODE](migrating("all"), cast(ServerCall, Call()))
    kept = await side.decode(msgspec.structs.replace(migrating("kept"), keep_tokens=3))
    side.engine.requests[-1].entered()
    side.engine.step(TokenStep([5, 6], ""))
    await until(lambda: side.decodes.find("kept").job.has_blocks, "its blocks")
    side.decodes.look()
    assert leaves(side) == []
    side.engine.step(TokenStep([7], ""))
    side.decodes.look()
    side.decodes.look()
    assert leaves(side) == [Leave(LeaveCause.KEPT)]
    await cancelled(kept)


async def test_jobs_that_cannot_be_moved_are_refused_with_the_reason() -> None:
    side = Side(Role.DECODE)
    call, stays = cast(ServerCall, Call()), await side.decode(decode_request())
    for request, error, why in (
        (MoveRequest("nobody"), NotFound, "nobody: no such job decodes at d0"),
        (MoveRequest("job", "d0"), Conflict, "job decodes on d0 already"),
        (MoveRequest("job"), Conflict, "job stays on d0: its gateway does not migrate it"),
    ):
        with pytest.raises(error, match=why):
            await side.handlers[MOVE](request, call)
    side.roles.obey(5)
    with pytest.raises(Conflict, match="obeys epoch 5"):
        await side.handlers[MOVE](MoveRequest("job", epoch=4), call)
    assert side.call.items == []
    await cancelled(stays)


async def test_a_drain_lets_decodes_leave_again_and_again_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_side, "DRAIN_NEWS_S", 0.01)
    side, call = Side(Role.DECODE), cast(ServerCall, Call())
    stays = await side.decode(decode_request())
    assert leaves(side) == []
    await side.handlers[DRAIN](DrainRequest(0.0), call)
    assert leaves(side) == [], "its gateway does not migrate"
    side.roles.resume()
    moves = await side.decode(migrating())
    await side.handlers[DRAIN](DrainRequest(0.0), call)
    assert leaves(side) == [Leave(LeaveCause.DRAIN)]
    await until(lambda: len(leaves(side)) >= 3, "more notices")
    side.roles.resume()
    count = len(leaves(side))
    await until(lambda: side.decodes._drain_news is None, "the end of the notices")
    assert set(leaves(side)) == {Leave(LeaveCause.DRAIN)}
    assert len(leaves(side)) == count
    await side.handlers[DRAIN](DrainRequest(0.0), call)
    await cancelled(stays, moves)
    await until(lambda: side.decodes._drain_news is None, "the end of the notices with that of the jobs")


@pytest.mark.parametrize(
    ("codec", "precision", "salt"),
    [
        (Codec.RAW, "", "mine"),
        (Codec.RAW, "fp8", "mixed-precision:fp8:mine"),
        (Codec.INT8, "", "lossy-kv:t"),
        (Codec.INT8, "fp8", "lossy-kv:t"),
    ],
)
async def test_kv_that_the_engine_would_not_have_computed_is_kept_apart(
    codec: Codec, precision: str, salt: str
) -> None:
    side = Side(Role.DECODE)
    handle = msgspec.structs.replace(side.port.handle("t", 2, codec), precision=precision)
    request = decode_request(handle)
    request.generation = msgspec.structs.replace(request.generation, cache_salt="mine")
    task = await side.decode(request)
    assert side.engine.requests[0].generation.cache_salt == salt
    assert may_import(handle, side.info.precision, salt)
    assert may_import(handle, side.info.precision, "mine") is (salt == "mine")
    assert holds_exact_kv(salt) is (salt == "mine")
    side.engine.step(TokenStep([6], "stop"))
    await task
