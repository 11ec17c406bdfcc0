"""`polyphase bench streams`: thousands of chat streams open at once through one gateway process, for a minute.

All services are real and the instances are emulated: each stream gets a token a second. One process reads all streams
with a minimal protocol, so that the clients cost little. A stream is lost if it ends without all its tokens; a token is
late if it arrives a step or more after its time.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks.results import Result, at_most, result
from benchmarks.suite import BARE, started
from services.launcher.up import RunningSuite
from tools.client import CHAT, Request, StreamFailed, chat_body

_EVENT, _DONE, _ERROR = b"data: {", b"data: [DONE]", b'data: {"error"'
_TOKENS = b'"completion_tokens":'  # of the usage in the last event of a whole answer


@dataclass(slots=True)
class Watched:
    """One stream as it was seen. Times are seconds on the performance counter; `fault` is empty for a whole one."""

    sent_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    events: int = 0
    tokens: int = 0  # as the server counts them, in the end
    done: bool = False
    fault: str = ""
    gaps: list[tuple[float, float]] = field(default_factory=list)  # (when it ended, how long): those over `slow_s`

    def late(self, after_s: float, before_s: float) -> int:
        """How many slow gaps ended in that time."""
        return sum(after_s <= when < before_s for when, _ in self.gaps)


class _Reader(asyncio.Protocol):
    """Counts a stream's events as they come; never waits, never parses JSON."""

    def __init__(self, request: bytes, slow_s: float) -> None:
        self.seen = Watched(time.perf_counter())
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.began: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._slow_s = slow_s
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        data = self._tail + data
        whole = data.rfind(b"\n") + 1
        self._tail = data[whole:]
        self._take(data[:whole])

    def _take(self, lines: bytes) -> None:
        seen, now = self.seen, time.perf_counter()
        if lines.startswith(b"HTTP/1.1 ") and not lines.startswith(b"HTTP/1.1 200 "):
            seen.fault = lines[:200].decode(errors="replace")
        if (at := lines.find(_ERROR)) >= 0:
            seen.fault = lines[at:][:200].decode(errors="replace")
        seen.done = seen.done or _DONE in lines
        if (at := lines.rfind(_TOKENS)) >= 0:
            digits = lines[at + len(_TOKENS) :][:12]
            seen.tokens = int(digits[: len(digits) - len(digits.lstrip(b"0123456789"))])
        if events := lines.count(_EVENT):
            if seen.first_s and now - seen.last_s > self._slow_s:
                seen.gaps.append((now, now - seen.last_s))
            seen.first_s, seen.last_s = seen.first_s or now, now
            seen.events += events
            if not self.began.done():
                self.began.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.seen.done:
            self.seen.fault = self.seen.fault or f"the stream ended without [DONE]: {exc}"
        for future in (self.began, self.ended):
            if not future.done():
                future.set_result(None)


class Crowd:
    """Streams of one server, opened one after the other and held until each has ended."""

    def __init__(self, host: str, port: int, slow_s: float) -> None:
        """slow_s: from how long on a gap between two events of a stream is noted."""
        self._address = (host, port)
        self._slow_s = slow_s
        self._readers: list[_Reader] = []

    async def open(self, bodies: Sequence[dict[str, object]], path: str, per_s: float) -> None:
        """Open a stream for each body, so many a second, and wait until each has its first event. Raises OSError."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        for number, body in enumerate(bodies):
            await asyncio.sleep(max(0.0, began + number / per_s - loop.time()))
            request = Request(path, body).encode()
            _, reader = await loop.create_connection(partial(_Reader, request, self._slow_s), *self._address)
            self._readers.append(reader)
        await asyncio.gather(*(reader.began for reader in self._readers))

    async def ended(self, timeout_s: float) -> list[Watched]:
        """What was seen of each, once all have ended. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*(reader.ended for reader in self._readers))
        return [reader.seen for reader in self._readers]


STREAMS, HELD_S, PER_S = 2000, 60.0, 80.0
STEP_S, SETTLE_S = 1.0, 3.0  # a job that is handed over waits for a step under way: its second token is no measure
QUICK_STEP_S, QUICK_STREAMS, QUICK_TOKENS = 0.001, 64, 1500  # more than can be written
SHORT_REQUESTS, SHORT_TOKENS, LOADS = 300, 2, 4
PROMPT = "The quick brown fox jumps over the lazy dog. " * 4
_ENDS_S = 180.0


@dataclass(frozen=True, slots=True)
class _Held:
    """The many streams, and what the gateway's process had in memory before and while they were open."""

    streams: list[Watched]
    from_s: float  # when all were open
    before_bytes: int
    open_bytes: int
    cpu_share: float  # cores that the gateway used while all were open


@dataclass(frozen=True, slots=True)
class _Rate:
    """Of all gateway processes together."""

    tokens_per_s: float
    cpu_us_per_token: float
    requests_per_s: float


def run_streams_bench(streams: int = STREAMS, held_s: float = HELD_S) -> Result:
    return asyncio.run(_bench(streams, held_s))


async def _bench(streams: int, held_s: float) -> Result:
    async with started(_cluster(STEP_S, processes=1)) as running:
        held = await _hold(running, streams, held_s)
    return _result(held, held_s, await _rates())


def _cluster(step_s: float, processes: int) -> dict[str, Any]:
    engine = {"engine": "emulated", "accelerator": "A100-SXM-80", "max_seqs": 8192, "kv_cache_bytes": 1 << 40}
    return {
        **BARE,
        "name": "streams bench (emulated instances)",
        "gateway": {"max_queued_jobs": 8192, "processes": processes},
        "instance_defaults": engine,
        "instances": [
            {"id": "p0", "role": "prefill", "emulated_step_s": 0.0},
            {"id": "d0", "role": "decode", "emulated_step_s": step_s},
        ],
    }


