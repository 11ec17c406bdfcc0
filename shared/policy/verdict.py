"""The verdict on the cluster: what is wrong and why, the chain of stages, and all of it in one sentence."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from shared.domain.instance import InstanceState, Role
from shared.domain.verdict import (
    ClassSeen,
    Count,
    Level,
    Link,
    Peer,
    Problem,
    Situation,
    Stage,
    StageSeen,
    Standing,
    Thresholds,
    Verdict,
    duration,
    size,
)

# MERGED verdict_causes.py
# Why targets are missed and requests fail: the stage that takes the time, and what else is wrong there.


_AFTER_FIRST = (Stage.TRANSFER, Stage.DECODE_QUEUE, Stage.DECODE)
_BEFORE_FIRST = (Stage.QUEUE, Stage.PREFILL, Stage.TRANSFER, Stage.DECODE_QUEUE)
_STAGE_NAMES = {
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
    said = _STAGE_NAMES[stage]
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


# MERGED verdict_checks.py
# What can be wrong with a cluster: one check each, from what is known to problems.


_FAULTS = {  # of KV transfers; `services.worker.kv.errors.KvFault` has all of them
    "unreachable": "prefill instances cannot be reached for KV",
    "peer_lost": "KV connections break",
    "timeout": "KV does not come, or not in time",
    "checksum": "KV arrives damaged",
    "protocol": "KV arrives damaged",
    "refused": "prefill instances have no room to stage KV",
    "expired_lease": "KV is fetched too late",
    "stale_generation": "prefill instances were restarted",
}
ALIVE = (InstanceState.READY, InstanceState.DRAINING)


def results(situation: Situation, limits: Thresholds) -> Iterator[Problem]:
    """Requests that failed or were refused, and whether any was served at all."""
    failed, refused = sum(situation.failed.values()), sum(situation.refused.values())
    asked = situation.completed + failed + refused
    if failed + refused >= limits.least_requests and not situation.completed:
        text = f"none of {asked} requests was served in the last {situation.window_s:.0f} s"
        yield Problem("nothing_served", Level.DOWN, text, _most_common(situation), value=0.0)
    elif stuck(situation, limits):
        text = (
            f"{situation.placed} requests were placed in the last {situation.window_s:.0f} s and none is being computed"
        )
        yield Problem("nothing_served", Level.DOWN, text, value=0.0)
    if asked < limits.least_requests:
        return
    if failed > limits.errors * asked:
        text = f"{_share(failed / asked)} of requests failed ({failed} of {asked})"
        yield Problem("errors", Level.DEGRADED, text, value=failed / asked, limit=limits.errors)
    if refused > limits.refusals * asked:
        text = f"{_share(refused / asked)} of requests refused ({refused} of {asked})"
        yield Problem("refusals", Level.DEGRADED, text, value=refused / asked, limit=limits.refusals)


def stuck(situation: Situation, limits: Thresholds) -> bool:
    """Whether requests were placed and neither end nor are computed."""
    ended = situation.completed + situation.cancelled + sum(situation.failed.values())
    alive = [one for one in situation.instances if one.state in ALIVE]
    return situation.placed >= limits.least_requests and not ended and not any(one.running for one in alive)


def standing(situation: Situation, counts: dict[Role, Count], limits: Thresholds) -> Iterator[Problem]:
    """Instances that are not what they should be."""
    for role, count in counts.items():
        if count.expected and not count.ready and (problem := _empty(role, count, counts)) is not None:
            yield problem
        for what, state, words in (
            ("instances_dead", InstanceState.DEAD, "dead"),
            ("instances_unresponsive", InstanceState.UNRESPONSIVE, "unresponsive"),
        ):
            names = tuple(
                sorted(one.instance_id for one in situation.instances if (one.role, one.state) == (role, state))
            )
            if names:
                yield _not_there(what, role, names, count.expected, words)
        if count.missing:
            known = {one.instance_id for one in situation.instances}
            absent = sorted(name for name, its in situation.expected.items() if its is role and name not in known)
            yield _not_there("instances_missing", role, tuple(absent), count.expected, "never came")


def followed(situation: Situation, limits: Thresholds) -> Iterator[Problem]:
    """Schedulers and instances that do not go by the policies in force."""
    alive = [one for one in situation.instances if one.state in ALIVE]
    behind = tuple(sorted(one.instance_id for one in alive if one.trouble or one.behind_s > limits.policies_s))
    late = tuple(peer.name for peer in situation.schedulers if peer.trouble or peer.behind_s > limits.policies_s)
    if behind or late:
        said = [one.trouble for one in alive if one.trouble]
        said += [peer.trouble for peer in situation.schedulers if peer.trouble]
        text = f"policies not followed by {_listed((*late, *behind))}"
        cause = said[0] if said else "they go by older ones"
        yield Problem("policies_not_followed", Level.DEGRADED, text, cause, instances=behind)


def _empty(role: Role, count: Count, counts: dict[Role, Count]) -> Problem | None:
    """Without prefill instances decode instances compute whole jobs; without decode instances nothing is served."""
    if count.starting and not (count.dead or count.unresponsive or count.draining or count.missing):
        return None  # on their way up
    works = role is Role.PREFILL and counts[Role.DECODE].ready > 0
    level = Level.DEGRADED if works else Level.DOWN
    cause = "decode instances compute prompts, too" if works else _why_empty(count)
    stage = Stage.PREFILL if role is Role.PREFILL else Stage.DECODE
    return Problem("role_empty", level, f"no {role.value} instance is ready", cause, stage, value=0.0, limit=1.0)


def _why_empty(count: Count) -> str:
    states = ("dead", "unresponsive", "draining", "starting", "missing")
    return ", ".join(f"{number} {state}" for state in states if (number := getattr(count, state)))


def _not_there(what: str, role: Role, names: tuple[str, ...], expected: int, words: str) -> Problem:
    plural = "s" if expected != 1 else ""
    text = f"{len(names)} of {expected} {role.value} instance{plural} {words}"
    stage = Stage.PREFILL if role is Role.PREFILL else Stage.DECODE
    return Problem(what, Level.DEGRADED, text, _listed(names), stage, names, float(len(names)), 0.0)


def peers(situation: Situation, limits: Thresholds) -> Iterator[Problem]:
    """Gateways and schedulers that are not heard of any more, and predictors that only guess."""
    for what, kind, known in (
        ("gateway_gone", "gateway", situation.gateways),
        ("scheduler_gone", "scheduler", situation.schedulers),
    ):
        gone = [peer for peer in known if peer.silent_s > limits.gone_s]
        if gone and (what != "gateway_gone" or _heard(situation.schedulers, limits)):
            yield _gone(what, kind, gone, len(known), limits)
    asked = sum(situation.predictions.values())
    guessed = asked - situation.predictions.get("classifier", 0)
    if asked >= limits.least_requests and guessed > limits.fallback_share * asked:
        none = situation.predictions.get("none", 0)
        cause = "no predictor answers" if none > guessed / 2 else "its classifier does not answer, or is not believed"
        text = f"{_share(guessed / asked)} of output lengths not predicted"
        text += " by the classifier" if none < guessed else ""
        yield Problem(
            "predictor_fallback", Level.DEGRADED, text, cause, value=guessed / asked, limit=limits.fallback_share
        )


def _heard(schedulers: Sequence[Peer], limits: Thresholds) -> bool:
    """Whether somebody could tell of gateways: they are heard of through schedulers."""
    return any(peer.silent_s <= limits.gone_s for peer in schedulers)


def _gone(what: str, kind: str, gone: Sequence[Peer], known: int, limits: Thresholds) -> Problem:
    level = Level.DOWN if len(gone) == known else Level.DEGRADED
    silent_s = max(peer.silent_s for peer in gone)
    text = f"{len(gone)} of {known} {kind}{'s' if known != 1 else ''} silent for {silent_s:.0f} s"
    names = tuple(peer.name for peer in gone)
    return Problem(what, level, text, _listed(names), value=silent_s, limit=limits.gone_s)


def missed(situation: Situation, limits: Thresholds) -> Iterator[Problem]:
    """Targets that too few requests meet: of each kind the class that does worst."""
    several = len(situation.classes) > 1
    one = worst_ttft(situation, limits)
    if one is not None and _ttft_met(one) < limits.attainment:
        text = _missed("TTFT", _ttft_met(one), one.ttft_target_s, one.slo if several else "", limits)
        yield Problem("ttft_missed", Level.DEGRADED, text, value=_ttft_met(one), limit=limits.attainment)
    one = worst_tpot(situation, limits)
    if one is not None and _tpot_met(one) < limits.attainment:
        text = _missed("TPOT", _tpot_met(one), one.tpot_target_s, one.slo if several else "", limits)
        yield Problem("tpot_missed", Level.DEGRADED, text, value=_tpot_met(one), limit=limits.attainment)

    one = worst_itl(situation, limits)
    if one is not None and _itl_met(one) < limits.attainment:
        text = _missed("ITL", _itl_met(one), one.itl_target_s, one.slo if several else "", limits)
        yield Problem("itl_missed", Level.DEGRADED, text, value=_itl_met(one), limit=limits.attainment)


def worst_ttft(situation: Situation, limits: Thresholds) -> ClassSeen | None:
    """The class whose TTFT target is met by the fewest; None while too little ended."""
    return min(_judged(situation, limits), key=_ttft_met, default=None)


def worst_tpot(situation: Situation, limits: Thresholds) -> ClassSeen | None:
    """The class whose TPOT target is met by the fewest; None while too little ended."""
    return min(_judged(situation, limits), key=_tpot_met, default=None)


def worst_itl(situation: Situation, limits: Thresholds) -> ClassSeen | None:
    """The class whose target for the gaps between tokens is met by the fewest; None while too little ended."""
    return min(_judged(situation, limits), key=_itl_met, default=None)


def _judged(situation: Situation, limits: Thresholds) -> list[ClassSeen]:
    return [one for one in situation.classes if one.requests >= limits.least_requests]


def _missed(words: str, share: float, target_s: float | None, slo: str, limits: Thresholds) -> str:
    said = _share(share) if 100.0 * share <= round(100.0 * limits.attainment) - 0.5 else f"{100.0 * share:.4g} %"
    about = [f"target {duration(target_s)}"] if target_s is not None else []
    about += [f"class {slo}"] if slo else []
    return f"{words} met by {said}" + (f" ({', '.join(about)})" if about else "")


def _ttft_met(one: ClassSeen) -> float:
    return 1.0 if one.ttft_met is None else one.ttft_met


def _tpot_met(one: ClassSeen) -> float:
    return 1.0 if one.tpot_met is None else one.tpot_met


def _itl_met(one: ClassSeen) -> float:
    return 1.0 if one.itl_met is None else one.itl_met


def capacity(situation: Situation, limits: Thresholds) -> Iterator[Problem]:
    """KV memory and queues by role."""
    for role in Role:
        there = [one for one in situation.instances if one.role is role and one.state in ALIVE]
        if not there:
            continue
        waiting = sum(one.waiting for one in there)
        full = [one for one in there if one.kv_used is not None and one.kv_used >= limits.kv_used and one.waiting]
        stage = Stage.QUEUE if role is Role.PREFILL else Stage.DECODE_QUEUE
        if full:
            used = sum(one.kv_used or 0.0 for one in there) / len(there)
            of = "" if len(full) == len(there) else f" ({len(full)} of {len(there)} full)"
            text = f"{role.value} KV {_share(used)}{of}, {waiting} waiting"
            names = tuple(sorted(one.instance_id for one in full))
            yield Problem("kv_full", Level.DEGRADED, text, _listed(names), stage, names, used, limits.kv_used)
        elif role is Role.DECODE and (problem := _decodes_wait(there, waiting, limits)) is not None:
            yield problem
        if role is Role.PREFILL and (long := _prompts_wait(situation, there, limits)) is not None:
            yield long


def _decodes_wait(there: Sequence[Standing], waiting: int, limits: Thresholds) -> Problem | None:
    queued = waiting - sum(one.importing for one in there)
    running = sum(one.running for one in there)
    if queued < limits.least_requests or queued <= limits.waiting_share * running:
        return None
    names = tuple(sorted(one.instance_id for one in there if one.waiting > limits.waiting_share * one.running))
    text = f"{_number(queued, 'decode')} wait{_s(queued)} beside {running} that run"
    share = queued / running if running else float(queued)
    return Problem(
        "queue_long", Level.DEGRADED, text, _listed(names), Stage.DECODE_QUEUE, names, share, limits.waiting_share
    )


def _prompts_wait(situation: Situation, there: Sequence[Standing], limits: Thresholds) -> Problem | None:
    targets = [one.ttft_target_s for one in situation.classes if one.requests and one.ttft_target_s]
    limit_s = limits.queue_share * min(targets, default=2.0)
    long = [one for one in there if one.queue_s > limit_s]
    if not long:
        return None
    most, jobs = max(one.queue_s for one in long), sum(one.queued_prefill for one in there)
    names = tuple(sorted(one.instance_id for one in long))
    where = f"{len(long)} of {_number(len(there), 'prefill instance')}"
    text = f"{_number(jobs, 'prompt')} wait{_s(jobs)} for up to {duration(most)} at {where}"
    return Problem("queue_long", Level.DEGRADED, text, _listed(names), Stage.QUEUE, names, most, limit_s)


def transfers(situation: Situation, limits: Thresholds) -> Iterator[Problem]:
    """KV that does not come, or late."""
    number, failed = situation.transfers, situation.transfers_failed
    if number >= limits.least_requests and failed > limits.transfers_failing * number:
        text = f"{_share(failed / number)} of KV transfers failed ({failed} of {number})"
        cause = "; ".join(filter(None, (_fault(situation), "decode instances compute these prompts again")))
        yield Problem(
            "transfers_failing",
            Level.DEGRADED,
            text,
            cause,
            Stage.TRANSFER,
            (),
            failed / number,
            limits.transfers_failing,
        )
    seen = situation.stages.get(Stage.TRANSFER)
    targets = [one.ttft_target_s for one in situation.classes if one.requests and one.ttft_target_s]
    if seen is None or seen.p50_s is None or not targets or seen.requests < limits.least_requests:
        return
    limit_s = limits.transfers_share * min(targets)
    if seen.p50_s > limit_s:
        text = f"half of the KV transfers take over {duration(seen.p50_s)}"
        cause = _carried(situation, seen)
        yield Problem("transfers_slow", Level.DEGRADED, text, cause, Stage.TRANSFER, (), seen.p50_s, limit_s)


def _carried(situation: Situation, seen: StageSeen) -> str:
    """Whether there is much to carry, or little comes through."""
    if not situation.transfers or not situation.transfer_bytes or seen.total_s <= 0.0:
        return ""
    each = situation.transfer_bytes / situation.transfers
    return f"{size(each)} each on average, at {size(situation.transfer_bytes / seen.total_s)}/s"


def _fault(situation: Situation) -> str:
    """What most of the transfers failed by."""
    if not situation.transfer_faults:
        return ""
    code = max(situation.transfer_faults, key=lambda one: situation.transfer_faults[one])
    return f"{_FAULTS.get(code, code)} ({situation.transfer_faults[code]} {code})"


def _number(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _s(number: int) -> str:
    """The end of a verb of which so many are the subject."""
    return "s" if number == 1 else ""


def _share(share: float) -> str:
    percent = 100.0 * share
    return f"{percent:.0f} %" if percent >= 1.0 or percent == 0.0 else f"{percent:.1g} %"


def _listed(names: Sequence[str], most: int = 4) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _most_common(situation: Situation) -> str:
    counts = situation.failed | situation.refused
    return f"most of them: {max(counts, key=lambda code: counts[code])}" if counts else ""


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
_LEVEL_NAMES = {Level.GOOD: "Good", Level.IDLE: "Idle", Level.DEGRADED: "Degraded", Level.DOWN: "Down"}


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
        return f"{_LEVEL_NAMES[level]}: {named}" + (f"; {more} more" if more > 0 else "")
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
