"""`polyphase bench streams`: thousands of chat streams open at once through one gateway process, for a minute.

All services are real and the instances are emulated: each stream gets a token a second. One process reads all streams
with a minimal protocol, so that the clients cost little. A stream is lost if it ends without all its tokens; a token is
late if it arrives a step or more after its time.
"""

import asyncio
import re
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

import psutil

from benchmarks.cluster_files import emulated
from benchmarks.measuring import cores, cpu_s, own_bytes, pids_of, port_of
from benchmarks.results import Figures, Result, at_most, in_turns, medians, result
from benchmarks.suite import started
from services.launcher.up import RunningSuite
from tools.client import CHAT, Json, Request, StreamFailed, chat_body

STREAMS, HELD_S, PER_S = 2000, 60.0, 80.0
STEP_S, SETTLE_S = 1.0, 3.0  # the second token of a request may be late: it waits for the step under way
QUICK_STEP_S, QUICK_STREAMS, QUICK_TOKENS = 0.001, 64, 1500  # more tokens than a gateway can write
SHORT_REQUESTS, SHORT_TOKENS, LOADS = 300, 2, 4
PROMPT = "The quick brown fox jumps over the lazy dog. " * 4
END_S = 180.0
_EVENT, _DONE, _ERROR = b"data: {", b"data: [DONE]", b'data: {"error"'
_USAGE = rb'"completion_tokens":%d\b'  # in the last event of an answer


