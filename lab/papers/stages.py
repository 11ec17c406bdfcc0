"""Instances whose layers lie on several groups of accelerators: pipeline parallelism, alike or unlike."""

from dataclasses import dataclass, replace

from lab.papers.testbed import Testbed
from shared.cost.geometry import kv_capacity_tokens
from shared.cost.linear import partial_prefill_of
from shared.cost.network import Link
from shared.cost.pipeline import Pipeline
from shared.cost.rates_file import ScaledSteps
from shared.cost.step import StepModel
from shared.domain.instance import Role
from shared.domain.rates import PartialPrefillCost, Rates
from shared.sim.spec import EngineLimits, InstanceSpec


@dataclass(frozen=True, slots=True)
class Stage:
    """`layers` layers on `tensor_parallel` accelerators."""

    accelerator: str
    layers: int
    tensor_parallel: int = 1


def staged(
    testbed: Testbed,
    name: str,
    model: str,
    stages: tuple[Stage, ...],
    role: Role,
    limits: EngineLimits,
    link: Link,
    hop: Link,
) -> InstanceSpec:
    """One instance; a single stage is a plain tensor-parallel one. hop: the path from a stage to the next.

    As many batches are in flight as there are stages.
    """
    geometry = testbed.geometry(model)
    models = tuple(testbed.stage(s.accelerator, model, s.tensor_parallel, s.layers) for s in stages)
    lanes = len(stages)
    per_token_s = geometry.hidden * 2.0 / (hop.bandwidth_bytes_s * hop.efficiency)
    price = sum(testbed.catalogue.get(s.accelerator).price_usd_hour * s.tensor_parallel for s in stages)
    return InstanceSpec(
        instance_id=name,
        model=models[0] if lanes == 1 else Pipeline(models, lanes, hop.latency_s, per_token_s),
        role=role,
        kv_tokens=_kv_tokens(testbed, stages, models),
        kv_bytes_per_token=geometry.kv_bytes_per_token(),
        limits=limits,
        link=link,
        accelerator="+".join(f"{s.tensor_parallel}x{s.accelerator}" for s in stages),
        accelerators=sum(s.tensor_parallel for s in stages),
        price_per_hour=price,
        lanes=lanes,
        rates=Rates(prefill=_prefill_cost(models), price_per_hour=price),
    )


def in_turn(spec: InstanceSpec) -> InstanceSpec:
    """The same with lanes that take turns instead of overlapping: a step waits for a pass of every other lane."""
    pipeline = spec.model
    if not isinstance(pipeline, Pipeline):
        return spec
    passes = float(spec.lanes)
    stages = tuple(ScaledSteps(stage, passes) for stage in pipeline.stages if isinstance(stage, StepModel))
    hops = {"hop_s": passes * pipeline.hop_s, "hop_s_per_token": passes * pipeline.hop_s_per_token}
    return replace(spec, model=Pipeline(stages, 1, **hops))


def _kv_tokens(testbed: Testbed, stages: tuple[Stage, ...], models: tuple[StepModel, ...]) -> int:
    """Every token has its KV on all stages: the tightest one decides."""
    return min(
        kv_capacity_tokens(
            testbed.catalogue.get(stage.accelerator), model.geometry, tensor_parallel=stage.tensor_parallel
        )
        for stage, model in zip(stages, models, strict=True)
    )


def _prefill_cost(models: tuple[StepModel, ...]) -> PartialPrefillCost:
    """Of a prompt that passes the stages alone."""
    costs = [partial_prefill_of(model) for model in models]
    return PartialPrefillCost(sum(cost.k_p for cost in costs), sum(cost.b_p for cost in costs))
