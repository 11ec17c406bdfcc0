"""A scheduler's decisions over time: what it has heard and decided, and what follows for the next request.

Pure: every event comes with its time, and random numbers from a seed, so that the same events give the same decisions
again. The live scheduler is its driver; a journal of its events can be replayed.
"""

from collections.abc import Collection
from random import Random

import msgspec

from shared.domain.instance import ClusterView
from shared.domain.job import JobView
from shared.domain.prefix import PrefixDelta
from shared.domain.route import PolicySpec, Reason, Route
from shared.policy import registry
from shared.policy.assignment import assignments
from shared.policy.ledger import WorkloadLedger
from shared.policy.load_tracker import LoadTracker
from shared.policy.overload import decide
from shared.policy.placement import Policies
from shared.policy.prefix_index import PrefixIndex, wants_prefixes


class PolicySpecs(msgspec.Struct, frozen=True):
    """The policies in force, by name. Raises InvalidRequest that names the choices when they are built."""

    placement: PolicySpec
    split: PolicySpec
    dispatch: PolicySpec

    def build(self) -> Policies:
        """As functions."""
        return Policies(
            registry.placement(self.placement.name, self.placement.parameters),
            registry.split(self.split.name, self.split.parameters),
            registry.dispatch(self.dispatch.name, self.dispatch.parameters),
        )


class Decider:
    """Times are unix seconds, and do not go back by more than clocks do."""

    def __init__(self, specs: PolicySpecs, seed: int) -> None:
        self._rng = Random(seed)
        self._live = LoadTracker()
        self.specs = specs
        self._policies = specs.build()

    def follow(self, specs: PolicySpecs) -> None:
        """Other policies from now on. Raises InvalidRequest, and nothing changes."""
        self._policies, self.specs = specs.build(), specs

    def hear(self, view: ClusterView, now: float) -> None:
        """A broadcast."""
        self._live.update(view, now, self._rng)

    def tell(self, instance_id: str, delta: PrefixDelta) -> bool:
        """What an instance tells of its prefix cache; False when something before it was lost."""
        return self._live.prefixes.apply(instance_id, delta)

    def forget(self, instance_id: str) -> None:
        """Nothing is known of that instance's prefix cache any more."""
        self._live.prefixes.forget(instance_id)

    def decide(self, job: JobView, exclude: Collection[str], now: float) -> Route:
        """A route; it counts as load until broadcasts show it, and as work until the job ends.

        Raises Unavailable, InvalidRequest; Overloaded, Delayed where the job's class allows it.
        """
        index = self._live.current
        route = decide(job, index, self._policies, now, self._rng, exclude)
        self.ledger.add(job, route, now)
        for assignment in assignments(job, route, now):
            self._live.book(assignment)
        reasons = route.reasons
        if age_s := self._live.stale_s(now):
            reasons += (Reason("old loads: the monitor is silent", {"broadcast_age_s": round(age_s, 1)}),)
        return msgspec.structs.replace(
            route, dispatch=self.specs.dispatch, reasons=reasons, wants_prefix=self.wants_prefixes
        )

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
    def known(self) -> bool:
        """Whether there was a broadcast."""
        return self._live.known

    @property
    def view(self) -> ClusterView | None:
        """The newest broadcast."""
        return self._live.current.view if self._live.known else None

    @property
    def prefixes(self) -> PrefixIndex:
        """What instances have told of the prompts whose KV they hold."""
        return self._live.prefixes

    @property
    def wants_prefixes(self) -> bool:
        """Whether the placement in force looks at them."""
        return wants_prefixes(self._policies.placement)

    @property
    def ledger(self) -> WorkloadLedger:
        """Work that was placed here and is not over."""
        return self._live.ledger
