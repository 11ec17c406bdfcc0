"""Why targets are missed and requests fail: the stage that takes the time, and what else is wrong there."""

from collections.abc import Mapping, Sequence

import msgspec

from shared.domain.situation import ClassSeen, Situation, StageSeen
from shared.domain.verdict import Problem, Stage
from shared.domain.words import duration

_AFTER_FIRST = (Stage.TRANSFER, Stage.DECODE_QUEUE, Stage.DECODE)
_BEFORE_FIRST = (Stage.QUEUE, Stage.PREFILL, Stage.TRANSFER, Stage.DECODE_QUEUE)
_WORDS = {
    Stage.QUEUE: "requests wait for prefill",
    Stage.PREFILL: "prompts take long to compute",
    Stage.TRANSFER: "KV takes long to arrive",
    Stage.DECODE_QUEUE: "requests wait for room to decode",
    Stage.DECODE: "decode steps are slow: too many decodes share an instance, or prompts are computed beside them",
}
_ELSEWHERE = {  # before the first token, at no instance's stage
    "intake": "the gateway takes long to read and tokenise",
    "placement": "requests wait for a place: for a scheduler, or for room",
    "handover": "instances take jobs late",
    "reply": "the gateway hears of first tokens late",
    "lost": "work was lost with instances, and done again",
}
_REFUSED = {
    "busy": "more at once than the gateway or a key may have",
    "overloaded": "the cluster is too full for the targets of their class",
    "delayed": "heavier classes took the room",
    "unavailable": "nothing to serve them was ready",
}
_FAILED = {
    "unavailable": "no instance took them in time",
    "deadline_exceeded": "they took longer than they may",
    "peer_lost": "their instances were lost",
    "instances_lost": "they lost one instance after the other",
    "engine_failed": "their engine could not compute them",
    "lost": "their gateway is gone",
}


def why_ttft(
    problem: Problem, situation: Situation, found: Sequence[Problem], missed: ClassSeen | None = None
) -> Problem:
    """What took the most time before the first tokens of the class that missed, and what is wrong there."""
    stages = _stages(situation, missed)
    spent = dict(missed.before_first) if missed is not None else {}
    spent = spent or {stage.value: stages[stage].total_s for stage in _BEFORE_FIRST if stage in stages}
    longest = _longest(spent)
    if longest in _ELSEWHERE:
        share = spent[longest] / sum(spent.values())
        return msgspec.structs.replace(problem, cause=f"{_ELSEWHERE[longest]} ({100 * share:.0f} % of the time)")
    return _by_stage(problem, stages, found, Stage(longest) if longest in set(Stage) else None)


def why_tpot(
    problem: Problem, situation: Situation, found: Sequence[Problem], missed: ClassSeen | None = None
) -> Problem:
    """What keeps tokens after the first: room to decode, KV on its way, or the decode steps themselves."""
    stages = _stages(situation, missed)
    before = missed.before_first if missed is not None else {}
    blocked = next(
        (one for one in found if one.what in ("kv_full", "queue_long") and one.stage is Stage.DECODE_QUEUE), None
    )
    if blocked:
        return _by_stage(problem, stages, found, Stage.DECODE_QUEUE)
    after = {one.value: stages[one].total_s - before.get(one.value, 0.0) for one in _AFTER_FIRST if one in stages}
    longest = _longest(after)
    return _by_stage(problem, stages, found, Stage(longest) if longest else None)


def why_errors(problem: Problem, situation: Situation, found: Sequence[Problem]) -> Problem:
    """The most common error, and the instances that are gone."""
    return _by_code(problem, situation.failed, _FAILED, found)


def why_refusals(problem: Problem, situation: Situation, found: Sequence[Problem]) -> Problem:
    """The most common refusal, and what is full."""
    return _by_code(problem, situation.refused, _REFUSED, found)


def _stages(situation: Situation, missed: ClassSeen | None) -> Mapping[Stage, StageSeen]:
    """Of the class that missed: others may wait where it does not."""
    return missed.stages if missed is not None and missed.stages else situation.stages


def _longest(spent: Mapping[str, float]) -> str:
    """Where the most time went; empty where none did."""
    return max(spent, key=lambda each: spent[each]) if spent and max(spent.values()) > 0.0 else ""


def _by_stage(
    problem: Problem, stages: Mapping[Stage, StageSeen], found: Sequence[Problem], stage: Stage | None
) -> Problem:
    if stage is None:
        return problem
    seen = stages.get(stage)
    said = _WORDS[stage]
    if seen is not None and seen.p50_s is not None:
        said += f" ({stage.value.replace('_', ' ')}: {duration(seen.p50_s)} in the middle{_worst(seen)})"
    there = [one for one in found if _concerns(one, stage) and one.what != problem.what]
    there.sort(key=lambda one: one.stage is not stage)
    if there:
        said += "; " + "; ".join(_told(one) for one in there[:2])
    instances = next((one.instances for one in there if one.instances), ())
    return msgspec.structs.replace(problem, cause=said, stage=stage, instances=instances)


def _worst(seen: StageSeen) -> str:
    """Where a few wait long and most do not at all, the middle alone would say that nobody does."""
    return f", {duration(seen.p99_s)} at the 99th percentile" if seen.p99_s is not None else ""


def _concerns(one: Problem, stage: Stage) -> bool:
    """Whether a problem is at a stage, or at the instances that do its work."""
    if one.stage is None:
        return False
    prefill = (Stage.QUEUE, Stage.PREFILL)
    return (one.stage in prefill) == (stage in prefill) and (one.stage is Stage.TRANSFER) == (stage is Stage.TRANSFER)


def _told(one: Problem) -> str:
    return f"{one.text} ({one.cause})" if one.instances else one.text


def _by_code(
    problem: Problem, counts: Mapping[str, int], words: Mapping[str, str], found: Sequence[Problem]
) -> Problem:
    code = max(counts, key=lambda one: counts[one])
    said = f"{words.get(code, code)} ({counts[code]} {code})"
    gone = [one for one in found if one.what in ("role_empty", "instances_dead", "kv_full", "queue_long")]
    if gone:
        said += "; " + "; ".join(_told(one) for one in gone[:2])
    instances = gone[0].instances if gone else ()
    return msgspec.structs.replace(problem, cause=said, instances=instances)
