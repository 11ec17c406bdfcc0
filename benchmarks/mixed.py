"""`polyphase bench mixed`: two real engines of unequal speed on this machine, and the throughput and latency of each
way to share them.

One suite changes its roles and policies while it runs. Each round sends the same requests to every system: first all at
once, then at shares of the data-parallel throughput. The report compares medians with the paper's gains and with the
simulator.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.experiment import shots_of
from benchmarks.mixed_pair import (
    ADAPTIVE,
    BALANCED,
    CORES,
    DATA_PARALLEL,
    HIGH_LOW,
    LOW_HIGH,
    METRICS,
    SEED,
    SHAPE,
    SYSTEMS,
    Load,
    Means,
    Pair,
    Seen,
    Speeds,
    System,
    Twin,
    burst,
    cluster_of,
    conversations,
    drawn,
    learned,
    replay,
)
from benchmarks.real_engines import measured_under_quotas
from benchmarks.results import Aim, Result, at_least, at_most, merged, progress, rotated
from shared.cost.rates_file import ControlPlane
from shared.sim.workload import Workload
from tools.calibrate.host_watch import HostWatch
from tools.calibrate.live import StepReader, control_plane
from tools.calibrate.target import Sample, Shot

# The report.

OVER_DATA_PARALLEL, OVER_DISAGGREGATED = 1.05, 1.8
TBT_SHARE, JCT_SHARE, TTFT_SHARE = 0.5, 0.7, 1.0  # of data-parallel's, at most
NOISE = 1.03  # what counts as not behind
MEANS_PERCENT = 15.0
TOLD_APART = 0.15  # systems that differ by less have no order
# Cronus 5.2 to 5.4: over Disagg L-H and H-L, and below data-parallel.
PAPER = {
    "paper_throughput_over_low_high_up_to": 1.9,
    "paper_throughput_over_high_low_up_to": 5.64,
    "paper_ttft_p99_below_data_parallel_percent_up_to": 55.0,
    "paper_tbt_p99_below_data_parallel_percent_up_to": 63.0,
}


@dataclass(frozen=True, slots=True)
class Run:
    """One replay on the engines. throttled: by instance, the share of periods in which it used its quota up.

    sent: where each request went, of systems that take turns.
    """

    system: System
    load: Load
    seen: Seen
    throttled: Mapping[str, float]
    foreign_cores: float
    sent: tuple[str, ...] = ()


@dataclass(slots=True)
class Table:
    runs: Sequence[Run]
    found: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        groups: defaultdict[tuple[str, str], list[Run]] = defaultdict(list)
        for run in self.runs:
            groups[run.load.label, run.system.label].append(run)
        for key, several in groups.items():
            rows = {name: median(getattr(run.seen, name) for run in several) for name in METRICS}
            for instance in several[0].throttled:
                rows[f"{instance}_throttled_share"] = median(run.throttled[instance] for run in several)
            rows["foreign_cores"] = median(run.foreign_cores for run in several)
            self.found[key] = rows

    def get(self, load: str, system: System, metric: str) -> float | None:
        rows = self.found.get((load, system.label))
        return rows[metric] if rows is not None else None

    @property
    def loads(self) -> list[str]:
        return list(dict.fromkeys(load for load, _ in self.found))

    def figures(self) -> dict[str, float]:
        return {
            f"{load}_{system}_{name}": value
            for (load, system), rows in self.found.items()
            for name, value in rows.items()
        }


def report(runs: Sequence[Run], predicted: Mapping[tuple[str, str], Means], notes: Iterable[str] = ()) -> Result:
    """Figures, aims and notes. predicted: the simulator's means, by load and system."""
    table = Table(runs)
    figures, aims = table.figures() | PAPER, dict[str, Aim]()
    for more, wanted in (_throughput(table), *map(_at_rate(table), table.loads), _simulated(table, predicted)):
        figures |= more
        aims |= wanted
    words = [f"{system.label}: {system.words}" for system in SYSTEMS]
    return {"figures": figures, "aims": aims, "notes": [*words, *notes]}


def _throughput(table: Table) -> tuple[dict[str, float], dict[str, Aim]]:
    def ours(other: System) -> float | None:
        got, base = (table.get("burst", system, "requests_per_s") for system in (ADAPTIVE, other))
        return got / base if got is not None and base else None

    ratios = {other.label: ours(other) for other in SYSTEMS if other is not ADAPTIVE}
    figures = {f"throughput_over_{label}": ratio for label, ratio in ratios.items() if ratio is not None}
    disaggregated = [ratio for label in (LOW_HIGH.label, HIGH_LOW.label) if (ratio := ratios[label]) is not None]
    aims = {
        "throughput_over_data_parallel": at_least(OVER_DATA_PARALLEL, ratios[DATA_PARALLEL.label]),
        "throughput_over_better_disaggregation": at_least(OVER_DISAGGREGATED, min(disaggregated, default=None)),
        "throughput_over_balanced": at_least(1.0 / NOISE, ratios[BALANCED.label]),
    }
    return figures, aims


