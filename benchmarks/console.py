"""`polyphase bench console`: what a console reads, with 200 instances over 24 h and 10^5 requests in SQLite."""

import asyncio
import resource
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry
from sqlalchemy.ext.asyncio import AsyncEngine

from benchmarks.control_fleet import make_info
from services.cluster_monitor.history import Grid, history, instances_over_time
from services.cluster_monitor.load_history import FIGURES, STEPS_S, LoadBook, Totals
from services.cluster_monitor.request_stats import STEPS_S as SERVED_STEPS_S
from services.cluster_monitor.request_stats import Ended, How, Served
from services.cluster_monitor.verdict import judge
from shared.domain.instance import InstanceLoad, InstanceState, InstanceView, Role
from shared.domain.verdict import Situation, Standing, Thresholds
from shared.store.database import open_engine
from shared.store.reading import Order, Wanted, search_requests
from shared.store.tables import load_steps, requests, served
from shared.store.write_behind import WriteBehind

INSTANCES, REQUESTS, HOURS = 200, 100_000, 24
KEPT_S = {10: 3 * 3_600, 60: HOURS * 3_600, 600: HOURS * 3_600}
CLASSES = ("default", "chat", "batch")
ROUNDS = 5
READ_S, PAUSE_S, PROBE_S = 0.2, 0.02, 0.001  # aims, CPU time of a read and a turn of the loop; between two looks at it
NOTE = (
    "least of five reads each, on one machine with whatever else it does. cpu: of the process, SQLite's thread "
    "included; pause: the longest that the event loop did not turn meanwhile. sample: of all loads, once a second."
)
TIMELINE = "x" * 2_000  # characters: as much as that of a usual request


def run_console_bench() -> dict[str, Any]:
    """Fill a database, read each page a few times. The aims: 0.2 s of CPU a read, no pause of the loop over 20 ms.

    Returns {"figures": {name_unit: number}, "aims": {name: {"want", "got", "met"}}, "notes": [str]}.
    """
    with tempfile.TemporaryDirectory(prefix="polyphase-console-") as folder:
        figures = asyncio.run(_measured(f"sqlite:///{Path(folder) / 'console.db'}"))
    aims = {}
    for ending, most in (("_cpu_s", READ_S), ("_pause_s", PAUSE_S)):
        name, got = max(((n, v) for n, v in figures.items() if n.endswith(ending)), key=lambda one: one[1])
        aims[name] = {"want": f"at most {most:g}", "got": got, "met": got <= most}
    return {"figures": figures, "aims": aims, "notes": [NOTE]}


async def _measured(url: str) -> dict[str, float]:
    engine = open_engine(url)
    now = time.time()
    await fill(engine, now)
    figures: dict[str, float] = {}
    for name, read in _reads(engine, now).items():
        cpu_s, wall_s, pause_s = zip(*[await _one(read) for _ in range(ROUNDS)], strict=True)
        figures[f"{name}_cpu_s"] = round(min(cpu_s), 4)  # others use this machine, too
        figures[f"{name}_wall_s"] = round(min(wall_s), 4)
        figures[f"{name}_pause_s"] = round(min(pause_s), 4)
    await engine.dispose()
    return figures | _in_memory(now)


async def _one(read: Callable[[], Awaitable[Any]]) -> tuple[float, float, float]:
    """CPU time of the process, time that passed, and the longest the loop did not turn."""
    longest, stop = 0.0, asyncio.Event()

    async def probe() -> None:
        nonlocal longest
        before = time.perf_counter()
        while not stop.is_set():
            await asyncio.sleep(PROBE_S)
            now = time.perf_counter()
            longest, before = max(longest, now - before - PROBE_S), now

    probing = asyncio.ensure_future(probe())
    await asyncio.sleep(0)
    began, cpu = time.perf_counter(), time.process_time()
    await read()
    spent = time.process_time() - cpu, time.perf_counter() - began
    stop.set()
    await probing
    return *spent, longest


def _reads(engine: AsyncEngine, now: float) -> dict[str, Callable[[], Awaitable[Any]]]:
    found: dict[str, Callable[[], Awaitable[Any]]] = {}
    for minutes in (5, 60, 1_440):
        grid = Grid.of(minutes, 120, now)
        found[f"history_{minutes}"] = partial(history, engine, grid, [])
        found[f"instances_{minutes}"] = partial(instances_over_time, engine, grid)
        found[f"instance_{minutes}"] = partial(instances_over_time, engine, grid, "decode-7")
    for order in Order:
        found[f"search_{order.value}"] = partial(search_requests, engine, Wanted(order=order))
    for name, wanted in {
        "caller": Wanted(caller="key-3"),
        "instance": Wanted(instance="decode-7"),
        "instance_ttft": Wanted(instance="decode-7", order=Order.SLOWEST_TTFT),
        "class_missed": Wanted(slo="batch", missed=True),
        "job": Wanted(job="job-0777"),
        "rare": Wanted(outcome="peer_lost"),
        "nothing": Wanted(slo="none"),
        "hour_longest": Wanted(since_s=now - 3_600, order=Order.LONGEST),
        "far": Wanted(offset=50_000),
    }.items():
        found[f"search_{name}"] = partial(search_requests, engine, wanted)
    return found


