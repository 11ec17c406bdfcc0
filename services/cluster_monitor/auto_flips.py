"""Role flips that a policy decides: the thin driver between it and the operations that carry a flip out."""

import asyncio
from collections.abc import Callable, Iterable

from services.cluster_monitor.audit import Asked
from services.cluster_monitor.flips import Operations
from shared.domain.instance import ClusterView
from shared.domain.policies import PolicySet
from shared.domain.route import PolicySpec, Reason
from shared.errors import PolyphaseError
from shared.policy import registry
from shared.policy.role_flip import FlipDecision
from shared.runtime.logs import get_log
from shared.runtime.tasks import Background

log = get_log(__name__)


class AutoFlips:
    """Asks the policy that the view names at each `step`, another one without what its predecessor remembered.

    Its decisions run as operations like any other, with their reasons in the audit.
    """

    def __init__(self, view: Callable[[], ClusterView], operations: Operations, tasks: Background) -> None:
        self._view = view
        self._operations = operations
        self._tasks = tasks
        self._spec = PolicySet().role_flip
        self._policy = registry.role_flip(self._spec.name)
        self._state = self._policy.start()

    def step(self) -> None:
        """Ask once."""
        now, view = asyncio.get_running_loop().time(), self._view()
        self._follow(view.policies.role_flip)
        self._state, decision = self._policy.step(self._state, view, now)
        if decision is not None:
            self._tasks.start(f"role flip of {decision.instance_id}", self._flip(decision))

    def _follow(self, spec: PolicySpec) -> None:
        if spec != self._spec:
            self._spec = spec
            self._policy = registry.role_flip(spec.name, spec.parameters)
            self._state = self._policy.start()

    async def _flip(self, decision: FlipDecision) -> None:
        who = f"role_flip:{self._policy.name}"
        asked = Asked(who, why=in_words(decision.reasons))
        try:
            await self._operations.flip(decision.instance_id, asked, force=False, drain_timeout_s=None)
        except PolyphaseError as error:  # the policy decides again when its conditions hold again
            log.warning("a flip failed", instance_id=decision.instance_id, who=who, error=error.message)


def in_words(reasons: Iterable[Reason]) -> str:
    """Reasons as one line for the audit."""
    return "; ".join(
        f"{reason.what} ({', '.join(f'{name} {value}' for name, value in reason.figures.items())})"
        for reason in reasons
    )
