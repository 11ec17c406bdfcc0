"""Two real engines of unequal speed on one machine: the systems that `bench mixed` compares on them, the requests it
sends, and the same pair in the simulator with the step times that the engines recorded."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import msgspec
import numpy as np

from benchmarks.experiment import WHO, shots_of
from benchmarks.papers.testbed import CONVERSATION
from benchmarks.real_engines import LlamaShape, QuotaSuite, Throttled, cluster_file
from shared.cost.linear import rates_of_steps
from shared.cost.network import Link
from shared.cost.pipeline import Pipeline
from shared.cost.rates_file import ControlPlane
from shared.cost.step import Batch
from shared.cost.step_rates import NAMES, TERMS, fit_form
from shared.domain.instance import Role
from shared.domain.job import JobView
from shared.domain.rates import StepForm, StepRates
from shared.domain.route import PolicySpec
from shared.errors import Unavailable
from shared.policy import registry
from shared.policy.dispatch import Choice, PowerOfTwo
from shared.policy.index import ClusterIndex
from shared.policy.placement import LeastLoad, Policies
from shared.policy.split import NoSplit
from shared.sim.cluster import simulate
from shared.sim.measured import LiveInstance, with_control
from shared.sim.outcomes import Outcomes
from shared.sim.spec import EngineLimits, InstanceSpec, RunSpec
from shared.sim.traces import read_trace
from shared.sim.workload import Workload, poisson
from shared.wire.messages import StepRecord
from tools.calibrate.live import Steps
from tools.calibrate.target import Sample, Shot
from tools.simulate.workloads import WorkloadOptions, make_workload

FAST, SLOW = "fast", "slow"
CORES = MappingProxyType({FAST: 0.90, SLOW: 0.32})  # 2.8 : 1, and the rest of two cores for everything else
# 48 million parameters: a prompt token takes some ms, and what the services add is small beside it.
SHAPE = LlamaShape(4096, 640, 1728, 10, 10, 5, 4096)
MAX_MODEL_LEN, CHUNK, SEATS = 2048, 256, 32
KV_BYTES, STAGING_BYTES = 1 << 30, 256 << 20
Roles = Mapping[str, Role]
Speeds = Mapping[str, float]  # requests a second, by instance
COUPLED: Roles = MappingProxyType({FAST: Role.DECODE, SLOW: Role.DECODE})
SLOW_PREFILLS: Roles = MappingProxyType({FAST: Role.DECODE, SLOW: Role.PREFILL})
FAST_PREFILLS: Roles = MappingProxyType({FAST: Role.PREFILL, SLOW: Role.DECODE})
_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class System:
    """Roles and policies. words: what it is, for people. by_speed: requests go in turn, by the instances' speeds."""

    label: str
    words: str
    roles: Roles
    names: Mapping[str, str] = field(default_factory=lambda: _NONE)
    by_speed: bool = False

    def specs(self, speeds: Speeds) -> dict[str, PolicySpec]:
        found = {kind: PolicySpec(name) for kind, name in self.names.items()}
        if self.by_speed:
            routes = [["", name, round(speeds[name], 6)] for name in self.roles]
            found["placement"] = PolicySpec("plan", {"routes": routes})
        return found

    def policies(self, speeds: Speeds) -> Policies:
        """The same policies, for the simulator."""
        given = self.specs(speeds)
        return Policies(*(registry.make(kind, given[kind]) for kind in ("placement", "split", "dispatch")))


def _named(placement: str, split: str, dispatch: str = "power_of_two") -> Mapping[str, str]:
    return MappingProxyType({"placement": placement, "split": split, "dispatch": dispatch})


