"""Placement: drives the pure `Decider` with a clock, metrics, log lines, and the journal where one is kept."""

import secrets
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram

from services.global_scheduler.journal import (
    BroadcastApplied,
    Decision,
    DecodeStarted,
    JobEnded,
    Journal,
    LogStarted,
    PrefixesReported,
)
from shared.domain.cluster import ClusterDelta
from shared.domain.estimated import PromptSize
from shared.domain.instance import ClusterView, Role
from shared.domain.job import JobView
from shared.domain.policies import ROUTING, PolicySet
from shared.domain.prompt import PrefixDelta
from shared.domain.route import Affinity, Route
from shared.errors import Overloaded, PolyphaseError
from shared.policy.decider import Decider
from shared.policy.prefix_index import MAX_BLOCKS
from shared.policy.registry import in_words
from shared.policy.truth import KINDS, Compared, What
from shared.runtime.logs import get_log
from shared.runtime.metrics import Bound
from shared.wire.api.scheduler import InstanceErrors, KindErrors, Predictions
from shared.wire.messages import PlaceRequest
from shared.wire.rpc_server import ServerCall

if TYPE_CHECKING:
    from shared.runtime.otlp import Tracer  # OpenTelemetry is heavy, and loaded only where tracing is on

log = get_log(__name__)
REFUSED_KEPT = 10_000  # jobs without a placement that are remembered
GONE_SERIES = 1_000  # metric series of instances that are gone: beyond so many they are removed
_ERRORS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_DECISION_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3, 2e-2, 0.1)


class SchedulerMetrics:
    """Prometheus metrics of placements, and of lost jobs. The gateway has those of requests."""

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
        self._kept = Counter(
            "polyphase_scheduler_kept_answers",
            "Placements of whole jobs on a prefill instance, which decodes at least the first tokens",
            registry=registry,
        )
        self._pulls = Counter(
            "polyphase_scheduler_prefix_pulls", "Placements that pull a prefix from a holder", registry=registry
        )
        self._pulled = Counter(
            "polyphase_scheduler_prefix_pull_tokens", "Of those, prompt tokens that are pulled", registry=registry
        )
        affinity = Counter(
            "polyphase_scheduler_session_turns",
            "Placements of a session's later turns, by whether they go to an instance of the last turn",
            ["affinity"],
            registry=registry,
        )
        self._affinity = {each: affinity.labels(each.value) for each in Affinity}
        self._refused = Counter(
            "polyphase_scheduler_refused",
            "Placements refused or delayed, by error code, SLO class, and what was full",
            ["code", "slo", "cause"],
            registry=registry,
        )
        errors = Histogram(
            "polyphase_scheduler_prediction_error_ratio",
            "Absolute error of the times that the estimate of the first placement predicted, over those observed",
            ["what", "route", "prompt"],
            buckets=_ERRORS,
            registry=registry,
        )
        self._errors = Bound(errors)
        self.lost = Counter("polyphase_scheduler_jobs_lost", "Open jobs whose gateway is gone", registry=registry)

    def refusal(self, slo: str, error: PolyphaseError) -> None:
        """Count a request that got no route."""
        self._refused.labels(error.code, slo, error.cause if isinstance(error, Overloaded) else "").inc()

    def keep(self, instance_ids: Collection[str]) -> None:
        """Bound the series of instances that are gone: new instances may come under ever new names."""
        if len(self._chosen) > GONE_SERIES + len(Role) * len(instance_ids):
            self._chosen.keep(lambda labels: labels[0] in instance_ids)

    def compared(self, compared: Compared) -> None:
        """Count the errors of an estimate whose outcome is known."""
        route, prompt = compared.estimated.kind.value, PromptSize.of(compared.prompt_tokens).value
        for what, error in compared.errors:
            self._errors.labels(what.value, route, prompt).observe(abs(error))

    def placed(self, route: Route, duration_s: float) -> None:
        """Count one decision."""
        self._decisions.observe(duration_s)
        kind = "local" if route.prefill is None else "partial" if route.decode is not None else "full"
        self._placements.labels(kind).inc()
        at_prefill = route.keep_tokens > 0
        last = Role.PREFILL if at_prefill else Role.DECODE
        for role, instance in ((Role.PREFILL, route.prefill), (last, route.decode)):
            if instance is not None:
                self._chosen.labels(instance.instance_id, role.value).inc()
        if route.affinity is not None:
            self._affinity[route.affinity].inc()
        if at_prefill:
            self._kept.inc()
        if route.pull is not None:
            self._pulls.inc()
            self._pulled.inc(route.pulled_tokens)


