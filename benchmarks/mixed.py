"""`polyphase bench mixed`: two real engines of unequal speed on this machine, and the throughput and latency of each
way to share them.

One suite changes its roles and policies while it runs. Each round sends the same requests to every system: first all at
once, then at shares of the data-parallel throughput. The report compares medians with the paper's gains and with the
simulator, which has the step times that the engines recorded.
"""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from statistics import fmean, median
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec
import numpy as np

from benchmarks.experiment import WHO, shots_of
from benchmarks.papers.testbed import CONVERSATION
from benchmarks.real_engines import LlamaShape, QuotaSuite, cluster_file, measured_under_quotas
from benchmarks.results import Aim, Result, at_least, at_most, merged, progress, result, rotated
from shared.cost.network import Link
from shared.cost.rates_file import ControlPlane
from shared.cost.step import Batch
from shared.cost.step_rates import TERMS, fit_form, kind_of
from shared.domain.instance import Role
from shared.domain.job import JobView
from shared.domain.rates import Rates, StepRates
from shared.domain.route import PolicySpec
from shared.errors import Unavailable
from shared.policy import registry
from shared.policy.dispatch import Choice
from shared.policy.index import ClusterIndex
from shared.policy.placement import Policies
from shared.sim.cluster import simulate
from shared.sim.measured import LiveInstance, with_control
from shared.sim.outcomes import Outcomes
from shared.sim.spec import EngineLimits, InstanceSpec, RunSpec
from shared.sim.traces import read_trace
from shared.sim.workload import Workload, poisson
from shared.wire.messages import StepRecord
from tools.calibrate.host_watch import HostWatch
from tools.calibrate.live import StepReader, Steps, control_plane
from tools.calibrate.target import Sample, Shot
from tools.simulate.workloads import WorkloadOptions, make_workload

FAST, SLOW = "fast", "slow"
CORES = MappingProxyType({FAST: 0.90, SLOW: 0.32})  # 2.8 : 1, and the rest of two cores for everything else
# 48 million parameters: a prompt token takes some ms, and what the services add is small beside it.
SHAPE = LlamaShape(4096, 640, 1728, 10, 10, 5, 4096)
MAX_MODEL_LEN, CHUNK, SEATS = 2048, 256, 32
KV_BYTES, STAGING_BYTES = 1 << 30, 256 << 20
SEED = 11


def cluster_of(model: Path) -> dict[str, Any]:
    instances = ({"id": FAST, "role": Role.DECODE.value}, {"id": SLOW, "role": Role.PREFILL.value})
    memory = {"kv_cache_bytes": KV_BYTES, "staging_bytes": STAGING_BYTES}
    return cluster_file("mixed", model, instances, MAX_MODEL_LEN, chunk_size=CHUNK, max_seqs=SEATS, **memory)


# The systems.

Speeds = Mapping[str, float]  # requests a second, by instance
P, D = Role.PREFILL, Role.DECODE


@dataclass(frozen=True, slots=True)
class System:
    """Roles of the fast and the slow instance, and policies of placement, split and dispatch.

    Placement `plan` sends requests in turn, by the instances' speeds.
    """

    words: str
    roles: tuple[Role, Role]
    placement: str
    split: str
    dispatch: str = "power_of_two"

    def role(self, instance_id: str) -> Role:
        return self.roles[(FAST, SLOW).index(instance_id)]

    def specs(self, speeds: Speeds) -> dict[str, PolicySpec]:
        routes = [["", name, round(speeds[name], 6)] for name in (FAST, SLOW)]
        parameters = {"routes": routes} if self.placement == "plan" else {}
        return {
            "placement": PolicySpec(self.placement, parameters),
            "split": PolicySpec(self.split),
            "dispatch": PolicySpec(self.dispatch),
        }

    def policies(self, speeds: Speeds) -> Policies:
        """The same policies, for the simulator."""
        return Policies(*(registry.make(kind, spec) for kind, spec in self.specs(speeds).items()))


