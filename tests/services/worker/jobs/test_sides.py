"""The prefill and decode sides over an engine that does what the test says."""

import asyncio
from typing import cast

import msgspec
import pytest

from services.worker.engines.base import deliver
from shared.domain.instance import Role
from shared.domain.kv import Codec, TransferOutcome, TransferReport
from shared.domain.prompt import packed
from shared.domain.route import InstanceRef
from shared.errors import EngineFailed, InvalidRequest, PolyphaseError, Unavailable, WrongRole
from shared.wire.messages import (
    LogprobRows,
    PrefetchRequest,
    PrefillStarted,
    Reused,
    TokenStep,
    decode_rows,
    encode_rows,
)
from shared.wire.rpc_server import ServerCall
from tests.services.worker.jobs.sides import (
    FIRST_TOKEN,
    TARGET,
    Call,
    ScriptedPort,
    Side,
    decode_request,
    prefill_request,
)

END = TokenStep([1], "length")


async def test_a_prefill_answers_with_its_token_the_instance_and_the_handle() -> None:
    side = Side(Role.PREFILL)
    reply = await side.prefilled(prefill_request(), TokenStep([42], "length", reused=Reused(2, 1)))
    assert (reply.tokens, reply.decode, reply.finish_reason, reply.reused) == ([42], TARGET, "", Reused(2, 1))
    assert reply.handle is not None
    assert reply.handle.tokens == 3
    assert side.engine.requests[0].export_to == "t1"
    assert side.roles.inflight == 0


