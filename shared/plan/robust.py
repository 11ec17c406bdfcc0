"""What a plan keeps when it loses any one of its groups, and the running cluster flips the roles of others."""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.plan.estimate import Estimator
from shared.plan.group import Group
from shared.plan.plan import Plan, canonical
from shared.plan.running import after_loss, reschedule


@dataclass(frozen=True, slots=True)
class Loss:
    """lost: position of the group. plan: the others after the best flips. goodput: estimated for crowds."""

    lost: int
    plan: Plan
    flips: int
    goodput: float


@dataclass(frozen=True, slots=True)
class Endurance:
    """What a plan serves without the group whose loss costs most, after the best flips of others.

    lost: the group, in words. goodput: requests a second. flips: groups that change their roles. given_up: share of the
    most goodput that was found which the plan costs because it survives losses better.
    """

    lost: str
    goodput: float
    flips: int
    given_up: float = 0.0


def losses(estimator: Estimator, plan: Plan) -> list[Loss]:
    """The loss of each group, the one that leaves the least first; of equal groups one."""
    found = []
    for at, left in _left(estimator, plan.groups):
        if not left:
            found.append(Loss(at, Plan(()), 0, 0.0))
            continue
        kept = reschedule(estimator, Plan(*after_loss(plan, [at]), plan.policies))
        found.append(Loss(at, kept.plan, len(kept.flips), _goodput(estimator, kept.plan.groups)))
    return sorted(found, key=lambda loss: loss.goodput)


def kept_as_it_is(estimator: Estimator, groups: Sequence[Group]) -> float:
    """The estimated goodput after the loss of any one group, without flips: quick to compare."""
    return min(_goodput(estimator, left) if left else 0.0 for _, left in _left(estimator, groups))


def _goodput(estimator: Estimator, groups: Sequence[Group]) -> float:
    """The estimate that counts crowded batches: fewer groups are fuller, and small ones fill first."""
    return estimator.for_crowds().estimate(groups).goodput


def _left(estimator: Estimator, groups: Sequence[Group]) -> list[tuple[int, tuple[Group, ...]]]:
    """Each group's position, and the groups without it; equal results once."""
    alike = estimator.problem.inventory.alike
    found: dict[object, tuple[int, tuple[Group, ...]]] = {}
    for at in range(len(groups)):
        left = (*groups[:at], *groups[at + 1 :])
        found.setdefault(canonical(left, alike), (at, left))
    return list(found.values())
