"""Small clusters, workloads and policies for tests of the simulator, and what holds for each run."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import msgspec
import numpy as np
import pytest

from shared.cost.network import Link
from shared.cost.step import Batch
from shared.domain.instance import InstanceView, Role
from shared.domain.job import JobView
from shared.errors import Unavailable
from shared.policy.dispatch import Choice
from shared.policy.placement import Policies
from shared.sim.outcomes import SimResult
from shared.sim.spec import EngineLimits, InstanceSpec, plain_policies
from shared.sim.workload import Workload


@dataclass(frozen=True)
class Linear:
    """Step times that can be worked out by hand."""

    base_s: float = 0.010
    prefill_s: float = 0.001  # a prompt token
    decode_s: float = 0.001  # a decode
    context_s: float = 0.0  # a token of a decode's context

    def step_time_s(self, batch: Batch) -> float:
        tokens = sum(tokens for tokens, _ in batch.prefill)
        decodes = self.decode_s * batch.decode_count + self.context_s * batch.decode_context_tokens
        return self.base_s + self.prefill_s * tokens + decodes

    def decode_time_s(self, count: int, context_tokens: int) -> float:
        return self.step_time_s(Batch((), count, context_tokens))

    def decode_segments(self, count: int, context_tokens: int, steps: int) -> tuple[tuple[int, float, float], ...]:
        last = self.decode_time_s(count, context_tokens + (steps - 1) * count)
        return ((steps, self.decode_time_s(count, context_tokens), last),)


def instance(
    name: str,
    role: Role,
    model: Linear | None = None,
    *,
    kv_tokens: int = 16_000,
    limits: EngineLimits | None = None,
    **more: object,
) -> InstanceSpec:
    """An instance with a link of 1 MB/s and KV of 100 bytes a token: 0.1 ms a token."""
    return InstanceSpec(
        name,
        model or Linear(),
        role,
        kv_tokens,
        100.0,
        limits or EngineLimits(batched_tokens=256, sequences=64),
        Link(1e6, 0.0, 1.0),
        accelerator=name,
        **more,  # type: ignore[arg-type]
    )


def pair(**more: object) -> list[InstanceSpec]:
    """One prefill and one decode instance."""
    return [instance("p", Role.PREFILL, **more), instance("d", Role.DECODE, **more)]  # type: ignore[arg-type]


def several(prefills: int, decodes: int, **more: object) -> list[InstanceSpec]:
    """Alike instances."""
    named: Sequence[tuple[str, Role]] = [(f"p{i}", Role.PREFILL) for i in range(prefills)]
    named = [*named, *((f"d{i}", Role.DECODE) for i in range(decodes))]
    return [instance(name, role, **more) for name, role in named]  # type: ignore[arg-type]


def workload(*requests: tuple[float, int, int]) -> Workload:
    arrivals, prompts, outputs = zip(*requests, strict=True)
    return Workload("test", np.array(arrivals, dtype=np.float64), np.array(prompts), np.array(outputs))


def drawn(count: int, seed: int, rate: float = 20.0) -> Workload:
    rng = np.random.default_rng(seed)
    return Workload(
        "drawn", np.cumsum(rng.exponential(1 / rate, count)), rng.integers(1, 400, count), rng.integers(1, 120, count)
    )


@dataclass(frozen=True)
class LastByName:
    """The last instance by name of those that may have the job."""

    name: ClassVar[str] = "last by name"

    def choose(
        self, job: JobView, candidates: Sequence[InstanceView], exclude: Collection[str], now: float, rng: Random
    ) -> Choice:
        views = [view for view in candidates if view.instance_id not in exclude]
        if not views:
            raise Unavailable("no decode instance")
        return Choice(max(views, key=lambda view: view.instance_id))


def policies(**changed: object) -> Policies:
    """The default ones but for those named."""
    return msgspec.structs.replace(plain_policies(), **changed)


def with_split(split: object) -> Policies:
    return policies(split=split)


def check(result: SimResult, work: Workload, gaps: bool = True) -> None:
    """What must hold of every run that ends well."""
    rows = result.outcomes
    assert rows.completed.all()
    assert (rows.first_token_s > rows.arrival_s).all()
    assert (rows.last_token_s >= rows.first_token_s).all()
    several_tokens = rows.output_tokens > 1
    assert (rows.last_token_s > rows.first_token_s)[several_tokens].all()
    if gaps:  # every gap between two tokens of a request is counted once, and together they span its decode
        assert result.gaps.count == pytest.approx(float((work.output_tokens - 1).sum()))
        assert result.gaps.total_s == pytest.approx(float((rows.last_token_s - rows.first_token_s).sum()))
    for use in result.instances:
        assert 0.0 <= use.busy_s <= sum(use.role_s.values()) + 1e-9
        assert 0.0 <= use.peak_kv_share <= 1.0
