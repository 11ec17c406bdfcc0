"""Checks of a verdict: every figure of the verdict, and every number and name in the sentences of its problems,
against the ground truth in `troubles_suite`. Pure."""

import re
from collections.abc import Callable, Iterator

from lab.bench.troubles_suite import (
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
    Window,
    about_median,
    gaps_met,
    is_failed,
    is_refused,
    percent,
    same,
    share,
    told_as,
    tpot_met,
    ttft_met,
    window_of,
    within,
)
from shared.domain.instance import Role
from shared.domain.verdict import Level, Problem, Stage, Verdict, duration

_SEEN_S = 1.2  # loads come with heartbeats, and a verdict is kept for half a second
_FORESEEN = 1.15  # what is to come is foreseen by measured rates
_GATEWAY_S, _SCHEDULER_S = 3.6, 4.6  # the longest between two words of a quiet one, and on their way


def of_problem(problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
    pattern, check = _CHECKS[problem.what]
    found = re.fullmatch(pattern, problem.text)
    if found is None:
        yield same(f"{problem.what} text", problem.text, pattern)
        return
    for figure in check(found, problem, verdict, known):
        yield Figure(f"{problem.what}: {figure.name}", figure.said, figure.want, figure.ok)


Check = Callable[[re.Match[str], Problem, Verdict, Known], Iterator[Figure]]


def _nothing(found: re.Match[str], _: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
    window = window_of(verdict)
    yield same("window", found["seconds"] or found["seconds2"], f"{verdict.window_s:.0f}")
    yield within("served", 0, window.of(known.shots, lambda shot: shot.done))
    if found["asked"] is not None:
        asked = window.of(known.shots, lambda shot: shot.done or is_failed(shot) or is_refused(shot))
        yield within("asked", int(found["asked"]), asked)
    else:
        began = [shot.began_s for shot in known.shots]
        most = sum(window.start_s - LATE_S <= at <= window.end_s for at in began)
        yield within("placed", int(found["placed"]), (5, most))


def _empty(found: re.Match[str], problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
    role = Role(found["role"])
    yield same("ready", known.counts[role].ready, 0)
    others = known.counts[Role.DECODE].ready
    if role is Role.PREFILL and others:
        yield same("cause", problem.cause, "decode instances compute prompts, too")
        return
    count = known.counts[role]
    states = ("dead", "unresponsive", "draining", "starting", "missing")
    want = ", ".join(f"{getattr(count, state)} {state}" for state in states if getattr(count, state))
    yield same("cause", problem.cause, want)


def _gone(found: re.Match[str], problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
    kind = found["kind"]
    names = sorted(name for name in known.silent if name.startswith(kind))
    yield same("number", int(found["number"]), len(names))
    yield same("of", int(found["of"]), known.gateways if kind == "gateway" else known.schedulers)
    yield same("who", problem.cause, ", ".join(names))
    if names:
        least = verdict.time_s - min(known.silent[name] for name in names)
        longer = _GATEWAY_S if kind == "gateway" else _SCHEDULER_S
        yield within("seconds", float(found["seconds"]), (least - 1.0, least + longer), 0.5)


def _missed(found: re.Match[str], problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
    window, kind = window_of(verdict), found["kind"]
    slo = CLASSES[found["slo"] or "default"]
    shots = [shot for shot in known.shots if shot.slo == slo.name]
    met, target_s = {"TTFT": (ttft_met, slo.ttft_s), "TPOT": (tpot_met, slo.tpot_s), "ITL": (gaps_met, slo.itl_s)}[kind]
    yield percent("share", found["share"], met(window, shots))
    yield same("target", found["target"], duration(target_s))
    yield from _middle(problem, verdict, shots, window)


def _middle(problem: Problem, verdict: Verdict, shots: list[Shot], window: Window) -> Iterator[Figure]:
    """The stage's median in the cause: not longer than those clients waited."""
    found = re.search(r"\(([a-z ]+): (\S+ \w+) in the middle, (\S+ \w+) at the 99th percentile\)", problem.cause)
    if found is None:
        return
    ended = [shot for shot in shots if shot.ended_s and window.start_s - STAMP_S <= shot.ended_s <= window.end_s]
    whole_s = [shot.jct_s for shot in ended if not is_refused(shot)]
    limit_s, worst_s = (one * HISTOGRAM + OWN_S for one in (about_median(whole_s), max(whole_s, default=0.0)))
    yield within(f"{found[1]} in the middle", _seconds(found[2]), (0.0, limit_s))
    yield within(f"{found[1]} at p99", _seconds(found[3]), (_seconds(found[2]), worst_s))
    yield same("stage", found[1].replace(" ", "_"), problem.stage.value if problem.stage else "")


def _seconds(said: str) -> float:
    number, unit = said.split()
    return float(number) * {"ms": 0.001, "s": 1.0, "min": 60.0}[unit]


def _ended_badly(found: re.Match[str], problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
    window = window_of(verdict)
    which = is_failed if found["kind"] == "failed" else is_refused
    part, of = int(found["part"]), int(found["of"])
    judged = [shot for shot in known.shots if shot.done or is_failed(shot) or is_refused(shot) or shot.cut]
    yield within("part", part, window.of(judged, which))
    yield within("of", of, window.of(judged, lambda _: True))
    yield percent("share", found["share"], (part / of, part / of))
    told = re.search(r"\((\d+) ([a-z_]+)\)", problem.cause)
    if told is None:
        yield same("cause", problem.cause, "… (number code)")
        return
    code = told[2]
    yield within(f"of {code}", int(told[1]), window.of(judged, lambda shot: told_as(shot, code)))


def _kv_full(found: re.Match[str], problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
    role = Role(found["role"])
    means = _moments(known, verdict, role, lambda some: sum(one.kv_used for one in some) / len(some))
    yield within("share", float(found["share"]), (100 * means[0], 100 * means[1]), 8.0)
    waiting = _moments(known, verdict, role, lambda some: float(sum(one.waiting for one in some)))
    yield within("waiting", int(found["waiting"]), waiting, 1.0)
    ready = known.counts[role].ready
    yield within("full", int(found["full"] or ready), (1, ready))
    yield same("of", int(found["of"] or ready), ready)
    yield same("names", len(problem.instances), int(found["full"] or ready))


def _decodes(found: re.Match[str], problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
    waiting = _moments(known, verdict, Role.DECODE, lambda some: float(sum(one.waiting for one in some)))
    running = _moments(known, verdict, Role.DECODE, lambda some: float(sum(one.running for one in some)))
    yield within("waiting", int(found["waiting"]), waiting, 2.0)
    yield within("running", int(found["running"]), running, 2.0)


def _prompts(found: re.Match[str], problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
    jobs = _moments(known, verdict, Role.PREFILL, lambda some: float(sum(one.queued_prefill for one in some)))
    yield within("prompts", int(found["jobs"]), jobs, 2.0)
    yield same("of", int(found["of"]), known.counts[Role.PREFILL].ready)
    yield same("names", len(problem.instances), int(found["number"]))
    # Those that ask now have their first tokens when all of that is computed.
    later = [shot.ttft_s or 0.0 for shot in known.shots if abs(shot.began_s - verdict.time_s) <= 4.0]
    yield within("seconds", _seconds(found["seconds"]), (0.0, _FORESEEN * max(later, default=0.0)), 0.5)


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


def _failing(found: re.Match[str], problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
    window = window_of(verdict)
    part, of = int(found["part"]), int(found["of"])
    yield percent("share", found["share"], (part / of, part / of))
    yield within("of", of, window.of(known.shots, lambda shot: shot.done))  # each had one
    cut_s = known.cut_s if known.cut_s is not None else float("inf")
    bad = window.count(
        known.shots, lambda shot: shot.done and shot.began_s > cut_s, lambda shot: shot.done and shot.ended_s > cut_s
    )
    yield within("part", part, bad)
    if told := re.search(r"\((\d+) \w+\)", problem.cause):
        yield within("by one fault", int(told[1]), (1, part))


def _slow(found: re.Match[str], problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
    ended = [shot for shot in known.shots if shot.ended_s and verdict.time_s - verdict.window_s <= shot.ended_s]
    ended = [shot for shot in ended if shot.ended_s <= verdict.time_s]
    limit_s = about_median(shot.jct_s for shot in ended) * HISTOGRAM + OWN_S
    yield within("median", _seconds(found["seconds"]), (known.slow_s / HISTOGRAM, limit_s))
    told = re.fullmatch(r"(\S+ \w+) each on average, at (\S+ \w+)/s", problem.cause)
    if told is not None:  # more than half of them were slowed
        yield within("rate", _bytes(told[2]), (0.0, _bytes(told[1]) / (known.slow_s / 2.0)))


def _bytes(said: str) -> float:
    number, unit = said.split()
    return float(number) * {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]


def _not_there(found: re.Match[str], problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
    count = known.counts[Role(found["role"])]
    state = "missing" if found["state"] == "never came" else found["state"]
    yield same("number", int(found["number"]), getattr(count, state))
    yield same("of", int(found["of"]), count.expected)
    yield same("names", problem.cause, ", ".join(problem.instances))
    yield same("named", len(problem.instances), int(found["number"]))


def _policies(found: re.Match[str], problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
    yield same("who", found["who"], ", ".join(sorted(known.behind, key=lambda name: (_service(name), name))))


def _service(name: str) -> int:
    return 0 if name.startswith("scheduler") else 1


def _fallback(found: re.Match[str], problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
    window, mute_s = window_of(verdict), known.mute_s if known.mute_s is not None else float("inf")
    asked = [shot for shot in known.shots if not is_refused(shot)]
    guessed = window.count(
        asked, lambda shot: shot.began_s > mute_s + EARLY_S, lambda shot: shot.began_s > mute_s - LATE_S
    )
    told = window.count(
        asked, lambda shot: shot.began_s <= mute_s - LATE_S, lambda shot: shot.began_s <= mute_s + EARLY_S
    )
    yield percent("share", found["share"], share(guessed, told))


_BADLY = r"(?P<share>\S+) % of requests (?P<kind>failed|refused) \((?P<part>\d+) of (?P<of>\d+)\)"
_MISSED = r"(?P<kind>TTFT|TPOT|ITL) met by (?P<share>\S+) % \(target (?P<target>\S+ \w+)(?:, class (?P<slo>[\w-]+))?\)"
_SILENT = r"(?P<number>\d+) of (?P<of>\d+) (?P<kind>gateway|scheduler)s? silent for (?P<seconds>\d+) s"
_LESS = r"(?P<number>\d+) of (?P<of>\d+) (?P<role>prefill|decode) instances? (?P<state>dead|unresponsive|never came)"
_QUEUES = (
    r"(?P<jobs>\d+) prompts? waits? for up to (?P<seconds>\S+ \w+) at (?P<number>\d+) of (?P<of>\d+) prefill instances?"
    r"|(?P<waiting>\d+) decodes? waits? beside (?P<running>\d+) that run"
)


def _queues(found: re.Match[str], problem: Problem, verdict: Verdict, known: Known) -> Iterator[Figure]:
    return (_prompts if found["jobs"] is not None else _decodes)(found, problem, verdict, known)


_CHECKS: dict[str, tuple[str, Check]] = {
    "nothing_served": (
        r"none of (?P<asked>\d+) requests was served in the last (?P<seconds>\d+) s"
        r"|(?P<placed>\d+) requests were placed in the last (?P<seconds2>\d+) s and none is being computed",
        _nothing,
    ),
    "role_empty": (r"no (?P<role>prefill|decode) instance is ready", _empty),
    "scheduler_gone": (_SILENT, _gone),
    "gateway_gone": (_SILENT, _gone),
    "ttft_missed": (_MISSED, _missed),
    "tpot_missed": (_MISSED, _missed),
    "itl_missed": (_MISSED, _missed),
    "errors": (_BADLY, _ended_badly),
    "refusals": (_BADLY, _ended_badly),
    "kv_full": (
        r"(?P<role>prefill|decode) KV (?P<share>\S+) %(?: \((?P<full>\d+) of (?P<of>\d+) full\))?"
        r", (?P<waiting>\d+) waiting",
        _kv_full,
    ),
    "queue_long": (_QUEUES, _queues),
    "transfers_failing": (r"(?P<share>\S+) % of KV transfers failed \((?P<part>\d+) of (?P<of>\d+)\)", _failing),
    "transfers_slow": (r"half of the KV transfers take over (?P<seconds>\S+ \w+)", _slow),
    "instances_dead": (_LESS, _not_there),
    "instances_unresponsive": (_LESS, _not_there),
    "instances_missing": (_LESS, _not_there),
    "policies_not_followed": (r"policies not followed by (?P<who>.*)", _policies),
    "predictor_fallback": (r"(?P<share>\S+) % of output lengths not predicted(?: by the classifier)?", _fallback),
}

# The verdict as a whole.

_OPEN_S = 2.0  # loads, and so the jobs that are there now, may be so old
_WORDS = {Level.GOOD: "Good", Level.IDLE: "Idle", Level.DEGRADED: "Degraded", Level.DOWN: "Down"}


def figures(verdict: Verdict, known: Known) -> list[Figure]:
    return [
        *_counts(verdict, known),
        *_headline(verdict, known),
        *_chain(verdict, known),
        *(figure for problem in verdict.problems for figure in of_problem(problem, verdict, known)),
    ]


def _counts(verdict: Verdict, known: Known) -> Iterator[Figure]:
    for role, want in known.counts.items():
        said = verdict.counts[role]
        for name in ("ready", "expected", "dead", "unresponsive", "draining", "starting", "missing"):
            yield same(f"{role.value} {name}", getattr(said, name), getattr(want, name))


def _headline(verdict: Verdict, known: Known) -> Iterator[Figure]:
    window = window_of(verdict)
    yield within("requests", verdict.requests, window.of(known.shots, lambda _: True))
    said = verdict.headline
    if verdict.problems:
        worst = Level.DOWN if any(one.level is Level.DOWN for one in verdict.problems) else Level.DEGRADED
        yield same("level", verdict.level, worst)
        more = len(verdict.problems) - 3
        parts = [one.text for one in verdict.problems[:3]] + ([f"{more} more"] if more > 0 else [])
        yield same("headline", said, f"{_WORDS[worst]}: {'; '.join(parts)}")
        return
    yield same("level", verdict.level, Level.GOOD)
    found = re.fullmatch(
        r"Good: (\d+) requests? ended in the last (\d+) s"
        r"(?:, TTFT met by (\S+) %, TPOT by (\S+) %, ITL by (\S+) %)?; (.*) ready",
        said,
    )
    if found is None:
        yield same("headline", said, "Good: … ended in the last … s …")
        return
    number, seconds, ttft, tpot, itl, ready = found.groups()
    yield same("headline requests", number, str(verdict.requests))
    yield same("headline window", seconds, f"{verdict.window_s:.0f}")
    if ttft is not None:
        yield percent("headline TTFT", ttft, ttft_met(window, known.shots))
        yield percent("headline TPOT", tpot, tpot_met(window, known.shots))
        yield percent("headline ITL", itl, gaps_met(window, known.shots))
    there = ", ".join(f"{count.ready} {role.value}" for role, count in known.counts.items() if count.ready)
    yield same("headline ready", ready, there)


def _chain(verdict: Verdict, known: Known) -> Iterator[Figure]:
    window = window_of(verdict)
    most = window.of(known.shots, lambda _: True)[1]
    ended = [shot for shot in known.shots if shot.ended_s and window.start_s - STAMP_S <= shot.ended_s <= window.end_s]
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
