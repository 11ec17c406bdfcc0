"""The live driver of the placement policies: newest broadcast, own assignments, clock and random numbers."""

import time
from random import Random

import msgspec

from services.global_scheduler.metrics import SchedulerMetrics
from services.global_scheduler.policy_set import PolicySet
from shared.domain.instance import ClusterView
from shared.domain.route import Reason, Route
from shared.errors import PolyphaseError
from shared.policy.assignment import assignments
from shared.policy.ledger import WorkloadLedger
from shared.policy.load_tracker import LoadTracker
from shared.policy.placement import place
from shared.policy.prefix_index import PrefixIndex, wants_prefixes
from shared.runtime.logs import get_log
from shared.wire.messages import PlaceRequest
from shared.wire.rpc_server import ServerCall

log = get_log(__name__)
REFUSED_KEPT = 10_000


class Placer:
    """Answers PLACE."""

    def __init__(self, policies: PolicySet, metrics: SchedulerMetrics, seed: int | None) -> None:
        self._policies = policies
        self._metrics = metrics
        self._rng = Random(seed)
        self._live = LoadTracker()
        self._heard_s = 0.0
        self._refused: dict[str, int] = {}  # jobs that have no place yet, and how often they asked

    def update(self, view: ClusterView) -> None:
        """Take a broadcast of the monitor."""
        self._heard_s = time.time()
        self._live.update(view, self._heard_s, self._rng)

    @property
    def broadcast_age_s(self) -> float:
        """Seconds since the last broadcast; infinite before the first."""
        return time.time() - self._heard_s if self._live.known else float("inf")

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
        return wants_prefixes(self._policies.current.placement)

    @property
    def ledger(self) -> WorkloadLedger:
        """Work that was placed here and is not over."""
        return self._live.ledger

    async def handle(self, request: PlaceRequest, _: ServerCall) -> Route:
        """The PLACE method."""
        return self.place(request)

    def place(self, request: PlaceRequest) -> Route:
        """Decide, and count it: its load until broadcasts show it, its work until the job ends.

        Raises Unavailable, InvalidRequest.
        """
        started = time.perf_counter()
        now = time.time()
        try:
            route = place(request.job, self._live.current, self._policies.current, now, self._rng, request.exclude)
        except PolyphaseError as error:
            self._refuse(request.job.job_id, error)
            raise
        if refusals := self._refused.pop(request.job.job_id, 0):
            log.info("placed after all", job_id=request.job.job_id, refusals=refusals)
        self.ledger.add(request.job, route, now)
        for assignment in assignments(request.job, route, now):
            self._live.book(assignment)
        reasons = route.reasons
        if age_s := self._live.stale_s(now):
            reasons += (Reason("old loads: the monitor is silent", {"broadcast_age_s": round(age_s, 1)}),)
        dispatch, prefixes = self._policies.dispatch, self.wants_prefixes
        route = msgspec.structs.replace(route, dispatch=dispatch, reasons=reasons, wants_prefix=prefixes)
        self._metrics.placed(route, time.perf_counter() - started)
        return route

    def decodes(self, job_id: str) -> None:
        """A job has come to its decode instance."""
        self._live.arrived(job_id, time.time())

    def ended(self, job_id: str, output_tokens: int) -> None:
        """A job is over here, however it ended; `output_tokens` of a whole answer, else 0."""
        self.ledger.complete(job_id, output_tokens)
        self._live.ended(job_id)
        if refusals := self._refused.pop(job_id, 0):
            log.info("ended without a placement", job_id=job_id, refusals=refusals)

    def _refuse(self, job_id: str, error: PolyphaseError) -> None:
        """Count it; a waiting job asks ten times a second, and one line is enough."""
        self._metrics.refused.labels(error.code).inc()
        known = self._refused.pop(job_id, 0)
        self._refused[job_id] = known + 1
        if not known:
            log.warning("no placement", job_id=job_id, code=error.code, reason=error.message)
            if len(self._refused) > REFUSED_KEPT:
                del self._refused[next(iter(self._refused))]
