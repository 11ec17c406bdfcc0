"""`polyphase bench mixed`: two real engines of unequal speed on this machine, and the throughput and latency of each
way to share them.

One suite changes its roles and policies while it runs. Each round sends the same requests to every system: first all at
once, then at shares of the data-parallel throughput. The report compares medians with the paper's gains and with the
simulator, which has the step times that the engines recorded.
"""

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from types import MappingProxyType
from typing import ClassVar

import msgspec
import numpy as np

from benchmarks.cluster_files import ClusterDict, LlamaShape, engines_on_cpu
from benchmarks.experiment import Arm, LiveRun, Means, judged, part_of, random_prompt, shots_of
from benchmarks.papers.testbed import CONVERSATION
from benchmarks.quotas import QuotaSession, measured_under_quotas
from benchmarks.results import Aim, Figures, Result, arm_medians, at_least, at_most, in_turns, merged, progress, result
from shared.cost.network import Link
from shared.cost.rates_file import ControlPlane
from shared.cost.step import Batch
from shared.cost.step_rates import TERMS, fit_form, kind_of
from shared.domain.instance import Role
from shared.domain.job import JobView, Slo
from shared.domain.rates import Rates, StepRates
from shared.errors import Unavailable
from shared.policy.dispatch import Choice
from shared.policy.index import ClusterIndex
from shared.sim.cluster import simulate
from shared.sim.measured import LiveInstance, with_control
from shared.sim.metrics import summary
from shared.sim.outcomes import SimResult
from shared.sim.spec import EngineLimits, InstanceSpec, RunSpec, with_words
from shared.sim.traces import read_trace
from shared.sim.workload import Workload, poisson
from shared.wire.messages import StepRecord
from tools.calibrate.live import StepReader, Steps, control_plane
from tools.calibrate.target import Shot
from tools.simulate.workloads import WorkloadOptions, make_workload

FAST, SLOW = "fast", "slow"
CORES = MappingProxyType({FAST: 0.90, SLOW: 0.32})  # 2.8 : 1, and the rest of two cores for everything else
# 48 million parameters: a prompt token takes some ms, and what the services add is small beside it.
SHAPE = LlamaShape(4096, 640, 1728, 10, 10, 5, 4096)
MAX_MODEL_LEN, CHUNK, SEATS = 2048, 256, 32
KV_BYTES, STAGING_BYTES = 1 << 30, 256 << 20
SEED = 11


def cluster_of(model: Path) -> ClusterDict:
    instances = ({"id": FAST, "role": Role.DECODE.value}, {"id": SLOW, "role": Role.PREFILL.value})
    memory = {"kv_cache_bytes": KV_BYTES, "staging_bytes": STAGING_BYTES}
    return engines_on_cpu("mixed", model, instances, MAX_MODEL_LEN, chunk_size=CHUNK, max_seqs=SEATS, **memory)


# The systems.

Speeds = Mapping[str, float]  # requests a second, by instance
P, D = Role.PREFILL, Role.DECODE


@dataclass(frozen=True, slots=True)
class System:
    """Roles of the fast and the slow instance, and policies in words. in_turn: requests go to both by their speeds."""

    about: str
    roles: tuple[Role, Role]
    words: str
    in_turn: bool = False

    def role(self, instance_id: str) -> Role:
        return self.roles[(FAST, SLOW).index(instance_id)]

    def arm(self, label: str, speeds: Speeds) -> Arm:
        routes = json.dumps([["", name, round(speeds[name], 6)] for name in (FAST, SLOW)])
        return Arm(label, f"plan:routes={routes}+{self.words}" if self.in_turn else self.words)


DATA_PARALLEL, LOW_HIGH, HIGH_LOW = "data_parallel", "low_high", "high_low"
BALANCED, ADAPTIVE = "balanced", "adaptive"
WHOLE, FULL = "split=none+power_of_two", "least_load+split=full+power_of_two"
SYSTEMS: Mapping[str, System] = {
    DATA_PARALLEL: System("each computes whole requests, in turn by speed", (D, D), WHOLE, in_turn=True),
    LOW_HIGH: System("the slow one prefills, the fast one decodes", (D, P), FULL),
    HIGH_LOW: System("the fast one prefills, the slow one decodes", (P, D), FULL),
    BALANCED: System("the slow one prefills a part", (D, P), "least_load+balanced+power_of_two"),
    ADAPTIVE: System("the default policies", (D, P), "adaptive"),
    "data_parallel_least_load": System("data-parallel by measured backlog", (D, D), f"least_load+{WHOLE}"),
}

