"""Checks of a verdict's fields against the ground truth: what clients, samples of metrics and the injected faults say.

A count lies between the requests that the monitor must have received and those that it may have received: the end of a
request reaches the monitor from the gateway within 0.1 s and from the scheduler within 1 s more; refusals are reported
every 3 s. Pure.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from shared.domain.instance import Role
from shared.domain.job import Slo, itl_met
from shared.domain.verdict import Count, Level, Problem, Stage, Verdict

CLASSES = {
    one.name: one
    for one in (Slo("default", 1.5, 0.2), Slo("instant", 0.03, 0.2), Slo("swift", 1.5, 0.02), Slo("batch", 600.0, 1.0))
}
EARLY_S = 0.3  # a client may see the end of its answer so much later than the gateway
LATE_S = 2.5  # by then an end has reached the monitor
STAMP_S = 1.0  # the scheduler's time of an end, later than the client's
REFUSED_LATE_S, REFUSED_STAMP_S = 6.0, 4.5
DOUBT_S = 30.0  # a process that stands still holds reports back
TTFT_ERROR_S = 0.08  # TTFT as a client measures it is so much longer than the gateway's, at most
GAP_ERROR_S = 0.08  # a client's gap differs by so much from the gateway's, beside the client's own lateness
TPOT_ERROR = 0.1  # tokens that share a message: so much of TPOT, either way
HISTOGRAM = 1.06  # percentiles of the verdict are of buckets within 5 %
OWN_S = 0.05  # beside a client's time
SAMPLE_S = 1.2  # loads come with heartbeats, and a verdict is kept for half a second
FORESEEN = 1.15  # error of a foreseen wait
SILENCE_S = {"gateway": 3.6, "scheduler": 4.6}  # the longest between two reports of a quiet one, and on their way
OPEN_S = 2.0  # loads, and so the jobs that there are now, may be so old
Bounds = tuple[float, float]


@dataclass(slots=True)
class ClientRequest:
    """One request as its client saw it. Unix seconds; ended_s: 0 while it is open.

    code: of its error. cut: its connection ended without an error. doubtful: its gateway or its scheduler may have
    stood still meanwhile, so that their reports of it may be late or missing. gaps_s: between two messages with tokens.
    late_s: by which this process was late meanwhile, at worst.
    """

    slo: str
    began_s: float
    ended_s: float = 0.0
    status: int = 0
    code: str = ""
    cut: bool = False
    doubtful: bool = False
    ttft_s: float | None = None
    tpot_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    late_s: float = 0.0

    @property
    def done(self) -> bool:
        return self.ended_s > 0.0 and not self.code and not self.cut

    @property
    def refused(self) -> bool:
        return self.status == 429 or self.code in ("busy", "overloaded", "delayed")

    @property
    def failed(self) -> bool:
        return bool(self.code) and not self.refused

    @property
    def jct_s(self) -> float:
        return self.ended_s - self.began_s


Requests = Iterable[ClientRequest]
Which = Callable[[ClientRequest], bool]


@dataclass(frozen=True, slots=True)
class Sample:
    """`GET /metrics` of an instance at a moment."""

    time_s: float
    instance: str
    role: Role
    kv_used: float
    waiting: int
    running: int


@dataclass(slots=True)
class GroundTruth:
    """What is true at one moment. Unix seconds.

    silent: since when gateways and schedulers stand still. behind: instances without broadcasts. mute_s: since when
    no predictor answers. cut_s: since when KV does not come. slow_s: the shortest time of a KV transfer.
    """

    counts: dict[Role, Count]
    requests: list[ClientRequest] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    silent: dict[str, float] = field(default_factory=dict)
    behind: frozenset[str] = frozenset()
    mute_s: float = float("inf")
    cut_s: float = float("inf")
    slow_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Window:
    """The window of a verdict, in unix seconds."""

    start_s: float
    end_s: float

    @classmethod
    def of(cls, verdict: Verdict) -> "Window":
        return cls(verdict.time_s - verdict.window_s, verdict.time_s)

    def count(self, requests: Requests, surely: Which, maybe: Which | None = None) -> Bounds:
        """How many of these the verdict counts: at least those with `surely`, at most those with `maybe`."""
        maybe = maybe or surely
        least = most = 0
        for one in requests:
            if not one.ended_s:
                continue
            if one.doubtful:
                most += one.began_s <= self.end_s and self.start_s <= one.ended_s + DOUBT_S
                continue
            late_s, stamp_s = (REFUSED_LATE_S, REFUSED_STAMP_S) if one.refused else (LATE_S, STAMP_S)
            inside = self.start_s <= one.ended_s - EARLY_S and one.ended_s + late_s <= self.end_s
            near = self.start_s <= one.ended_s + stamp_s and one.ended_s - EARLY_S <= self.end_s
            least += inside and not one.cut and surely(one)
            most += near and (one.cut or maybe(one))
        return least, most

    def share(self, requests: Requests, surely: Which, maybe: Which | None = None) -> Bounds:
        """The share of these requests, of which at least those with `surely` and at most those with `maybe` count."""
        requests, maybe = list(requests), maybe or surely
        others = self.count(requests, lambda one: not maybe(one), lambda one: not surely(one))
        return share(self.count(requests, surely, maybe), others)


def share(part: Bounds, rest: Bounds) -> Bounds:
    """The share that the part may have of both together; 0..1 where there may be none of either."""
    least = part[0] / (part[0] + rest[1]) if part[0] + rest[1] else 0.0
    most = part[1] / (part[1] + rest[0]) if part[1] + rest[0] else 1.0
    return least, most


def ttft_met(window: Window, requests: Requests) -> Bounds:
    """The share of completed requests whose TTFT was within its class's target."""

    def within(error_s: float) -> Which:
        return lambda one: one.done and (one.ttft_s or float("inf")) - CLASSES[one.slo].ttft_s <= error_s

    return window.share(_completed(requests), within(0.0), within(TTFT_ERROR_S))


