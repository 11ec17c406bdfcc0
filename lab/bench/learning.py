"""`polyphase bench learning`: how good the rates are that real engines learn while they serve, and how soon they act.

First a cold start: two minutes of chats, then a calibration of the same instances beside what they publish. Then all
instances are made equal, serve a steady load, and one after the other has its cores halved for a while.
"""

import asyncio
import os
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console

from lab.bench.learning_rates import Compared, apart, beside, busy_others, compare
from lab.bench.learning_report import Result, report
from lab.bench.learning_shares import Episode, Placed, placed
from lab.bench.learning_suite import CORES, EQUAL, FAST, HALF, Trio, running_trio
from lab.bench.mixed_load import SEED, conversations, replay
from lab.calibrate.host_watch import HostWatch
from lab.calibrate.kinds import fit_kinds
from lab.calibrate.phases import run_phases
from lab.calibrate.step_reader import StepReader
from lab.calibrate.target import Target
from lab.calibrate.traffic import Shot, Traffic
from shared.cost.library import Library
from shared.domain.rates import StepRates
from shared.sim.workload import Workload

COLD_S, COLD_RATE = 120.0, 1.6  # of chats, requests a second: some two fifths of what the three can serve
PROMPT, OUTPUT = (48, 96), (6, 14)  # tokens of the steady load: small, so that shares of two seconds mean something
LOAD, BESIDE = 0.5, 4  # of what the three can serve, at so many decodes of one step
WARM_UP_S, BEFORE_S, SLOW_S, AFTER_S = 25.0, 10.0, 20.0, 12.0
_ROWS = 10_000


def run_learning_bench(data: Path) -> Result:
    """All of it; figures, aims and notes. Raises Unavailable where CPU quotas are not allowed."""
    return asyncio.run(_bench(conversations(data)))


async def _bench(lengths: Workload) -> Result:
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="polyphase-learning-") as folder:
        async with running_trio(Path(folder), console) as trio:
            return await trio.running.supervisor.during(_measure(trio, lengths, console))


async def _measure(trio: Trio, lengths: Workload, console: Console) -> Result:
    target = Target.local(trio.running.suite)
    traffic = await Traffic.to(target, SEED)
    async with HostWatch(target.launcher_pid) as watch:
        cold = await _cold_start(trio, target, traffic, lengths, console)
        work, episodes = await _halved(trio, traffic, console)
        trio.check()
    result = report(cold, work, episodes)
    result["figures"]["foreign_cores"] = watch.mean_cores
    cores = ", ".join(f"{name} {cores:g}" for name, cores in CORES.items())
    result["notes"] += [
        f"{lengths.name}, prompts a third and answers a quarter as long, {COLD_RATE:g} requests/s; cores: {cores}",
        f"then three coupled instances of {EQUAL:g} cores, one of them of {HALF:g}; {LOAD:.0%} of what they can serve",
    ]
    return result


async def _cold_start(
    trio: Trio, target: Target, traffic: Traffic, lengths: Workload, console: Console
) -> list[Compared]:
    serving = StepReader(await target.instances())
    async with asyncio.TaskGroup() as group:
        group.create_task(traffic.timed(replay(lengths, 0.0, COLD_RATE, COLD_S, SEED).shots))
        await asyncio.sleep(COLD_S)
        learned = await trio.rates()  # while it serves: they follow the last seconds
        steps = await serving.read()
    console.print("two minutes of chats are over; calibrating", soft_wrap=True)
    instances = apart(await target.instances())
    reader = StepReader(instances)
    await run_phases(target, traffic, instances, reader, os.cpu_count() or 1, SEED)
    kinds = await asyncio.to_thread(fit_kinds, instances, reader.steps, Library.built_in())
    found: list[Compared] = []
    for calibrated in kinds:
        (name,) = calibrated.instances
        found += compare(name, learned[name], beside(calibrated, busy_others(steps)[name]), reader.steps[name])
    for each in found:
        console.print(f"{each.instance_id} {each.kind}: off by {each.mean_error:.1%}", soft_wrap=True)
    return found


async def _halved(trio: Trio, traffic: Traffic, console: Console) -> tuple[list[Placed], list[Episode]]:
    await trio.turn_third()
    for group in trio.groups.values():
        group.limit(EQUAL)
    rate = LOAD * len(CORES) * _speed((await trio.rates())[FAST]) * EQUAL / CORES[FAST]
    lasts_s = WARM_UP_S + len(CORES) * (BEFORE_S + SLOW_S + AFTER_S)
    console.print(f"{rate:.1f} requests/s for {lasts_s:.0f} s", soft_wrap=True)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(traffic.timed(steady(rate, lasts_s, SEED)))
        slowing = tasks.create_task(_slow_down(trio))
    await trio.running.suite.wait_idle()
    rows: list[dict[str, Any]] = []
    for scheduler in trio.running.suite.schedulers():
        async with scheduler:
            rows += await scheduler.requests(limit=_ROWS)
    return placed(rows), slowing.result()


async def _slow_down(trio: Trio) -> list[Episode]:
    """One instance after the other, each for a while."""
    episodes = []
    await asyncio.sleep(WARM_UP_S)
    for name, group in trio.groups.items():
        await asyncio.sleep(BEFORE_S)
        group.limit(HALF)
        episodes.append(Episode(name, time.time()))
        await asyncio.sleep(SLOW_S)
        group.limit(EQUAL)
        await asyncio.sleep(AFTER_S)
    return episodes


def steady(rate: float, lasts_s: float, seed: int) -> list[Shot]:
    """A Poisson process of small requests."""
    rng = Random(seed)
    at_s, shots = 0.0, list[Shot]()
    while at_s < lasts_s:
        shots.append(Shot(rng.randint(*PROMPT), rng.randint(*OUTPUT), at_s))
        at_s += rng.expovariate(rate)
    return shots


def _speed(rates: StepRates) -> float:
    """Requests of the steady load a second."""
    prompt, output = sum(PROMPT) / 2, sum(OUTPUT) / 2
    return 1.0 / (rates.prefill_s(prompt, 0.0) + output * rates.decode_s(BESIDE, BESIDE * prompt) / BESIDE)
