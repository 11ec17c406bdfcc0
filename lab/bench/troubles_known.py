"""What the stager of a trouble knows by itself, and bounds for what a verdict may say of the same window.

A request's end comes to the monitor in a moment: from the gateway within 0.1 s and from its scheduler within 1 s more,
and refusals with the gateway's next word, 3 s apart. So a count lies between those that must have been told of and
those that may have been.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lab.bench.troubles_beds import CLASSES
from lab.bench.troubles_load import Shot
from shared.domain.instance import Role
from shared.domain.job import itl_met
from shared.domain.verdict import Count, Verdict
from shared.errors import DeadlineExceeded, EngineFailed, PeerLost, Unavailable

EARLY_S = 0.3  # a client may see the end of its answer so much later than the gateway
LATE_S = 2.5  # by then a request's end has been told to the monitor
STAMP_S = 1.0  # the scheduler's time of an end, later than the client's
REFUSED_LATE_S, REFUSED_STAMP_S = 6.0, 4.5
DOUBT_S = 30.0  # what stands still holds reports back
BLUR_S = 0.08  # TTFT as a client measures it is so much longer than the gateway's, at most
GAP_BLUR_S = (
    0.08  # a gap as a client measures it differs by so much from the gateway's, either way, and by its lateness
)
TPOT_BLUR = 0.1  # tokens that share a message: so much of TPOT, either way

_STATUS = {one.code: str(one.http_status) for one in (Unavailable, PeerLost, DeadlineExceeded, EngineFailed)}
HISTOGRAM = 1.06  # percentiles of the verdict are of buckets within 5 %
OWN_S = 0.05  # beside a client's time
Bounds = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Sample:
    """What `GET /metrics` of an instance said at a moment."""

    time_s: float
    instance: str
    role: Role
    kv_used: float
    waiting: int
    running: int
    queued_prefill: int


@dataclass(slots=True)
class Known:
    """All that is known at one moment. Unix seconds.

    silent: since when gateways and schedulers stand still. behind: who cannot hear of new policies. mute_s: since when
    no predictor answers. cut_s: since when KV does not come. slow_s: what each KV transfer takes at least.
    """

    counts: dict[Role, Count]
    shots: list[Shot] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    gateways: int = 1
    schedulers: int = 1
    silent: dict[str, float] = field(default_factory=dict)
    behind: frozenset[str] = frozenset()
    mute_s: float | None = None
    cut_s: float | None = None
    slow_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Window:
    """The window of a verdict, in unix seconds."""

    start_s: float
    end_s: float

    def count(self, shots: Iterable[Shot], surely: Callable[[Shot], bool], maybe: Callable[[Shot], bool]) -> Bounds:
        """How many of those the verdict counts: at least, those for whom `surely`, and at most, for whom `maybe`."""
        least = most = 0
        for shot in shots:
            refused = is_refused(shot)
            late_s, stamp_s = (REFUSED_LATE_S, REFUSED_STAMP_S) if refused else (LATE_S, STAMP_S)
            if not shot.ended_s:
                continue
            if shot.doubt:
                most += shot.began_s <= self.end_s and self.start_s <= shot.ended_s + DOUBT_S
                continue
            inside = self.start_s <= shot.ended_s - EARLY_S and shot.ended_s + late_s <= self.end_s
            near = self.start_s <= shot.ended_s + stamp_s and shot.ended_s - EARLY_S <= self.end_s
            least += inside and not shot.cut and surely(shot)
            most += near and (shot.cut or maybe(shot))
        return least, most

    def of(self, shots: Iterable[Shot], which: Callable[[Shot], bool]) -> Bounds:
        """The same of those that are clearly so or not so."""
        return self.count(shots, which, which)


def is_refused(shot: Shot) -> bool:
    """Turned away, not broken."""
    return shot.status == 429 or shot.code in ("busy", "overloaded", "delayed")


def is_failed(shot: Shot) -> bool:
    """Broken."""
    return bool(shot.code) and not is_refused(shot)


def told_as(shot: Shot, code: str) -> bool:
    """Whether an error may have been that one: within a stream clients are told its HTTP status only."""
    return shot.code in (code, _STATUS.get(code))


def share(part: Bounds, rest: Bounds) -> Bounds:
    """What share the part may be of both together; 0..1 where there may be none of either."""
    least = part[0] / (part[0] + rest[1]) if part[0] + rest[1] else 0.0
    most = part[1] / (part[1] + rest[0]) if part[1] + rest[0] else 1.0
    return least, most


def ttft_met(window: Window, shots: Iterable[Shot]) -> Bounds:
    """The share of completed requests whose TTFT was within its class's target."""

    def late(shot: Shot) -> float:
        return (shot.ttft_s if shot.ttft_s is not None else float("inf")) - CLASSES[shot.slo].ttft_s

    return _met(
        window, shots, lambda shot: shot.done and late(shot) <= 0.0, lambda shot: shot.done and late(shot) <= BLUR_S
    )


