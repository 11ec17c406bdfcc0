"""Role flips that a policy decides: the thin driver between it and the operations that carry a flip out."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator

from services.cluster_monitor.audit import Asked, Audit, Result
from services.cluster_monitor.flips import Operations
from shared.domain.demand import Demand, RolesWanted
from shared.domain.instance import ClusterView, Role
from shared.domain.policies import PolicySet
from shared.domain.route import PolicySpec, Reason
from shared.errors import PolyphaseError
from shared.policy import registry
from shared.policy.predictive_roles import PredictiveFlip
from shared.policy.role_flip import FlipDecision, NoFlip, Seen
from shared.runtime.logs import get_log
from shared.runtime.tasks import Background

log = get_log(__name__)
POLICY = "role_flip:"  # who, in the audit, before the policy's name
_STOOD = (Result.RUNNING, Result.SUCCEEDED, Result.UNKNOWN)


class AutoFlips:
    """Asks the policy that the view names at each `step`, another one without what its predecessor remembered.

    Its decisions run as operations like any other, with their reasons in the audit.
    """

    def __init__(
        self, view: Callable[[], ClusterView], seen: Callable[[], Seen], operations: Operations, tasks: Background
    ) -> None:
        self._view = view
        self._seen = seen
        self._operations = operations
        self._tasks = tasks
        self._spec = PolicySet().role_flip
        self._policy = registry.role_flip(self._spec.name)
        self._state = self._policy.start()

    def step(self) -> None:
        """Ask once."""
        now, view = asyncio.get_running_loop().time(), self._view()
        self._follow(view.policies.role_flip)
        if isinstance(self._policy, NoFlip):
            return
        self._state, decision = self._policy.step(self._state, view, now, self._seen())
        if decision is not None:
            self._tasks.start(f"role flip of {decision.instance_id}", self._flip(decision))

    def held(self) -> Seen:
        """What people's flips forbid every policy, and the planner, at the moment."""
        return self._seen()

    def wanted(self) -> RolesWanted | None:
        """The roles that `predictive` would go for, whether it is in force or not; None while it cannot tell."""
        policy = self._policy if isinstance(self._policy, PredictiveFlip) else PredictiveFlip()
        return policy.wanted(self._view(), self._seen())

    def _follow(self, spec: PolicySpec) -> None:
        if spec != self._spec:
            self._spec = spec
            self._policy = registry.role_flip(spec.name, spec.parameters)
            self._state = self._policy.start()

    async def _flip(self, decision: FlipDecision) -> None:
        who = f"{POLICY}{self._policy.name}"
        asked = Asked(who, why=in_words(decision.reasons))
        try:
            await self._operations.flip(decision.instance_id, asked, force=False, drain_timeout_s=None)
        except PolyphaseError as error:  # the policy decides again when its conditions hold again
            log.warning("a flip failed", instance_id=decision.instance_id, who=who, error=error.message)


def seen_now(demand: Demand | None, audit: Audit, respects_s: float) -> Seen:
    """What a policy may know beside the loads; flips that people have ordered hold for `respects_s`."""
    now = time.time()
    return Seen.of(demand, _by_people(audit, now - respects_s), now, respects_s)


def _by_people(audit: Audit, since_s: float) -> Iterator[tuple[float, str, Role]]:
    """The flips that people have ordered since then and that were not refused and did not fail, newest first.

    Programs give reasons with theirs, people do not.
    """
    for row in audit.newest_first():
        if row["started_s"] < since_s:
            return
        if row["kind"] == "flip" and row["result"] in _STOOD and not row["why"]:
            yield row["started_s"], row["instance_id"], Role(row["to_role"])


def in_words(reasons: Iterable[Reason]) -> str:
    """Reasons as one line for the audit."""
    return "; ".join(
        f"{reason.what} ({', '.join(f'{name} {value}' for name, value in reason.figures.items())})"
        for reason in reasons
    )
