"""Simulated instances of the papers' testbeds, and what a run of them comes to."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from lab.papers.testbed import Testbed
from shared.cost.linear import rates_of
from shared.cost.network import Link
from shared.cost.rates_file import ScaledSteps
from shared.cost.step import StepTimes
from shared.domain.instance import Role
from shared.sim.outcomes import SimResult
from shared.sim.spec import EngineLimits, InstanceSpec


@dataclass(frozen=True, slots=True)
class Kind:
    """Instances of one kind: an accelerator, how many of them, a model, and how the engine is run.

    slowed: factor on every step (a second model on the same accelerator). kv_tokens: capacity, worked out if None.
    """

    accelerator: str
    model: str
    tensor_parallel: int = 1
    limits: EngineLimits = field(default_factory=EngineLimits)
    link: Link = field(default_factory=lambda: Link(12.5e9))
    slowed: float = 1.0
    kv_tokens: int | None = None


def instances(testbed: Testbed, kind: Kind, role: Role, count: int = 1, prefix: str = "") -> tuple[InstanceSpec, ...]:
    """`count` instances of one kind; ids are `prefix` (by default the role) and a number."""
    model = testbed.model(kind.accelerator, kind.model, kind.tensor_parallel)
    device = testbed.catalogue.get(kind.accelerator)
    price = device.price_usd_hour * kind.tensor_parallel
    times: StepTimes = model if kind.slowed == 1.0 else ScaledSteps(model, kind.slowed)
    first = InstanceSpec(
        instance_id="",
        model=times,
        role=role,
        kv_tokens=kind.kv_tokens or testbed.kv_tokens(kind.accelerator, kind.model, kind.tensor_parallel),
        kv_bytes_per_token=model.geometry.kv_bytes_per_token(),
        limits=kind.limits,
        link=kind.link,
        accelerator=device.name,
        accelerators=kind.tensor_parallel,
        price_per_hour=price,
        rates=rates_of(model, min(kind.limits.batched_tokens, 2048), price),
    )
    return tuple(first.renamed(f"{prefix or role.value}-{at}") for at in range(count))


def mean_ttft_s(result: SimResult) -> float:
    """Of completed requests."""
    return float(result.outcomes.ttft_s[result.outcomes.completed].mean())


def mean_jct_s(result: SimResult) -> float:
    """Of completed requests."""
    return float(result.outcomes.jct_s[result.outcomes.completed].mean())


def p99_ttft_s(result: SimResult) -> float:
    """Of completed requests."""
    return float(np.percentile(result.outcomes.ttft_s[result.outcomes.completed], 99))


def requests_per_s(result: SimResult) -> float:
    """Completed requests over the run."""
    return float(result.outcomes.completed.sum()) / result.duration_s


def tokens_per_s(result: SimResult) -> float:
    """Prompt and output tokens of completed requests over the run."""
    done = result.outcomes.completed
    total = result.outcomes.prompt_tokens[done].sum() + result.outcomes.output_tokens[done].sum()
    return float(total) / result.duration_s


def busy_s(result: SimResult, ids: Iterable[str] = ()) -> float:
    """Seconds with a step under way, of those instances (of all, if none are named)."""
    wanted = set(ids)
    return sum(use.busy_s for use in result.instances if not wanted or use.instance_id in wanted)


def change(ours: float, baseline: float) -> float:
    """Percent by which `ours` differs from `baseline`."""
    return 100.0 * (ours / baseline - 1.0)


def weighed(spec: InstanceSpec, weight: float) -> InstanceSpec:
    """The same with that share under weighted placement."""
    return replace(spec, rates=msgspec.structs.replace(spec.rates, weight=weight))
