"""Why targets are missed and requests fail: the stage that takes the time, and what else is wrong there."""

from collections.abc import Mapping, Sequence

import msgspec

from shared.domain.situation import Situation
from shared.domain.verdict import Problem, Stage
from shared.domain.words import duration

_BEFORE_FIRST = (Stage.QUEUE, Stage.PREFILL, Stage.TRANSFER, Stage.DECODE_QUEUE)
_WORDS = {
    Stage.QUEUE: "requests wait for prefill",
    Stage.PREFILL: "prompts take long to compute",
    Stage.TRANSFER: "KV takes long to arrive",
    Stage.DECODE_QUEUE: "requests wait for room to decode",
    Stage.DECODE: "decode steps are slow: too many decodes share an instance, or prompts are computed beside them",
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
    "engine_failed": "their engine could not compute them",
    "lost": "their gateway is gone",
}


def why_ttft(problem: Problem, situation: Situation, found: Sequence[Problem]) -> Problem:
    """The stage before the first token with the most time in it, and what is wrong there."""
    return _by_stage(problem, situation, found, _longest(situation, _BEFORE_FIRST))


def why_tpot(problem: Problem, situation: Situation, found: Sequence[Problem]) -> Problem:
    """What keeps tokens after the first: room to decode, KV on its way, or the decode steps themselves."""
    blocked = next(
        (one for one in found if one.what in ("kv_full", "queue_long") and one.stage is Stage.DECODE_QUEUE), None
    )
    stage = Stage.DECODE_QUEUE if blocked else _longest(situation, (Stage.TRANSFER, Stage.DECODE_QUEUE, Stage.DECODE))
    return _by_stage(problem, situation, found, stage)


def why_errors(problem: Problem, situation: Situation, found: Sequence[Problem]) -> Problem:
    """The most common error, and the instances that are gone."""
    return _by_code(problem, situation.failed, _FAILED, found)


def why_refusals(problem: Problem, situation: Situation, found: Sequence[Problem]) -> Problem:
    """The most common refusal, and what is full."""
    return _by_code(problem, situation.refused, _REFUSED, found)


def _longest(situation: Situation, stages: Sequence[Stage]) -> Stage | None:
    spent = {stage: situation.stages[stage].total_s for stage in stages if stage in situation.stages}
    return max(spent, key=lambda stage: spent[stage]) if spent and max(spent.values()) > 0.0 else None


def _by_stage(problem: Problem, situation: Situation, found: Sequence[Problem], stage: Stage | None) -> Problem:
    if stage is None:
        return problem
    seen = situation.stages.get(stage)
    said = _WORDS[stage]
    if seen is not None and seen.p50_s is not None:
        said += f" ({stage.value.replace('_', ' ')}: {duration(seen.p50_s)} in the middle)"
    there = [one for one in found if _concerns(one, stage) and one.what != problem.what]
    there.sort(key=lambda one: one.stage is not stage)
    if there:
        said += "; " + "; ".join(_told(one) for one in there[:2])
    instances = next((one.instances for one in there if one.instances), ())
    return msgspec.structs.replace(problem, cause=said, stage=stage, instances=instances)


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
