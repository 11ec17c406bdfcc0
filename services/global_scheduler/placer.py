"""The live driver of the decisions: clock, metrics, log lines, and the journal where one is kept."""

import secrets
import time
from collections.abc import Callable, Collection

from prometheus_client import CollectorRegistry, Counter, Histogram

from services.global_scheduler.journal import Begun, Came, Decided, Ended, Heard, Journal, Told
from shared.domain.cluster import ClusterDelta
from shared.domain.instance import ClusterView, Role
from shared.domain.job import JobView
from shared.domain.policies import ROUTING, PolicySet
from shared.domain.prompt import PrefixDelta
from shared.domain.route import Route
from shared.errors import Overloaded, PolyphaseError
from shared.policy.decider import Decider
from shared.policy.ledger import WorkloadLedger
from shared.policy.prefix_index import MAX_BLOCKS, PrefixIndex
from shared.policy.registry import in_words
from shared.policy.split import Freedom
from shared.runtime.logs import get_log
from shared.runtime.metrics import Bound
from shared.wire.messages import PlaceRequest

# MERGED metrics.py
# What the scheduler counts: placements. Series of requests are the gateway's, who sees all of each.


GONE_SERIES = 1_000  # of instances that are gone: beyond so many all of theirs are removed
_DECISION_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3, 2e-2, 0.1)


