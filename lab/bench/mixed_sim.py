"""The pair in the simulator: the same requests, by the step times that its own engines recorded meanwhile."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np

from lab.bench.mixed_load import SEED, Load, drawn
from lab.bench.mixed_pair import DATA_PARALLEL, SHAPE, STAGING_BYTES, Speeds, System
from lab.calibrate.kinds import Steps
from shared.cost.linear import rates_of_steps
from shared.cost.network import Link
from shared.cost.pipeline import Pipeline
from shared.cost.rates_file import ControlPlane
from shared.cost.step import Batch
from shared.cost.step_rates import NAMES, TERMS, fit_form
from shared.domain.job import JobView
from shared.domain.rates import StepForm, StepRates
from shared.errors import Unavailable
from shared.policy.dispatch import Choice, PowerOfTwo
from shared.policy.index import ClusterIndex
from shared.policy.placement import LeastLoad, Policies
from shared.policy.split import NoSplit
from shared.sim.cluster import simulate
from shared.sim.measured import LiveInstance, with_control
from shared.sim.outcomes import Outcomes
from shared.sim.spec import EngineLimits, InstanceSpec, RunSpec
from shared.sim.workload import Workload
from shared.wire.messages import StepRecord

FEWEST = 12  # steps of a kind, below which the instance's own account of them is taken
PAUSE_S = 0.05  # between two steps of an engine that has work: shorter ones are part of the second
UNSEEN_BYTES_S = 1e12  # of a link too fast to be measured
LANES = 2  # batches in flight in a pipeline
WARM_UP, SETTLED_S = 64, 60.0  # requests before those that count, from which answers' lengths are known; and a pause


@dataclass(frozen=True, slots=True)
class FormSteps:
    """Step times by linear forms."""

    rates: StepRates

    def step_time_s(self, batch: Batch) -> float:
        """See `StepTimes`."""
        if not batch.prefill:
            return self.decode_time_s(batch.decode_count, batch.decode_context_tokens)
        form = self.rates.mixed if batch.decode_count else self.rates.prefill
        chunks_s = sum(new * (form.token_s + form.position_s * (before + new / 2.0)) for new, before in batch.prefill)
        decodes_s = form.sequence_s * batch.decode_count + form.context_s * batch.decode_context_tokens
        return form.fixed_s + chunks_s + decodes_s

    def decode_time_s(self, count: int, context_tokens: int) -> float:
        """See `StepTimes`."""
        return self.rates.decode_s(count, context_tokens) if count else 0.0

    def decode_segments(self, count: int, context_tokens: int, steps: int) -> tuple[tuple[int, float, float], ...]:
        """See `StepTimes`: with each step each context is a token longer, which is linear throughout."""
        last_s = self.decode_time_s(count, context_tokens + count * (steps - 1))
        return ((steps, self.decode_time_s(count, context_tokens), last_s),)

    def share(self, of: float) -> "FormSteps":
        """Of the layers."""
        known = self.rates
        return FormSteps(StepRates(_times(known.prefill, of), _times(known.decode, of), _times(known.mixed, of)))


@dataclass(frozen=True, slots=True)
class AsSent:
    """Each request goes where it went on the engines, and those before them in the same order.

    For who takes turns: which of a few requests falls to the slow instance is chance, and means of JCT follow it.
    """

    name: ClassVar[str] = "as_sent"
    instances: tuple[str, ...]

    def choose(
        self, job: JobView, index: ClusterIndex, exclude: Collection[str], now: float, rng: Random
    ) -> Choice | None:
        """See `Placement`."""
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
    """Step times of each instance, fitted to what it recorded; what it saw too little of is as it says itself.

    Raises Unavailable for an instance that says nothing of its steps.
    """
    found = {}
    for one in instances:
        name, told = one.info.instance_id, one.info.rates.step
        if told is None:
            raise Unavailable(f"{name} tells no step times")
        samples = lasting(steps.get(name, ()))
        forms = {
            kind: fit_form(kind, of_kind)
            if len(of_kind := [each for each in samples if _kind(each[0]) == kind]) >= FEWEST
            else getattr(told, kind)
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
    """The pair as the simulator has it."""

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
