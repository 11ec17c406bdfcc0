"""The verdict on the cluster: what is wrong and why, the chain of stages, and all of it in one sentence."""

from collections.abc import Iterable, Sequence

from shared.domain.instance import InstanceState, Role
from shared.domain.situation import Situation, Standing
from shared.domain.verdict import Count, Level, Link, Problem, Stage, Thresholds, Verdict
from shared.policy.verdict_causes import why_errors, why_refusals, why_tpot, why_ttft
from shared.policy.verdict_checks import (
    capacity,
    followed,
    missed,
    peers,
    results,
    standing,
    transfers,
    worst_itl,
    worst_tpot,
    worst_ttft,
)

NAMED = 3  # problems of which the headline tells
_ORDER = (  # of problems of one level
    "nothing_served",
    "role_empty",
    "scheduler_gone",
    "gateway_gone",
    "ttft_missed",
    "tpot_missed",
    "itl_missed",
    "errors",
    "refusals",
    "kv_full",
    "queue_long",
    "transfers_failing",
    "transfers_slow",
    "instances_dead",
    "instances_unresponsive",
    "instances_missing",
    "policies_not_followed",
    "predictor_fallback",
)
_SEVERITY = {Level.DOWN: 0, Level.DEGRADED: 1, Level.IDLE: 2, Level.GOOD: 3}
_WORDS = {Level.GOOD: "Good", Level.IDLE: "Idle", Level.DEGRADED: "Degraded", Level.DOWN: "Down"}


def judge(situation: Situation, thresholds: Thresholds) -> Verdict:
    """All of it; a pure function of what is known."""
    counts = counts_of(situation, thresholds)
    found = [
        *results(situation, thresholds),
        *standing(situation, counts, thresholds),
        *followed(situation, thresholds),
        *peers(situation, thresholds),
        *missed(situation, thresholds),
        *capacity(situation, thresholds),
        *transfers(situation, thresholds),
    ]
    problems = _ordered(_with_cause(problem, situation, found, thresholds) for problem in found)
    level = _level(situation, problems)
    return Verdict(
        situation.time_s,
        level,
        _headline(level, situation, problems, counts),
        problems,
        tuple(_link(stage, situation, problems) for stage in Stage),
        counts,
        situation.window_s,
        ended(situation),
        thresholds,
    )


def ended(situation: Situation) -> int:
    """Requests that ended in the window, however they did."""
    failed, refused = sum(situation.failed.values()), sum(situation.refused.values())
    return situation.completed + situation.cancelled + failed + refused


def counts_of(situation: Situation, thresholds: Thresholds) -> dict[Role, Count]:
    """Instances by role against those that should be there: all that are known, and those that never came.

    Until they are due, these count as starting.
    """
    known = {one.instance_id for one in situation.instances}
    absent = [role for instance_id, role in situation.expected.items() if instance_id not in known]
    late = situation.up_s >= thresholds.missing_s
    return {role: _count(role, situation.instances, absent.count(role), late=late) for role in Role}


def _count(role: Role, instances: Sequence[Standing], absent: int, *, late: bool) -> Count:
    states = [one.state for one in instances if one.role is role]
    return Count(
        ready=states.count(InstanceState.READY),
        expected=len(states) + absent,
        dead=states.count(InstanceState.DEAD),
        unresponsive=states.count(InstanceState.UNRESPONSIVE),
        draining=states.count(InstanceState.DRAINING),
        starting=states.count(InstanceState.STARTING) + (0 if late else absent),
        missing=absent if late else 0,
    )


def _with_cause(problem: Problem, situation: Situation, found: Sequence[Problem], limits: Thresholds) -> Problem:
    match problem.what:
        case "ttft_missed":
            return why_ttft(problem, situation, found, worst_ttft(situation, limits))
        case "tpot_missed":
            return why_tpot(problem, situation, found, worst_tpot(situation, limits))
        case "itl_missed":
            return why_tpot(problem, situation, found, worst_itl(situation, limits))
        case "errors":
            return why_errors(problem, situation, found)
        case "refusals":
            return why_refusals(problem, situation, found)
    return problem


def _ordered(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    return tuple(sorted(problems, key=lambda one: (_SEVERITY[one.level], _ORDER.index(one.what))))


def _level(situation: Situation, problems: Sequence[Problem]) -> Level:
    if problems:
        return min((problem.level for problem in problems), key=_SEVERITY.__getitem__)
    if ended(situation) or situation.placed or any(one.inflight for one in situation.instances):
        return Level.GOOD
    return Level.IDLE


def _headline(level: Level, situation: Situation, problems: Sequence[Problem], counts: dict[Role, Count]) -> str:
    if problems:
        more = len(problems) - NAMED
        named = "; ".join(problem.text for problem in problems[:NAMED])
        return f"{_WORDS[level]}: {named}" + (f"; {more} more" if more > 0 else "")
    ready = ", ".join(f"{counts[role].ready} {role.value}" for role in Role if counts[role].ready)
    there = f"{ready} ready" if ready else "no instances yet"
    if level is Level.IDLE:
        return f"Idle: nothing asked for in the last {situation.window_s:.0f} s; {there}"
    number = ended(situation)
    said = f"{number} request{'' if number == 1 else 's'} ended in the last {situation.window_s:.0f} s"
    return f"Good: {said}{_met(situation)}; {there}"


def _met(situation: Situation) -> str:
    judged = [one for one in situation.classes if one.requests and one.ttft_met is not None]
    total = sum(one.requests for one in judged)
    if not total:
        return ""
    ttft = sum(one.requests * (one.ttft_met or 0.0) for one in judged) / total
    tpot = sum(one.requests * (1.0 if one.tpot_met is None else one.tpot_met) for one in judged) / total
    itl = sum(one.requests * (1.0 if one.itl_met is None else one.itl_met) for one in judged) / total
    return f", TTFT met by {100 * ttft:.0f} %, TPOT by {100 * tpot:.0f} %, ITL by {100 * itl:.0f} %"


def _link(stage: Stage, situation: Situation, problems: Sequence[Problem]) -> Link:
    seen = situation.stages.get(stage)
    now = sum(_there(stage, one) for one in situation.instances)
    levels = [problem.level for problem in problems if problem.stage is stage]
    calm = Level.GOOD if now or seen is not None else Level.IDLE
    level = min(levels, key=_SEVERITY.__getitem__, default=calm)
    if seen is None:
        return Link(stage, now=now, level=level)
    share = seen.total_s / situation.spent_s if situation.spent_s > 0.0 else None
    return Link(stage, seen.requests, seen.p50_s, seen.p99_s, share, now, level)


def _there(stage: Stage, one: Standing) -> int:
    """Jobs of one instance that are in a stage at the moment."""
    if one.state in (InstanceState.DEAD, InstanceState.STARTING):
        return 0
    prefills = one.role is Role.PREFILL
    computed = min(one.running, one.queued_prefill) if prefills else 0
    match stage:
        case Stage.QUEUE:
            return one.queued_prefill - computed if prefills else 0
        case Stage.PREFILL:
            return computed
        case Stage.TRANSFER:
            return 0 if prefills else one.importing
        case Stage.DECODE_QUEUE:
            return 0 if prefills else max(0, one.waiting - one.importing)
    return 0 if prefills else one.running