def tpot_met(window: Window, requests: Requests) -> Bounds:
    """The share of completed requests whose TPOT was within its class's target."""

    def within(factor: float) -> Which:
        return lambda one: one.done and (one.tpot_s or 0.0) <= factor * CLASSES[one.slo].tpot_s

    return window.share(_completed(requests), within(1.0 - TPOT_ERROR), within(1.0 + TPOT_ERROR))


def itl_within(window: Window, requests: Requests) -> Bounds:
    """The share of completed requests whose gaps between tokens were within their class's target."""

    def within(sign: int) -> Which:
        def met(one: ClientRequest) -> bool:
            limit_s = CLASSES[one.slo].itl_s + sign * (GAP_ERROR_S + one.late_s)
            return one.done and itl_met(len(one.gaps_s), sum(gap_s > limit_s for gap_s in one.gaps_s))

        return met

    return window.share(_completed(requests), within(-1), within(1))


def _completed(requests: Requests) -> list[ClientRequest]:
    return [one for one in requests if one.done or one.cut]


def _upper_median(values: Iterable[float]) -> float:
    """A bound for the median of a part of these, because those at the window's edges may count or not.

    The 60th percentile, by nearest rank; infinite without any.
    """
    some = sorted(values)
    return some[min(len(some) - 1, int(0.6 * len(some)))] if some else float("inf")


@dataclass(frozen=True, slots=True)
class Figure:
    """A number or a name of a verdict, and its true value."""

    name: str
    reported: str
    want: str
    ok: bool


def within(name: str, reported: float | None, bounds: Bounds, slack: float = 0.0) -> Figure:
    least, most = bounds
    reported = reported or 0.0
    want = f"{least:.4g}" if least == most else f"{least:.4g}..{most:.4g}"
    return Figure(name, f"{reported:.4g}", want, least - slack <= reported <= most + slack)


def same(name: str, reported: object, want: object) -> Figure:
    return Figure(name, str(reported), str(want), reported == want)


Figures = Iterator[Figure]
Check = Callable[[Problem, Verdict, GroundTruth], Figures]


def figures(verdict: Verdict, truth: GroundTruth) -> list[Figure]:
    """Every figure of the verdict and of its problems, beside the truth."""
    found = [*_counts(verdict, truth), *_chain(verdict, truth)]
    for problem in verdict.problems:
        found += problem_figures(problem, verdict, truth)
    return found