def _at_rate(table: Table) -> Any:
    """A function of the load: adaptive over data-parallel and over `balanced` there."""

    def of(load: str) -> tuple[dict[str, float], dict[str, Aim]]:
        if load == "burst":
            return {}, {}
        figures: dict[str, float] = {}
        aims: dict[str, Aim] = {}
        wanted = {"tbt_p99": TBT_SHARE, "jct_mean": JCT_SHARE, "ttft_p99": TTFT_SHARE}
        for metric, most in wanted.items():
            for other, bound in ((DATA_PARALLEL, most), (BALANCED, NOISE)):
                got, base = (table.get(load, system, f"{metric}_s") for system in (ADAPTIVE, other))
                name = f"{load}_{metric}_over_{other.label}"
                ratio = got / base if got is not None and base else None
                if ratio is not None:
                    figures[name] = ratio
                aims[name] = at_most(bound, ratio)
        return figures, aims

    return of


def _simulated(table: Table, predicted: Mapping[tuple[str, str], Means]) -> tuple[dict[str, float], dict[str, Aim]]:
    figures: dict[str, float] = {}
    worst: dict[str, float] = {}
    for (load, system), means in predicted.items():
        for name, value in means._asdict().items():
            figures[f"{load}_{system}_{name}_simulated"] = value
            rows = table.found.get((load, system))
            at_rate = name == "requests_per_s" and load != "burst"  # what arrives, and how long the last answer takes
            if rows is not None and rows[name] and not at_rate:
                off = 100.0 * (value / rows[name] - 1.0)
                figures[f"{load}_{system}_{name}_off_percent"] = off
                worst[name] = max(worst.get(name, 0.0), abs(off))
    aims = {f"simulated_{name}_off_percent": at_most(MEANS_PERCENT, off) for name, off in worst.items()}
    wrong = [*_wrong_order(table, predicted)]
    aims["simulated_pairs_in_wrong_order"] = {"want": 0, "got": ", ".join(wrong) or 0, "met": not wrong}
    return figures, aims


def _wrong_order(table: Table, predicted: Mapping[tuple[str, str], Means]) -> Iterable[str]:
    """Pairs of systems that really differ under a load, and the other way round in the simulator."""
    for load in table.loads:
        name = "requests_per_s" if load == "burst" else "jct_mean_s"
        labels = [system.label for system in SYSTEMS if (load, system.label) in table.found.keys() & predicted.keys()]
        for at, one in enumerate(labels):
            for other in labels[at + 1 :]:
                live = table.found[load, other][name] / table.found[load, one][name]
                simulated = getattr(predicted[load, other], name) / getattr(predicted[load, one], name)
                if max(live, 1.0 / live) >= 1.0 + TOLD_APART and (live - 1.0) * (simulated - 1.0) <= 0.0:
                    yield f"{load}: {one} and {other}"


BESIDE = 8  # decodes of one step, when speeds are compared
KEEPS_UP = 1.1  # of its own throughput: at higher rates a system's queue only grows
LONE = (64, 128, 256, 384, 512, 640, 768, 64, 256, 512)  # prompt tokens of requests sent one at a time
WARM_UP, TOGETHER = 12, 4


@dataclass(frozen=True, slots=True)
class MixedOptions:
    """rounds: medians are over so many. quick: one, with little in it, to see that it works."""

    rounds: int = 2
    quick: bool = False

    @property
    def rounds_run(self) -> int:
        return 1 if self.quick else self.rounds

    @property
    def burst_requests(self) -> int:
        return 16 if self.quick else 40

    @property
    def shares(self) -> tuple[float, ...]:
        return (0.75,) if self.quick else (0.5, 0.75, 1.0)

    @property
    def lasts_s(self) -> float:
        """Requests of one replay arrive for so long."""
        return 12.0 if self.quick else 30.0


def run_mixed_bench(data: Path, options: MixedOptions | None = None) -> Result:
    """Raises Unavailable where CPU quotas are not allowed."""
    work = partial(_measure, conversations(data), options or MixedOptions())
    return asyncio.run(measured_under_quotas(Pair, SHAPE, CORES, cluster_of, work, SEED))


async def _measure(lengths: Workload, options: MixedOptions, pair: Pair) -> Result:
    meter = await Meter.start(pair, lengths)
    control = await meter.control()
    runs: list[Run] = []
    for number in range(options.rounds_run):
        runs += await meter.round(number, [burst(lengths, options.burst_requests, SEED + number)], runs)
    rate = median(run.seen.requests_per_s for run in runs if run.system is DATA_PARALLEL)
    for number in range(options.rounds_run):
        seed = SEED + 100 + number
        loads = [replay(lengths, share, share * rate, options.lasts_s, seed) for share in options.shares]
        runs += await meter.round(number, loads, runs)
    twin = await meter.twin(control)
    predicted = await asyncio.to_thread(_simulate, twin, runs, lengths)
    notes = (
        f"{lengths.name}, prompts a third and answers a quarter as long; {options.rounds_run} rounds; cores: "
        + ", ".join(f"{name} {cores:g}" for name, cores in CORES.items()),
        "pipeline: only simulated, CPU quotas are an instance's and not a stage's",
    )
    speeds = {f"{name}_requests_per_s_by_its_rates": speed for name, speed in meter.speeds.items()}
    return merged(report(runs, predicted, notes), {"figures": speeds})


