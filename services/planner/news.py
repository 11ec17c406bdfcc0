"""What became of proposals, as events of the cluster: told to the monitor, later where it is away."""

from collections import deque
from typing import Any

from services.planner.proposal import Proposal, ProposalState
from shared.errors import InvalidRequest, PolyphaseError
from shared.runtime.logs import get_log
from shared.wire.clients.monitor import MonitorClient

log = get_log(__name__)
KEPT = 200
PERIOD_S = 1.0
MOST = 2_048  # characters of a text
_KINDS = {
    ProposalState.OPEN: "plan_proposed",
    ProposalState.APPLYING: "plan_accepted",
    ProposalState.REFUSED: "plan_refused",
    ProposalState.WITHDRAWN: "plan_withdrawn",
    ProposalState.APPLIED: "plan_applied",
    ProposalState.FAILED: "plan_failed",
}


class PlanNews:
    """Keeps the newest until the monitor has taken them, in order."""

    def __init__(self, monitor: MonitorClient) -> None:
        self._monitor = monitor
        self._waiting: deque[dict[str, Any]] = deque(maxlen=KEPT)

    def became(self, proposal: Proposal) -> None:
        """A proposal has another state."""
        kind = _KINDS[proposal.state]
        said = [f"by {proposal.who}" if proposal.who else "", proposal.error or proposal.why]
        event = {
            "event_id": f"{proposal.proposal_id}:{kind}",
            "kind": kind,
            "text": (": ".join(part for part in said if part) or kind)[:MOST],
            "subject": proposal.proposal_id,
        }
        self._waiting.append(event)

    async def step(self) -> None:
        """Tell what waits."""
        while self._waiting:
            event = self._waiting[0]
            try:
                await self._monitor.happened(event)
            except InvalidRequest as error:
                log.error("an event was refused", kind=event["kind"], reason=error.message)
            except PolyphaseError:
                return  # it is away: later
            if self._waiting and self._waiting[0] is event:  # not pushed out meanwhile
                self._waiting.popleft()
