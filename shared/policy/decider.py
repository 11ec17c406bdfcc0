"""A scheduler's decisions over time: the broadcasts and reports that it has received, its decisions, and what both mean
for the next request.

Free of clocks and I/O: every event carries its time, and random numbers come from a seed, so that the same events give
the same decisions again. The live scheduler drives it; a journal of its events can be replayed.
"""

from collections.abc import Callable, Collection
from random import Random
from typing import Generic, TypeVar

import msgspec

from shared.domain.cluster import ClusterDelta
from shared.domain.job import JobView
from shared.domain.policies import ROUTING, PolicySet
from shared.domain.prompt import PrefixDelta
from shared.domain.route import Reason, Route
from shared.errors import PolyphaseError
from shared.policy import registry
from shared.policy.index import LoadTracker
from shared.policy.overload import decide
from shared.policy.placement import Policies, wants_prefixes
from shared.policy.prefix_index import MAX_BLOCKS
from shared.policy.saved_tokens import saved_tokens
from shared.policy.split import Freedom, freedom
from shared.policy.truth import Compared

Policy = TypeVar("Policy")


class PolicyFollower(Generic[Policy]):
    """The policies of some `kinds` that a process follows: the newest in the broadcasts that this version knows.

    `make` builds a process's policy objects from a `PolicySet` and raises InvalidRequest for policies that it does not
    know. current: what it built last; as policies may have state, it is called only when a policy of those kinds has
    changed. policies: the set from which `current` was built. problem: why a newer set is not followed, or empty.
    """

    def __init__(
        self, kinds: Collection[str], make: Callable[[PolicySet], Policy], first: PolicySet = PolicySet()
    ) -> None:
        self._kinds = tuple(kinds)
        self._make = make
        self._refused: PolicySet | None = None
        self.policies = first
        self.current = make(self.policies)
        self.problem = ""

    def apply(self, policies: PolicySet) -> None:
        """Apply the policies of a broadcast.

        An older revision than the one followed comes from a monitor that has lost its memory, and is ignored. So are
        policies that cannot be made: another version of Polyphase may know more of them.
        """
        if policies == self.policies:
            self._refused, self.problem = None, ""
            return
        if policies.revision < self.policies.revision or policies == self._refused:
            return
        if any(policies.spec(kind) != self.policies.spec(kind) for kind in self._kinds):
            try:
                self.current = self._make(policies)
            except PolyphaseError as error:
                self._refused, self.problem = policies, error.message
                return
        self.policies, self._refused, self.problem = policies, None, ""


class Decider:
    """Decisions by the policies that come with the broadcasts. Times are unix seconds, and do not decrease by more than
    clocks do.

    prefix_blocks: how many prefix-cache blocks of all instances are known at most. loads: the cluster by the
    broadcasts. follower: of the policies in force. prefixes: what the instances have reported of their prefix caches.
    ledger: unfinished work that was placed here.
    """

    def __init__(self, seed: int, prefix_blocks: int = MAX_BLOCKS) -> None:
        self._rng = Random(seed)
        self.loads = LoadTracker(prefix_blocks)
        self.follower = PolicyFollower(ROUTING, _routing)
        self.prefixes = self.loads.prefixes
        self.ledger = self.loads.ledger

    def apply(self, delta: ClusterDelta, now: float) -> bool:
        """Apply a broadcast: other loads, and perhaps other policies. False when a broadcast before it is missing."""
        if not self.loads.apply(delta, now, self._rng):
            return False
        if delta.policies is not None:
            self.follower.apply(delta.policies)
        return True

    def apply_prefixes(self, instance_id: str, delta: PrefixDelta) -> bool:
        """Apply an instance's report of its prefix cache; False when a report before it is missing."""
        return self.prefixes.apply(instance_id, delta)

    def forget_prefixes(self, instance_id: str) -> None:
        """Forget an instance's prefix cache."""
        self.prefixes.forget(instance_id)

    def decide(self, job: JobView, exclude: Collection[str], now: float) -> Route:
        """A route; it counts as load until broadcasts show it, and as work until the job ends. A job that only
        warms does not count.

        Raises what `overload.decide` raises.
        """
        route = decide(job, self.loads.current, self.follower.current, now, self._rng, exclude)
        if not job.warms:
            for assignment in self.ledger.add(job, route, now):
                self.loads.book(assignment)
        reasons = route.reasons
        if age_s := self.loads.stale_s(now):
            reasons += (Reason("old loads: the monitor is silent", {"broadcast_age_s": round(age_s, 1)}),)
        return msgspec.structs.replace(
            route, dispatch=self.follower.policies.dispatch, reasons=reasons, wants_prefix=self.wants_prefixes
        )

    def expected(self, job: JobView, route: Route) -> tuple[int, float]:
        """Prompt tokens that the instance which starts the job holds or pulls, and expected tokens of the answer."""
        held, first = 0, route.prefill or route.decode
        if job.prefix and first is not None:
            index = self.loads.current
            at_prefill = route.prefill is not None or route.keep_tokens > 0
            view = (index.prefill if at_prefill else index.decode).get(first.instance_id)
            held = saved_tokens(self.prefixes, view, job) if view is not None else 0
            held = max(held, route.pull.tokens) if route.pull is not None else held
        return held, self.ledger.output_lengths.expected(job).mean

    def arrived(self, job_id: str, now: float) -> None:
        """Report that a job has reached its decode instance."""
        self.loads.arrived(job_id, now)

    def ended(
        self, job_id: str, output_tokens: int, met: bool | None, now: float, compared: Compared | None = None
    ) -> None:
        """Report that a job has ended; `output_tokens` of a whole answer, else 0.

        met: whether it met its targets, None where that is not known. compared: of a job that was served as it was
        placed first, with an estimate.
        """
        if compared is not None:
            self.ledger.errors.add(compared)
        self.ledger.complete(job_id, output_tokens, met, now)
        self.loads.ended(job_id)

    @property
    def freedom(self) -> Freedom:
        """The range of splits that the split policy in force allows."""
        return freedom(self.follower.current.split)

    @property
    def wants_prefixes(self) -> bool:
        """Whether the placement policy in force uses the prefix caches."""
        return wants_prefixes(self.follower.current.placement)


def _routing(policies: PolicySet) -> Policies:
    return Policies(*(registry.make(kind, policies.spec(kind)) for kind in ROUTING))
