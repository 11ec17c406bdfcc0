"""`polyphase bench learning`: accuracy of the step rates that real engines learn while they serve, and the time until
they change routing.

After a cold start the learned rates are compared with a calibration of the same instances. Then all instances are made
equal and serve a steady load while one after the other has its cores halved.
"""

import asyncio
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean, median
from types import MappingProxyType
from typing import Any

import numpy as np

from benchmarks.mixed_pair import CHUNK, SEATS, SEED, SHAPE, STAGING_BYTES, FormSteps, conversations, replay
from benchmarks.real_engines import QuotaSuite, cluster_file, measured_under_quotas
from benchmarks.results import Result, at_most, merged, progress, result
from shared.cost.kinds import others_busy, slowdown_at
from shared.cost.library import Library
from shared.cost.rates_file import CalibratedKind, ScaledSteps
from shared.cost.step import Batch
from shared.domain.instance import Role
from shared.domain.rates import StepRates
from shared.errors import Unavailable
from shared.sim.measured import LiveInstance
from shared.sim.workload import Workload
from shared.wire.messages import StepRecord
from tools.calibrate.host_watch import HostWatch
from tools.calibrate.live import StepReader, fit_kinds, run_phases, timed_step
from tools.calibrate.target import Shot

# The suite.

FAST, SLOW, THIRD = "fast", "slow", "third"
CORES = MappingProxyType({FAST: 0.8, SLOW: 0.3, THIRD: 0.5})  # the rest of two cores is for everything else
EQUAL, HALF = 0.5, 0.25  # cores of each where they are alike, and of the one that is slowed down
MAX_MODEL_LEN = 1024


@dataclass(frozen=True, slots=True)
class Trio(QuotaSuite):
    async def rates(self) -> dict[str, StepRates]:
        """The published step times. Raises Unavailable for an instance that publishes none."""
        infos = await self.instances()
        silent = [info.instance_id for info in infos if info.rates.step is None]
        if silent:
            raise Unavailable(f"{', '.join(silent)}: no step times are published")
        return {info.instance_id: info.rates.step for info in infos if info.rates.step is not None}


def cluster_of(model: Path) -> dict[str, Any]:
    """The cluster file. Two compute whole requests, and meet decodes and chunks beside them; the third prompts only."""
    roles = {FAST: Role.DECODE, SLOW: Role.DECODE, THIRD: Role.PREFILL}
    instances = [{"id": name, "role": role.value} for name, role in roles.items()]
    memory = {"kv_cache_bytes": 256 << 20, "staging_bytes": STAGING_BYTES}
    return cluster_file("learning", model, instances, MAX_MODEL_LEN, chunk_size=CHUNK, max_seqs=SEATS, **memory)


# Learned rates beside those of a calibration: predicted times of steps.