DATA_PARALLEL, LOW_HIGH, HIGH_LOW = "data_parallel", "low_high", "high_low"
BALANCED, ADAPTIVE = "balanced", "adaptive"
SYSTEMS: Mapping[str, System] = {
    DATA_PARALLEL: System("each computes whole requests, in turn by speed", (D, D), "plan", "none"),
    LOW_HIGH: System("the slow one prefills, the fast one decodes", (D, P), "least_load", "full"),
    HIGH_LOW: System("the fast one prefills, the slow one decodes", (P, D), "least_load", "full"),
    BALANCED: System("the slow one prefills a part", (D, P), "least_load", "balanced"),
    ADAPTIVE: System("the default policies", (D, P), "adaptive", "adaptive", "adaptive"),
    "data_parallel_least_load": System("data-parallel by measured backlog", (D, D), "least_load", "none"),
}

# The load: conversations. A 48-million-parameter model on a core is to conversations of a third of the prompt and a
# quarter of the answer about what an accelerator is to whole ones with a model of billions.

PROMPT_PART, OUTPUT_PART = 3, 4
SHORTEST, LONGEST = 40, 2400  # prompt tokens of the trace's requests that are used
FEWEST_PROMPT, FEWEST_OUTPUT = 16, 4
BURST = "burst"


@dataclass(frozen=True, slots=True)
class Load:
    """Requests and when they arrive. share: of data-parallel's throughput; 0: all at once."""

    label: str
    share: float
    workload: Workload

    @property
    def shots(self) -> list[Shot]:
        return shots_of(self.workload)


