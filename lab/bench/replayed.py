"""What the cost model's benches share: coupled instances, mean latencies, names and aims of figures."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from shared.cost.geometry import ModelGeometry
from shared.cost.step import StepTimes
from shared.domain.instance import Role
from shared.policy.dispatch import RandomDispatch
from shared.policy.placement import LeastLoad, Policies
from shared.policy.split import NoSplit
from shared.sim.outcomes import Outcomes
from shared.sim.spec import EngineLimits, InstanceSpec, RunSpec

COUPLED = RunSpec(policies=Policies(LeastLoad(), NoSplit(), RandomDispatch()))

Result = dict[str, Any]


def coupled(
    times: StepTimes, geometry: ModelGeometry, limits: EngineLimits, kv_tokens: int, at: int = 0
) -> InstanceSpec:
    """An instance that computes whole requests."""
    return InstanceSpec(str(at), times, Role.DECODE, kv_tokens, geometry.kv_bytes_per_token(), limits)


def mean_s(outcomes: Outcomes, what: str) -> float:
    """Mean of a latency; a request of one token has a TPOT of 0."""
    return float(np.nan_to_num(getattr(outcomes, f"{what}_s")).mean())


def at_most(want: float, got: float) -> dict[str, Any]:
    """An aim: no more than that."""
    return {"want": f"<= {want:g}", "got": round(got, 2), "met": bool(got <= want)}


def word(text: str) -> str:
    """A name for figures: lower case, underscores."""
    words: Iterable[str] = "".join(c.lower() if c.isalnum() else " " for c in text).split()
    return "_".join(words)
