"""Every figure of a verdict beside what the stager knows by itself. Pure."""

import re
from collections.abc import Iterator

from lab.bench.troubles_known import (
    HISTOGRAM,
    OWN_S,
    STAMP_S,
    Figure,
    Known,
    about_median,
    gaps_met,
    is_refused,
    percent,
    same,
    tpot_met,
    ttft_met,
    window_of,
    within,
)
from lab.bench.troubles_problems import of_problem
from shared.domain.verdict import Level, Stage, Verdict

_OPEN_S = 2.0  # loads, and so the jobs that are there now, may be so old
_WORDS = {Level.GOOD: "Good", Level.IDLE: "Idle", Level.DEGRADED: "Degraded", Level.DOWN: "Down"}


def figures(verdict: Verdict, known: Known) -> list[Figure]:
    """All of them."""
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
