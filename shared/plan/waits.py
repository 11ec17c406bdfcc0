"""How long requests wait: for an engine that computes prompts, and for a seat among its decodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

import numpy as np
from numpy.typing import NDArray

from shared.plan.costs import EngineCost
from shared.sim.workload import Times


@dataclass(frozen=True, slots=True)
class Wait:
    """How long a prompt waits: not at all, or an exponential time. Source: Sakasegawa's form for M/G/c."""

    probability: float
    rate: float

    @classmethod
    def of(cls, costs: Sequence[EngineCost], flows: NDArray[np.float64]) -> "Wait":
        """Where such flows come to such engines, each of which takes a prompt of those that wait when it is free."""
        used = [(cost, flow) for cost, flow in zip(costs, flows.tolist(), strict=True) if flow > 0.0]
        if not used:
            return cls(0.0, inf)
        speed = sum(cost.prefills_per_s for cost, _ in used)
        load = sum(flow for _, flow in used) / speed
        if load >= 1.0:
            return cls(1.0, 0.0)
        servers = sum(cost.lanes for cost, _ in used)
        times = np.concatenate([cost.prefill_s for cost, _ in used])
        varies = float(times.var() / times.mean() ** 2)
        return cls(load ** (sqrt(2.0 * (servers + 1.0)) - 1.0), 2.0 * (1.0 - load) * speed / (1.0 + varies))

    @classmethod
    def for_seats(cls, taken: float, seats: float, life_s: float) -> "Wait":
        """Where decodes of `life_s` take so many of the seats on average."""
        load = taken / seats
        if load >= 1.0:
            return cls(1.0, 0.0)
        return cls(load ** (sqrt(2.0 * (seats + 1.0)) - 1.0), seats * (1.0 - load) / life_s)

    @property
    def mean_s(self) -> float:
        """Of all prompts."""
        return self.probability / self.rate if self.rate > 0.0 else inf

    def within(self, left_s: Times) -> NDArray[np.float64]:
        """The probability that a prompt waits no longer than that, by request."""
        if self.rate == inf or self.probability == 0.0:
            return (left_s >= 0.0).astype(np.float64)
        waits: NDArray[np.float64] = np.where(
            left_s >= 0.0, 1.0 - self.probability * np.exp(-self.rate * np.maximum(left_s, 0.0)), 0.0
        )
        return waits
