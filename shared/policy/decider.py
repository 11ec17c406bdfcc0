"""A scheduler's decisions over time: what it has heard and decided, and what follows for the next request.

Pure: every event comes with its time, and random numbers from a seed, so that the same events give the same decisions
again. The live scheduler is its driver; a journal of its events can be replayed.
"""

from collections.abc import Callable, Collection
from random import Random
from typing import Generic, TypeVar

import msgspec

from shared.domain.cluster import ClusterDelta
from shared.domain.instance import ClusterView
from shared.domain.job import JobView
from shared.domain.policies import ROUTING, PolicySet
from shared.domain.prompt import PrefixDelta
from shared.domain.route import Reason, Route
from shared.errors import PolyphaseError
from shared.policy import registry
from shared.policy.assignment import assignments
from shared.policy.index import LoadTracker
from shared.policy.ledger import WorkloadLedger
from shared.policy.overload import decide
from shared.policy.placement import Policies
from shared.policy.prefix_index import MAX_BLOCKS, PrefixIndex, saved_tokens, wants_prefixes
from shared.policy.split import Freedom, freedom

# MERGED following.py
# How a process follows the policies that broadcasts name: it goes by the newest of them that it can make.


Made = TypeVar("Made")


class Following(Generic[Made]):
    """Follows the policies of some `kinds`; `make` makes them, and raises InvalidRequest for those that it cannot.

    made: what `make` gave last; it is called only when a policy of those kinds is another one, since policies may have
    a state. policies: what was heard when that was done. trouble: why what was heard last is not followed, or nothing.
    """

    def __init__(
        self, kinds: Collection[str], make: Callable[[PolicySet], Made], first: PolicySet = PolicySet()
    ) -> None:
        self._kinds = tuple(kinds)
        self._make = make
        self._refused: PolicySet | None = None
        self.policies = first
        self.made = make(self.policies)
        self.trouble = ""

    def hear(self, policies: PolicySet) -> None:
        """What a broadcast says. An older revision than the one followed is that of a monitor that remembers nothing
        yet: nothing changes. Nor does anything when it cannot be made: another version of the suite may know more.
        """
        if policies == self.policies:
            self._refused, self.trouble = None, ""
            return
        if policies.revision < self.policies.revision or policies == self._refused:
            return
        if any(policies.of(kind) != self.policies.of(kind) for kind in self._kinds):
            try:
                self.made = self._make(policies)
            except PolyphaseError as error:
                self._refused, self.trouble = policies, error.message
                return
        self.policies, self._refused, self.trouble = policies, None, ""


class Decider:
    """Times are unix seconds, and do not go back by more than clocks do. Policies come with the broadcasts.

    prefix_blocks: of all instances' prefix caches, the most that is known.
    """

    def __init__(self, seed: int, prefix_blocks: int = MAX_BLOCKS) -> None:
        self._rng = Random(seed)
        self._live = LoadTracker(prefix_blocks)
        self._following = Following(ROUTING, _routing)

    def hear(self, delta: ClusterDelta, now: float) -> bool:
        """A broadcast: other loads, and perhaps other policies from now on. False where one before it is missing."""
        if not self._live.hear(delta, now, self._rng):
            return False
        if delta.policies is not None:
            self._following.hear(delta.policies)
        return True

    def tell(self, instance_id: str, delta: PrefixDelta) -> bool:
        """What an instance tells of its prefix cache; False when something before it was lost."""
        return self._live.prefixes.apply(instance_id, delta)

    def forget(self, instance_id: str) -> None:
        """Nothing is known of that instance's prefix cache any more."""
        self._live.prefixes.forget(instance_id)

    def decide(self, job: JobView, exclude: Collection[str], now: float) -> Route:
        """A route; it counts as load until broadcasts show it, and as work until the job ends.

        Raises Unavailable, InvalidRequest; Overloaded, Delayed where the job's class allows it; Stays for a paused job.
        """
        route = decide(job, self._live.current, self._following.made, now, self._rng, exclude)
        self.ledger.add(job, route, now)
        for assignment in assignments(job, route, now):
            self._live.book(assignment)
        reasons = route.reasons
        if age_s := self._live.stale_s(now):
            reasons += (Reason("old loads: the monitor is silent", {"broadcast_age_s": round(age_s, 1)}),)
        return msgspec.structs.replace(
            route, dispatch=self.policies.dispatch, reasons=reasons, wants_prefix=self.wants_prefixes
        )

    def expected(self, job: JobView, route: Route) -> tuple[int, float]:
        """Tokens of the job's prompt that the instance which begins it holds, and those of its answer, on average."""
        held, first = 0, route.prefill or route.decode
        if job.prefix and first is not None:
            ready = self._live.current.prefill if route.prefill is not None else self._live.current.decode
            view = ready.get(first.instance_id)
            held = saved_tokens(self.prefixes, view, job) if view is not None else 0
        return held, self.ledger.answers.expected(job).mean

    @property
    def freedom(self) -> Freedom:
        """What the split in force leaves to choose from."""
        return freedom(self._following.made.split)

    def came(self, job_id: str, now: float) -> None:
        """A job has come to its decode instance."""
        self._live.arrived(job_id, now)

    def ended(self, job_id: str, output_tokens: int, met: bool | None, now: float) -> None:
        """A job is over here, however it ended; `output_tokens` of a whole answer, else 0.

        met: whether it kept its targets, None where that says nothing.
        """
        self.ledger.complete(job_id, output_tokens, met, now)
        self._live.ended(job_id)

    @property
    def policies(self) -> PolicySet:
        """Those that it goes by."""
        return self._following.policies

    @property
    def trouble(self) -> str:
        """Why it does not go by the newest that it heard of; empty when it does."""
        return self._following.trouble

    @property
    def known(self) -> bool:
        """Whether there was a broadcast."""
        return self._live.known

    @property
    def view(self) -> ClusterView:
        """What broadcasts have come to; nobody, before the first. O(instances)."""
        return self._live.view

    @property
    def moves(self) -> int:
        """Rises when somebody comes, goes, or has another role or state."""
        return self._live.moves

    @property
    def prefixes(self) -> PrefixIndex:
        """What instances have told of the prompts whose KV they hold."""
        return self._live.prefixes

    @property
    def wants_prefixes(self) -> bool:
        """Whether the placement in force looks at them."""
        return wants_prefixes(self._following.made.placement)

    @property
    def ledger(self) -> WorkloadLedger:
        """Work that was placed here and is not over."""
        return self._live.ledger


def _routing(policies: PolicySet) -> Policies:
    return Policies(*(registry.make(kind, policies.of(kind)) for kind in ROUTING))