FEWEST = 10  # steps of a kind, in the traffic and in the calibration, else there is nothing to compare
_CONTEXTS = (128, 384)  # tokens of a decode's context
# Prefill chunks at a prompt's beginning and further on; decodes at several counts and contexts; both together.
BATCHES: Mapping[str, tuple[Batch, ...]] = MappingProxyType(
    {
        "prefill": tuple(Batch(((new, before),)) for new in (64, 128, 256) for before in (0, 256)),
        "decode": tuple(Batch((), count, count * context) for count in (1, 2, 4, 8) for context in _CONTEXTS),
        "mixed": tuple(
            Batch(((new, before),), count, count * 256)
            for new, before in ((64, 0), (192, 0), (192, 256))
            for count in (1, 2, 4)
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Compared:
    """One kind of an instance's steps. off: learned over calibrated times − 1, of each of the `BATCHES`.

    measured_off: the same of the calibration's steps, learned over measured.
    """

    instance_id: str
    kind: str
    steps: int  # that were learned from
    off: tuple[float, ...]
    measured_off: tuple[float, ...]

    @property
    def mean_error(self) -> float:
        """Of the magnitudes; a share."""
        return fmean(abs(one) for one in self.off)


def apart(instances: Sequence[LiveInstance]) -> tuple[LiveInstance, ...]:
    """The same as kinds of their own: alike by name, they differ in their cores, which no kind knows."""
    return tuple(replace(one, threads=1000 + number) for number, one in enumerate(instances))


def busy_others(steps: Mapping[str, Sequence[StepRecord]]) -> dict[str, float]:
    """By instance, how many of the others computed on average while it did; 0 for one that did nothing."""
    intervals = {}
    for name, records in steps.items():
        ended_s = np.array([one.ended_s for one in records])
        intervals[name] = (ended_s - np.array([one.seconds for one in records]), ended_s)
    found = others_busy(intervals)
    return {name: float(others.mean()) if len(others) else 0.0 for name, others in found.items()}


def beside(calibrated: CalibratedKind, others: float) -> ScaledSteps:
    """Its step times while so many others of the host compute, which slow each other in spite of their quotas."""
    slowdown = float(slowdown_at(calibrated.slowdown, np.array([others]))[0])
    return calibrated.step_times(Library.built_in()).times(slowdown)


def compare(
    instance_id: str, learned: StepRates, calibrated: ScaledSteps, steps: Sequence[StepRecord]
) -> list[Compared]:
    """The kinds that the instance has served and that its calibration, of these `steps`, has seen enough of."""
    by_kind: dict[str, list[StepRecord]] = {kind: [] for kind in BATCHES}
    for step in steps:
        by_kind[kind_of(timed_step(step).batch)].append(step)
    published, found = FormSteps(learned), []
    for kind, batches in BATCHES.items():
        known = getattr(learned, kind).steps
        if min(known, len(by_kind[kind])) >= FEWEST:
            off = tuple(published.step_time_s(batch) / calibrated.step_time_s(batch) - 1.0 for batch in batches)
            timed = [timed_step(step) for step in by_kind[kind]]
            measured = tuple(published.step_time_s(one.batch) / one.seconds - 1.0 for one in timed)
            found.append(Compared(instance_id, kind, known, off, measured))
    return found


def kind_of(batch: Batch) -> str:
    return "decode" if not batch.prefill else "mixed" if batch.decode_count else "prefill"


def median_error(compared: Sequence[Compared]) -> float:
    """Of all batches of all kinds and instances; a share."""
    return median(abs(one) for each in compared for one in each.off)


# Shares of new work, before and after an instance was slowed down.

WINDOW_S = 2.0


@dataclass(frozen=True, slots=True)
class Placed:
    """A request, when it came (unix seconds), and where it went. tokens: of its prompt and its answer."""

    at_s: float
    instance_id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Episode:
    """An instance was slowed down at `at_s`, unix seconds."""

    instance_id: str
    at_s: float


def placed(rows: Iterable[Mapping[str, Any]]) -> list[Placed]:
    """From rows of the status table, without requests that were not placed."""
    return [
        Placed(row["arrived_s"], row["decode_instance"], row["prompt_tokens"] + row["output_tokens"])
        for row in rows
        if row["decode_instance"]
    ]


def share(work: Sequence[Placed], episodes: Sequence[Episode], begins_s: float, ends_s: float) -> float | None:
    """Of the new work of all episodes from `begins_s` until `ends_s` after the slowdown, what the slowed one got.

    None where there was no work.
    """
    mine = every = 0
    for episode in episodes:
        for one in work:
            if begins_s <= one.at_s - episode.at_s < ends_s:
                every += one.tokens
                mine += one.tokens if one.instance_id == episode.instance_id else 0
    return mine / every if every else None


def windows(
    work: Sequence[Placed], episodes: Sequence[Episode], begins_s: float, ends_s: float
) -> list[tuple[float, float | None]]:
    """Shares in windows of `WINDOW_S`, by when each begins."""
    count = round((ends_s - begins_s) / WINDOW_S)
    starts = [begins_s + number * WINDOW_S for number in range(count)]
    return [(start, share(work, episodes, start, start + WINDOW_S)) for start in starts]


# The report.

OFF_PERCENT = 15.0
LEFT = 0.5  # of its share before
WINDOW_FROM_S, SOON_S, BY_S, UNTIL_S = -10.0, 6.0, 10.0, 20.0  # after the slowdown


def report(compared: Sequence[Compared], work: Sequence[Placed], episodes: Sequence[Episode]) -> Result:
    figures, aims = _of_rates(compared)
    more, wanted = _of_shares(work, episodes)
    notes = ["in proportion to their speeds the halved one of three would keep 0.6 of its share"]
    return {"figures": figures | more, "aims": aims | wanted, "notes": notes}


def _of_rates(compared: Sequence[Compared]) -> tuple[dict[str, float], Result]:
    figures: dict[str, float] = {}
    for one in compared:
        name = f"{one.instance_id}_{one.kind}"
        figures |= {
            f"{name}_steps": float(one.steps),
            f"{name}_off_mean_percent": 100.0 * one.mean_error,
            f"{name}_bias_percent": 100.0 * fmean(one.off),
            f"{name}_measured_steps_off_median_percent": 100.0 * median(abs(off) for off in one.measured_off),
        }
    figures["off_median_percent"] = 100.0 * median_error(compared)
    aims = {"off_median_percent": at_most(OFF_PERCENT, figures["off_median_percent"])}
    for kind in BATCHES:
        of_kind = [abs(off) for one in compared if one.kind == kind for off in one.off]
        got = 100.0 * fmean(of_kind) if of_kind else None
        aims[f"{kind}_off_mean_percent"] = at_most(OFF_PERCENT, got)
    return figures, aims


def _of_shares(work: Sequence[Placed], episodes: Sequence[Episode]) -> tuple[dict[str, float], Result]:
    before = share(work, episodes, WINDOW_FROM_S, 0.0)
    figures = {
        f"halved_share_from_{begins_s:g}_s": got
        for begins_s, got in windows(work, episodes, WINDOW_FROM_S, UNTIL_S)
        if got is not None
    }
    if before is not None:
        figures["share_before"] = before
    aims: Result = {}
    for name, begins_s, ends_s in (("within_10_s", SOON_S, BY_S), ("from_10_to_20_s", BY_S, UNTIL_S)):
        after = share(work, episodes, begins_s, ends_s)
        ratio = after / before if after is not None and before else None
        if ratio is not None:
            figures[f"share_left_{name}"] = ratio
        aims[f"share_left_{name}"] = at_most(LEFT, ratio)
    return figures, aims


COLD_S, COLD_RATE = 120.0, 1.6  # of chats, requests a second: some two fifths of what the three can serve
PROMPT, OUTPUT = (48, 96), (6, 14)  # tokens of the steady load: small, so that shares of two seconds mean something
LOAD, BESIDE = 0.5, 4  # of what the three can serve, at so many decodes of one step
WARM_UP_S, BEFORE_S, SLOW_S, AFTER_S = 25.0, 10.0, 20.0, 12.0
_ROWS = 10_000


def run_learning_bench(data: Path) -> Result:
    """Raises Unavailable where CPU quotas are not allowed."""
    work = partial(_measure, conversations(data))
    return asyncio.run(measured_under_quotas(Trio, SHAPE, CORES, cluster_of, work, SEED))


async def _measure(lengths: Workload, trio: Trio) -> Result:
    async with HostWatch(trio.target.launcher_pid) as watch:
        cold = await _cold_start(trio, lengths)
        work, episodes = await _halved(trio)
        trio.check()
    cores = ", ".join(f"{name} {cores:g}" for name, cores in CORES.items())
    notes = [
        f"{lengths.name}, prompts a third and answers a quarter as long, {COLD_RATE:g} requests/s; cores: {cores}",
        f"then three coupled instances of {EQUAL:g} cores, one of them of {HALF:g}; {LOAD:.0%} of what they can serve",
    ]
    return merged(report(cold, work, episodes), result({"foreign_cores": watch.mean_cores}, notes=notes))


async def _cold_start(trio: Trio, lengths: Workload) -> list[Compared]:
    target, traffic = trio.target, trio.traffic
    serving = StepReader(await target.instances())
    async with asyncio.TaskGroup() as group:
        group.create_task(traffic.timed(replay(lengths, 0.0, COLD_RATE, COLD_S, SEED).shots))
        await asyncio.sleep(COLD_S)
        learned = await trio.rates()  # while it serves: they follow the last seconds
        steps = await serving.read()
    progress("two minutes of chats are over; calibrating")
    instances = apart(await target.instances())
    reader = StepReader(instances)
    await run_phases(target, traffic, instances, reader, os.cpu_count() or 1, SEED)
    kinds = await asyncio.to_thread(fit_kinds, instances, reader.steps, Library.built_in())
    found: list[Compared] = []
    for calibrated in kinds:
        (name,) = calibrated.instances
        found += compare(name, learned[name], beside(calibrated, busy_others(steps)[name]), reader.steps[name])
    for each in found:
        progress(f"{each.instance_id} {each.kind}: off by {each.mean_error:.1%}")
    return found


async def _halved(trio: Trio) -> tuple[list[Placed], list[Episode]]:
    await trio.suite.wait_idle()
    await trio.flip(THIRD)
    for group in trio.groups.values():
        group.limit(EQUAL)
    rate = LOAD * len(CORES) * _speed((await trio.rates())[FAST]) * EQUAL / CORES[FAST]
    lasts_s = WARM_UP_S + len(CORES) * (BEFORE_S + SLOW_S + AFTER_S)
    progress(f"{rate:.1f} requests/s for {lasts_s:.0f} s")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(trio.traffic.timed(steady(rate, lasts_s, SEED)))
        slowing = tasks.create_task(_slow_down(trio))
    await trio.suite.wait_idle()
    rows: list[dict[str, Any]] = []
    for scheduler in trio.suite.schedulers():
        async with scheduler:
            rows += await scheduler.requests(limit=_ROWS)
    return placed(rows), slowing.result()


async def _slow_down(trio: Trio) -> list[Episode]:
    """Slow one instance after the other for a while."""
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