async def fill(engine: AsyncEngine, now: float) -> None:
    store = WriteBehind(engine, CollectorRegistry(), capacity=1_000_000)
    await store._migrate()
    rng = Random(1)
    for rows, table in ((_requests(rng, now), requests), (_served(rng, now), served), (_loads(now), load_steps)):
        for row in rows:
            store.put(table, row)
            if store.queued >= 20_000:
                await store.flush()
        await store.flush()


def _requests(rng: Random, now: float) -> Any:
    for number in range(REQUESTS):
        arrived_s = now - HOURS * 3_600 * rng.random()
        ttft_s = rng.lognormvariate(-1.0, 0.8)
        yield {
            "job_id": f"job-{number:06d}",
            "scheduler_id": "scheduler-0",
            "gateway_id": "gateway-0",
            "caller": f"key-{rng.randrange(20)}",
            "phase": "completed",
            "final": True,
            "arrived_s": arrived_s,
            "updated_s": arrived_s + rng.expovariate(0.1),
            "prompt_tokens": rng.randrange(4_000),
            "output_tokens": rng.randrange(500),
            "prefill_instance": f"prefill-{rng.randrange(INSTANCES // 2)}",
            "decode_instance": f"decode-{rng.randrange(INSTANCES // 2)}",
            "split": 100,
            "slo": rng.choice(CLASSES),
            "outcome": "peer_lost" if rng.random() < 0.0005 else "stop",
            "ttft_s": ttft_s,
            "tpot_s": rng.lognormvariate(-3.0, 0.3),
            "longest_gap_s": rng.lognormvariate(-2.0, 0.8),
            "slo_met": ttft_s < 0.8,
            "timeline": TIMELINE,
        }


def _served(rng: Random, now: float) -> Any:
    for step_s in SERVED_STEPS_S:
        for slo in CLASSES:
            for start_s in range(int(now - KEPT_S[step_s]) // step_s * step_s, int(now), step_s):
                one = Served()
                for _ in range(20):
                    seconds = {
                        name: rng.random() for name in ("queue", "prefill", "transfer", "decode_queue", "decode")
                    }
                    ttft_s, tpot_s = rng.lognormvariate(-1.0, 0.8), rng.lognormvariate(-3.0, 0.3)
                    times = (ttft_s, tpot_s, 1.0, 0.1)
                    ended = Ended(slo, How.COMPLETED, start_s, "stop", 1, *times, 900, 200, "", seconds)
                    longest_s = rng.lognormvariate(-2.0, 0.8)
                    one.add(msgspec.structs.replace(ended, itl_target_s=0.25, longest_gap_s=longest_s, gaps=199))
                counts = {
                    name: getattr(one, name) for name in set(served.columns.keys()) & set(Served.__struct_fields__)
                }
                content = msgspec.json.encode(msgspec.structs.replace(one, stages={})).decode()
                yield {"step_s": step_s, "time_s": start_s, "slo": slo, "life": "life", **counts, "content": content}


def _loads(now: float) -> Any:
    who = [(view.info.instance_id, view.role.value, view.state.value) for view in _views()]
    names = msgspec.json.encode(who).decode()
    totals = msgspec.json.encode(Totals(100.0, 20.0, 5_000.0, 6.0, 6.0, 10, 10, 1_000.0, 1_000.0)).decode()
    figures = np.random.default_rng(1).random((INSTANCES, len(FIGURES)), np.float32).tobytes()
    for step_s in STEPS_S:
        for start_s in range(int(now - KEPT_S[step_s]) // step_s * step_s, int(now), step_s):
            key = {"step_s": step_s, "time_s": start_s, "life": "life", "samples": step_s}
            yield {**key, "totals": totals, "instances": names, "figures": figures}


def _views() -> list[InstanceView]:
    found = []
    for role in Role:
        for number in range(INSTANCES // 2):
            info = make_info(f"{role.value}-{number}")
            load = InstanceLoad(time_s=1.0, running=20, waiting=3, free_blocks=2_000, context_tokens=9_000, decoding=20)
            found.append(InstanceView(info, role, InstanceState.READY, load))
    return found


def _in_memory(now: float) -> dict[str, float]:
    """What the monitor does by itself: a sample of all loads each second, a verdict twice a second at most."""
    views, book = _views(), LoadBook()
    instances = tuple(Standing(one.info.instance_id, one.role, one.state, 0.8, 20, 3, 0, 5) for one in views)
    situation = Situation(now, 60.0, 1_000.0, instances, completed=1_000, placed=1_000)
    found = {}
    works: dict[str, Callable[[], Any]] = {
        "sample": partial(book.sample, views, now),
        "verdict": partial(judge, situation, Thresholds()),
    }
    for name, work in works.items():
        times = []
        for _ in range(50):
            began = time.process_time()
            work()
            times.append(time.process_time() - began)
        found[f"{name}_cpu_s"] = round(min(times), 5)
    found["peak_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
    return found
