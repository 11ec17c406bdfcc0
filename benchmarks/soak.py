"""`polyphase bench soak`: well-behaved users beside hostile clients, for long enough that a leak shows.

The suite is real, its instances are emulated. The other clients run in a process that is held to `HOSTILE_CORES`. It is
hostile in long parts and sends legal load in shorter ones: the gaps of the users' streams in neighbouring parts are
compared. Every kind of hostile client is bounded in count and rate.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from random import Random
from statistics import median, quantiles
from typing import Any

import httpx
import psutil

from benchmarks.chaos import hostile
from benchmarks.cluster_files import emulated
from benchmarks.measuring import port_of
from benchmarks.quotas import cpu_quota
from benchmarks.results import Result, at_most, result
from benchmarks.suite import spawned, started
from services.launcher.suite import Suite
from shared.errors import Unavailable
from tools.client import (
    CHAT,
    COMPLETIONS,
    Address,
    Request,
    StreamFailed,
    chat_body,
    completion_body,
    stream_completion,
    users,
)

MINUTES = 20.0
USERS, USER_TOKENS, LEGAL_STREAMS = 12, 48, 8
HOSTILE_CORES = 0.3
ROUNDS, LEGAL_SHARE = 5, 0.2  # the legal part of a round takes so long beside the hostile part
WARM_UP_S, SAMPLE_S = 20.0, 5.0
WARM_SHARE = 0.25  # of the samples: memory is compared from here on
STILL_S = 85.0  # descriptors that did not change for so long are at rest: idle connections are closed after 75 s
REST_S = 300.0  # they must be at rest so long after the last client has left
AIM_GROWTH, AIM_GAP_RATIO = 1.02, 1.5
PROMPT = "The quick brown fox jumps over the lazy dog. " * 4

CLUSTER = emulated(
    "soak",
    [{"id": "prefill", "count": 2, "role": "prefill"}, {"id": "decode", "count": 2, "role": "decode"}],
    {"emulated_step_s": 0.04, "kv_cache_bytes": 4 << 30},
)


@dataclass(slots=True)
class Part:
    """What the users and a watcher saw. pss_bytes: memory of each process, one sample every `SAMPLE_S`."""

    gaps_s: list[float] = field(default_factory=list)
    streams: int = 0
    failed: list[str] = field(default_factory=list)
    pss_bytes: dict[str, list[int]] = field(default_factory=dict)
    attacks: Counter[str] = field(default_factory=Counter)

    @property
    def gap_p99_s(self) -> float:
        return quantiles(self.gaps_s, n=100)[98]

    async def send(self, port: int, number: int, turn: int) -> bool:
        """A user's request. Returns whether it was served."""
        body = chat_body(f"{number} {turn} {PROMPT}", USER_TOKENS)
        try:
            seen = await stream_completion("127.0.0.1", port, body, path=CHAT)
        except (StreamFailed, OSError) as error:
            self.failed.append(f"{type(error).__name__}: {error}"[:300])
            return False
        self.streams += 1
        self.gaps_s.extend(seen.gaps_s)
        return True


def run_soak_bench(minutes: float = MINUTES) -> Result:
    """Figures and aims. Raises Unavailable where this machine allows no CPU quota."""
    return asyncio.run(_bench(minutes))


async def _bench(minutes: float) -> Result:
    with cpu_quota("soak", HOSTILE_CORES) as group:
        async with started(CLUSTER) as running:
            suite, port = running.suite, port_of(running)
            with spawned(run_clients, ("127.0.0.1", port)) as clients:
                group.add(await asyncio.to_thread(clients.recv))
                await _part(suite, port, clients, "legal", WARM_UP_S)
                before = await _files_at_rest(suite)
                parts: dict[str, list[Part]] = {"legal": [], "hostile": []}
                for _ in range(ROUNDS):
                    seconds = 60.0 * minutes / ROUNDS
                    parts["legal"].append(await _part(suite, port, clients, "legal", LEGAL_SHARE * seconds))
                    parts["hostile"].append(await _part(suite, port, clients, "hostile", seconds))
                after = await _files_at_rest(suite)
            restarts = sum(process.restarts for process in suite.state.processes)
    return _result(parts, before, after, restarts)