@pytest.mark.parametrize(
    ("outcome", "reused"),
    [
        (TransferOutcome.PULLED, Reused(3, 0, 2)),
        (TransferOutcome.RECOMPUTED, Reused(1, 0, 0)),  # of its own cache
        (None, Reused(3, 0, 2)),
    ],
)
async def test_what_a_failed_import_was_to_bring_has_been_computed(
    outcome: TransferOutcome | None, reused: Reused, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = Side(Role.DECODE)
    report = None if outcome is None else TransferReport(outcome)
    monkeypatch.setattr(side.port, "known_report", lambda _: report)
    request = decode_request(side.port.handle("t1", 3, Codec.RAW))
    await side.decoded(request, TokenStep([1], reused=Reused(3, 0, 2)), TokenStep([2], "length"))
    assert [step.reused for step in side.call.items] == [reused, None]


@pytest.mark.parametrize("wanted", [True, False])
async def test_the_engine_knows_whether_its_token_is_wanted(wanted: bool) -> None:
    side = Side(Role.PREFILL)
    reply = await side.prefilled(msgspec.structs.replace(prefill_request(), want_token=wanted))
    assert reply.tokens == ([42] if wanted else [])
    assert side.engine.requests[0].wants_token == wanted


@pytest.mark.parametrize("dispatched", [None, TARGET])
async def test_a_first_token_that_ends_the_answer_needs_no_dispatch_and_leaves_nothing_staged(
    dispatched: InstanceRef | None,
) -> None:
    side = Side(Role.PREFILL)
    reply = await side.prefilled(prefill_request(decode=dispatched), TokenStep([2], "stop"))
    assert (reply.finish_reason, reply.decode, reply.handle) == ("stop", dispatched, None)
    assert side.dispatcher.asked == 0
    assert side.port.released == ["t1"]


async def test_a_long_prompt_names_its_decode_instance_after_the_first_chunk() -> None:
    side = Side(Role.PREFILL, chunk_size=4)
    task = await side.prefill(prefill_request(10))
    side.port.callbacks["t1"]()
    assert isinstance(side.call.items[0], PrefillStarted)
    assert side.call.items[0].handle.tokens == 10
    side.engine.step(FIRST_TOKEN)
    assert (await task).decode == TARGET
    assert side.dispatcher.asked == 1


@pytest.mark.parametrize("comes", [False, True])
async def test_a_decode_instance_that_comes_while_the_prompt_is_computed_is_taken_and_none_is_no_error(
    comes: bool,
) -> None:
    side = Side(Role.PREFILL, chunk_size=4)
    side.dispatcher.refusal = Unavailable("no decode instance is ready")
    task = await side.prefill(prefill_request(10))
    side.port.callbacks["t1"]()  # nothing to announce, and no error
    assert side.call.items == []
    if comes:
        side.dispatcher.refusal = None
    side.engine.step(FIRST_TOKEN)
    reply = await task
    assert (reply.decode, reply.tokens) == (TARGET if comes else None, [42])
    assert [reason.what for reason in reply.reasons] == ([] if comes else ["no decode instance is ready"])
    assert reply.handle is not None
    assert side.port.released == []  # until a decode instance is found, or the lease ends


@pytest.mark.parametrize("end", ["cancelled", "error"])
async def test_a_prefill_that_is_cancelled_or_fails_leaves_nothing_behind(end: str) -> None:
    side = Side(Role.PREFILL)
    task = await side.prefill(prefill_request())
    if end == "cancelled":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert side.engine.aborted == ["job#p1"]
    else:
        side.engine.step(TokenStep([], "error", "no room"))
        with pytest.raises(EngineFailed, match="no room"):
            await task
    assert side.port.released == ["t1"]
    assert side.roles.inflight == 0


@pytest.mark.parametrize(("imports", "outcome"), [(True, TransferOutcome.PULLED), (False, TransferOutcome.LOCAL)])
async def test_a_decode_streams_steps_and_reports_the_transfer(imports: bool, outcome: TransferOutcome) -> None:
    side, steps = Side(Role.DECODE), [TokenStep([1]), TokenStep([2], "stop", 7)]
    handle = side.port.handle("t1", 3, Codec.RAW) if imports else None
    reply = await side.decoded(decode_request(handle), *steps)
    assert side.call.items == steps
    assert reply.transfer.outcome is outcome


async def test_the_tokens_that_a_client_has_are_forced_and_not_sent_again() -> None:
    side = Side(Role.DECODE)
    request = msgspec.structs.replace(decode_request(), known=packed([4, 5, 6]))
    await side.decoded(request, *(TokenStep(each) for each in ([4], [5], [6, 7])), TokenStep([8], "stop", 8))
    assert side.engine.requests[0].forced_tokens == [4, 5, 6]
    assert side.call.items == [TokenStep([7]), TokenStep([8], "stop", 8)]


async def test_a_step_that_repeats_the_last_known_token_and_goes_on_keeps_the_log_probabilities_of_the_rest() -> None:
    side = Side(Role.DECODE)
    request = msgspec.structs.replace(decode_request(), known=packed([4, 5]))
    rows = LogprobRows(2, bytes(range(24)), bytes(range(24, 48)), bytes(range(48, 60)))
    await side.decoded(request, TokenStep([4]), TokenStep([5, 6, 7], "stop", 7, encode_rows(rows)))
    (step,) = side.call.items
    assert step.tokens == [6, 7]
    assert decode_rows(step.logprobs) == LogprobRows(2, bytes(range(8, 24)), bytes(range(32, 48)), bytes(range(52, 60)))


async def test_an_engine_that_does_not_repeat_them_fails_the_attempt() -> None:
    side = Side(Role.DECODE)
    request = msgspec.structs.replace(decode_request(), known=packed([4, 5]))
    with pytest.raises(EngineFailed, match="did not repeat"):
        await side.decoded(request, TokenStep([4]), TokenStep([9]), TokenStep([5]))
    assert side.call.items == []
    assert len(side.engine.aborted) == 1


@pytest.mark.parametrize("end", ["stop", "error", "cancelled"])
async def test_an_import_is_expected_from_the_begin_of_its_decode_to_its_end_however_that_comes(end: str) -> None:
    side = Side(Role.DECODE)
    task = await side.decode(decode_request(side.port.handle("t1", 3, Codec.RAW)))
    assert [each.handle.transfer_id for each in side.port.expected] == ["t1"]
    if end == "cancelled":
        task.cancel()
    else:
        side.engine.step(TokenStep([1], end))
    await asyncio.gather(task, return_exceptions=True)
    assert side.port.expected == []
    assert side.roles.inflight == 0
    assert side.engine.aborted == (["job#d1"] if end == "cancelled" else [])


@pytest.mark.parametrize("steps", [0, 1])
async def test_a_client_that_leaves_after_its_first_token_has_had_its_transfer(steps: int) -> None:
    side = Side(Role.DECODE)
    task = await side.decode(decode_request(ScriptedPort().handle("t1", 3, Codec.RAW)))
    for _ in range(steps):
        side.engine.step(TokenStep([1]))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [report.outcome for report in side.transfers] == [TransferOutcome.PULLED] * steps


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4, Codec.FP8])
async def test_approximate_kv_gets_a_salt_that_exact_requests_never_have(codec: Codec) -> None:
    side = Side(Role.DECODE)
    await side.decoded(decode_request(side.port.handle("t1", 3, codec)), END)
    assert "t1" in side.engine.requests[0].generation.cache_salt


