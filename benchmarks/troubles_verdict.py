"""Checks of a verdict's fields against the ground truth in `troubles_suite`. Pure."""

from collections.abc import Callable, Iterator

from benchmarks.troubles_suite import (
    CLASSES,
    EARLY_S,
    HISTOGRAM,
    LATE_S,
    OWN_S,
    STAMP_S,
    Bounds,
    Figure,
    Known,
    Sample,
    Shot,
    about_median,
    gaps_met,
    is_failed,
    is_refused,
    same,
    share,
    tpot_met,
    ttft_met,
    window_of,
    within,
)
from shared.domain.instance import Role
from shared.domain.verdict import Level, Problem, Stage, Verdict

_SEEN_S = 1.2  # loads come with heartbeats, and a verdict is kept for half a second
_FORESEEN = 1.15  # error of a foreseen wait
_GATEWAY_S, _SCHEDULER_S = 3.6, 4.6  # the longest between two reports of a quiet one, and on their way
_OPEN_S = 2.0  # loads, and so the jobs that are there now, may be so old
Check = Callable[[Problem, Verdict, Known], Iterator[Figure]]


def figures(verdict: Verdict, known: Known) -> list[Figure]:
    """Every figure of the verdict and of its problems, beside the truth."""
    return [
        *_counts(verdict, known),
        *_chain(verdict, known),
        *(figure for problem in verdict.problems for figure in of_problem(problem, verdict, known)),
    ]


