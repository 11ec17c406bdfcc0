"""The wait in a queue that several servers share (GI/G/c), in closed form.

`shared.policy.outlook` (the policy `predictive`) and `shared.plan.estimate` (the planner) use it.
Source: Sakasegawa, "An approximation formula Lq = α ρ^β / (1 − ρ)" (1977), for M/M/c: β = sqrt(2 (c + 1)) − 1; with
Kingman's factor (Ca² + Cs²) / 2 for arrivals and services that are not exponential.
"""

from dataclasses import dataclass
from math import inf, sqrt

import numpy as np
from numpy.typing import NDArray

# For the mean of a function over exponential waits (Gauss-Laguerre): multiples of the mean wait, and their weights.
EXPONENTIAL_POINTS = ((2.0 - sqrt(2.0), (2.0 + sqrt(2.0)) / 4.0), (2.0 + sqrt(2.0), (2.0 - sqrt(2.0)) / 4.0))


@dataclass(frozen=True, slots=True)
class Wait:
    """With `probability` a customer waits an exponential time of `rate` (1/s), else not at all.

    rate: inf where waits have no length; 0 where the queue grows without end.
    """

    probability: float
    rate: float

    @property
    def mean_s(self) -> float:
        return self.probability / self.rate if self.rate > 0.0 else inf

    def within(self, limits_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """The probability that the wait is at most each of the limits; 0 for a negative limit."""
        if self.rate == inf or self.probability == 0.0:
            return (limits_s >= 0.0).astype(np.float64)
        found: NDArray[np.float64] = np.where(
            limits_s >= 0.0, 1.0 - self.probability * np.exp(-self.rate * np.maximum(limits_s, 0.0)), 0.0
        )
        return found


NO_WAIT = Wait(0.0, inf)


def queue_wait(load: float, servers: float, served_per_s: float, variability: float = 1.0) -> Wait:
    """The wait where the servers are busy for `load` of the time.

    served_per_s: customers that all servers together serve. variability: (Ca² + Cs²) / 2 of the squared coefficients of
    variation of the times between arrivals and of the service times; 1 for M/M/c, 0 where both are constant.
    """
    if load >= 1.0:
        return Wait(1.0, 0.0)
    probability = load ** (sqrt(2.0 * (servers + 1.0)) - 1.0)
    return Wait(probability, (1.0 - load) * served_per_s / variability if variability > 0.0 else inf)
