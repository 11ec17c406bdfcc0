"""Role flips that a policy decides in a run, from what the live monitor would know at that moment."""

from shared.domain.demand import DemandSecond, Shift
from shared.domain.instance import InstanceView, Role
from shared.domain.route import Route
from shared.policy.demand import DemandBook, DemandCounter
from shared.policy.prefix_index import saved_tokens
from shared.policy.role_flip import FlipDecision, RoleFlip, Seen
from shared.policy.split import freedom
from shared.sim.fleet import Fleet
from shared.sim.outcomes import RoleFlipped
from shared.sim.request import SimRequest
from shared.sim.spec import RunSpec

TELL_S = 1.0  # schedulers tell of a second when it is over, once a second


class AutoFlips:
    """The policy with its state, and the profile of what clients ask for, as old as live."""

    def __init__(self, run: RunSpec, fleet: Fleet, policy: RoleFlip) -> None:
        self._run = run
        self._fleet = fleet
        self._policy = policy
        self._state = policy.start()
        self._counter = DemandCounter("scheduler", -1.0, pause_s=float("inf"))
        self._split = freedom(run.policies.split)
        self._book = DemandBook()
        self._untold: list[DemandSecond] = []
        self._ordered: list[tuple[float, str, Role]] = []
        self.made: list[RoleFlipped] = []
        self.shifts: list[tuple[float, Shift]] = []

    def placed(self, request: SimRequest, route: Route, now: float) -> None:
        """A request was placed for the first time."""
        index, job, first = self._fleet.index(now), request.job, route.prefill or route.decode
        assert first is not None
        view = self._fleet.instance(self._fleet.position(first.instance_id)).view(now) if job.prefix else None
        held = saved_tokens(index.prefixes, view, job) if view is not None else 0
        self._counter.add(job, held, self._fleet.ledger.answers.expected(job).mean, self._split, now)

    def ended(self, job_id: str, output_tokens: int, now: float) -> None:
        """A request is over; `output_tokens` of a whole answer, else 0."""
        self._counter.ended(job_id, output_tokens, now)

    def ordered(self, view: InstanceView, now: float) -> None:
        """A flip that the run's spec orders, as a person would."""
        self._ordered.append((now, view.instance_id, view.role.other))

    def ask(self, now: float) -> FlipDecision | None:
        """What the policy decides now."""
        self._untold += self._counter.take(now)
        told = [one for one in self._untold if one.second + 1 + TELL_S <= now]
        del self._untold[: len(told)]
        self._book.take(told, now)
        self.shifts += [(now, shift) for shift in self._book.advance(now)]
        seen = Seen.of(self._book.demand(now), self._ordered, now, self._run.role_flip_respects_s)
        self._state, decision = self._policy.step(self._state, self._fleet.view(now), now, seen)
        if decision is not None:
            self.made.append(RoleFlipped(now, decision.instance_id, decision.to.value, decision.reasons))
        return decision
