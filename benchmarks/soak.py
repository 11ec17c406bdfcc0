"""`polyphase bench soak`: well-behaved clients beside hostile ones, for long enough that a leak shows.

The suite is real, its instances are emulated. Hostile clients run in a process held to `HOSTILE_CORES`. Shorter parts
with legal load, of the same CPU share, lie between theirs: the gaps of the well-behaved streams in neighbouring parts
are compared.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import psutil

from benchmarks.real_engines import CpuGroup, cpu_quota
from benchmarks.results import at_most, result
from benchmarks.soak_clients import HOST
from benchmarks.suite import BARE, started
from services.launcher.suite import Suite
from tools.client import CHAT, StreamFailed, chat_body, stream_completion

MINUTES = 20.0
USERS, ANSWER_TOKENS = 12, 48
HOSTILE_CORES = 0.3
ROUNDS, BASE_SHARE = 5, 0.2  # each of a part with legal load, so long beside the hostile part that follows
SAMPLE_S = 5.0
WARM_SHARE = 0.25  # of the hostile part: memory is compared from here on
STILL_S = 85.0  # descriptors that did not change for so long are at rest: idle connections are closed after 75 s
REST_S = 300.0  # they must come to rest within that time after the last client has left
AIM_GROWTH, AIM_GAP_RATIO = 1.02, 1.5
PROMPT = "The quick brown fox jumps over the lazy dog. " * 4


@dataclass(slots=True)
class Users:
    gaps_s: list[float] = field(default_factory=list)
    streams: int = 0
    failed: list[str] = field(default_factory=list)

    @property
    def gap_p99_s(self) -> float:
        return statistics.quantiles(self.gaps_s, n=100)[98]


@dataclass(slots=True)
class Samples:
    """Proportional set size of each process in bytes, one sample every `SAMPLE_S`."""

    pss_bytes: dict[str, list[int]] = field(default_factory=dict)

    def extend(self, other: "Samples") -> None:
        for name, values in other.pss_bytes.items():
            self.pss_bytes.setdefault(name, []).extend(values)

    def by_minute(self) -> dict[str, list[int]]:
        each = max(1, round(60.0 / SAMPLE_S))
        return {name: [value >> 20 for value in values[::each]] for name, values in self.pss_bytes.items()}

    def growth(self) -> dict[str, float]:
        """Median of the last tenth over the median of a tenth that begins after the warm share, by process."""
        found = {}
        for name, values in self.pss_bytes.items():
            width = max(1, len(values) // 10)
            begin = round(len(values) * WARM_SHARE)
            found[name] = statistics.median(values[-width:]) / statistics.median(values[begin : begin + width])
        return found


def run_soak_bench(minutes: float = MINUTES) -> dict[str, Any]:
    """Figures and aims. Raises Unavailable where this machine allows no CPU quota."""
    return asyncio.run(_bench(minutes))


CLUSTER: dict[str, Any] = {
    **BARE,
    "name": "soak bench (emulated instances)",
    "instance_defaults": {
        "engine": "emulated",
        "accelerator": "A100-SXM-80",
        "emulated_step_s": 0.04,
        "kv_cache_bytes": 4 << 30,
    },
    "instances": [{"id": "prefill", "count": 2, "role": "prefill"}, {"id": "decode", "count": 2, "role": "decode"}],
}


async def _bench(minutes: float) -> dict[str, Any]:
    with cpu_quota("soak", HOSTILE_CORES) as group:
        async with started(CLUSTER) as running:
            suite, port = running.suite, urlsplit(running.plan.api_url).port or 80
            await _part(suite, port, group, "legal", 20.0)  # what is loaded once is loaded now
            before = await _files_at_rest(suite)
            legal: list[Users] = []
            hostile: list[Users] = []
            samples, made = Samples(), dict[str, dict[str, int]]()
            for _ in range(ROUNDS):
                seconds = 60.0 * minutes / ROUNDS
                for kind, seen, lasts_s in (("legal", legal, BASE_SHARE * seconds), ("hostile", hostile, seconds)):
                    users, part, counts = await _part(suite, port, group, kind, lasts_s)
                    seen.append(users)
                    samples.extend(part)
                    _count(made.setdefault(kind, {}), counts)
            after = await _files_at_rest(suite)
            restarts = {process.name: process.restarts for process in suite.state.processes if process.restarts}
    return _result(legal, hostile, samples, before, after, restarts, made)


async def _part(
    suite: Suite, port: int, group: CpuGroup, kind: str, seconds: float
) -> tuple[Users, Samples, dict[str, int]]:
    """Well-behaved users beside a process of `kind`, for so long."""
    users, samples, until_s = Users(), Samples(), time.monotonic() + seconds
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.soak_clients", kind, str(port), str(seconds), stdout=asyncio.subprocess.PIPE
    )
    try:
        group.add(process.pid)
        async with asyncio.TaskGroup() as tasks:
            for number in range(USERS):
                tasks.create_task(_user(port, number, users, until_s))
            tasks.create_task(_watch(suite, samples, until_s))
        async with asyncio.timeout(90.0):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return users, samples, json.loads(output)


async def _user(port: int, number: int, users: Users, until_s: float) -> None:
    turn = 0
    while time.monotonic() < until_s:
        turn += 1
        body = chat_body(f"{number} {turn} {PROMPT}", ANSWER_TOKENS)
        try:
            result = await stream_completion(HOST, port, body, path=CHAT)
            users.streams += 1
            users.gaps_s.extend(result.gaps_s)
        except (StreamFailed, OSError) as error:
            users.failed.append(f"{type(error).__name__}: {error}"[:300])
            await asyncio.sleep(0.2)


async def _watch(suite: Suite, samples: Samples, until_s: float) -> None:
    while time.monotonic() < until_s:
        for name, pid in _pids(suite).items():
            try:
                value = await asyncio.to_thread(_pss_bytes, pid)
            except psutil.Error:
                continue
            samples.pss_bytes.setdefault(name, []).append(value)
        await asyncio.sleep(SAMPLE_S)


def _pss_bytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_full_info().pss)


def _pids(suite: Suite) -> dict[str, int]:
    return {process.name: process.pid for process in suite.state.processes if process.pid}


async def _files_at_rest(suite: Suite) -> dict[str, int]:
    """Open descriptors by process, once they have stood still."""
    give_up, still_since, last = time.monotonic() + REST_S, time.monotonic(), dict[str, int]()
    while time.monotonic() < min(give_up, still_since + STILL_S):
        now = {name: psutil.Process(pid).num_fds() for name, pid in _pids(suite).items()}
        if now != last:
            still_since, last = time.monotonic(), now
        await asyncio.sleep(1.0)
    return last


def _count(into: dict[str, int], counts: Mapping[str, int]) -> None:
    for name, count in counts.items():
        into[name] = into.get(name, 0) + count


def _result(
    legal: Sequence[Users],
    hostile: Sequence[Users],
    samples: Samples,
    before: Mapping[str, int],
    after: Mapping[str, int],
    restarts: Mapping[str, int],
    made: Mapping[str, Mapping[str, int]],
) -> dict[str, Any]:
    growth = samples.growth()
    more_files = {name: after.get(name, 0) - count for name, count in before.items() if after.get(name) != count}
    ratios = [one.gap_p99_s / other.gap_p99_s for one, other in zip(hostile, legal, strict=True)]
    figures = {
        "streams": sum(users.streams for users in hostile),
        "streams_beside_legal_load": sum(users.streams for users in legal),
        "gap_p99_s": [round(users.gap_p99_s, 4) for users in hostile],
        "gap_p99_beside_legal_load_s": [round(users.gap_p99_s, 4) for users in legal],
        "longest_gap_s": round(max(max(users.gaps_s) for users in hostile), 3),
        "longest_gap_beside_legal_load_s": round(max(max(users.gaps_s) for users in legal), 3),
        "pss_growth": {name: round(value, 4) for name, value in growth.items()},
        "pss_mib": samples.by_minute(),
        "clients": made,
    }
    failed = [failure for users in (*legal, *hostile) for failure in users.failed]
    aims = {
        "failed_streams": at_most(0, len(failed)),
        "restarts": at_most(0, sum(restarts.values())),
        "pss_growth": at_most(AIM_GROWTH, max(growth.values())),
        "changed_descriptors": at_most(0, sum(map(abs, more_files.values()))),
        "gap_p99_ratio": at_most(AIM_GAP_RATIO, statistics.median(ratios)),
    }
    notes = [f"{name}: {count:+d} descriptors" for name, count in more_files.items()]
    return result(figures, aims, notes + [f"failed: {failure}" for failure in failed[:5]])