async def test_generated_tokens_count_as_context() -> None:
    side = Side(Role.DECODE)
    task = await side.decode(decode_request())
    for given, context in (([5], 4), ([6, 7], 6)):
        side.engine.step(TokenStep(given))
        assert side.decodes.context_tokens == context
    side.engine.step(TokenStep([8], "stop"))
    await task
    assert side.decodes.context_tokens == 0


async def test_a_prompt_whose_kv_has_no_room_may_not_enter_the_engine_yet() -> None:
    side = Side(Role.PREFILL)
    side.port.full = True
    task = await side.prefill(prefill_request())
    assert not side.engine.enter()
    side.port.full = False
    side.port.room()
    assert side.engine.woken == 1
    assert side.engine.enter()
    assert side.port.reserved == {"t1": b"gateway"}
    side.engine.step(FIRST_TOKEN)
    assert (await task).handle is not None


async def test_a_prompt_that_nothing_is_staged_of_needs_no_room() -> None:
    side = Side(Role.PREFILL)
    assert (await side.prefilled(prefill_request(export=False))).handle is None
    assert (side.engine.requests[0].export_to, side.port.announced) == ("", {})


async def test_an_engine_is_told_what_its_policies_want_to_know() -> None:
    side = Side(Role.PREFILL)
    await side.prefilled(prefill_request(5))
    request = side.engine.requests[0]
    assert (request.job.job_id, request.decodes, request.as_waiting().tokens) == ("job", False, 5)
    side = Side(Role.DECODE)
    for tokens in (2, 3):  # of three; the last one is always computed here
        await side.decoded(decode_request(side.port.handle("t1", tokens, Codec.RAW)), END)
        request = side.engine.requests[-1]
        assert (request.decodes, request.as_waiting().tokens) == (True, 1)


async def test_staged_kv_survives_a_flip_and_is_released_with_its_gateway() -> None:
    side = Side(Role.PREFILL)
    await side.prefilled(prefill_request())
    assert (await side.roles.drain(1)).drained
    side.roles.flip(Role.DECODE)
    side.roles.resume()
    await side.port.release_of(b"another")
    assert side.port.released == []
    await side.port.release_of(b"gateway")
    assert side.port.released == ["t1"]


def prefetch_request(side: Side, name: str = "t1") -> PrefetchRequest:
    return PrefetchRequest(side.port.handle(name, 3, Codec.RAW), keep_s=77.0)


async def test_prefetches_of_a_gone_gateway_are_dropped_unless_a_job_has_come_for_them() -> None:
    side = Side(Role.DECODE)
    for name, peer in (("t1", b"a"), ("t2", b"a"), ("t3", b"a"), ("t4", b"b")):
        await side.decodes.prefetch(prefetch_request(side, name), cast(ServerCall, Call(peer)))
    assert side.port.prefetched == dict.fromkeys(("t1", "t2", "t3", "t4"), 77.0)
    task = await side.decode(decode_request(side.port.handle("t1", 3, Codec.RAW)))
    side.decodes.forget(["t2"])  # released meanwhile
    await side.decodes.drop_of(b"a")
    assert side.port.released == ["t3"]
    side.engine.step(END)
    await task
    assert side.port.dropped == []


async def test_a_decode_that_is_refused_or_fails_leaves_no_prefetch() -> None:
    side = Side(Role.DECODE)
    handle = side.port.handle("t1", 3, Codec.RAW)
    await side.decodes.prefetch(prefetch_request(side), cast(ServerCall, side.call))
    with pytest.raises(EngineFailed):
        await side.decoded(decode_request(handle), TokenStep([], "error", "refused"))
    side.roles.draining = True
    with pytest.raises(WrongRole):
        await side.decodes.decode(decode_request(handle), cast(ServerCall, side.call))
    assert side.port.dropped == ["t1", "t1"]


async def test_a_job_that_cannot_take_its_step_does_not_cost_the_others_theirs() -> None:
    taken: list[TokenStep] = []
    deliver(lambda _: {}["a bug"], TokenStep([1]))
    deliver(taken.append, TokenStep([2]))
    assert taken == [TokenStep([2])]


@pytest.mark.parametrize(
    ("reason", "error"), [("refused", InvalidRequest), ("error", EngineFailed), ("abort", EngineFailed)]
)
@pytest.mark.parametrize("role", Role)
async def test_what_the_engine_refuses_is_the_requests_fault_and_what_fails_is_not(
    role: Role, reason: str, error: type[PolyphaseError]
) -> None:
    side, last = Side(role), TokenStep([], reason, "a prompt of 5 tokens")
    with pytest.raises(error, match="a prompt of 5 tokens"):
        await (
            side.prefilled(prefill_request(), last) if role is Role.PREFILL else side.decoded(decode_request(), last)
        )
    assert side.call.items == []