def tpot_met(window: Window, shots: Iterable[Shot]) -> Bounds:
    """The share of completed requests whose TPOT was within its class's target."""

    def ratio(shot: Shot) -> float:
        return (shot.tpot_s or 0.0) / CLASSES[shot.slo].tpot_s

    return _met(
        window,
        shots,
        lambda shot: shot.done and ratio(shot) <= 1.0 - TPOT_BLUR,
        lambda shot: shot.done and ratio(shot) <= 1.0 + TPOT_BLUR,
    )


def gaps_met(window: Window, shots: Iterable[Shot]) -> Bounds:
    """The share of completed requests whose gaps between tokens were within their class's target."""

    def within(shot: Shot, way: int) -> bool:
        limit_s = CLASSES[shot.slo].itl_s + way * (GAP_BLUR_S + shot.late_s)
        return shot.done and itl_met(len(shot.gaps_s), sum(gap_s > limit_s for gap_s in shot.gaps_s))

    return _met(window, shots, lambda shot: within(shot, -1), lambda shot: within(shot, 1))


def _met(
    window: Window, shots: Iterable[Shot], surely: Callable[[Shot], bool], maybe: Callable[[Shot], bool]
) -> Bounds:
    judged = [shot for shot in shots if shot.done or shot.cut]
    return share(
        window.count(judged, surely, maybe),
        window.count(judged, lambda shot: not maybe(shot), lambda shot: not surely(shot)),
    )


def about_median(values: Iterable[float]) -> float:
    """A bound for the median of a part of them, of those whose ends lie about the window's edges the one or the other.

    The 60th percentile, by nearest rank; infinite without any.
    """
    some = sorted(values)
    return some[min(len(some) - 1, int(0.6 * len(some)))] if some else float("inf")


@dataclass(frozen=True, slots=True)
class Figure:
    """A number or a phrase of a verdict; what it had to be."""

    name: str
    said: str
    want: str
    ok: bool


def within(name: str, said: float, bounds: Bounds, slack: float = 0.0) -> Figure:
    """A number that has to lie there."""
    least, most = bounds
    want = f"{least:.4g}" if least == most else f"{least:.4g}..{most:.4g}"
    return Figure(name, f"{said:.4g}", want, least - slack <= said <= most + slack)


def same(name: str, said: object, want: object) -> Figure:
    """Something that has to be just so."""
    return Figure(name, str(said), str(want), said == want)


def window_of(verdict: Verdict) -> Window:
    """What the verdict says that it counts."""
    return Window(verdict.time_s - verdict.window_s, verdict.time_s)


def percent(name: str, said: str, bounds: Bounds) -> Figure:
    """A share in per cent, rounded to its last digit."""
    least, most = bounds
    return within(name, float(said), (100.0 * least, 100.0 * most), 0.51 if float(said) >= 1.0 else 0.06)