def of_problem(problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
    for figure in _CHECKS[problem.what](problem, verdict, known):
        yield Figure(f"{problem.what}: {figure.name}", figure.reported, figure.want, figure.ok)


def _counts(verdict: Verdict, known: Known) -> Iterator[Figure]:
    for role, want in known.counts.items():
        reported = verdict.counts[role]
        for name in ("ready", "expected", "dead", "unresponsive", "draining", "starting", "missing"):
            yield same(f"{role.value} {name}", getattr(reported, name), getattr(want, name))
    yield within("requests", verdict.requests, window_of(verdict).of(known.shots, lambda _: True))
    levels = [problem.level for problem in verdict.problems]
    level = Level.DOWN if Level.DOWN in levels else Level.DEGRADED if levels else Level.GOOD
    yield same("level", verdict.level, level)


def _chain(verdict: Verdict, known: Known) -> Iterator[Figure]:
    window = window_of(verdict)
    most = window.of(known.shots, lambda _: True)[1]
    ended = _ended(verdict, known.shots)
    whole_s = about_median(shot.jct_s for shot in ended if not is_refused(shot))
    first_s = about_median(shot.ttft_s for shot in ended if shot.ttft_s is not None)
    for link in verdict.chain:
        name = f"chain {link.stage.value}"
        yield within(f"{name} requests", link.requests, (0, most))
        if link.p50_s is not None and link.p99_s is not None:
            limit_s = first_s if link.stage in (Stage.QUEUE, Stage.PREFILL) else whole_s
            yield within(f"{name} p50", link.p50_s, (0.0, limit_s * HISTOGRAM + OWN_S))
            yield within(f"{name} p99", link.p99_s, (link.p50_s, float("inf")))
    yield within("chain shares", sum(link.share or 0.0 for link in verdict.chain), (0.0, 1.1))
    began, now = verdict.time_s - _OPEN_S, verdict.time_s
    is_open = sum(shot.began_s <= now and (not shot.ended_s or shot.ended_s >= began) for shot in known.shots)
    # A job may be seen at both its instances at once, by heartbeats of two moments.
    yield within("chain now", sum(link.now for link in verdict.chain), (0, 2 * is_open))


def _ended(verdict: Verdict, shots: list[Shot]) -> list[Shot]:
    window = window_of(verdict)
    return [shot for shot in shots if shot.ended_s and window.start_s - STAMP_S <= shot.ended_s <= window.end_s]


def _nothing(problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
    yield within("served", 0, window_of(verdict).of(known.shots, lambda shot: shot.done))


def _empty(problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
    role = Role.PREFILL if problem.stage is Stage.PREFILL else Role.DECODE
    yield same("ready", known.counts[role].ready, 0)


def _silent(kind: str, longer_s: float) -> Check:
    def check(problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
        since_s = [at for name, at in known.silent.items() if name.startswith(kind)]
        yield same("any", bool(since_s), True)
        if since_s:
            least = verdict.time_s - min(since_s)
            yield within("seconds", problem.value or 0.0, (least - 1.0, least + longer_s), 0.5)

    return check


def _missed(met: Callable[..., Bounds]) -> Check:
    """The share that met the target, in the class whose share is nearest: the problem does not name its class."""

    def check(problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
        value = problem.value if problem.value is not None else 1.0
        of = [[shot for shot in known.shots if shot.slo == slo] for slo in CLASSES]
        bounds = [met(window_of(verdict), shots) for shots in of if shots]
        yield within("share", value, min(bounds, key=lambda one: max(one[0] - value, value - one[1])), 0.005)

    return check


def _ended_badly(which: Callable[[Shot], bool]) -> Check:
    def check(problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
        judged = [shot for shot in known.shots if shot.done or is_failed(shot) or is_refused(shot) or shot.cut]
        window = window_of(verdict)
        bounds = share(window.of(judged, which), window.of(judged, lambda shot: not which(shot)))
        yield within("share", problem.value or 0.0, bounds, 0.005)

    return check


def _kv_full(problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
    role = Role.PREFILL if problem.stage is Stage.QUEUE else Role.DECODE
    means = _moments(known, verdict, role, lambda some: sum(one.kv_used for one in some) / len(some))
    yield within("share", problem.value or 0.0, means, 0.08)
    yield within("instances", len(problem.instances), (1, known.counts[role].ready))


def _queue_long(problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
    if problem.stage is Stage.DECODE_QUEUE:

        def ratio(some: list[Sample]) -> float:
            return sum(one.waiting for one in some) / max(1, sum(one.running for one in some))

        yield within("waiting over running", problem.value or 0.0, _moments(known, verdict, Role.DECODE, ratio), 0.5)
        return
    yield within("instances", len(problem.instances), (1, known.counts[Role.PREFILL].ready))
    # The first tokens of requests that begin now come when all waiting prompts are computed.
    later = [shot.ttft_s or 0.0 for shot in known.shots if abs(shot.began_s - verdict.time_s) <= 4.0]
    yield within("seconds", problem.value or 0.0, (0.0, _FORESEEN * max(later, default=0.0)), 0.5)


def _moments(known: Known, verdict: Verdict, role: Role, of: Callable[[list[Sample]], float]) -> Bounds:
    """The least and the most of it over the moments about the verdict's; each is a sample of every instance."""
    latest: dict[str, Sample] = {}
    seen = []
    for one in known.samples:
        if one.role is role:
            latest[one.instance] = one
            if -_SEEN_S <= one.time_s - verdict.time_s <= _SEEN_S and len(latest) == known.counts[role].ready:
                seen.append(of(list(latest.values())))
    return (min(seen), max(seen)) if seen else (float("inf"), float("-inf"))


def _transfers_failing(problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
    """Each completed request had one transfer."""
    window, cut_s = window_of(verdict), known.cut_s if known.cut_s is not None else float("inf")
    done = [shot for shot in known.shots if shot.done]
    bad = window.count(done, lambda shot: shot.began_s > cut_s, lambda shot: shot.ended_s > cut_s)
    good = window.count(done, lambda shot: shot.ended_s <= cut_s, lambda shot: shot.began_s <= cut_s)
    yield within("share", problem.value or 0.0, share(bad, good), 0.005)


def _transfers_slow(problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
    limit_s = about_median(shot.jct_s for shot in _ended(verdict, known.shots)) * HISTOGRAM + OWN_S
    yield within("median", problem.value or 0.0, (known.slow_s / HISTOGRAM, limit_s))


def _not_there(state: str) -> Check:
    def check(problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
        role = Role.PREFILL if problem.stage is Stage.PREFILL else Role.DECODE
        number = getattr(known.counts[role], state)
        yield same("number", problem.value, float(number))
        yield same("names", len(problem.instances), number)

    return check


def _policies(problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
    behind = {name for name in known.behind if not name.startswith("scheduler")}
    yield same("instances", problem.instances, tuple(sorted(behind)))


def _fallback(problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
    window, mute_s = window_of(verdict), known.mute_s if known.mute_s is not None else float("inf")
    accepted = [shot for shot in known.shots if not is_refused(shot)]
    guessed = window.count(
        accepted, lambda shot: shot.began_s > mute_s + EARLY_S, lambda shot: shot.began_s > mute_s - LATE_S
    )
    predicted = window.count(
        accepted, lambda shot: shot.began_s <= mute_s - LATE_S, lambda shot: shot.began_s <= mute_s + EARLY_S
    )
    yield within("share", problem.value or 0.0, share(guessed, predicted), 0.005)


_CHECKS: dict[str, Check] = {
    "nothing_served": _nothing,
    "role_empty": _empty,
    "scheduler_gone": _silent("scheduler", _SCHEDULER_S),
    "gateway_gone": _silent("gateway", _GATEWAY_S),
    "ttft_missed": _missed(ttft_met),
    "tpot_missed": _missed(tpot_met),
    "itl_missed": _missed(gaps_met),
    "errors": _ended_badly(is_failed),
    "refusals": _ended_badly(is_refused),
    "kv_full": _kv_full,
    "queue_long": _queue_long,
    "transfers_failing": _transfers_failing,
    "transfers_slow": _transfers_slow,
    "instances_dead": _not_there("dead"),
    "instances_unresponsive": _not_there("unresponsive"),
    "instances_missing": _not_there("missing"),
    "policies_not_followed": _policies,
    "predictor_fallback": _fallback,
}