class SchedulerMetrics:
    """Prometheus metrics of placements, and of the jobs whose end nobody told."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._decisions = Histogram(
            "polyphase_scheduler_decision_seconds", "Time of one placement", buckets=_DECISION_S, registry=registry
        )
        self._placements = Bound(Counter("polyphase_scheduler_placements", "Placements", ["kind"], registry=registry))
        chosen = Counter(
            "polyphase_scheduler_chosen",
            "Placements that named an instance, for prefill or for decode",
            ["instance_id", "role"],
            registry=registry,
        )
        self._chosen = Bound(chosen)
        self._refused = Counter(
            "polyphase_scheduler_refused",
            "Placements refused or delayed, by error code, SLO class, and what was full",
            ["code", "slo", "cause"],
            registry=registry,
        )
        self.lost = Counter("polyphase_scheduler_jobs_lost", "Open jobs whose gateway is gone", registry=registry)

    def refusal(self, slo: str, error: PolyphaseError) -> None:
        """Count one question that got no route."""
        self._refused.labels(error.code, slo, error.cause if isinstance(error, Overloaded) else "").inc()

    def keep(self, instance_ids: Collection[str]) -> None:
        """These instances are there. New ones come under new names without end, each with series of its own."""
        if len(self._chosen) > GONE_SERIES + len(Role) * len(instance_ids):
            self._chosen.keep(lambda labels: labels[0] in instance_ids)

    def placed(self, route: Route, duration_s: float) -> None:
        """Count one decision."""
        self._decisions.observe(duration_s)
        kind = "local" if route.prefill is None else "partial" if route.decode is not None else "full"
        self._placements.of(kind).inc()
        for role, instance in ((Role.PREFILL, route.prefill), (Role.DECODE, route.decode)):
            if instance is not None:
                self._chosen.of(instance.instance_id, role.value).inc()


log = get_log(__name__)
REFUSED_KEPT = 10_000


class Placer:
    """Answers PLACE. `seed` None: other random numbers at each start."""

    def __init__(
        self,
        metrics: SchedulerMetrics,
        seed: int | None,
        journal: Journal | None = None,
        prefix_blocks: int = MAX_BLOCKS,
    ) -> None:
        seed = secrets.randbits(63) if seed is None else seed
        self._decider = Decider(seed, prefix_blocks)
        self._metrics = metrics
        self._journal = journal
        self._heard_s = 0.0
        self.on_policies: Callable[[], None] = lambda: None  # called when `followed` is another
        self._refused: dict[str, int] = {}  # jobs that have no place yet, and how often they asked
        if journal is not None:
            journal.add(Begun(seed, prefix_blocks))

    def hear(self, delta: ClusterDelta) -> bool:
        """Take a broadcast of the monitor: what has changed, and the policies in force. False where one before it is
        missing; it is as if it had not come then.
        """
        now, before, moves = time.time(), self.followed, self.moves
        if not self._decider.hear(delta, now):
            return False
        self._heard_s = now
        if self.moves != moves:
            self._metrics.keep({view.info.instance_id for view in self.view.instances})
        if self._journal is not None:
            self._journal.add(Heard(delta, now))
        if delta.policies is not None and self.followed != before:
            self._tell(self.followed)
        return True

    def tell(self, instance_id: str, delta: PrefixDelta) -> bool:
        """Take what an instance tells of its prefix cache; False when something before it was lost."""
        if self._journal is not None:
            self._journal.add(Told(instance_id, delta))
        return self._decider.tell(instance_id, delta)

    def forget(self, instance_id: str) -> None:
        """Know nothing of that instance's prefix cache any more."""
        if self._journal is not None:
            self._journal.add(Told(instance_id, None))
        self._decider.forget(instance_id)

    @property
    def broadcast_age_s(self) -> float:
        """Seconds since the last broadcast; infinite before the first."""
        return time.time() - self._heard_s if self._decider.known else float("inf")

    @property
    def view(self) -> ClusterView:
        """What broadcasts have come to; nobody, before the first. O(instances)."""
        return self._decider.view

    @property
    def moves(self) -> int:
        """Rises when somebody comes, goes, or has another role or state."""
        return self._decider.moves

    @property
    def prefixes(self) -> PrefixIndex:
        """What instances have told of the prompts whose KV they hold."""
        return self._decider.prefixes

    @property
    def followed(self) -> tuple[PolicySet, str]:
        """The policies that it goes by, and why not by newer ones that it heard of; empty when there are none."""
        return self._decider.policies, self._decider.trouble

    @property
    def wants_prefixes(self) -> bool:
        """Whether the placement in force looks at what instances hold of prompts."""
        return self._decider.wants_prefixes

    @property
    def freedom(self) -> Freedom:
        """The share of prompts that the split in force leaves to prefill instances, at least and at most."""
        return self._decider.freedom

    def expected(self, job: JobView, route: Route) -> tuple[int, float]:
        """Tokens of a job's prompt that its route finds computed, and tokens that its answer will have on average."""
        return self._decider.expected(job, route)

    @property
    def ledger(self) -> WorkloadLedger:
        """Work that was placed here and is not over."""
        return self._decider.ledger

    def place(self, request: PlaceRequest) -> Route:
        """Decide. Raises Unavailable, InvalidRequest, Overloaded, Delayed, Stays."""
        started, now = time.perf_counter(), time.time()
        try:
            route = self._decider.decide(request.job, request.exclude, now)
        except PolyphaseError as error:
            if not request.job.pause_s:  # else it has a place, and stays there
                self._refuse(request.job, error)
            if self._journal is not None:
                self._journal.add(Decided.refusal(request, now, error))
            raise
        if self._journal is not None:
            self._journal.add(Decided(request, now, route))
        if refusals := self._refused.pop(request.job.job_id, 0):
            log.info("placed after all", job_id=request.job.job_id, refusals=refusals)
        self._metrics.placed(route, time.perf_counter() - started)
        return route

    def decodes(self, job_id: str) -> None:
        """A job has come to its decode instance."""
        now = time.time()
        self._decider.came(job_id, now)
        if self._journal is not None:
            self._journal.add(Came(job_id, now))

    def ended(self, job_id: str, output_tokens: int, met: bool | None) -> None:
        """A job is over here, however it ended; `output_tokens` of a whole answer, else 0.

        met: whether it kept its targets, None where that says nothing.
        """
        now = time.time()
        self._decider.ended(job_id, output_tokens, met, now)
        if self._journal is not None:
            self._journal.add(Ended(job_id, output_tokens, met, now))
        if refusals := self._refused.pop(job_id, 0):
            log.info("ended without a placement", job_id=job_id, refusals=refusals)

    def _tell(self, followed: tuple[PolicySet, str]) -> None:
        policies, trouble = followed
        if trouble:
            log.error("other policies are not followed", following=policies.revision, reason=trouble)
        else:
            named = {kind: in_words(policies.of(kind)) for kind in ROUTING}
            log.info("policies followed", revision=policies.revision, **named)
        self.on_policies()

    def _refuse(self, job: JobView, error: PolyphaseError) -> None:
        """Count it; a waiting job asks ten times a second, and one line is enough."""
        job_id = job.job_id
        self._metrics.refusal(job.slo.name, error)
        known = self._refused.pop(job_id, 0)
        self._refused[job_id] = known + 1
        if len(self._refused) > REFUSED_KEPT:
            del self._refused[next(iter(self._refused))]
        if not known and not isinstance(error, Overloaded):  # those are many, and each has its cause in its timeline
            log.warning("no placement", job_id=job_id, code=error.code, reason=error.message)