def conversations(data: Path, seed: int = SEED) -> Workload:
    """Lengths to draw from: of the public trace under `data`, or synthetic ones like them where it is missing."""
    path = data / CONVERSATION
    table = read_trace(path) if path.is_file() else make_workload(WorkloadOptions("azure-conv", 5000, seed=seed))
    used = (table.prompt_tokens > SHORTEST) & (table.prompt_tokens < LONGEST)
    prompts = np.maximum(FEWEST_PROMPT, table.prompt_tokens[used] // PROMPT_PART)
    outputs = np.maximum(FEWEST_OUTPUT, table.output_tokens[used] // OUTPUT_PART)
    return Workload(table.name, np.zeros(len(prompts)), prompts, outputs)


def drawn(lengths: Workload, requests: int, seed: int) -> Workload:
    """A sample of so many requests, all at time 0."""
    rows = Random(seed).sample(range(len(lengths)), min(requests, len(lengths)))
    prompts, outputs = lengths.prompt_tokens[rows], lengths.output_tokens[rows]
    return Workload(lengths.name, np.zeros(len(rows)), prompts, outputs)


def burst(lengths: Workload, requests: int, seed: int) -> Load:
    return Load(BURST, 0.0, drawn(lengths, requests, seed))


def replay(lengths: Workload, share: float, rate: float, duration_s: float, seed: int) -> Load:
    """A Poisson process."""
    found = poisson(drawn(lengths, max(2, round(rate * duration_s)), seed), rate, seed + 1)
    timed = replace(found, arrival_s=found.arrival_s - found.arrival_s[0])
    return Load(f"at_{round(100 * share)}_percent", share, timed)


# The report.

OVER_DATA_PARALLEL, OVER_DISAGGREGATED = 1.05, 1.8
AT_RATE = {"tbt_p99": 0.5, "jct_mean": 0.7, "ttft_p99": 1.0}  # of data-parallel's, at most
NOISE = 1.03  # of the figure of `balanced`, at most
MEANS_PERCENT = 15.0
CLEAR_DIFFERENCE = 0.15  # systems that differ by less have no order
SIMULATED = ("requests_per_s", "ttft_mean_s", "tpot_mean_s", "jct_mean_s")
# Cronus 5.2 to 5.4: over Disagg L-H and H-L, and below data-parallel.
PAPER = {
    "paper_throughput_over_low_high_up_to": 1.9,
    "paper_throughput_over_high_low_up_to": 5.64,
    "paper_ttft_p99_below_data_parallel_percent_up_to": 55.0,
    "paper_tbt_p99_below_data_parallel_percent_up_to": 63.0,
}
Figures = Mapping[str, float]
Key = tuple[str, str]  # load and system


@dataclass(frozen=True, slots=True)
class Run:
    """One replay on the engines. sent: the instance of each request, of systems that take turns."""

    system: str
    load: Load
    figures: Figures
    sent: tuple[str, ...] = ()

    @property
    def key(self) -> Key:
        return self.load.label, self.system


def observed(samples: Sequence[Sample]) -> dict[str, float]:
    """Figures of one replay: seconds, and requests a second from the first arrival to the last token."""
    ttft = [sample.ttft_s for sample in samples]
    gaps = [gap for sample in samples for gap in sample.gaps_s]
    duration_s = max(s.sent_s + s.jct_s for s in samples) - min(s.sent_s for s in samples)

    def percentile(values: Sequence[float], percent: float) -> float:
        return float(np.percentile(values, percent)) if values else 0.0

    return {
        "requests_per_s": len(samples) / duration_s,
        "ttft_mean_s": fmean(ttft),
        "ttft_p50_s": percentile(ttft, 50),
        "ttft_p99_s": percentile(ttft, 99),
        "tbt_p50_s": percentile(gaps, 50),
        "tbt_p99_s": percentile(gaps, 99),
        "tpot_mean_s": fmean(value for sample in samples if (value := sample.tpot_s) is not None),
        "jct_mean_s": fmean(sample.jct_s for sample in samples),
    }


def medians(rows: Iterable[tuple[Key, Figures]]) -> dict[Key, dict[str, float]]:
    """Of the rounds of each system under each load."""
    groups: defaultdict[Key, list[Figures]] = defaultdict(list)
    for key, figures in rows:
        groups[key].append(figures)
    return {key: {name: median(each[name] for each in rounds) for name in rounds[0]} for key, rounds in groups.items()}


def report(runs: Sequence[Run], predicted: Mapping[Key, Figures], notes: Iterable[str] = ()) -> Result:
    """predicted: the simulator's means, by load and system."""
    live = medians((run.key, run.figures) for run in runs)
    figures = {f"{load}_{system}_{name}": value for (load, system), row in live.items() for name, value in row.items()}
    words = [f"{label}: {system.words}" for label, system in SYSTEMS.items()]
    base = result(figures | PAPER, notes=[*words, *notes])
    return merged(base, _throughput(live), _at_rates(live), _simulated(live, predicted))


def _ratio(live: Mapping[Key, Figures], load: str, name: str, other: str) -> float | None:
    """Of adaptive over another system; None where one of them was not measured."""
    ours, base = (live.get((load, system), {}).get(name) for system in (ADAPTIVE, other))
    return ours / base if ours is not None and base else None


def _throughput(live: Mapping[Key, Figures]) -> Result:
    others = [label for label in SYSTEMS if label != ADAPTIVE]
    ratios = {other: _ratio(live, BURST, "requests_per_s", other) for other in others}
    disaggregated = [ratio for label in (LOW_HIGH, HIGH_LOW) if (ratio := ratios[label]) is not None]
    aims = {
        "throughput_over_data_parallel": at_least(OVER_DATA_PARALLEL, ratios[DATA_PARALLEL]),
        "throughput_over_better_disaggregation": at_least(OVER_DISAGGREGATED, min(disaggregated, default=None)),
        "throughput_over_balanced": at_least(1.0 / NOISE, ratios[BALANCED]),
    }
    return result({f"throughput_over_{label}": ratio for label, ratio in ratios.items() if ratio is not None}, aims)


def _at_rates(live: Mapping[Key, Figures]) -> Result:
    figures: dict[str, float] = {}
    aims: dict[str, Aim] = {}
    for load in dict.fromkeys(load for load, _ in live if load != BURST):
        for metric, most in AT_RATE.items():
            for other, bound in ((DATA_PARALLEL, most), (BALANCED, NOISE)):
                name, ratio = f"{load}_{metric}_over_{other}", _ratio(live, load, f"{metric}_s", other)
                aims[name] = at_most(bound, ratio)
                if ratio is not None:
                    figures[name] = ratio
    return result(figures, aims)


def _simulated(live: Mapping[Key, Figures], predicted: Mapping[Key, Figures]) -> Result:
    figures: dict[str, float] = {}
    worst: dict[str, float] = {}
    for (load, system), means in predicted.items():
        for name, value in means.items():
            figures[f"{load}_{system}_{name}_simulated"] = value
            seen = live.get((load, system), {}).get(name)
            # At a rate, throughput is what arrives, and how long the last answer takes.
            if seen and (load == BURST or name != "requests_per_s"):
                off = 100.0 * (value / seen - 1.0)
                figures[f"{load}_{system}_{name}_off_percent"] = off
                worst[name] = max(worst.get(name, 0.0), abs(off))
    aims = {f"simulated_{name}_off_percent": at_most(MEANS_PERCENT, off) for name, off in worst.items()}
    wrong = [*_wrong_order(live, predicted)]
    aims["simulated_pairs_in_wrong_order"] = {"want": 0, "got": ", ".join(wrong) or 0, "met": not wrong}
    return result(figures, aims)


def _wrong_order(live: Mapping[Key, Figures], predicted: Mapping[Key, Figures]) -> Iterable[str]:
    """Pairs of systems that clearly differ under a load, and the other way round in the simulator."""
    for load in dict.fromkeys(load for load, _ in live):
        name = "requests_per_s" if load == BURST else "jct_mean_s"
        labels = [label for label in SYSTEMS if (load, label) in live.keys() & predicted.keys()]
        for at, one in enumerate(labels):
            for other in labels[at + 1 :]:
                seen, simulated = (by[load, other][name] / by[load, one][name] for by in (live, predicted))
                if max(seen, 1.0 / seen) >= 1.0 + CLEAR_DIFFERENCE and (seen - 1.0) * (simulated - 1.0) <= 0.0:
                    yield f"{load}: {one} and {other}"


# The pair in the simulator.

FEWEST_STEPS = 12  # of a kind; with fewer, the rates that the instance publishes are used
PAUSE_S = 0.05  # between two steps of an engine that has work: shorter ones are part of the second
UNMEASURED_BYTES_S = 1e12  # of a link too fast to be measured
EARLIER, SETTLED_S = 64, 60.0  # requests before those that count, from which answers' lengths are known; and a pause


@dataclass(frozen=True, slots=True)
class FormSteps:
    """Step times of an engine by its `StepRates`."""

    rates: StepRates

    def step_time_s(self, batch: Batch) -> float:
        if not batch.prefill:
            return self.decode_time_s(batch.decode_count, batch.decode_context_tokens)
        form = self.rates.mixed if batch.decode_count else self.rates.prefill
        chunks_s = sum(new * (form.token_s + form.position_s * (before + new / 2.0)) for new, before in batch.prefill)
        decodes_s = form.sequence_s * batch.decode_count + form.context_s * batch.decode_context_tokens
        return form.fixed_s + chunks_s + decodes_s

    def decode_time_s(self, count: int, context_tokens: int) -> float:
        return self.rates.decode_s(count, context_tokens) if count else 0.0

    def decode_segments(self, count: int, context_tokens: int, steps: int) -> tuple[tuple[int, float, float], ...]:
        """See `StepTimes`: with each step each context is a token longer, which is linear throughout."""
        last_s = self.decode_time_s(count, context_tokens + count * (steps - 1))
        return ((steps, self.decode_time_s(count, context_tokens), last_s),)


@dataclass(frozen=True, slots=True)
class AsSent:
    """Each request goes where it went on the engines, and those before them in the same order.

    For systems that take turns: chance decides which requests the slow instance gets, and the mean JCT depends on it.
    """

    name: ClassVar[str] = "as_sent"
    instances: tuple[str, ...]

    def choose(
        self, job: JobView, index: ClusterIndex, exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        found = index.candidates.get(self.instances[(int(job.job_id) - EARLIER) % len(self.instances)])
        return Choice(found) if found is not None else None


def recorded_rates(instances: Sequence[LiveInstance], steps: Steps) -> dict[str, StepRates]:
    """Step times of each instance, fitted to its recorded steps, or published ones for kinds with too few steps.

    Raises Unavailable for an instance that publishes no step times.
    """
    found = {}
    for one in instances:
        name, published = one.info.instance_id, one.info.rates.step
        if published is None:
            raise Unavailable(f"{name} publishes no step times")
        samples: dict[str, list[tuple[Batch, float]]] = {kind: [] for kind in TERMS}
        for batch, seconds in with_pauses(steps.get(name, ())):
            samples[kind_of(batch)].append((batch, seconds))
        fits = {kind: fit_form(kind, some) for kind, some in samples.items() if len(some) >= FEWEST_STEPS}
        found[name] = msgspec.structs.replace(published, **fits)
    return found


def with_pauses(steps: Sequence[StepRecord]) -> list[tuple[Batch, float]]:
    """How long steps kept their engine: from the end of the step before, where that was just before."""
    found, ended_s = [], 0.0
    for step in sorted(steps, key=lambda one: one.ended_s):
        pause_s = step.ended_s - step.seconds - ended_s
        seconds = step.seconds + (pause_s if 0.0 < pause_s < PAUSE_S else 0.0)
        found.append((Batch(step.prefill, step.decode_count, step.decode_context_tokens), seconds))
        ended_s = step.ended_s
    return found


@dataclass(frozen=True, slots=True)
class Twin:
    """The pair in the simulator."""

    instances: tuple[LiveInstance, ...]
    rates: Mapping[str, StepRates]
    control: ControlPlane
    speeds: Speeds

    def run(self, system: System, load: Load, lengths: Workload, sent: Sequence[str] = ()) -> Figures:
        """A system under a load. sent: where each request went on the engines, if that was a matter of turns."""
        policies = system.policies(self.speeds)
        if sent:
            policies = msgspec.structs.replace(policies, placement=AsSent(tuple(sent)))
        return self._means(tuple(self._spec(one, system) for one in self.instances), policies, load, lengths)

    def _means(self, specs: tuple[InstanceSpec, ...], policies: Policies, load: Load, lengths: Workload) -> Figures:
        """Earlier requests, which do not count, let schedulers know answers' lengths, as the live one does."""
        before, work = drawn(lengths, EARLIER, len(load.workload)), load.workload
        early_s = np.arange(len(before)) * (1.0 / max(self.speeds.values()))
        both = Workload(
            work.name,
            np.concatenate([early_s, work.arrival_s + early_s[-1] + SETTLED_S]),
            np.concatenate([before.prompt_tokens, work.prompt_tokens]),
            np.concatenate([before.output_tokens, work.output_tokens]),
        )
        run = with_control(RunSpec(policies=policies, seed=SEED), self.control)
        return simulated_means(simulate(both, specs, run).outcomes, len(before))

    def _spec(self, one: LiveInstance, system: System) -> InstanceSpec:
        info, rates = one.info, self.rates[one.info.instance_id]
        return InstanceSpec(
            instance_id=info.instance_id,
            model=FormSteps(rates),
            role=system.role(info.instance_id),
            kv_tokens=info.total_blocks * info.block_size,
            kv_bytes_per_token=info.kv_bytes_per_token,
            limits=EngineLimits(info.chunk_size, one.max_seqs, info.block_size, info.max_model_len),
            link=Link(self.control.link_bytes_s or UNMEASURED_BYTES_S, self.control.link_latency_s, 1.0),
            accelerator=info.accelerator,
            staging_tokens=int(STAGING_BYTES / info.kv_bytes_per_token),
            rates=Rates(rates),
        )


def simulated_means(out: Outcomes, first: int) -> Figures:
    """Of the requests from `first` on. Raises Unavailable when one of them did not end."""
    if not out.completed[first:].all():
        raise Unavailable("a simulated request did not end")
    duration_s = float(out.last_token_s[first:].max() - out.arrival_s[first])
    means = (float(np.nanmean(times[first:])) for times in (out.ttft_s, out.tpot_s, out.jct_s))
    return dict(zip(SIMULATED, ((len(out.arrival_s) - first) / duration_s, *means), strict=True))


# The measurement.

BESIDE = 8  # decodes of one step, when speeds are compared
KEEPS_UP = 1.1  # of its own throughput: at higher rates a system's queue only grows
LONE = (64, 128, 256, 384, 512, 640, 768, 64, 256, 512)  # prompt tokens of requests sent one at a time
WARM_UP, TOGETHER = 12, 4
EQUAL_SPEEDS: Speeds = dict.fromkeys(CORES, 1.0)


@dataclass(frozen=True, slots=True)
class MixedOptions:
    """rounds: medians are over so many. quick: one short round, to see that it works."""

    rounds: int = 2
    quick: bool = False


def run_mixed_bench(data: Path, options: MixedOptions | None = None) -> Result:
    """Raises Unavailable where CPU quotas are not allowed."""
    work = partial(_measure, conversations(data), options or MixedOptions())
    return asyncio.run(measured_under_quotas(QuotaSuite, SHAPE, CORES, cluster_of, work, SEED))


async def _measure(lengths: Workload, options: MixedOptions, suite: QuotaSuite) -> Result:
    rounds, requests, shares, duration_s = (
        (1, 16, (0.75,), 12.0) if options.quick else (options.rounds, 40, (0.5, 0.75, 1.0), 30.0)
    )
    meter = Meter(suite, lengths, StepReader(await suite.target.instances()))
    control = await meter.control()
    runs: list[Run] = []
    for number in range(rounds):
        runs += await meter.round(number, [burst(lengths, requests, SEED + number)], runs)
    rate = median(run.figures["requests_per_s"] for run in runs if run.system == DATA_PARALLEL)
    for number in range(rounds):
        loads = [replay(lengths, share, share * rate, duration_s, SEED + 100 + number) for share in shares]
        runs += await meter.round(number, loads, runs)
    predicted = await asyncio.to_thread(_simulate, await meter.twin(control), runs, lengths)
    cores = ", ".join(f"{name} {cores:g}" for name, cores in CORES.items())
    notes = [f"{lengths.name}, prompts a third and answers a quarter as long; {rounds} rounds; cores: {cores}"]
    speeds = {f"{name}_requests_per_s_by_its_rates": speed for name, speed in meter.speeds.items()}
    return merged(report(runs, predicted, notes), result(speeds))


def _simulate(twin: Twin, runs: Sequence[Run], lengths: Workload) -> dict[Key, dict[str, float]]:
    """Medians over the same rounds."""
    rows = [(run.key, twin.run(SYSTEMS[run.system], run.load, lengths, run.sent)) for run in runs]
    return medians(rows)


class Meter:
    """Sends loads to the pair and collects the results. speeds: of each instance, by the rates that it has learned."""

    def __init__(self, suite: QuotaSuite, lengths: Workload, reader: StepReader) -> None:
        self.speeds = EQUAL_SPEEDS
        self._suite = suite
        self._lengths = lengths
        self._reader = reader

    async def control(self) -> ControlPlane:
        """What the services and the link add, from requests that have the pair to themselves."""
        await self._warm_up(0)
        await self._become(SYSTEMS[LOW_HIGH])
        await self._reader.read()
        samples = await self._suite.traffic.closed([Shot(tokens, 6) for tokens in LONE], 1)
        await self._reader.read()
        timelines = await self._suite.target.timelines({sample.request_id for sample in samples})
        return control_plane(samples, samples, timelines, self._reader.steps)

    async def round(self, number: int, loads: Sequence[Load], before: Sequence[Run]) -> list[Run]:
        """Every system that keeps up, under every load, in rotating order."""
        await self._warm_up(number)
        best = {run.system: run.figures["requests_per_s"] for run in before if run.load.label == BURST}
        return [
            await self._run(label, load)
            for load in loads
            for label in rotated(list(SYSTEMS), number)
            if not load.share or load.workload.rate <= KEEPS_UP * best.get(label, inf)
        ]

    async def twin(self, control: ControlPlane) -> Twin:
        await self._become(SYSTEMS[LOW_HIGH])
        instances = await self._suite.target.instances()
        return Twin(instances, recorded_rates(instances, self._reader.steps), control, self.speeds)

    async def _become(self, system: System) -> None:
        """Apply a system's roles and policies once no request is left."""
        suite = self._suite.suite
        await suite.wait_idle()
        roles = {name: entry["role"] for name, entry in (await suite.instances()).items()}
        await self._suite.flip(*(name for name in CORES if roles[name] != system.role(name).value))
        await suite.set_policies(system.specs(self.speeds), WHO)

    async def _warm_up(self, number: int) -> None:
        """Rates are learned while serving: both compute prompts and decode, and transfer KV; none of it counts."""
        shots = shots_of(drawn(self._lengths, WARM_UP, SEED - 1 - number))
        self.speeds = EQUAL_SPEEDS
        for label in (DATA_PARALLEL, LOW_HIGH):
            await self._become(SYSTEMS[label])
            await self._suite.traffic.closed(shots, TOGETHER)
        await self._suite.suite.wait_idle()
        await self._reader.skip()
        prompt, output = float(self._lengths.prompt_tokens.mean()), float(self._lengths.output_tokens.mean())
        self.speeds = {
            one.instance_id: speed_of(one.rates.step, prompt, output, BESIDE)
            for one in await self._suite.instances()
            if one.rates.step is not None  # an instance starts with the catalogue's
        }

    async def _run(self, label: str, load: Load) -> Run:
        suite, system = self._suite, SYSTEMS[label]
        await self._become(system)
        suite.check()
        before = {name: group.throttled() for name, group in suite.groups.items()}
        async with HostWatch(suite.target.launcher_pid) as watch:
            samples = await suite.traffic.timed(load.shots)
        suite.check()
        shares = {f"{n}_throttled_share": g.throttled().since(before[n]).share for n, g in suite.groups.items()}
        await self._reader.read()
        figures = observed(samples) | shares | {"foreign_cores": watch.mean_cores}
        progress(
            f"{load.label:14} {label:25} {figures['requests_per_s']:5.2f} req/s, TTFT p99 {figures['ttft_p99_s']:6.2f} "
            f"s, TBT p99 {1e3 * figures['tbt_p99_s']:5.0f} ms, JCT {figures['jct_mean_s']:6.2f} s"
        )
        return Run(label, load, figures, await self._sent(samples) if system.placement == "plan" else ())

    async def _sent(self, samples: Sequence[Sample]) -> tuple[str, ...]:
        """The instance of each request's first placement."""
        timelines = await self._suite.target.timelines({sample.request_id for sample in samples})
        decisions = (timelines[sample.request_id].decisions for sample in samples)
        return tuple(next(one.chosen for one in each if one.kind == "placement") for each in decisions)


def speed_of(rates: StepRates, prompt: float, output: float, beside: int) -> float:
    """Requests of these lengths a second, with so many decodes in one step."""
    return 1.0 / (rates.prefill_s(prompt, 0.0) + output * rates.decode_s(beside, beside * prompt) / beside)
