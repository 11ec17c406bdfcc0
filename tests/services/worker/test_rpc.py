"""The spans around the methods of an instance."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from benchmarks.traces import Collector, ReceivedSpan, collecting
from services.worker.rpc import traced
from shared.domain.job import Generation, JobView
from shared.domain.kv import Codec, KvHandle, TransferOutcome, TransferReport
from shared.domain.prompt import packed
from shared.domain.route import InstanceRef, Reason
from shared.errors import WrongRole
from shared.runtime.otlp import Tracer
from shared.runtime.settings import Tracing
from shared.wire.messages import (
    DECODE,
    PREFILL,
    DecodeReply,
    DecodeRequest,
    PrefillReply,
    PrefillRequest,
    PrefillStarted,
    TokenStep,
)
from shared.wire.rpc_server import ServerCall

ID, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


WIRE = f"00-{ID}-{PARENT}-01 a=b"


HANDLE = KvHandle("t", "p0", 1, "f", (), 1000, "bfloat16", Codec.INT8)


GENERATION = Generation(b"", 0.0)


class Call:
    timeout_s, peer = 10.0, b"peer"

    def __init__(self) -> None:
        self.items: list[object] = []

    def send(self, item: object) -> None:
        self.items.append(item)


@asynccontextmanager
async def told(inner: Callable[[Any, ServerCall], Awaitable[Any]]) -> AsyncIterator[tuple[Any, Any, Call, Collector]]:
    """Handlers that trace around `inner`, a call, and what has come at the end of the block."""
    with collecting() as collector:
        tracer = Tracer(Tracing(endpoint=collector.url), "worker", "x", CollectorRegistry())
        handlers = traced({PREFILL: inner, DECODE: inner}, tracer, "x", lambda: 512)
        try:
            yield handlers[PREFILL], handlers[DECODE], Call(), collector
        finally:
            await tracer.close()


def prefill_request(trace: str = WIRE) -> PrefillRequest:
    job = JobView("j", 1000, 8)
    return PrefillRequest(job, "t", packed(list(range(1000))), GENERATION, saved=100, trace=trace)


def decode_request() -> DecodeRequest:
    return DecodeRequest(JobView("j", 1000, 8), packed(list(range(1000))), GENERATION, HANDLE, trace=WIRE)


def named(collector: Collector, name: str) -> ReceivedSpan:
    (found,) = [span for span in collector.of(ID) if span.name == name]
    return found


async def test_a_prefill() -> None:
    now = time.time()
    ref = InstanceRef("d0", 1, "tcp://a:1")

    async def inner(_: PrefillRequest, call: ServerCall) -> PrefillReply:
        call.send(PrefillStarted(ref, HANDLE))
        reasons = (Reason("dispatch:power_of_two", {"chosen": "d0", "ratio": 0.51234}),)
        return PrefillReply([1], ref, HANDLE, queued_s=now, started_s=now + 1, ended_s=now + 3, reasons=reasons)

    async with told(inner) as (prefill, _, call, collector):
        assert (await prefill(prefill_request(), call)).tokens == [1]
        assert len(call.items) == 1
    queue, span = named(collector, "queue"), named(collector, "prefill")
    assert {one.parent_id for one in (queue, span)} == {PARENT}
    assert {one.state for one in (queue, span)} == {"a=b"}
    assert (queue.ended_s, span.ended_s - span.began_s) == pytest.approx((span.began_s, 2.0), abs=1e-5)
    assert "first_chunk_staged" in span.events
    assert span.attributes == {
        "polyphase.instance.id": "x",
        "polyphase.prompt_tokens": 1000,
        "polyphase.known_cached_tokens": 100,
        "polyphase.chunk_tokens": 512,
        "polyphase.chunks": 2,
        "polyphase.decode.instance.id": "d0",
        "polyphase.reasons": ["dispatch:power_of_two: chosen=d0, ratio=0.5123"],
    }


@pytest.mark.parametrize("outcome", [TransferOutcome.PULLED, TransferOutcome.RECOMPUTED])
async def test_a_decode_and_its_transfer(outcome: TransferOutcome) -> None:
    now = time.time()

    async def inner(_: DecodeRequest, call: ServerCall) -> DecodeReply:
        call.send(TokenStep([1]))
        report = TransferReport(outcome, 900, 12345, now - 1, now + 1, "", "tcp")
        return DecodeReply(report, now, now + 2, now + 5)

    async with told(inner) as (_, decode, call, collector):
        await decode(decode_request(), call)
    assert [span.name for span in collector.of(ID)] == ["transfer", "decode_queue", "decode"]
    transfer = named(collector, "transfer")
    assert transfer.error is (outcome is TransferOutcome.RECOMPUTED)
    figures = {name.rpartition(".")[2]: value for name, value in transfer.attributes.items()}
    expected = {"from": "p0", "outcome": outcome.value, "tokens": 900, "bytes": 12345, "codec": "int8"}
    assert figures.items() >= {**expected, "transport": "tcp"}.items()


async def test_a_refusal_is_an_error_and_a_cancellation_is_none() -> None:
    async def refuse(_: Any, __: ServerCall) -> None:
        raise WrongRole("it drains")

    async with told(refuse) as (prefill, decode, call, collector):
        for ask in (prefill(prefill_request(), call), decode(decode_request(), call)):
            with pytest.raises(WrongRole):
                await ask
    assert [(span.name, span.error) for span in collector.of(ID)] == [("prefill", True), ("decode_queue", True)]

    async def stream(_: Any, call: ServerCall) -> None:
        call.send(TokenStep([1]))
        await asyncio.Event().wait()

    async with told(stream) as (_, decode, call, collector):
        task = asyncio.create_task(decode(decode_request(), call))
        while not call.items:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    spans = collector.of(ID)
    assert [(span.name, span.error) for span in spans] == [("decode_queue", False), ("decode", False)]
    assert spans[-1].attributes["polyphase.cancelled"] is True


async def test_a_job_that_is_not_traced_is_handed_on_as_it_is() -> None:
    calls: list[object] = []

    async def inner(_: Any, call: ServerCall) -> None:
        calls.append(call)

    async with told(inner) as (prefill, _, call, collector):
        await prefill(prefill_request(trace=""), cast(Any, call))
    assert calls == [call]
    assert collector.bodies == []