def problem_figures(problem: Problem, verdict: Verdict, truth: GroundTruth) -> Figures:
    for figure in _CHECKS[problem.what](problem, verdict, truth):
        yield Figure(f"{problem.what}: {figure.name}", figure.reported, figure.want, figure.ok)


def _counts(verdict: Verdict, truth: GroundTruth) -> Figures:
    for role, want in truth.counts.items():
        for name in Count.__struct_fields__:
            yield same(f"{role.value} {name}", getattr(verdict.counts[role], name), getattr(want, name))
    yield within("requests", verdict.requests, Window.of(verdict).count(truth.requests, lambda _: True))
    levels = [problem.level for problem in verdict.problems]
    level = Level.DOWN if Level.DOWN in levels else Level.DEGRADED if levels else Level.GOOD
    yield same("level", verdict.level, level)


def _chain(verdict: Verdict, truth: GroundTruth) -> Figures:
    most = Window.of(verdict).count(truth.requests, lambda _: True)[1]
    ended = _ended(verdict, truth)
    whole_s = _upper_median(one.jct_s for one in ended if not one.refused)
    first_s = _upper_median(one.ttft_s for one in ended if one.ttft_s is not None)
    for link in verdict.chain:
        name = f"chain {link.stage.value}"
        yield within(f"{name} requests", link.requests, (0, most))
        if link.p50_s is not None and link.p99_s is not None:
            limit_s = first_s if link.stage in (Stage.QUEUE, Stage.PREFILL) else whole_s
            yield within(f"{name} p50", link.p50_s, (0.0, limit_s * HISTOGRAM + OWN_S))
            yield within(f"{name} p99", link.p99_s, (link.p50_s, float("inf")))
    yield within("chain shares", sum(link.share or 0.0 for link in verdict.chain), (0.0, 1.1))
    began, now = verdict.time_s - OPEN_S, verdict.time_s
    is_open = sum(one.began_s <= now and (not one.ended_s or one.ended_s >= began) for one in truth.requests)
    # A job may be seen at both its instances at once, by heartbeats of two moments.
    yield within("chain now", sum(link.now for link in verdict.chain), (0, 2 * is_open))


def _ended(verdict: Verdict, truth: GroundTruth) -> list[ClientRequest]:
    window = Window.of(verdict)
    return [one for one in truth.requests if one.ended_s and window.start_s - STAMP_S <= one.ended_s <= window.end_s]


def _nothing_served(problem: Problem, verdict: Verdict, truth: GroundTruth) -> Figures:
    yield within("served", 0, Window.of(verdict).count(truth.requests, lambda one: one.done))


def _role_of(problem: Problem, of_prefill: Stage = Stage.PREFILL) -> Role:
    return Role.PREFILL if problem.stage is of_prefill else Role.DECODE


def _role_empty(problem: Problem, verdict: Verdict, truth: GroundTruth) -> Figures:
    yield same("ready", truth.counts[_role_of(problem)].ready, 0)


def _silent(service: str) -> Check:
    def check(problem: Problem, verdict: Verdict, truth: GroundTruth) -> Figures:
        since_s = [at for name, at in truth.silent.items() if name.startswith(service)]
        yield same("any", bool(since_s), True)
        if since_s:
            least = verdict.time_s - min(since_s)
            yield within("seconds", problem.value, (least - 1.0, least + SILENCE_S[service]), 0.5)

    return check


def _missed(met: Callable[[Window, Requests], Bounds]) -> Check:
    """The share that met the target, in the class whose share is nearest: the problem does not name its class."""

    def check(problem: Problem, verdict: Verdict, truth: GroundTruth) -> Figures:
        value = problem.value if problem.value is not None else 1.0
        by_class = [[one for one in truth.requests if one.slo == slo] for slo in CLASSES]
        bounds = [met(Window.of(verdict), requests) for requests in by_class if requests]
        yield within("share", value, min(bounds, key=lambda one: max(one[0] - value, value - one[1])), 0.005)

    return check


def _ended_badly(which: Which) -> Check:
    def check(problem: Problem, verdict: Verdict, truth: GroundTruth) -> Figures:
        judged = (one for one in truth.requests if one.done or one.failed or one.refused or one.cut)
        yield within("share", problem.value, Window.of(verdict).share(judged, which), 0.005)

    return check


