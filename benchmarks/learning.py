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

import numpy as np

from benchmarks.cluster_files import ClusterDict, engines_on_cpu
from benchmarks.experiment import shots_of
from benchmarks.mixed import CHUNK, SEATS, SEED, SHAPE, STAGING_BYTES, FormSteps, conversations, replay, speed_of
from benchmarks.quotas import QuotaSession, measured_under_quotas
from benchmarks.results import Aim, Result, at_most, merged, progress, result
from shared.cost.library import Library
from shared.cost.rates_file import CalibratedKind
from shared.cost.slowdown import others_busy, slowdown_at
from shared.cost.step import Batch
from shared.cost.step_rates import kind_of
from shared.cost.step_variants import ScaledSteps
from shared.domain.instance import Role
from shared.domain.rates import StepRates
from shared.errors import Unavailable
from shared.sim.measured import LiveInstance
from shared.sim.workload import Workload
from shared.wire.api.scheduler import RequestRow
from shared.wire.messages import StepRecord
from tools.calibrate.host_watch import HostWatch
from tools.calibrate.live import StepReader, fit_kinds, run_phases, timed_step
from tools.calibrate.target import Shot

FAST, SLOW, THIRD = "fast", "slow", "third"
CORES = MappingProxyType({FAST: 0.8, SLOW: 0.3, THIRD: 0.5})  # the rest of two cores is for everything else
EQUAL, HALF = 0.5, 0.25  # cores of each where they are alike, and of the one that is slowed down
MAX_MODEL_LEN = 1024


def cluster_of(model: Path) -> ClusterDict:
    """Two instances compute whole requests, in steps of decodes and of chunks beside them; the third prompts only."""
    roles = {FAST: Role.DECODE, SLOW: Role.DECODE, THIRD: Role.PREFILL}
    instances = [{"id": name, "role": role.value} for name, role in roles.items()]
    memory = {"kv_cache_bytes": 256 << 20, "staging_bytes": STAGING_BYTES}
    return engines_on_cpu("learning", model, instances, MAX_MODEL_LEN, chunk_size=CHUNK, max_seqs=SEATS, **memory)


async def published_rates(on: QuotaSession) -> dict[str, StepRates]:
    """The step times of all instances. Raises Unavailable for an instance that publishes none."""
    rates: dict[str, StepRates] = {}
    for info in await on.instances():
        if info.rates.step is None:
            raise Unavailable(f"{info.instance_id} publishes no step times")
        rates[info.instance_id] = info.rates.step
    return rates


# Learned rates beside those of a calibration.

