"""A first look at many plans, in short runs at one rate, so that the long runs are for those that lead.

Short runs tell too high a goodput, but all plans about as much: their order is that of the long ones, within `_ALIKE`.
"""

from collections.abc import Callable, Sequence

from shared.plan.judge import Ask, Judge
from shared.plan.plan import Plan

_TELLS = (-0.25, 0.05)  # attainment beside the target at which plans differ: lower all queues grow, higher none does
_STRIDE = 1.12  # from a rate to the next
_LOOKS = 6  # rates, until one tells
_ALIKE = 0.05  # attainment by which runs that short differ by chance
_LEADING = 2  # plans that long runs decide between


class Scout:
    """Looks at one rate, about where the best so far meets the target. rate: requests a second, where to begin."""

    def __init__(self, judge: Judge, rate: float, stop: Callable[[], bool]) -> None:
        self._judge = judge
        self._stop = stop
        self._rate = rate

    def holds(self, plan: Plan) -> bool:
        """Whether the plan meets the target at the rate."""
        return self._glimpsed(plan) >= self._judge.problem.target

    def led(self, plans: Sequence[Plan]) -> list[tuple[Plan, float]]:
        """Of the plans those that lead, expected to serve as much as they are ahead of each other."""
        order = self._settled(plans)
        top = self._glimpsed(order[0])
        near = [(plan, self._glimpsed(plan)) for plan in order[:_LEADING]]
        return [(plan, self._rate * (1.0 + share - top)) for plan, share in near if share > top - _ALIKE]

    def beside(self, leader: Plan, plans: Sequence[Plan]) -> list[tuple[Plan, float]]:
        """Of the plans those that may be better than the leader, with their attainment at a rate that tells."""
        self._settled([leader])
        least = self._glimpsed(leader) - _ALIKE
        return [(plan, share) for share, plan in self._looked(plans) if share >= least]

    def _settled(self, plans: Sequence[Plan]) -> list[Plan]:
        """The plans, best first, at a rate at which the best is about the target."""
        order = [plan for _, plan in self._looked(plans)]
        for _ in range(_LOOKS):
            off = self._glimpsed(order[0]) - self._judge.problem.target
            if _TELLS[0] <= off <= _TELLS[1] or self._stop():
                break
            self._rate = self._rate * _STRIDE if off > 0.0 else self._rate / _STRIDE
            half = max(_LEADING, len(order) // 2)
            order = [*(plan for _, plan in self._looked(order[:half])), *order[half:]]
        return order

    def _looked(self, plans: Sequence[Plan]) -> list[tuple[float, Plan]]:
        """Attainment at the rate, the highest first; when the time is up, of the first plan alone."""
        self._judge.ahead(Ask(plan, self._rate, short=True) for plan in plans)
        found = [(self._glimpsed(plan), plan) for plan in plans[:1]]
        found += [(self._glimpsed(plan), plan) for plan in plans[1:] if not self._stop()]
        return sorted(found, key=lambda one: -one[0])

    def _glimpsed(self, plan: Plan) -> float:
        return self._judge.attained(plan, self._rate, short=True)