# The load: conversations. A 48-million-parameter model on a core is to conversations of a third of the prompt and a
# quarter of the answer about what an accelerator is to whole ones with a model of billions.

PROMPT_PART, OUTPUT_PART = 3, 4
SHORTEST, LONGEST = 40, 2400  # prompt tokens of the trace's requests that are used
MIN_PROMPT, MIN_OUTPUT = 16, 4
BURST = "burst"


def conversations(data: Path, seed: int = SEED) -> Workload:
    """Lengths to draw from: of the public trace under `data`, or synthetic ones like them where it is missing."""
    path = data / CONVERSATION
    table = read_trace(path) if path.is_file() else make_workload(WorkloadOptions("azure-conv", 5000, seed=seed))
    used = (table.prompt_tokens > SHORTEST) & (table.prompt_tokens < LONGEST)
    prompts = np.maximum(MIN_PROMPT, table.prompt_tokens[used] // PROMPT_PART)
    outputs = np.maximum(MIN_OUTPUT, table.output_tokens[used] // OUTPUT_PART)
    return Workload(table.name, np.zeros(len(prompts)), prompts, outputs)


def drawn(lengths: Workload, requests: int, seed: int) -> Workload:
    """A sample of so many requests, all at time 0."""
    rows = Random(seed).sample(range(len(lengths)), min(requests, len(lengths)))
    prompts, outputs = lengths.prompt_tokens[rows], lengths.output_tokens[rows]
    return Workload(lengths.name, np.zeros(len(rows)), prompts, outputs)


def replay(lengths: Workload, rate: float, duration_s: float, seed: int) -> Workload:
    """A Poisson process."""
    found = poisson(drawn(lengths, max(2, round(rate * duration_s)), seed), rate, seed + 1)
    return replace(found, arrival_s=found.arrival_s - found.arrival_s[0])


# The report.

FIGURES = ("requests_per_s", "ttft_mean_s", "ttft_p99_s", "itl_p99_s", "tpot_mean_s", "jct_mean_s")
MAX_RATIOS = {"itl_p99_s": 0.5, "jct_mean_s": 0.7, "ttft_p99_s": 1.0}  # of data-parallel's figures at a rate
OVER_DATA_PARALLEL, OVER_DISAGGREGATED = 1.05, 1.8  # throughput, at least
NOISE = 1.03  # of the figure of `balanced`, at most


def over_others(load: str, rounds: Sequence[Mapping[str, Figures]]) -> Result:
    """Adaptive over each other system, medians of the rounds' ratios. Without a measurement an aim is missed."""

    def over(other: str, metric: str) -> float | None:
        pairs = [(row[ADAPTIVE], row[other]) for row in rounds if ADAPTIVE in row and other in row]
        return median(ours[metric] / base[metric] for ours, base in pairs) if pairs else None

    ratios: dict[str, float | None] = {}
    aims: dict[str, Aim] = {}
    if load == BURST:
        rates = {other: over(other, "requests_per_s") for other in SYSTEMS if other != ADAPTIVE}
        ratios = {f"throughput_over_{other}": ratio for other, ratio in rates.items()}
        disaggregated = [rate for name in (LOW_HIGH, HIGH_LOW) if (rate := rates[name]) is not None]
        aims = {
            "throughput_over_data_parallel": at_least(OVER_DATA_PARALLEL, rates[DATA_PARALLEL]),
            "throughput_over_better_disaggregation": at_least(OVER_DISAGGREGATED, min(disaggregated, default=None)),
            "throughput_over_balanced": at_least(1.0 / NOISE, rates[BALANCED]),
        }
    else:
        for metric, bound in MAX_RATIOS.items():
            for other, want in ((DATA_PARALLEL, bound), (BALANCED, NOISE)):
                name = f"{load}_{metric.removesuffix('_s')}_over_{other}"
                ratios[name] = over(other, metric)
                aims[name] = at_most(want, ratios[name])
    return result({name: ratio for name, ratio in ratios.items() if ratio is not None}, aims)


# The pair in the simulator.

MIN_STEPS = 12  # of a kind; with fewer, the rates that the instance publishes are used
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
        fits = {kind: fit_form(kind, some) for kind, some in samples.items() if len(some) >= MIN_STEPS}
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

    def run(self, label: str, work: Workload, lengths: Workload, sent: Sequence[str] = ()) -> SimResult:
        """A system under a load. sent: where each request went on the engines, if that was a matter of turns.

        Earlier requests, which do not count, let schedulers know answers' lengths, as the live one does. Raises
        Unavailable when a request does not end.
        """
        run = with_words(RunSpec(seed=SEED, migration=False), SYSTEMS[label].arm(label, self.speeds).words)
        if sent:
            run = replace(run, policies=msgspec.structs.replace(run.policies, placement=AsSent(tuple(sent))))
        before = drawn(lengths, EARLIER, len(work))
        early_s = np.arange(len(before)) * (1.0 / max(self.speeds.values()))
        both = Workload(
            work.name,
            np.concatenate([early_s, work.arrival_s + early_s[-1] + SETTLED_S]),
            np.concatenate([before.prompt_tokens, work.prompt_tokens]),
            np.concatenate([before.output_tokens, work.output_tokens]),
        )
        specs = tuple(self._spec(one, SYSTEMS[label].role(one.info.instance_id)) for one in self.instances)
        seen = part_of(simulate(both, specs, with_control(run, self.control)), np.arange(len(both)) >= len(before))
        if not seen.outcomes.completed.all():
            raise Unavailable("a simulated request did not end")
        return seen

    def _spec(self, one: LiveInstance, role: Role) -> InstanceSpec:
        info, rates = one.info, self.rates[one.info.instance_id]
        return InstanceSpec(
            instance_id=info.instance_id,
            model=FormSteps(rates),
            role=role,
            kv_tokens=info.total_blocks * info.block_size,
            kv_bytes_per_token=info.kv_bytes_per_token,
            limits=EngineLimits(info.chunk_size, one.max_seqs, info.block_size, info.max_model_len),
            link=Link(self.control.link_bytes_s or UNMEASURED_BYTES_S, self.control.link_latency_s, 1.0),
            accelerator=info.accelerator,
            staging_tokens=int(STAGING_BYTES / info.kv_bytes_per_token),
            rates=Rates(rates),
        )


# The measurement.

BESIDE = 8  # decodes of one step, when speeds are compared
KEEPS_UP = 1.1  # of its own best throughput: at higher rates the queue of a system only grows
LONE = (64, 128, 256, 384, 512, 640, 768, 64, 256, 512)  # prompt tokens of requests sent one at a time
WARM_UP, TOGETHER = 12, 4
EQUAL_SPEEDS: Speeds = dict.fromkeys(CORES, 1.0)


@dataclass(frozen=True, slots=True)
class Run:
    """One load on one system. sent: the instance of each request, of systems that take turns."""

    workload: Workload
    live: LiveRun
    sent: tuple[str, ...]

    @property
    def figures(self) -> Figures:
        figures = summary(self.live.result, Slo())
        return {**{name: figures[name] for name in FIGURES}, "foreign_cores": self.live.foreign_cores}


Rounds = Sequence[Mapping[str, Run]]  # by system


def run_mixed_bench(data: Path, rounds: int = 2, *, quick: bool = False) -> Result:
    """rounds: medians are over so many. quick: one short round, to see that it works.

    Raises Unavailable where CPU quotas are not allowed.
    """
    work = partial(_measure, conversations(data), 1 if quick else rounds, quick)
    return asyncio.run(measured_under_quotas(SHAPE, CORES, cluster_of, work, SEED))


async def _measure(lengths: Workload, rounds: int, quick: bool, on: QuotaSession) -> Result:
    requests, shares, duration_s = (16, (0.75,), 12.0) if quick else (40, (0.5, 0.75, 1.0), 30.0)
    meter = Meter(on, lengths, StepReader(await on.target.instances()))
    control = await meter.control()
    bursts = [drawn(lengths, requests, SEED + number) for number in range(rounds)]
    found: dict[str, Rounds] = {BURST: await meter.rounds(BURST, bursts, list(SYSTEMS))}
    served = {name: [row[name].figures["requests_per_s"] for row in found[BURST]] for name in SYSTEMS}
    for share in shares:
        rate = share * median(served[DATA_PARALLEL])
        loads = [replay(lengths, rate, duration_s, SEED + 100 + number) for number in range(rounds)]
        label, keeps_up = f"at_{round(100 * share)}_percent", [n for n in SYSTEMS if rate <= KEEPS_UP * max(served[n])]
        found[label] = await meter.rounds(label, loads, keeps_up)
    twin = await meter.twin(control)
    parts = [await asyncio.to_thread(_report, load, each, twin, lengths) for load, each in found.items()]
    cores = ", ".join(f"{name} {cores:g}" for name, cores in CORES.items())
    notes = [f"{lengths.name}, prompts a third and answers a quarter as long; {rounds} rounds; cores: {cores}"]
    speeds = {f"{name}_requests_per_s_by_its_rates": speed for name, speed in meter.speeds.items()}
    return merged(*parts, result(speeds, notes=notes + [f"{name}: {one.about}" for name, one in SYSTEMS.items()]))


def _report(load: str, rounds: Rounds, twin: Twin, lengths: Workload) -> Result:
    figures = [{name: run.figures for name, run in row.items()} for row in rounds]
    compared = [
        {
            Arm(name, ""): (
                Means.from_result(run.live.result),
                Means.from_result(twin.run(name, run.workload, lengths, run.sent)),
            )
            for name, run in row.items()
        }
        for row in rounds
    ]
    return merged(result(arm_medians(load, figures)), over_others(load, figures), judged(load, compared))


class Meter:
    """Sends loads to the pair and collects the results. speeds: of each instance, by the rates that it has learned."""

    def __init__(self, on: QuotaSession, lengths: Workload, reader: StepReader) -> None:
        self.speeds = EQUAL_SPEEDS
        self._on = on
        self._lengths = lengths
        self._reader = reader
        self._sent = 0  # requests, which number their ids

    async def control(self) -> ControlPlane:
        """What the services and the link add, from requests that have the pair to themselves."""
        await self._warm_up(0)
        await self._become(LOW_HIGH)
        await self._reader.read()
        samples = await self._on.traffic.closed([Shot(tokens, 6) for tokens in LONE], 1)
        await self._reader.read()
        timelines = await self._on.target.timelines({sample.request_id for sample in samples})
        return control_plane(samples, samples, timelines, self._reader.steps)

    async def rounds(self, label: str, loads: Sequence[Workload], systems: Sequence[str]) -> Rounds:
        """These systems in turns, in each round under its load."""
        warm: set[int] = set()

        async def run(number: int, system: str) -> Run:
            if number not in warm:
                warm.add(number)
                await self._warm_up(number)
            found = await self._run(system, loads[number])
            seen = found.figures
            progress(
                f"{label:14} {system:25} {seen['requests_per_s']:5.2f} req/s, TTFT p99 {seen['ttft_p99_s']:6.2f} s, "
                f"ITL p99 {1e3 * seen['itl_p99_s']:5.0f} ms, JCT {seen['jct_mean_s']:6.2f} s"
            )
            return found

        return await in_turns(systems, len(loads), run)

    async def twin(self, control: ControlPlane) -> Twin:
        await self._become(LOW_HIGH)
        instances = await self._on.target.instances()
        return Twin(instances, recorded_rates(instances, self._reader.steps), control, self.speeds)

    async def _become(self, label: str) -> None:
        """Apply a system's roles and policies once no request is left."""
        on, system = self._on, SYSTEMS[label]
        await on.suite.wait_idle()
        roles = {name: entry.role for name, entry in (await on.suite.instances()).items()}
        await on.flip(*(name for name in CORES if roles[name] is not system.role(name)))
        await on.use(system.arm(label, self.speeds).specs)

    async def _warm_up(self, number: int) -> None:
        """Rates are learned while serving: both compute prompts and decode, and transfer KV; none of it counts."""
        shots = shots_of(drawn(self._lengths, WARM_UP, SEED - 1 - number))
        self.speeds = EQUAL_SPEEDS
        for label in (DATA_PARALLEL, LOW_HIGH):
            await self._become(label)
            await self._on.traffic.closed(shots, TOGETHER)
        await self._on.suite.wait_idle()
        await self._reader.skip()
        prompt, output = float(self._lengths.prompt_tokens.mean()), float(self._lengths.output_tokens.mean())
        self.speeds = {
            one.instance_id: speed_of(one.rates.step, prompt, output, BESIDE)
            for one in await self._on.instances()
            if one.rates.step is not None  # an instance starts with the catalogue's
        }

    async def _run(self, label: str, work: Workload) -> Run:
        await self._become(label)
        self._on.check()
        first, self._sent = self._sent, self._sent + len(work)

        def body(number: int, shot: Shot) -> dict[str, object]:
            return random_prompt(number, shot) | {"request_id": f"mixed{first + number}"}

        live = await self._on.send(work, body=body)
        self._on.check()
        await self._reader.read()
        if not SYSTEMS[label].in_turn:
            return Run(work, live, ())
        names = [f"mixed{first + number}" for number in range(len(work))]
        timelines = await self._on.target.timelines(set(names))
        placements = (next(one for one in timelines[name].decisions if one.kind == "placement") for name in names)
        return Run(work, live, tuple(one.chosen for one in placements))


def speed_of(rates: StepRates, prompt: float, output: float, beside: int) -> float:
    """Requests of these lengths a second, with so many decodes in one step."""
    return 1.0 / (rates.prefill_s(prompt, 0.0) + output * rates.decode_s(beside, beside * prompt) / beside)
