"""Makers of instances, views and jobs for tests of policies."""

from random import Random
from typing import Any

from shared.domain.instance import (
    ClusterView,
    Compatibility,
    InstanceInfo,
    InstanceLoad,
    InstanceState,
    InstanceView,
    KvGeometry,
    Role,
)
from shared.domain.job import JobView, LengthPrediction
from shared.domain.policies import PolicySet
from shared.domain.rates import PartialPrefillCost, Rates
from shared.domain.route import PolicySpec
from shared.policy.index import ClusterIndex

FIT = Compatibility("fp", "emulated", "1", 1, KvGeometry(2, 2, 64))


def instance(
    instance_id: str,
    role: Role = Role.PREFILL,
    state: InstanceState = InstanceState.READY,
    *,
    rate: float = 0.0,
    base: float = 0.0,
    rates: Rates | None = None,
    max_model_len: int = 4096,
    block_size: int = 16,
    total_blocks: int = 1000,
    chunk_size: int = 512,
    max_seqs: int = 0,
    **load: Any,
) -> InstanceView:
    info = InstanceInfo(
        instance_id=instance_id,
        generation=1,
        model="m",
        compatibility=FIT,
        accelerator="cpu",
        dtype="bfloat16",
        tensor_parallel=1,
        block_size=block_size,
        total_blocks=total_blocks,
        max_model_len=max_model_len,
        chunk_size=chunk_size,
        rpc=f"tcp://127.0.0.1:{1000 + sum(map(ord, instance_id))}",
        http="http://h:1",
        kv_endpoints=(),
        max_seqs=max_seqs,
        rates=rates or Rates(prefill=PartialPrefillCost(rate, base) if rate else None),
    )
    return InstanceView(info, role, state, InstanceLoad(**{"free_blocks": total_blocks, **load}))


def prefill(instance_id: str, **more: Any) -> InstanceView:
    return instance(instance_id, Role.PREFILL, **more)


def decode(instance_id: str, **more: Any) -> InstanceView:
    return instance(instance_id, Role.DECODE, **more)


def view(*instances: InstanceView, sequence: int = 1, time_s: float = 0.0) -> ClusterView:
    return ClusterView(sequence, time_s, instances, PolicySet(step_budget=PolicySpec("off")))


def index(*instances: InstanceView, seed: int = 0) -> ClusterIndex:
    return ClusterIndex(view(*instances), rng=Random(seed))


def job(prompt: int = 100, output: int = 50, job_id: str = "j", **more: Any) -> JobView:
    return JobView(job_id, prompt, output, **more)


def predicted(lower: int, upper: int) -> LengthPrediction:
    return LengthPrediction(lower // 200, lower, upper, 0.9, "classifier")