DATA_PARALLEL = System(
    "data_parallel", "each computes whole requests, in turn by speed", COUPLED, _named("plan", "none"), by_speed=True
)
LOW_HIGH = System(
    "low_high", "the slow one prefills, the fast one decodes", SLOW_PREFILLS, _named("least_load", "full")
)
HIGH_LOW = System(
    "high_low", "the fast one prefills, the slow one decodes", FAST_PREFILLS, _named("least_load", "full")
)
BALANCED = System("balanced", "slow prefills a part", SLOW_PREFILLS, _named("least_load", "balanced"))
ADAPTIVE = System("adaptive", "the default policies", SLOW_PREFILLS, _named("adaptive", "adaptive", "adaptive"))
LEAST_LOAD = System("data_parallel_least_load", "the same, by measured backlog", COUPLED, _named("least_load", "none"))
SYSTEMS = (DATA_PARALLEL, LOW_HIGH, HIGH_LOW, BALANCED, ADAPTIVE, LEAST_LOAD)


@dataclass(frozen=True, slots=True)
class Pair(QuotaSuite):
    async def become(self, system: System, speeds: Speeds) -> None:
        """Take a system's roles and policies once no request is left. Raises the monitor's errors, DeadlineExceeded."""
        await self.suite.wait_idle()
        found = await self.suite.instances()
        await self.flip(*(name for name, role in system.roles.items() if found[name]["role"] != role.value))
        await self.suite.set_policies(system.specs(speeds), WHO)

    def throttled(self) -> dict[str, Throttled]:
        """So far, by instance. Raises Unavailable when one was started again meanwhile, and so without its quota."""
        self.check()
        return {name: group.throttled() for name, group in self.groups.items()}


def cluster_of(model: Path) -> dict[str, Any]:
    instances = ({"id": FAST, "role": Role.DECODE.value}, {"id": SLOW, "role": Role.PREFILL.value})
    memory = {"kv_cache_bytes": KV_BYTES, "staging_bytes": STAGING_BYTES}
    return cluster_file("mixed", model, instances, MAX_MODEL_LEN, chunk_size=CHUNK, max_seqs=SEATS, **memory)


# The load: conversations, scaled so that computing dominates.

# A 48-million-parameter model on a core is to conversations of a third of the prompt and a quarter of the answer about
# what an accelerator is to whole ones with a model of billions.
PROMPT_PART, OUTPUT_PART = 3, 4
SHORTEST, LONGEST = 40, 2400  # prompt tokens of the trace's requests that are taken
FEWEST_PROMPT, FEWEST_OUTPUT = 16, 4
SEED = 11


@dataclass(frozen=True, slots=True)
class Load:
    """Requests and when they arrive. share: of data-parallel's throughput; 0: all at once."""

    label: str
    share: float
    workload: Workload

    @property
    def shots(self) -> list[Shot]:
        return shots_of(self.workload)


@dataclass(frozen=True, slots=True)
class Seen:
    """Figures of one replay: seconds, and requests a second from the first arrival to the last token."""

    requests_per_s: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tbt_p50_s: float
    tbt_p99_s: float
    tpot_mean_s: float
    jct_mean_s: float
    longest_gap_p90_s: float  # of the requests' longest gaps
    longest_gap_max_s: float

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "Seen":
        ttft = [sample.ttft_s for sample in samples]
        gaps = [gap for sample in samples for gap in sample.gaps_s]
        longest = [gap_s for sample in samples if (gap_s := sample.longest_gap_s) is not None]
        tpot = [value for sample in samples if (value := sample.tpot_s) is not None]
        took_s = max(s.sent_s + s.jct_s for s in samples) - min(s.sent_s for s in samples)
        return cls(
            len(samples) / took_s,
            float(np.mean(ttft)),
            *_percentiles(ttft),
            *_percentiles(gaps),
            float(np.mean(tpot)),
            float(np.mean([sample.jct_s for sample in samples])),
            float(np.percentile(longest, 90)) if longest else 0.0,
            max(longest, default=0.0),
        )


METRICS = tuple(field.name for field in fields(Seen))


