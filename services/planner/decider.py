"""Who decides on proposals: people, or nobody where they are applied by themselves; and their being carried out."""

from collections import Counter

from services.planner.carry_out import carry_out
from services.planner.proposal import Proposal
from services.planner.proposals import Proposals
from services.planner.settings import PlannerSettings
from shared.domain.instance import ClusterView, InstanceState
from shared.errors import Conflict, PolyphaseError
from shared.runtime.logs import get_log
from shared.runtime.tasks import Background
from shared.wire.clients.monitor import MonitorClient

log = get_log(__name__)
AUTO = "auto"  # who, where nobody was asked


class Decider:
    """auto: whether proposals are applied without being asked about; as the settings say until somebody changes it."""

    def __init__(
        self, settings: PlannerSettings, monitor: MonitorClient, proposals: Proposals, tasks: Background
    ) -> None:
        self._settings = settings
        self._monitor = monitor
        self._proposals = proposals
        self._tasks = tasks
        self.auto = settings.auto
        self.view: ClusterView | None = None

    def heard(self, view: ClusterView) -> None:
        """A broadcast of the monitor."""
        self.view = view

    def set_auto(self, auto: bool, who: str) -> None:
        """An open proposal is applied, too, where it is switched on."""
        log.info("proposals are applied by themselves" if auto else "proposals wait for people", who=who)
        self.auto = auto
        if (waiting := self._proposals.open) is not None:
            self.proposed(waiting)

    def proposed(self, proposal: Proposal) -> None:
        """A new proposal: applied at once where nobody wants to be asked."""
        if self.auto and not self.why_not_auto:
            try:
                self.accept(proposal.proposal_id, AUTO)
            except PolyphaseError as error:  # another is under way
                log.info("left open", proposal_id=proposal.proposal_id, why=error.message)

    @property
    def why_not_auto(self) -> str:
        """Why nothing is applied by itself; empty when nothing speaks against it."""
        policy = self.view.policies.role_flip.name if self.view is not None else "off"
        return "" if policy == "off" else f"the policy role_flip: {policy} flips roles itself"

    def accept(self, proposal_id: str, who: str) -> Proposal:
        """Begin to carry it out. Raises NotFound; Conflict, also where the roles are others by now."""
        if misfit := self._misfit(self._proposals.decidable(proposal_id)):
            self._proposals.withdraw(misfit)
            raise Conflict(f"proposal {proposal_id} does not fit any more: {misfit}")
        accepted = self._proposals.accept(proposal_id, who)
        self._tasks.start(f"proposal {proposal_id}", self._carry_out(accepted))
        return accepted

    def _misfit(self, proposal: Proposal) -> str:
        """Why its flips are not what they were; empty when they are."""
        views = {one.instance_id: one for one in self.view.instances} if self.view is not None else {}
        for flip in proposal.flips:
            one = views.get(flip.instance_id)
            if one is None:
                return f"{flip.instance_id} is gone"
            if one.state is not InstanceState.READY or one.role is not flip.from_role:
                return f"{flip.instance_id} is {one.state.value} as a {one.role.value} instance"
        return ""

    async def _carry_out(self, proposal: Proposal) -> None:
        views = self.view.instances if self.view is not None else ()
        ready = Counter(one.role for one in views if one.state is InstanceState.READY)

        error = "the planner ended meanwhile"
        try:
            error = await carry_out(
                proposal,
                ready,
                self._monitor,
                self._settings.drain_timeout_s,
                lambda step: self._proposals.note(proposal.proposal_id, step),
            )
        finally:
            self._proposals.end(proposal.proposal_id, error)