class Stream(asyncio.Protocol):
    """Counts the events of a stream as they arrive; never waits and never parses JSON.

    Times are seconds on the performance counter. late_s: when each gap of more than `slow_s` ended.
    """

    def __init__(self, body: Json, slow_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.sent_s = time.perf_counter()
        self.first_s = self.last_s = 0.0
        self.late_s: list[float] = []
        self.began: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._request, self._slow_s = Request(CHAT, body).encode(), slow_s
        self._usage = re.compile(_USAGE % body["max_tokens"])
        self._done = self._counted = False
        self._error = ""
        self._tail = b""

    @property
    def fault(self) -> str:
        """Empty if the stream had all its tokens, by the server's own count."""
        missing = "" if self._done and self._counted else "the stream ended without its last token or [DONE]"
        return self._error or missing

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        data, now = self._tail + data, time.perf_counter()
        end = data.rfind(b"\n") + 1
        lines, self._tail = data[:end], data[end:]
        if lines.startswith(b"HTTP/1.1 ") and not lines.startswith(b"HTTP/1.1 200 "):
            self._error = lines[:200].decode(errors="replace")
        elif _ERROR in lines:
            self._error = lines[lines.index(_ERROR) :][:200].decode(errors="replace")
        self._done = self._done or _DONE in lines
        self._counted = self._counted or self._usage.search(lines) is not None
        if _EVENT in lines:
            if self.first_s and now - self.last_s > self._slow_s:
                self.late_s.append(now)
            self.first_s, self.last_s = self.first_s or now, now
            if not self.began.done():
                self.began.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        for future in (self.began, self.ended):
            if not future.done():
                future.set_result(None)


async def open_streams(port: int, bodies: Sequence[Json], per_s: float, slow_s: float) -> list[Stream]:
    """Open a stream for each body, at most `per_s` a second, and wait until each has its first event."""
    loop = asyncio.get_running_loop()
    began, streams = loop.time(), list[Stream]()
    for number, body in enumerate(bodies):
        await asyncio.sleep(max(0.0, began + number / per_s - loop.time()))
        _, stream = await loop.create_connection(partial(Stream, body, slow_s), "127.0.0.1", port)
        streams.append(stream)
    await asyncio.gather(*(stream.began for stream in streams))
    return streams


async def ended(streams: Sequence[Stream]) -> Sequence[Stream]:
    """The streams, once all have ended. Raises TimeoutError."""
    async with asyncio.timeout(END_S):
        await asyncio.gather(*(stream.ended for stream in streams))
    return streams


def run_streams_bench(streams: int = STREAMS, held_s: float = HELD_S) -> Result:
    return asyncio.run(_bench(streams, held_s))


async def _bench(count: int, held_s: float) -> Result:
    async with started(_cluster(STEP_S, processes=1)) as running:
        streams, from_s, figures = await _hold(running, count, held_s)
    faults = [stream.fault for stream in streams if stream.fault]
    late = sum(from_s <= when < from_s + held_s for stream in streams for when in stream.late_s)
    one, two = (await _rates()).values()
    figures = {
        "streams": count,
        "lost_streams": len(faults),
        "late_tokens": late,
        "tokens_per_s": count / STEP_S,
        **figures,
        **{
            f"{name}_{n}_process": round(value, 1) for n, rates in ((1, one), (2, two)) for name, value in rates.items()
        },
        "two_processes_tokens_x": round(two["tokens_per_s_at_most"] / one["tokens_per_s_at_most"], 3),
        "two_processes_requests_x": round(two["requests_per_s_at_most"] / one["requests_per_s_at_most"], 3),
    }
    aims = {"lost_streams": at_most(0, len(faults)), "late_tokens": at_most(0, late)}
    notes = [f"{psutil.cpu_count()} cores, which gateways share with the client and all other services", *faults[:3]]
    return result(figures, aims, notes)


def _cluster(step_s: float, processes: int) -> Json:
    instances = [
        {"id": "p0", "role": "prefill", "emulated_step_s": 0.0},
        {"id": "d0", "role": "decode", "emulated_step_s": step_s},
    ]
    engine = {"max_seqs": 8192, "kv_cache_bytes": 1 << 40}
    return emulated("streams", instances, engine, gateway={"max_queued_jobs": 8192, "processes": processes})


def _body(number: int, tokens: int) -> Json:
    return chat_body(f"{number} {PROMPT}", tokens, stream_options={"include_usage": True})


async def _hold(running: RunningSuite, count: int, held_s: float) -> tuple[Sequence[Stream], float, Figures]:
    """The many streams, when all were open, and what the gateway used for them."""
    gateways, port, slow_s = pids_of(running, "gateway"), port_of(running), STEP_S * 2
    await ended(await open_streams(port, [_body(number, 2) for number in range(64)], PER_S, slow_s))
    before_bytes = own_bytes(gateways)
    opening_s = count / PER_S
    # The first streams are open while the others are being opened, and all together for the time that counts.
    bodies = [_body(n, int((opening_s - n / PER_S + SETTLE_S + held_s) / STEP_S) + 10) for n in range(count)]
    streams = await open_streams(port, bodies, PER_S, slow_s)
    await asyncio.sleep(SETTLE_S)
    from_mono = time.perf_counter()
    used = await cores({"gateway": gateways}, held_s)
    figures = {
        "gateway_cores": round(used["gateway"], 3),
        "memory_kb_per_stream": round((own_bytes(gateways) - before_bytes) / count / 1024, 1),
    }
    return await ended(streams), from_mono, figures


async def _rates() -> dict[int, Figures]:
    """By number of gateway processes: medians over the loads but the first, which warms up."""
    async with AsyncExitStack() as stack:
        suites = {n: await stack.enter_async_context(started(_cluster(QUICK_STEP_S, n))) for n in (1, 2)}
        loads = await in_turns(suites, LOADS, lambda _, processes: _load(suites[processes]))
    return {n: medians(load[n] for load in loads[1:]) for n in suites}


async def _load(running: RunningSuite) -> Figures:
    tokens, gateways = QUICK_STREAMS * QUICK_TOKENS, pids_of(running, "gateway")
    before_s = cpu_s(gateways)
    long = await _at_once(running, QUICK_STREAMS, QUICK_TOKENS)
    used_s = cpu_s(gateways) - before_s
    short = await _at_once(running, SHORT_REQUESTS, SHORT_TOKENS)
    long_s = max(stream.last_s for stream in long) - min(stream.first_s for stream in long)
    short_s = max(stream.last_s for stream in short) - min(stream.sent_s for stream in short)
    return {
        "tokens_per_s_at_most": tokens / long_s,
        "gateway_cpu_us_per_token": used_s / tokens * 1e6,
        "requests_per_s_at_most": SHORT_REQUESTS / short_s,
    }


async def _at_once(running: RunningSuite, count: int, tokens: int) -> Sequence[Stream]:
    """As many streams at once. Raises StreamFailed for one that does not end well."""
    bodies = [_body(number, tokens) for number in range(count)]
    streams = await ended(await open_streams(port_of(running), bodies, 1e6, END_S))
    for stream in streams:
        if stream.fault:
            raise StreamFailed(stream.fault)
    return streams