def _body(number: int, tokens: int) -> dict[str, Any]:
    return chat_body(f"{number} {PROMPT}", tokens, stream_options={"include_usage": True})


async def _hold(running: RunningSuite, count: int, held_s: float) -> _Held:
    gateways = _gateways(running)
    port = _port(running)
    warm = Crowd("127.0.0.1", port, slow_s=STEP_S * 2)
    await warm.open([_body(number, 2) for number in range(64)], CHAT, PER_S)
    await warm.ended(_ENDS_S)
    before = _memory(gateways)
    crowd = Crowd("127.0.0.1", port, slow_s=STEP_S * 2)
    opening = count / PER_S
    # The first ones are open while the others are being opened, and all together for the time that counts.
    bodies = [_body(n, int((opening - n / PER_S + SETTLE_S + held_s) / STEP_S) + 10) for n in range(count)]
    await crowd.open(bodies, CHAT, PER_S)
    await asyncio.sleep(SETTLE_S)
    from_s, cpu_s = time.perf_counter(), _cpu_s(gateways)
    await asyncio.sleep(held_s)
    memory, cpu_share = _memory(gateways), (_cpu_s(gateways) - cpu_s) / (time.perf_counter() - from_s)
    seen = await crowd.ended(_ENDS_S)
    for each, body in zip(seen, bodies, strict=True):
        if not each.fault and each.tokens != body["max_tokens"]:
            each.fault = f"{each.tokens} of {body['max_tokens']} tokens"
    return _Held(seen, from_s, before, memory, cpu_share)


def _port(running: RunningSuite) -> int:
    return urlsplit(running.plan.api_url).port or 80


async def _rates() -> dict[int, _Rate]:
    """Of one process and of two, in turn on two suites: the medians of the loads after the first, which warms up."""
    async with started(_cluster(QUICK_STEP_S, 1)) as one, started(_cluster(QUICK_STEP_S, 2)) as two:
        loads = [{n: await _load(running) for n, running in ((1, one), (2, two))} for _ in range(LOADS)]
    return {n: _median([load[n] for load in loads[1:]]) for n in (1, 2)}


def _median(rates: Sequence[_Rate]) -> _Rate:
    return _Rate(*(statistics.median(column) for column in zip(*map(astuple, rates), strict=True)))


async def _load(running: RunningSuite) -> _Rate:
    tokens, gateways = QUICK_STREAMS * QUICK_TOKENS, _gateways(running)
    before_s = _cpu_s(gateways)
    seen = await _all(running, QUICK_STREAMS, QUICK_TOKENS)
    cpu_s = _cpu_s(gateways) - before_s
    took_s = max(one.last_s for one in seen) - min(one.first_s for one in seen)
    short = await _all(running, SHORT_REQUESTS, SHORT_TOKENS)
    short_s = max(one.last_s for one in short) - min(one.sent_s for one in short)
    return _Rate(tokens / took_s, cpu_s / tokens * 1e6, SHORT_REQUESTS / short_s)


async def _all(running: RunningSuite, count: int, tokens: int) -> list[Watched]:
    """So many streams at once. Raises StreamFailed when one of them did not end as it should."""
    crowd = Crowd("127.0.0.1", _port(running), slow_s=_ENDS_S)
    await crowd.open([_body(number, tokens) for number in range(count)], CHAT, 1e6)
    seen = await crowd.ended(_ENDS_S)
    for one in seen:
        if one.fault or one.tokens != tokens:
            raise StreamFailed(one.fault or f"{one.tokens} of {tokens} tokens")
    return seen


def _gateways(running: RunningSuite) -> list[psutil.Process]:
    return [psutil.Process(one.pid) for one in running.suite.state.processes if one.name.startswith("gateway")]


def _memory(processes: list[psutil.Process]) -> int:
    """Bytes that are theirs alone: what the fork server shares with them is no stream's."""
    return sum(process.memory_full_info().uss for process in processes)


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def _result(held: _Held, held_s: float, rates: dict[int, _Rate]) -> Result:
    lost = [one.fault for one in held.streams if one.fault]
    late = sum(one.late(held.from_s, held.from_s + held_s) for one in held.streams)
    count = len(held.streams)
    figures = {
        "streams": count,
        "lost_streams": len(lost),
        "late_tokens": late,
        "tokens_per_s": count / STEP_S,
        "gateway_cores": round(held.cpu_share, 3),
        "memory_kb_per_stream": round((held.open_bytes - held.before_bytes) / count / 1024, 1),
        **{f"tokens_per_s_at_most_{n}_process": round(rate.tokens_per_s) for n, rate in rates.items()},
        **{f"gateway_cpu_us_per_token_{n}_process": round(rate.cpu_us_per_token, 1) for n, rate in rates.items()},
        **{f"requests_per_s_at_most_{n}_process": round(rate.requests_per_s) for n, rate in rates.items()},
        "two_processes_tokens_x": round(rates[2].tokens_per_s / rates[1].tokens_per_s, 3),
        "two_processes_requests_x": round(rates[2].requests_per_s / rates[1].requests_per_s, 3),
    }
    aims = {"lost_streams": at_most(0, len(lost)), "late_tokens": at_most(0, late)}
    notes = [f"{psutil.cpu_count()} cores, which gateways share with the client and all other services", *lost[:3]]
    return result(figures, aims, notes)