class Placer:
    """Answers PLACE. seed None: other random numbers at each start. `decider` is to be read, not to be changed."""

    def __init__(
        self,
        metrics: SchedulerMetrics,
        seed: int | None,
        journal: Journal | None = None,
        prefix_blocks: int = MAX_BLOCKS,
    ) -> None:
        seed = secrets.randbits(63) if seed is None else seed
        self.decider = Decider(seed, prefix_blocks)
        self._metrics = metrics
        self._journal = journal
        self._updated_s = 0.0
        self.on_policies: Callable[[], None] = lambda: None  # called when `followed` changes
        self._refused: dict[str, int] = {}  # jobs without a placement, and how often they were refused
        if journal is not None:
            journal.add(LogStarted(seed, prefix_blocks))

    def apply(self, delta: ClusterDelta) -> bool:
        """Apply a broadcast of the monitor. False, and nothing is applied, where the broadcast before it is missing."""
        now, before, moves = time.time(), self.followed, self.decider.loads.moves
        if not self.decider.apply(delta, now):
            return False
        self._updated_s = now
        if self.decider.loads.moves != moves:
            self._metrics.keep({view.info.instance_id for view in self.view.instances})
        if self._journal is not None:
            self._journal.add(BroadcastApplied(delta, now))
        if delta.policies is not None and self.followed != before:
            self._log_policies()
            self.on_policies()
        return True

    def apply_prefixes(self, instance_id: str, delta: PrefixDelta) -> bool:
        """Apply a change of an instance's prefix cache; False when a change before it was lost."""
        if self._journal is not None:
            self._journal.add(PrefixesReported(instance_id, delta))
        return self.decider.apply_prefixes(instance_id, delta)

    def forget_prefixes(self, instance_id: str) -> None:
        """Nothing is known of the instance's prefix cache any more."""
        if self._journal is not None:
            self._journal.add(PrefixesReported(instance_id, None))
        self.decider.forget_prefixes(instance_id)

    @property
    def broadcast_age_s(self) -> float:
        """Seconds since the last broadcast; infinite before the first."""
        return time.time() - self._updated_s if self.decider.loads.known else float("inf")

    @property
    def view(self) -> ClusterView:
        """The cluster by the broadcasts so far; O(instances)."""
        return self.decider.loads.view

    @property
    def followed(self) -> tuple[PolicySet, str]:
        """The policies that the scheduler follows, and why it does not follow newer ones; empty if there are none."""
        return self.decider.follower.policies, self.decider.follower.problem

    @property
    def predictions(self) -> Predictions:
        """The rolling errors of its estimates; O(instances)."""
        errors = self.decider.ledger.errors
        at, of = errors.of_instance, errors.of_kind
        names = [view.info.instance_id for view in self.view.instances]
        instances = [InstanceErrors(name, at(What.TTFT, name), at(What.TPOT, name)) for name in names]
        kinds = [KindErrors(*kind, of(What.TTFT, kind), of(What.TPOT, kind)) for kind in KINDS]
        return Predictions([each for each in instances if each.known], [each for each in kinds if each.known])

    def place(self, request: PlaceRequest) -> Route:
        """Decide. Raises Unavailable, InvalidRequest, Overloaded, Delayed, Stays."""
        started, now = time.perf_counter(), time.time()
        if request.to:
            others = {view.instance_id for view in self.view.instances} - {request.to}
            request = msgspec.structs.replace(request, exclude=tuple(sorted({*request.exclude, *others})))
        try:
            route = self.decider.decide(request.job, request.exclude, now)
        except PolyphaseError as error:
            job = request.job
            if not (job.pause_s or job.leaves or job.warms):  # else the job has a placement and keeps it, or needs none
                self._refuse(request.job, error)
            if self._journal is not None:
                self._journal.add(Decision.refusal(request, now, error))
            raise
        if self._journal is not None:
            self._journal.add(Decision(request, now, route))
        if refusals := self._refused.pop(request.job.job_id, 0):
            log.info("placed after all", job_id=request.job.job_id, refusals=refusals)
        self._metrics.placed(route, time.perf_counter() - started)
        return route

    def decodes(self, job_id: str) -> None:
        """The job has arrived at its decode instance."""
        now = time.time()
        self.decider.arrived(job_id, now)
        if self._journal is not None:
            self._journal.add(DecodeStarted(job_id, now))

    def ended(self, job_id: str, output_tokens: int, met: bool | None, compared: Compared | None = None) -> None:
        """A job has ended here; `output_tokens` of a complete answer, else 0. met: its targets, None if not judged.
        compared: as in `Decider.ended`.
        """
        now = time.time()
        self.decider.ended(job_id, output_tokens, met, now, compared)
        if compared is not None:
            self._metrics.compared(compared)
        if self._journal is not None:
            self._journal.add(JobEnded(job_id, output_tokens, met, now, compared))
        if refusals := self._refused.pop(job_id, 0):
            log.info("ended without a placement", job_id=job_id, refusals=refusals)

    def _log_policies(self) -> None:
        policies, trouble = self.followed
        if trouble:
            log.error("newer policies are not followed", following=policies.revision, reason=trouble)
        else:
            named = {kind: in_words(policies.spec(kind)) for kind in ROUTING}
            log.info("policies followed", revision=policies.revision, **named)

    def _refuse(self, job: JobView, error: PolyphaseError) -> None:
        """Count a refusal. A waiting job is refused ten times a second: it is logged once."""
        job_id = job.job_id
        self._metrics.refusal(job.slo.name, error)
        known = self._refused.pop(job_id, 0)
        self._refused[job_id] = known + 1
        if len(self._refused) > REFUSED_KEPT:
            del self._refused[next(iter(self._refused))]
        if not known and not isinstance(error, Overloaded):  # these are many, and each job's timeline has the cause
            log.warning("no placement", job_id=job_id, code=error.code, reason=error.message)


Place = Callable[[PlaceRequest, ServerCall], Route]
MAX_REASONS = 16  # of a span


def traced(place: Place, tracer: "Tracer") -> Place:
    """`place` with a span for each request that belongs to a trace: the route, and the reasons for it."""

    def traced_place(request: PlaceRequest, call: ServerCall) -> Route:
        trace = tracer.remote(request.trace) if request.trace else None
        if trace is None:
            return place(request, call)
        span = trace.child("place", time.time(), {"polyphase.job.id": request.job.job_id}, "server")
        with structlog.contextvars.bound_contextvars(trace_id=trace.trace_id):
            try:
                route = place(request, call)
            except PolyphaseError as error:
                span.end(time.time(), error=error.code)
                raise
        figures: dict[str, str | int | list[str]] = {
            "polyphase.policy": route.policy,
            "polyphase.split": route.split,
            "polyphase.prefill.instance.id": route.prefill.instance_id if route.prefill is not None else "",
            "polyphase.decode.instance.id": route.decode.instance_id if route.decode is not None else "",
            "polyphase.reasons": [reason.line for reason in route.reasons[:MAX_REASONS]],
        }
        span.end(time.time(), figures)
        return route

    return traced_place