async def _part(suite: Suite, port: int, clients: Connection, kind: str, seconds: float) -> Part:
    """The users beside clients of this kind."""
    part = Part()
    clients.send((kind, seconds))
    async with users(USERS, lambda number, turn: part.send(port, number, turn)):
        await _watch(suite, part, time.monotonic() + seconds)
    if not await asyncio.to_thread(clients.poll, 90.0):
        raise Unavailable(f"the {kind} clients have not ended")
    part.attacks = clients.recv()
    return part


async def _watch(suite: Suite, part: Part, until_s: float) -> None:
    while time.monotonic() < until_s:
        for name, pid in _pids(suite).items():
            with suppress(psutil.Error):  # it may be restarting
                memory = await asyncio.to_thread(psutil.Process(pid).memory_full_info)
                part.pss_bytes.setdefault(name, []).append(memory.pss)
        await asyncio.sleep(SAMPLE_S)


def _pids(suite: Suite) -> dict[str, int]:
    return {process.name: process.pid for process in suite.state.processes if process.pid}


async def _files_at_rest(suite: Suite) -> Counter[str]:
    """Open descriptors of each process, once they have stood still."""
    give_up_mono, still_since_mono, last = time.monotonic() + REST_S, time.monotonic(), Counter[str]()
    while time.monotonic() < min(give_up_mono, still_since_mono + STILL_S):
        now = Counter({name: psutil.Process(pid).num_fds() for name, pid in _pids(suite).items()})
        if now != last:
            still_since_mono, last = time.monotonic(), now
        await asyncio.sleep(1.0)
    return last