def _kv_full(problem: Problem, verdict: Verdict, truth: GroundTruth) -> Figures:
    role = _role_of(problem, Stage.QUEUE)
    means = _at_moments(truth, verdict, role, lambda some: sum(one.kv_used for one in some) / len(some))
    yield within("share", problem.value, means, 0.08)
    yield within("instances", len(problem.instances), (1, truth.counts[role].ready))


def _queue_long(problem: Problem, verdict: Verdict, truth: GroundTruth) -> Figures:
    if problem.stage is Stage.DECODE_QUEUE:

        def ratio(some: list[Sample]) -> float:
            return sum(one.waiting for one in some) / max(1, sum(one.running for one in some))

        yield within("waiting over running", problem.value, _at_moments(truth, verdict, Role.DECODE, ratio), 0.5)
        return
    yield within("instances", len(problem.instances), (1, truth.counts[Role.PREFILL].ready))
    # The first tokens of requests that begin now come when all waiting prompts are computed.
    later = [one.ttft_s or 0.0 for one in truth.requests if abs(one.began_s - verdict.time_s) <= 4.0]
    yield within("seconds", problem.value, (0.0, FORESEEN * max(later, default=0.0)), 0.5)


def _at_moments(truth: GroundTruth, verdict: Verdict, role: Role, value: Callable[[list[Sample]], float]) -> Bounds:
    """The bounds of a value over the moments about the verdict's; each moment is a sample of every instance."""
    latest: dict[str, Sample] = {}
    values = []
    for one in truth.samples:
        if one.role is role:
            latest[one.instance] = one
            if abs(one.time_s - verdict.time_s) <= SAMPLE_S and len(latest) == truth.counts[role].ready:
                values.append(value(list(latest.values())))
    return (min(values), max(values)) if values else (float("inf"), float("-inf"))


def _transfers_failing(problem: Problem, verdict: Verdict, truth: GroundTruth) -> Figures:
    """Each completed request had one transfer."""
    done, cut_s = (one for one in truth.requests if one.done), truth.cut_s
    failed = Window.of(verdict).share(done, lambda one: one.began_s > cut_s, lambda one: one.ended_s > cut_s)
    yield within("share", problem.value, failed, 0.005)


def _transfers_slow(problem: Problem, verdict: Verdict, truth: GroundTruth) -> Figures:
    limit_s = _upper_median(one.jct_s for one in _ended(verdict, truth)) * HISTOGRAM + OWN_S
    yield within("median", problem.value, (truth.slow_s / HISTOGRAM, limit_s))


def _absent(state: str) -> Check:
    def check(problem: Problem, verdict: Verdict, truth: GroundTruth) -> Figures:
        number = getattr(truth.counts[_role_of(problem)], state)
        yield same("number", problem.value, float(number))
        yield same("names", len(problem.instances), number)

    return check


def _policies(problem: Problem, verdict: Verdict, truth: GroundTruth) -> Figures:
    yield same("instances", problem.instances, tuple(sorted(truth.behind)))


def _fallback(problem: Problem, verdict: Verdict, truth: GroundTruth) -> Figures:
    accepted, mute_s = (one for one in truth.requests if not one.refused), truth.mute_s
    guessed = Window.of(verdict).share(
        accepted, lambda one: one.began_s > mute_s + EARLY_S, lambda one: one.began_s > mute_s - LATE_S
    )
    yield within("share", problem.value, guessed, 0.005)


_CHECKS: dict[str, Check] = {
    "nothing_served": _nothing_served,
    "role_empty": _role_empty,
    "scheduler_gone": _silent("scheduler"),
    "gateway_gone": _silent("gateway"),
    "ttft_missed": _missed(ttft_met),
    "tpot_missed": _missed(tpot_met),
    "itl_missed": _missed(itl_within),
    "errors": _ended_badly(lambda one: one.failed),
    "refusals": _ended_badly(lambda one: one.refused),
    "kv_full": _kv_full,
    "queue_long": _queue_long,
    "transfers_failing": _transfers_failing,
    "transfers_slow": _transfers_slow,
    "instances_dead": _absent("dead"),
    "instances_unresponsive": _absent("unresponsive"),
    "instances_missing": _absent("missing"),
    "policies_not_followed": _policies,
    "predictor_fallback": _fallback,
}