def conversations(data: Path, seed: int = SEED) -> Workload:
    """Lengths to draw from: of the public trace under `data`, or made like them where it is not there."""
    path = data / CONVERSATION
    table = read_trace(path) if path.is_file() else make_workload(WorkloadOptions("azure-conv", 5000, seed=seed))
    taken = (table.prompt_tokens > SHORTEST) & (table.prompt_tokens < LONGEST)
    prompts = np.maximum(FEWEST_PROMPT, table.prompt_tokens[taken] // PROMPT_PART)
    outputs = np.maximum(FEWEST_OUTPUT, table.output_tokens[taken] // OUTPUT_PART)
    return Workload(table.name, np.zeros(len(prompts)), prompts, outputs)


def drawn(lengths: Workload, requests: int, seed: int) -> Workload:
    """A sample of so many requests, all at time 0."""
    rows = Random(seed).sample(range(len(lengths)), min(requests, len(lengths)))
    prompts, outputs = lengths.prompt_tokens[rows], lengths.output_tokens[rows]
    return Workload(lengths.name, np.zeros(len(rows)), prompts, outputs)


def burst(lengths: Workload, requests: int, seed: int) -> Load:
    return Load("burst", 0.0, drawn(lengths, requests, seed))


def replay(lengths: Workload, share: float, rate: float, lasts_s: float, seed: int) -> Load:
    """A Poisson process for some `lasts_s`."""
    some = drawn(lengths, max(2, round(rate * lasts_s)), seed)
    found = poisson(some, rate, seed + 1)
    return Load(
        f"at_{round(100 * share)}_percent", share, replace(found, arrival_s=found.arrival_s - found.arrival_s[0])
    )


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    found = np.percentile(values, (50, 99)) if values else (0.0, 0.0)
    return float(found[0]), float(found[1])


# The pair in the simulator, with the step times that its own engines recorded.

FEWEST = 12  # steps of a kind, below which the instance's own account of them is taken
PAUSE_S = 0.05  # between two steps of an engine that has work: shorter ones are part of the second
UNSEEN_BYTES_S = 1e12  # of a link too fast to be measured
LANES = 2  # batches in flight in a pipeline
WARM_UP, SETTLED_S = 64, 60.0  # requests before those that count, from which answers' lengths are known; and a pause


@dataclass(frozen=True, slots=True)
class FormSteps:
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

    def share(self, of: float) -> "FormSteps":
        """The step times of that share of the layers."""
        known = self.rates
        return FormSteps(StepRates(_times(known.prefill, of), _times(known.decode, of), _times(known.mixed, of)))


@dataclass(frozen=True, slots=True)
class AsSent:
    """Each request goes where it went on the engines, and those before them in the same order.

    For systems that take turns: chance decides which requests fall to the slow instance, and means of JCT follow.
    """

    name: ClassVar[str] = "as_sent"
    instances: tuple[str, ...]

    def choose(
        self, job: JobView, index: ClusterIndex, exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        found = index.candidates.get(self.instances[(int(job.job_id) - WARM_UP) % len(self.instances)])
        return Choice(found) if found is not None else None


class Means(NamedTuple):
    """Of one run, by the names that live figures have: requests a second, and seconds."""

    requests_per_s: float
    ttft_mean_s: float
    tpot_mean_s: float
    jct_mean_s: float

    @classmethod
    def of(cls, outcomes: Outcomes, first: int) -> "Means":
        """Of the requests from `first` on. Raises Unavailable when one of them did not end."""
        if not outcomes.completed[first:].all():
            raise Unavailable("a simulated request did not end")
        took_s = outcomes.last_token_s[first:].max() - outcomes.arrival_s[first]
        means = (getattr(outcomes, name)[first:] for name in ("ttft_s", "tpot_s", "jct_s"))
        count = len(outcomes.arrival_s) - first
        return cls(count / float(took_s), *(float(np.nanmean(values)) for values in means))


def learned(instances: Sequence[LiveInstance], steps: Steps) -> dict[str, StepRates]:
    """Step times of each instance, fitted to its recorded steps, or published ones for kinds with too few steps.

    Raises Unavailable for an instance that publishes no step times.
    """
    found = {}
    for one in instances:
        name, published = one.info.instance_id, one.info.rates.step
        if published is None:
            raise Unavailable(f"{name} publishes no step times")
        samples = lasting(steps.get(name, ()))
        forms = {
            kind: fit_form(kind, of_kind)
            if len(of_kind := [each for each in samples if _kind(each[0]) == kind]) >= FEWEST
            else getattr(published, kind)
            for kind in TERMS
        }
        found[name] = StepRates(**forms)
    return found


def lasting(steps: Sequence[StepRecord]) -> list[tuple[Batch, float]]:
    """How long steps kept their engine: from the end of the one before where that was just before."""
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

    def run(self, system: System, load: Load, lengths: Workload, sent: Sequence[str] = ()) -> Means:
        """A system under a load. sent: where each request went on the engines, if that was a matter of turns."""
        specs = tuple(self._spec(one, system) for one in self.instances)
        policies = system.policies(self.speeds)
        if sent:
            policies = msgspec.structs.replace(policies, placement=AsSent(tuple(sent)))
        return self._means(specs, policies, load, lengths)

    def pipeline(self, load: Load, lengths: Workload) -> Means:
        """One instance whose layers are divided over both by their speeds, with two batches in flight.

        Only here: the bench's CPU quotas are an instance's, not a stage's.
        """
        one, whole = self.instances[0], sum(self.speeds.values())
        layers = {name: max(1, round(SHAPE.num_hidden_layers * speed / whole)) for name, speed in self.speeds.items()}
        all_layers = sum(layers.values())
        stages = tuple(FormSteps(self.rates[name]).share(count / all_layers) for name, count in layers.items())
        plain = self._spec(one, DATA_PARALLEL)
        limits = replace(plain.limits, sequences=max(1, plain.limits.sequences // LANES))
        kv_tokens = int(plain.kv_tokens * all_layers / max(layers.values()))
        spec = replace(plain, model=Pipeline(stages, LANES), limits=limits, kv_tokens=kv_tokens, lanes=LANES)
        policies = Policies(LeastLoad(), NoSplit(), PowerOfTwo())
        return self._means((spec,), policies, load, lengths)

    def _means(self, specs: tuple[InstanceSpec, ...], policies: Policies, load: Load, lengths: Workload) -> Means:
        """Requests before those that count, from which schedulers know answers' lengths, as the live one does."""
        before, work = drawn(lengths, WARM_UP, len(load.workload)), load.workload
        early_s = np.arange(len(before)) * (1.0 / max(self.speeds.values()))
        both = Workload(
            work.name,
            np.concatenate([early_s, work.arrival_s + early_s[-1] + SETTLED_S]),
            np.concatenate([before.prompt_tokens, work.prompt_tokens]),
            np.concatenate([before.output_tokens, work.output_tokens]),
        )
        result = simulate(both, specs, with_control(RunSpec(policies=policies, seed=SEED), self.control))
        return Means.of(result.outcomes, len(before))

    def _spec(self, one: LiveInstance, system: System) -> InstanceSpec:
        info, rates = one.info, self.rates[one.info.instance_id]
        return InstanceSpec(
            instance_id=info.instance_id,
            model=FormSteps(rates),
            role=system.roles[info.instance_id],
            kv_tokens=info.total_blocks * info.block_size,
            kv_bytes_per_token=info.kv_bytes_per_token,
            limits=EngineLimits(info.chunk_size, one.max_seqs, info.block_size, info.max_model_len),
            link=Link(self.control.link_bytes_s or UNSEEN_BYTES_S, self.control.link_latency_s, 1.0),
            accelerator=info.accelerator,
            staging_tokens=int(STAGING_BYTES / info.kv_bytes_per_token),
            rates=rates_of_steps(rates, info.chunk_size),
        )


def _kind(batch: Batch) -> str:
    return "decode" if not batch.prefill else "mixed" if batch.decode_count else "prefill"


def _times(form: StepForm, factor: float) -> StepForm:
    return msgspec.structs.replace(form, **{name: getattr(form, name) * factor for name in NAMES})