def growth(samples: list[int]) -> float:
    """Median of the last tenth of the samples over the median of a tenth that begins after the warm share."""
    width, begin = max(1, len(samples) // 10), round(len(samples) * WARM_SHARE)
    return median(samples[-width:]) / median(samples[begin : begin + width])


def _result(parts: Mapping[str, list[Part]], before: Counter[str], after: Counter[str], restarts: int) -> Result:
    in_order = [part for round_ in zip(parts["legal"], parts["hostile"], strict=True) for part in round_]
    samples = {
        name: [sample for part in in_order for sample in part.pss_bytes.get(name, ())]
        for name in {name: None for part in in_order for name in part.pss_bytes}
    }
    grown = {name: growth(values) for name, values in samples.items()}
    changed = {name: after[name] - before[name] for name in before if after[name] != before[name]}
    ratios = [other.gap_p99_s / legal.gap_p99_s for legal, other in zip(*parts.values(), strict=True)]
    per_minute = max(1, round(60.0 / SAMPLE_S))
    figures: dict[str, Any] = {
        "streams": sum(part.streams for part in in_order),
        "gap_p99_s": [round(part.gap_p99_s, 4) for part in parts["hostile"]],
        "gap_p99_beside_legal_load_s": [round(part.gap_p99_s, 4) for part in parts["legal"]],
        "pss_growth": {name: round(value, 4) for name, value in grown.items()},
        "pss_mib": {name: [sample >> 20 for sample in values[::per_minute]] for name, values in samples.items()},
        "attacks": dict(sum((part.attacks for part in parts["hostile"]), Counter())),
    }
    failed = [failure for part in in_order for failure in part.failed]
    aims = {
        "failed_streams": at_most(0, len(failed)),
        "restarts": at_most(0, restarts),
        "pss_growth": at_most(AIM_GROWTH, max(grown.values())),
        "changed_descriptors": at_most(0, sum(map(abs, changed.values()))),
        "gap_p99_ratio": at_most(AIM_GAP_RATIO, median(ratios)),
    }
    notes = [f"{name}: {count:+d} descriptors" for name, count in changed.items()]
    return result(figures, aims, notes + [f"failed: {failure}" for failure in failed[:5]])


# The process of the other clients.

PAUSE_S = 0.5  # between two attacks of one hostile client
ANSWER_S = 20.0  # a hostile client leaves after that
BODY_BYTES = 3_900_000


def run_clients(pipe: Connection, address: Address) -> None:
    """Send this process's id; then answer each (kind, seconds) with the number of attacks by kind, until None."""
    pipe.send(os.getpid())
    while (part := pipe.recv()) is not None:
        kind, seconds = part
        run = {"hostile": _hostile, "legal": _legal}[kind]
        pipe.send(asyncio.run(run(address, seconds)))


def _completion(**more: object) -> Request:
    return Request(COMPLETIONS, {"model": "demo", "prompt": "Hello", "max_tokens": 4, **more})


def _chat(content: Any = "Hello", **more: object) -> Request:
    message = {"role": "user", "content": content}
    return Request(CHAT, {"model": "demo", "messages": [message], "max_tokens": 4, **more})


def _many_items(rng: Random) -> Request:
    """The largest body of the smallest items, of one of the kinds that a body may have."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    match rng.randrange(4):
        case 0:
            return Request("/v1/responses", {"model": "demo", "input": [{"role": "user", "content": ""}] * 90_000})
        case 1:
            return _chat(messages=[{"role": "user", "content": "a"}] * 60_000)
        case 2:
            return _chat(tools=[tool] * 40_000)
    return _completion(stop=["a"] * 200_000)


def _costly_grammar(rng: Random) -> Request:
    """A new large schema each time, so that no cache serves it."""
    name = f"p{rng.getrandbits(60)}"
    schema = {"type": "object", "properties": {f"{name}{n}": {"type": "string"} for n in range(1500)}}
    return _chat(response_format={"type": "json_schema", "json_schema": {"name": name, "schema": schema}})


BODIES: dict[str, Callable[[Random], Request]] = {
    "many_items": _many_items,
    "long_text": lambda _: Request("/tokenize", {"model": "demo", "prompt": "a b " * (BODY_BYTES // 4)}),
    "prompt_logprobs": lambda _: _completion(prompt=[5], max_tokens=1, prompt_logprobs=1),
    "costly_grammar": _costly_grammar,
    "bad_number": lambda rng: _completion(temperature=rng.choice([float("nan"), float("inf"), 10**400])),
    "image": lambda _: _chat([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]),
}


async def _attack(kind: str, address: Address, rng: Random) -> None:
    stream = _completion(max_tokens=200, stream=True)
    match kind:
        case "unread":
            await hostile.never_read(address, stream, 3.0)
        case "disconnect":
            await hostile.leave(address, stream, rng.uniform(0.0, 1.0))
        case "silent":  # connections that send nothing
            writers = [(await asyncio.open_connection(*address))[1] for _ in range(20)]
            await asyncio.sleep(5.0)
            for writer in writers:
                writer.transport.abort()
        case "metrics":
            async with httpx.AsyncClient(trust_env=False, timeout=ANSWER_S) as client:
                for _ in range(20):
                    await client.get("http://{}:{}/metrics".format(*address), headers={"Connection": "close"})
        case _:
            await hostile.body_of(address, BODIES[kind](rng), ANSWER_S)


async def _hostile(address: Address, seconds: float) -> Counter[str]:
    """One client for each kind of attack. Returns how often each attack was made."""
    made, until_mono = Counter[str](), time.monotonic() + seconds

    async def client(number: int, kind: str) -> None:
        rng = Random(number)
        while time.monotonic() < until_mono:
            with suppress(OSError, httpx.HTTPError):
                await _attack(kind, address, rng)
            made[kind] += 1
            await asyncio.sleep(PAUSE_S)

    kinds = (*BODIES, "unread", "disconnect", "silent", "metrics")
    await asyncio.gather(*(client(number, kind) for number, kind in enumerate(kinds)))
    return made


async def _legal(address: Address, seconds: float) -> Counter[str]:
    """Short streams, `LEGAL_STREAMS` at a time."""

    async def send(number: int, turn: int) -> bool:
        with suppress(StreamFailed, OSError):
            await stream_completion(*address, completion_body(f"{number} {turn} fox", 16))
        return True

    async with users(LEGAL_STREAMS, send):
        await asyncio.sleep(seconds)
    return Counter()