def _simulate(twin: Twin, runs: Sequence[Run], lengths: Workload) -> dict[tuple[str, str], Means]:
    """Medians over the same rounds."""
    found: dict[tuple[str, str], list[Means]] = {}
    for run in runs:
        found.setdefault((run.load.label, run.system.label), []).append(
            twin.run(run.system, run.load, lengths, run.sent)
        )
        if run.system is DATA_PARALLEL:
            found.setdefault((run.load.label, "pipeline"), []).append(twin.pipeline(run.load, lengths))
    return {key: Means(*(median(values) for values in zip(*several, strict=True))) for key, several in found.items()}


class Meter:
    """Sends loads to the pair and collects the results."""

    def __init__(self, pair: Pair, lengths: Workload) -> None:
        self.speeds: Speeds = dict.fromkeys(CORES, 1.0)
        self._pair = pair
        self._lengths = lengths
        self._reader: StepReader

    @classmethod
    async def start(cls, pair: Pair, lengths: Workload) -> "Meter":
        meter = cls(pair, lengths)
        await pair.become(LOW_HIGH, meter.speeds)
        meter._reader = StepReader(await pair.target.instances())
        return meter

    async def control(self) -> ControlPlane:
        """What the services and the link add, from requests that have the pair to themselves."""
        await self._warm_up(0)
        await self._pair.become(LOW_HIGH, self.speeds)
        await self._reader.read()
        samples = await self._pair.traffic.closed([Shot(tokens, 6) for tokens in LONE], 1)
        await self._reader.read()
        timelines = await self._pair.target.timelines({sample.request_id for sample in samples})
        return control_plane(samples, samples, timelines, self._reader.steps)

    async def round(self, number: int, loads: Sequence[Load], before: Sequence[Run]) -> list[Run]:
        """Every system that keeps up, under every load, in rotating order."""
        await self._warm_up(number)
        best = {run.system.label: run.seen.requests_per_s for run in before if run.load.label == "burst"}
        runs = []
        for load in loads:
            for system in rotated(SYSTEMS, number):
                most = KEEPS_UP * best.get(system.label, inf)
                if not load.share or load.workload.rate <= most:
                    runs.append(await self._run(system, load))
        return runs

    async def twin(self, control: ControlPlane) -> Twin:
        await self._pair.become(LOW_HIGH, self.speeds)
        instances = await self._pair.target.instances()
        return Twin(instances, learned(instances, self._reader.steps), control, self.speeds)

    async def _warm_up(self, number: int) -> None:
        """Rates are learned while serving: both compute prompts and decode, and hand KV over; nothing of it counts."""
        some = drawn(self._lengths, WARM_UP, SEED - 1 - number)
        shots = shots_of(some)
        for system in (DATA_PARALLEL, LOW_HIGH):
            await self._pair.become(system, dict.fromkeys(CORES, 1.0))
            await self._pair.traffic.closed(shots, TOGETHER)
        await self._pair.suite.wait_idle()
        await self._reader.skip()
        self.speeds = await self._speeds()

    async def _speeds(self) -> Speeds:
        """Requests a second of each instance at the mean lengths, by the rates that it has learned."""
        prompt, output = float(self._lengths.prompt_tokens.mean()), float(self._lengths.output_tokens.mean())
        found = {}
        for one in await self._pair.instances():
            step = one.rates.step
            assert step is not None  # an instance starts with the catalogue's
            decode_s = output * step.decode_s(BESIDE, BESIDE * prompt) / BESIDE
            found[one.instance_id] = 1.0 / (step.prefill_s(prompt, 0.0) + decode_s)
        return found

    async def _run(self, system: System, load: Load) -> Run:
        await self._pair.become(system, self.speeds)
        before = self._pair.throttled()
        async with HostWatch(self._pair.target.launcher_pid) as watch:
            samples = await self._pair.traffic.timed(load.shots)
        met = {name: now.since(before[name]).share for name, now in self._pair.throttled().items()}
        await self._reader.read()
        seen = Seen.of(samples)
        progress(
            f"{load.label:14} {system.label:25} {seen.requests_per_s:5.2f} req/s, TTFT p99 {seen.ttft_p99_s:6.2f} s, "
            f"TBT p99 {1e3 * seen.tbt_p99_s:5.0f} ms, longest gap p90 {seen.longest_gap_p90_s:5.2f} s, "
            f"JCT {seen.jct_mean_s:6.2f} s"
        )
        sent = await self._sent(samples) if system.by_speed else ()
        return Run(system, load, seen, met, watch.mean_cores, sent)

    async def _sent(self, samples: Sequence[Sample]) -> tuple[str, ...]:
        """The instance of each request's first placement."""
        timelines = await self._pair.target.timelines({sample.request_id for sample in samples})
        ways = (timelines[sample.request_id].decisions for sample in samples)
        return tuple(next(one.chosen for one in way if one.kind == "placement") for way in ways)
