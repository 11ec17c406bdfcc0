"""`polyphase bench control`: what the control plane costs with 10, 100 and 1,000 instances.

Monitor and scheduler are the real processes, started as a suite starts them. The instances are one process with a
heartbeat, a broadcast and an RPC connection for each, which compute nothing; under load every one of them tells another
load each 100 ms, idle they tell that they live. Placements are asked for as a gateway does, and timed there.
"""

import asyncio
import signal
import time
from statistics import median
from typing import Any

import httpx
import uvloop

from lab.bench.control_processes import Control, healthy, running, settled, until
from shared.domain.cluster import ClusterState
from shared.domain.job import JobView, Phase
from shared.wire.clients.scheduler import SchedulerClient
from shared.wire.messages import JobReport
from shared.wire.rpc_client import RpcClients
from shared.wire.sockets import Sockets

SIZES = (10, 100, 1_000)
WINDOW_S = 8.0
PLACE_PER_S, OPEN = 100.0, 100  # placements, and jobs of them that are not over
AIMS = {"monitor_cores": 0.3, "scheduler_cores": 0.2, "place_p99_ms": 1.0, "known_again_s": 5.0}
Figures = dict[str, float]


def run_control_bench(sizes: tuple[int, ...] = SIZES, window_s: float = WINDOW_S) -> dict[str, Any]:
    """{"figures": {size: {name_unit: number}}, "aims": of the largest, "notes": [str]}."""
    figures = {str(size): uvloop.run(_measure(size, window_s)) for size in sizes}
    largest = figures[str(sizes[-1])]
    aims = {
        f"{name} at {sizes[-1]}": {"want": f"<= {most:g}", "got": largest[name], "met": largest[name] <= most}
        for name, most in AIMS.items()
    }
    first = figures[str(sizes[0])]
    names = ("monitor_cores", "scheduler_cores", "broadcast_bytes_per_s", "place_p50_ms", "place_p99_ms")
    growth = {name: round(largest[name] / first[name], 1) for name in names if first[name]}
    return {
        "figures": {**figures, f"growth_{sizes[0]}_to_{sizes[-1]}": growth},
        "aims": aims,
        "notes": [
            "cores: CPU time of the whole process, in cores, while every load changes each 100 ms and nobody asks for "
            "a placement; idle_…: while none does. place_…: from the question to the answer at the client, "
            f"{PLACE_PER_S:g} a second beside those changing loads; decision_…: the part of it that the scheduler "
            "decides, by its own histogram. known_again: from the start of a new monitor process after a kill -9 until "
            "a listener knows all instances to be ready; of it, start is until the process answers at all."
        ],
    }


async def _measure(size: int, window_s: float) -> Figures:
    async with running(size) as control:
        figures = {f"idle_{name}": value for name, value in (await _window(control, window_s)).items()}
        control.load("busy")
        await settled()
        figures |= await _window(control, window_s)
        figures |= await _place(control, window_s)
        figures |= await _restart(control, size)
    return figures


async def _window(control: Control, window_s: float) -> Figures:
    """Cores of both processes, and what is broadcast, while nobody asks for anything."""
    sent = await _counter(control.monitor_url, "polyphase_broadcast_bytes_total")
    beats = await _counter(control.monitor_url, "polyphase_heartbeats_total")
    began, before = time.monotonic(), {name: control.cpu_s(name) for name in ("monitor", "scheduler")}
    await asyncio.sleep(window_s)
    took_s = time.monotonic() - began
    cores = {name: (control.cpu_s(name) - before[name]) / took_s for name in before}
    return {
        **{f"{name}_cores": round(value, 4) for name, value in cores.items()},
        "broadcast_bytes_per_s": round(
            (await _counter(control.monitor_url, "polyphase_broadcast_bytes_total") - sent) / took_s
        ),
        "heartbeats_per_s": round((await _counter(control.monitor_url, "polyphase_heartbeats_total") - beats) / took_s),
    }


async def _place(control: Control, window_s: float) -> Figures:
    """Round trips of placements, evenly spread."""
    sockets, took_s = Sockets(), list[float]()
    try:
        with RpcClients(sockets) as clients:
            client = SchedulerClient(clients, [control.scheduler_settings.rpc_address])
            await client.place(_job(0), timeout_s=10.0)
            before = await _decisions(control.scheduler_url)
            due = time.monotonic()
            for number in range(1, round(window_s * PLACE_PER_S) + 1):
                due += 1.0 / PLACE_PER_S
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                began = time.perf_counter()
                await client.place(_job(number), timeout_s=10.0)
                took_s.append(time.perf_counter() - began)
                if number > OPEN:
                    await client.report([_ended(number - OPEN)], timeout_s=10.0)
            after = await _decisions(control.scheduler_url)
    finally:
        sockets.close()
    took_s.sort()
    decided = {bound: after[bound] - before.get(bound, 0.0) for bound in after}
    return {
        "place_p50_ms": round(median(took_s) * 1e3, 3),
        "place_p99_ms": round(took_s[len(took_s) * 99 // 100] * 1e3, 3),
        "decision_p99_at_most_ms": _quantile_ms(decided, 0.99),
    }


async def _restart(control: Control, size: int) -> Figures:
    """A new monitor after one that was killed: when it answers, and when all are known again."""
    control.load("busy")
    control.processes["monitor"].send_signal(signal.SIGKILL)
    await control.processes["monitor"].wait()
    control.cluster = ClusterState()
    began = time.monotonic()
    await control.start_monitor()
    await until(lambda: healthy(f"{control.monitor_url}/health"), "the new monitor answers")
    start_s = time.monotonic() - began
    await until(lambda: control.all_ready(size), "all are known again")
    return {"known_again_s": round(time.monotonic() - began, 2), "known_again_start_s": round(start_s, 2)}


async def _scrape(url: str) -> list[str]:
    async with httpx.AsyncClient(timeout=30.0) as client:
        return (await client.get(f"{url}/metrics")).text.splitlines()


async def _counter(url: str, name: str) -> float:
    return next(float(line.split()[1]) for line in await _scrape(url) if line.startswith(f"{name} "))


async def _decisions(url: str) -> dict[float, float]:
    """Decisions by the time that they took at most, in seconds."""
    found = {}
    for line in await _scrape(url):
        if line.startswith("polyphase_scheduler_decision_seconds_bucket{"):
            bound, count = line.split('le="')[1].split('"')[0], float(line.split()[-1])
            found[float(bound)] = count
    return found


def _quantile_ms(counts: dict[float, float], share: float) -> float:
    total = max(counts.values())
    return next(bound * 1e3 for bound, count in sorted(counts.items()) if count >= share * total)


def _job(number: int) -> JobView:
    return JobView(f"bench-{number}", 200 + number * 37 % 1500, 100)


def _ended(number: int) -> JobReport:
    job = _job(number)
    return JobReport(
        job.job_id, "bench", Phase.COMPLETED, time.time() - 1.0, job.prompt_tokens, 100, outcome="stop", slo_met=True
    )
