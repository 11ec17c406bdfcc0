"""Automatic role changes: who proposes them, the rules that apply, and the decision to carry one out.

Two proposers exist: the policy `role_flip` in force (`shared.policy`), which `RoleController` calls at regular
intervals, and the planner, whose accepted proposals arrive as requests with the origin `plan` (`services.planner`).
`Operations` carries the role changes out. The rules:

- An operator's flip takes precedence for `role_flip_respects_s`: its instance keeps its role (checked here, for both),
  and no instance is flipped the other way (the proposers get this in `FlipContext`, the planner over
  `GET /demand/profile`).
- The last ready instance of a role stays, unless the request forces it (`Operations`; policies do not force).
- While an instance drains, no policy flips another one (`shared.policy`). The planner drains at most half of a role's
  instances at once, and accepts nothing by itself while a policy is in force (`services.planner`).
- The time between two flips is a parameter of the policy.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator

from services.cluster_monitor.operation_log import OperationLog
from services.cluster_monitor.operations import OperationRequest, Operations
from shared.domain.demand import Demand, RolesWanted
from shared.domain.instance import ClusterView, Role
from shared.domain.policies import PolicySet
from shared.domain.route import Reason
from shared.errors import Conflict, PolyphaseError
from shared.policy import registry
from shared.policy.predictive_flip import PredictiveFlip
from shared.policy.role_flip import FlipContext, FlipHistory, NoFlip
from shared.runtime.logs import get_log
from shared.runtime.tasks import Background
from shared.wire.api import Operation, OperationKind, OperationResult, Origin

log = get_log(__name__)
_STANDS = (OperationResult.RUNNING, OperationResult.SUCCEEDED, OperationResult.UNKNOWN)  # results of a flip that counts


class RoleController:
    """Decides which automatic role changes are carried out. operators_hold_s: how long an operator's flip takes
    precedence.

    A policy that replaces another starts without the history of its predecessor.
    """

    def __init__(
        self,
        view: Callable[[], ClusterView],
        demand: Callable[[], Demand | None],
        operations: Operations,
        operation_log: OperationLog,
        operators_hold_s: float,
    ) -> None:
        self._view = view
        self._demand = demand
        self._operations = operations
        self._log = operation_log
        self._operators_hold_s = operators_hold_s
        self._spec = PolicySet().role_flip
        self._policy = registry.role_flip(self._spec.name)
        self._history = FlipHistory()

    def step(self, tasks: Background) -> None:
        """Call the policy in force, and have the flip that it proposes carried out."""
        if (request := self._proposed_by_policy()) is not None:
            tasks.start(f"role flip of {request.instance_id}", self._carry_out(request))

    async def run(self, request: OperationRequest) -> Operation:
        """Carry a flip out under the rules for its origin. Raises what `Operations.run` raises."""
        rule = None if request.origin is Origin.OPERATOR else self._respect_operators
        return await self._operations.run(request, rule)

    def facts(self) -> FlipContext:
        """What proposers may know beside the loads: the demand, and what operators' flips forbid."""
        now, hold_s = time.time(), self._operators_hold_s
        return FlipContext.after_flips(self._demand(), self._flips_by_operators(now - hold_s), now, hold_s)

    def wanted(self) -> RolesWanted | None:
        """The roles that `predictive` would aim for, whether or not it is in force; None while it cannot tell."""
        policy = self._policy if isinstance(self._policy, PredictiveFlip) else PredictiveFlip()
        return policy.wanted(self._view(), self.facts())

    def _proposed_by_policy(self) -> OperationRequest | None:
        view = self._view()
        if view.policies.role_flip != self._spec:
            self._spec = view.policies.role_flip
            self._policy = registry.role_flip(self._spec.name, self._spec.parameters)
            self._history = FlipHistory()
        if isinstance(self._policy, NoFlip):
            return None
        now = asyncio.get_running_loop().time()
        decision = self._policy.propose(view, now, self._history, self.facts())
        if decision is None:
            return None
        return OperationRequest(
            OperationKind.FLIP,
            decision.instance_id,
            who=f"role_flip:{self._policy.name}",
            why=in_words(decision.reasons),
            origin=Origin.POLICY,
        )

    async def _carry_out(self, request: OperationRequest) -> None:
        """A failure is logged: the policy may propose the flip again."""
        try:
            await self.run(request)
        except PolyphaseError as error:
            log.warning("a flip failed", instance_id=request.instance_id, who=request.who, error=error.message)

    def _respect_operators(self, request: OperationRequest) -> None:
        if request.instance_id in self.facts().kept:
            raise Conflict(
                f"an operator set the role of {request.instance_id} less than {self._operators_hold_s:g} s ago, and a "
                f"{request.origin} does not change it meanwhile"
            )

    def _flips_by_operators(self, since_s: float) -> Iterator[tuple[float, str, Role]]:
        """Time, instance and new role of each flip that an operator ordered since then and that stands."""
        for operation in self._log.newest_first():
            if operation.started_s < since_s:
                return
            by_operator = operation.origin is Origin.OPERATOR and operation.kind is OperationKind.FLIP
            if by_operator and operation.result in _STANDS:
                for name in self._operations.names(operation.instance_id):
                    yield operation.started_s, name, operation.to_role


def in_words(reasons: Iterable[Reason]) -> str:
    """Reasons as one line of text."""
    return "; ".join(
        f"{reason.what} ({', '.join(f'{name} {value}' for name, value in reason.figures.items())})"
        for reason in reasons
    )