OFF_PERCENT = 15.0
MIN_STEPS = 10  # of a kind, in the traffic and in the calibration; with fewer a kind is not compared
# Prefill chunks at a prompt's beginning and further on; decodes at several counts and contexts; both together.
BATCHES: Mapping[str, tuple[Batch, ...]] = MappingProxyType(
    {
        "prefill": tuple(Batch(((new, before),)) for new in (64, 128, 256) for before in (0, 256)),
        "decode": tuple(Batch((), count, count * context) for count in (1, 2, 4, 8) for context in (128, 384)),
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

    steps: that were learned from. measured_off: learned over measured times − 1, of the calibration's steps.
    """

    instance_id: str
    kind: str
    steps: int
    off: tuple[float, ...]
    measured_off: tuple[float, ...]

    @property
    def mean_error(self) -> float:
        return fmean(abs(one) for one in self.off)


def compare(
    instance_id: str, learned: StepRates, calibrated: ScaledSteps, steps: Sequence[StepRecord]
) -> list[Compared]:
    """The kinds that the instance has served and that its calibration, of these `steps`, has seen enough of."""
    published, timed, found = FormSteps(learned), [timed_step(step) for step in steps], []
    for kind, batches in BATCHES.items():
        known, measured = getattr(learned, kind).steps, [one for one in timed if kind_of(one.batch) == kind]
        if min(known, len(measured)) >= MIN_STEPS:
            off = tuple(published.step_time_s(batch) / calibrated.step_time_s(batch) - 1.0 for batch in batches)
            measured_off = tuple(published.step_time_s(one.batch) / one.seconds - 1.0 for one in measured)
            found.append(Compared(instance_id, kind, known, off, measured_off))
    return found


def apart(instances: Sequence[LiveInstance]) -> tuple[LiveInstance, ...]:
    """The same as kinds of their own: alike by name, they differ in their cores, which no kind knows."""
    return tuple(replace(one, threads=1000 + number) for number, one in enumerate(instances))


def busy_others(steps: Mapping[str, Sequence[StepRecord]]) -> dict[str, float]:
    """By instance, how many of the others computed on average while it did; 0 for one that did nothing."""
    intervals = {}
    for name, records in steps.items():
        ended_s = np.array([one.ended_s for one in records])
        intervals[name] = (ended_s - np.array([one.seconds for one in records]), ended_s)
    return {name: float(others.mean()) if len(others) else 0.0 for name, others in others_busy(intervals).items()}


def beside(calibrated: CalibratedKind, others: float) -> ScaledSteps:
    """Its step times while so many others of the host compute, which slow each other in spite of their quotas."""
    slowdown = float(slowdown_at(calibrated.slowdown, np.array([others]))[0])
    return calibrated.step_times(Library.built_in()).times(slowdown)


def accuracy(compared: Sequence[Compared]) -> Result:
    figures: dict[str, float] = {}
    for one in compared:
        name = f"{one.instance_id}_{one.kind}"
        figures |= {
            f"{name}_steps": float(one.steps),
            f"{name}_off_mean_percent": 100.0 * one.mean_error,
            f"{name}_measured_steps_off_median_percent": 100.0 * median(abs(off) for off in one.measured_off),
        }
    figures["off_median_percent"] = 100.0 * median(abs(off) for one in compared for off in one.off)
    aims = {"off_median_percent": at_most(OFF_PERCENT, figures["off_median_percent"])}
    for kind in BATCHES:
        off = [abs(off) for one in compared if one.kind == kind for off in one.off]
        aims[f"{kind}_off_mean_percent"] = at_most(OFF_PERCENT, 100.0 * fmean(off) if off else None)
    return result(figures, aims)


# Shares of new work, before and after an instance was slowed down.

WINDOW_S = 2.0
LEFT = 0.5  # of its share before, at most
FROM_S, SOON_S, BY_S, UNTIL_S = -10.0, 6.0, 10.0, 20.0  # after the slowdown


@dataclass(frozen=True, slots=True)
class Placed:
    """A request, its arrival (unix seconds) and its instance. tokens: of its prompt and its answer."""

    at_s: float
    instance_id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Episode:
    """The slowdown of an instance at `at_s`, unix seconds."""

    instance_id: str
    at_s: float


def placed(rows: Iterable[RequestRow]) -> list[Placed]:
    """From rows of the status table, without requests that were not placed."""
    return [
        Placed(row.arrived_s, row.decode_instance, row.prompt_tokens + row.output_tokens)
        for row in rows
        if row.decode_instance
    ]


def share(work: Sequence[Placed], episodes: Sequence[Episode], begin_s: float, end_s: float) -> float | None:
    """The share of the slowed instance in the new work of all episodes, from `begin_s` to `end_s` after the slowdown.

    None where there was no work.
    """
    new = [
        (one.tokens, one.instance_id == episode.instance_id)
        for episode in episodes
        for one in work
        if begin_s <= one.at_s - episode.at_s < end_s
    ]
    total = sum(tokens for tokens, _ in new)
    return sum(tokens for tokens, slowed in new if slowed) / total if total else None


def reaction(work: Sequence[Placed], episodes: Sequence[Episode]) -> Result:
    figures: dict[str, float] = {}
    for number in range(round((UNTIL_S - FROM_S) / WINDOW_S)):
        begin_s = FROM_S + number * WINDOW_S
        if (window := share(work, episodes, begin_s, begin_s + WINDOW_S)) is not None:
            figures[f"halved_share_from_{begin_s:g}_s"] = window
    before = share(work, episodes, FROM_S, 0.0)
    if before is not None:
        figures["share_before"] = before
    aims: dict[str, Aim] = {}
    for name, begin_s, end_s in (("within_10_s", SOON_S, BY_S), ("from_10_to_20_s", BY_S, UNTIL_S)):
        after = share(work, episodes, begin_s, end_s)
        ratio = after / before if after is not None and before else None
        if ratio is not None:
            figures[f"share_left_{name}"] = ratio
        aims[f"share_left_{name}"] = at_most(LEFT, ratio)
    return result(figures, aims, ["in proportion to their speeds the halved one of three would keep 0.6 of its share"])


# The measurement.

COLD_S, COLD_RATE = 120.0, 1.6  # of chats, requests a second: some two fifths of what the three can serve
PROMPT, OUTPUT = (48, 96), (6, 14)  # tokens of the steady load: small, so that shares of two seconds mean something
LOAD, BESIDE = 0.5, 4  # of what the three can serve, at so many decodes of one step
WARM_UP_S, BEFORE_S, SLOW_S, AFTER_S = 25.0, 10.0, 20.0, 12.0
_ROWS = 10_000


def run_learning_bench(data: Path) -> Result:
    """Raises Unavailable where CPU quotas are not allowed."""
    work = partial(_measure, conversations(data))
    return asyncio.run(measured_under_quotas(SHAPE, CORES, cluster_of, work, SEED))


async def _measure(lengths: Workload, on: QuotaSession) -> Result:
    async with HostWatch(on.target.launcher_pid) as watch:
        cold = await _cold_start(on, lengths)
        work, episodes = await _halved(on)
        on.check()
    cores = ", ".join(f"{name} {cores:g}" for name, cores in CORES.items())
    notes = [
        f"{lengths.name}, prompts a third and answers a quarter as long, {COLD_RATE:g} requests/s; cores: {cores}",
        f"then three coupled instances of {EQUAL:g} cores, one of them of {HALF:g}; {LOAD:.0%} of what they can serve",
    ]
    return merged(accuracy(cold), reaction(work, episodes), result({"foreign_cores": watch.mean_cores}, notes=notes))


async def _cold_start(on: QuotaSession, lengths: Workload) -> list[Compared]:
    target, traffic = on.target, on.traffic
    serving = StepReader(await target.instances())
    async with asyncio.TaskGroup() as group:
        group.create_task(traffic.timed(shots_of(replay(lengths, COLD_RATE, COLD_S, SEED))))
        await asyncio.sleep(COLD_S)
        learned = await published_rates(on)  # while it serves: they follow the last seconds
        steps = await serving.read()
    progress("two minutes of chats are over; calibrating")
    instances = apart(await target.instances())
    reader = StepReader(instances)
    await run_phases(target, traffic, instances, reader, os.cpu_count() or 1, SEED)
    others = busy_others(steps)
    found: list[Compared] = []
    for calibrated in await asyncio.to_thread(fit_kinds, instances, reader.steps, Library.built_in()):
        (name,) = calibrated.instances
        found += compare(name, learned[name], beside(calibrated, others[name]), reader.steps[name])
    return found


async def _halved(on: QuotaSession) -> tuple[list[Placed], list[Episode]]:
    await on.suite.wait_idle()
    await on.flip(THIRD)
    for group in on.groups.values():
        group.limit(EQUAL)
    fast = speed_of((await published_rates(on))[FAST], sum(PROMPT) / 2, sum(OUTPUT) / 2, BESIDE)
    rate = LOAD * len(CORES) * fast * EQUAL / CORES[FAST]
    duration_s = WARM_UP_S + len(CORES) * (BEFORE_S + SLOW_S + AFTER_S)
    progress(f"{rate:.1f} requests/s for {duration_s:.0f} s")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(on.traffic.timed(steady(rate, duration_s, SEED)))
        slowing = tasks.create_task(_slow_down(on))
    await on.suite.wait_idle()
    rows: list[RequestRow] = []
    for scheduler in on.suite.schedulers():
        async with scheduler:
            rows += await scheduler.requests(limit=_ROWS)
    return placed(rows), slowing.result()


async def _slow_down(on: QuotaSession) -> list[Episode]:
    """Slow one instance after the other for a while."""
    episodes = []
    await asyncio.sleep(WARM_UP_S)
    for name, group in on.groups.items():
        await asyncio.sleep(BEFORE_S)
        group.limit(HALF)
        episodes.append(Episode(name, time.time()))
        await asyncio.sleep(SLOW_S)
        group.limit(EQUAL)
        await asyncio.sleep(AFTER_S)
    return episodes


def steady(rate: float, duration_s: float, seed: int) -> list[Shot]:
    """A Poisson process of small requests."""
    rng = Random(seed)
    at_s, shots = 0.0, list[Shot]()
    while at_s < duration_s:
        shots.append(Shot(rng.randint(*PROMPT), rng.randint(*OUTPUT), at_s))
        at_s += rng.expovariate(rate)
    return shots
