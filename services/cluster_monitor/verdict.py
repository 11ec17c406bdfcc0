"""The verdict on the cluster: its problems and their causes, the chain of stages, and a headline.

`judge` is the entry point, a pure function of a `Situation`. First the checks yield problems, each from what is known
of the cluster; then the problems that clients notice (missed targets, errors, refusals) get a cause: the stage that
took the most time, and the problems that were found there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import msgspec

from shared.domain.instance import InstanceState, Role
from shared.domain.verdict import (
    ClassSeen,
    Count,
    Level,
    Link,
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

NAMED = 3  # problems that the headline names
_ORDER = (  # of the problems of one level
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
_AFTER_FIRST = (Stage.TRANSFER, Stage.DECODE_QUEUE, Stage.DECODE)
_BEFORE_FIRST = (Stage.QUEUE, Stage.PREFILL, Stage.TRANSFER, Stage.DECODE_QUEUE)
_STAGE_NAMES = {
    Stage.QUEUE: "requests wait for prefill",
    Stage.PREFILL: "prompts take long to compute",
    Stage.TRANSFER: "KV takes long to arrive",
    Stage.DECODE_QUEUE: "requests wait for room to decode",
    Stage.DECODE: "decode steps are slow: too many decodes share an instance, or prompts are computed beside them",
}
_ELSEWHERE = {  # time before the first token that is not spent in a stage of an instance
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
_FAULTS = {  # of KV transfers, by `services.worker.kv.KvFault`
    "unreachable": "prefill instances cannot be reached for KV",
    "peer_lost": "KV connections break",
    "timeout": "KV does not come, or not in time",
    "checksum": "KV arrives damaged",
    "protocol": "KV arrives damaged",
    "refused": "prefill instances have no room to stage KV",
    "expired_lease": "KV is fetched too late",
    "stale_generation": "prefill instances were restarted",
}
_ALIVE = (InstanceState.READY, InstanceState.DRAINING)
_STAGE_OF = {Role.PREFILL: Stage.PREFILL, Role.DECODE: Stage.DECODE}


class _Target(NamedTuple):
    """One of the targets of a class: the code of the problem that it is missed, and how the class meets it."""

    what: str
    name: str
    met: Callable[[ClassSeen], float | None]
    target_s: Callable[[ClassSeen], float | None]

    def share(self, seen: ClassSeen) -> float:
        """Share of the requests that met it; 1 where that is not known."""
        met = self.met(seen)
        return 1.0 if met is None else met

    def worst(self, situation: Situation, limits: Thresholds) -> ClassSeen | None:
        """The class in which the fewest requests meet it; None while too few requests ended."""
        enough = [one for one in situation.classes if one.requests >= limits.least_requests]
        return min(enough, key=self.share, default=None)


_TARGETS = (
    _Target("ttft_missed", "TTFT", attrgetter("ttft_met"), attrgetter("ttft_target_s")),
    _Target("tpot_missed", "TPOT", attrgetter("tpot_met"), attrgetter("tpot_target_s")),
    _Target("itl_missed", "ITL", attrgetter("itl_met"), attrgetter("itl_target_s")),
)


def judge(situation: Situation, thresholds: Thresholds) -> Verdict:
    counts = counts_of(situation, thresholds)
    found = [
        *_results(situation, thresholds),
        *_instances(situation, counts),
        *_policies_followed(situation, thresholds),
        *_peers(situation, thresholds),
        *_missed_targets(situation, thresholds),
        *_capacity(situation, thresholds),
        *_transfers(situation, thresholds),
    ]
    now = _jobs_by_stage(situation.instances)
    explained = (_with_cause(problem, situation, found, thresholds) for problem in found)
    problems = tuple(sorted(explained, key=lambda one: (_SEVERITY[one.level], _ORDER.index(one.what))))
    level = _level(situation, problems)
    return Verdict(
        time_s=situation.time_s,
        level=level,
        headline=_headline(level, situation, problems, counts),
        problems=problems,
        chain=tuple(_link(stage, now[stage], situation, problems) for stage in Stage),
        counts=counts,
        window_s=situation.window_s,
        requests=ended(situation),
        thresholds=thresholds,
    )


def ended(situation: Situation) -> int:
    """Number of requests that ended in the window, in whatever way."""
    failed, refused = sum(situation.failed.values()), sum(situation.refused.values())
    return situation.completed + situation.cancelled + failed + refused


def counts_of(situation: Situation, thresholds: Thresholds) -> dict[Role, Count]:
    """Instances by role and state. Expected instances that have not registered count as missing from `missing_s` after
    the monitor's start on, and before that as starting.
    """
    known = {one.instance_id for one in situation.instances}
    absent = [role for instance_id, role in situation.expected.items() if instance_id not in known]
    late = situation.up_s >= thresholds.missing_s
    counts = {}
    for role in Role:
        states = [one.state for one in situation.instances if one.role is role]
        counts[role] = Count(
            ready=states.count(InstanceState.READY),
            expected=len(states) + absent.count(role),
            dead=states.count(InstanceState.DEAD),
            unresponsive=states.count(InstanceState.UNRESPONSIVE),
            draining=states.count(InstanceState.DRAINING),
            starting=states.count(InstanceState.STARTING) + (0 if late else absent.count(role)),
            missing=absent.count(role) if late else 0,
        )
    return counts


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
    ttft, tpot, itl = (100 * sum(one.requests * target.share(one) for one in judged) / total for target in _TARGETS)
    return f", TTFT met by {ttft:.0f} %, TPOT by {tpot:.0f} %, ITL by {itl:.0f} %"


def _link(stage: Stage, now: int, situation: Situation, problems: Sequence[Problem]) -> Link:
    seen = situation.stages.get(stage)
    levels = [problem.level for problem in problems if problem.stage is stage]
    calm = Level.GOOD if now or seen is not None else Level.IDLE
    level = min(levels, key=_SEVERITY.__getitem__, default=calm)
    if seen is None:
        return Link(stage, now=now, level=level)
    share = seen.total_s / situation.spent_s if situation.spent_s > 0.0 else None
    return Link(stage, seen.requests, seen.p50_s, seen.p99_s, share, now, level)


def _jobs_by_stage(instances: Iterable[Standing]) -> dict[Stage, int]:
    """Number of jobs that are in each stage now."""
    queue = prefill = transfer = decode_queue = decode = 0
    for one in instances:
        if one.state is InstanceState.DEAD or one.state is InstanceState.STARTING:
            continue
        if one.role is Role.PREFILL:
            computed = min(one.running, one.queued_prefill)
            prefill += computed
            queue += one.queued_prefill - computed
        else:
            transfer += one.importing
            decode_queue += max(0, one.waiting - one.importing)
            decode += one.running
    return {
        Stage.QUEUE: queue,
        Stage.PREFILL: prefill,
        Stage.TRANSFER: transfer,
        Stage.DECODE_QUEUE: decode_queue,
        Stage.DECODE: decode,
    }


# The checks: each yields the problems of one aspect.


def _results(situation: Situation, limits: Thresholds) -> Iterator[Problem]:
    """Requests that failed or were refused, and whether any was served at all."""
    failed, refused = sum(situation.failed.values()), sum(situation.refused.values())
    asked, window = situation.completed + failed + refused, f"in the last {situation.window_s:.0f} s"
    if failed + refused >= limits.least_requests and not situation.completed:
        counts = situation.failed | situation.refused
        text = f"none of {asked} requests was served {window}"
        yield Problem("nothing_served", Level.DOWN, text, f"most of them: {_most(counts)}", value=0.0)
    elif _is_stuck(situation, limits):
        text = f"{situation.placed} requests were placed {window} and none is being computed"
        yield Problem("nothing_served", Level.DOWN, text, value=0.0)
    if asked < limits.least_requests:
        return
    for what, number, limit, words in (
        ("errors", failed, limits.errors, f"failed ({failed} of {asked})"),
        ("refusals", refused, limits.refusals, f"refused ({refused} of {asked})"),
    ):
        if number > limit * asked:
            text = f"{_share(number / asked)} of requests {words}"
            yield Problem(what, Level.DEGRADED, text, value=number / asked, limit=limit)


def _is_stuck(situation: Situation, limits: Thresholds) -> bool:
    """Whether requests were placed that neither end nor are computed."""
    has_ended = situation.completed or situation.cancelled or sum(situation.failed.values())
    running = any(one.running for one in situation.instances if one.state in _ALIVE)
    return situation.placed >= limits.least_requests and not has_ended and not running


def _instances(situation: Situation, counts: dict[Role, Count]) -> Iterator[Problem]:
    """Roles without a ready instance; instances that are dead, unresponsive or missing."""
    known = {one.instance_id for one in situation.instances}
    for role, count in counts.items():
        if count.expected and not count.ready and (problem := _empty(role, count, counts)) is not None:
            yield problem
        by_state = {
            state: [one.instance_id for one in situation.instances if (one.role, one.state) == (role, state)]
            for state in (InstanceState.DEAD, InstanceState.UNRESPONSIVE)
        }
        missing = [name for name, its in situation.expected.items() if its is role and name not in known]
        for what, names, words in (
            ("instances_dead", by_state[InstanceState.DEAD], "dead"),
            ("instances_unresponsive", by_state[InstanceState.UNRESPONSIVE], "unresponsive"),
            ("instances_missing", missing if count.missing else [], "never came"),
        ):
            if names:
                text = f"{len(names)} of {_number(count.expected, f'{role.value} instance')} {words}"
                yield _of_instances(what, text, _STAGE_OF[role], names, value=float(len(names)), limit=0.0)


def _empty(role: Role, count: Count, counts: dict[Role, Count]) -> Problem | None:
    """The problem that a role has no ready instance; none while its instances start.

    Without prefill instances decode instances compute whole jobs; without decode instances no request is served.
    """
    if count.starting and not (count.dead or count.unresponsive or count.draining or count.missing):
        return None
    if role is Role.PREFILL and counts[Role.DECODE].ready > 0:
        level, cause = Level.DEGRADED, "decode instances compute prompts, too"
    else:
        states = ("dead", "unresponsive", "draining", "starting", "missing")
        level = Level.DOWN
        cause = ", ".join(f"{number} {state}" for state in states if (number := getattr(count, state)))
    text = f"no {role.value} instance is ready"
    return Problem("role_empty", level, text, cause, _STAGE_OF[role], value=0.0, limit=1.0)


def _policies_followed(situation: Situation, limits: Thresholds) -> Iterator[Problem]:
    """Schedulers and instances that do not follow the policies in force."""
    alive = [one for one in situation.instances if one.state in _ALIVE]
    behind = tuple(sorted(one.instance_id for one in alive if one.trouble or one.behind_s > limits.policies_s))
    late = tuple(peer.name for peer in situation.schedulers if peer.trouble or peer.behind_s > limits.policies_s)
    if behind or late:
        troubles = [*(one.trouble for one in alive), *(peer.trouble for peer in situation.schedulers)]
        text = f"policies not followed by {_listed((*late, *behind))}"
        cause = next(filter(None, troubles), "they go by older ones")
        yield Problem("policies_not_followed", Level.DEGRADED, text, cause, instances=behind)


def _peers(situation: Situation, limits: Thresholds) -> Iterator[Problem]:
    """Silent gateways and schedulers, and predictors that only guess.

    Gateways report through schedulers: while all schedulers are silent, nothing is known of gateways.
    """
    informed = any(peer.silent_s <= limits.gone_s for peer in situation.schedulers)
    for what, kind, known in (
        ("gateway_gone", "gateway", situation.gateways if informed else ()),
        ("scheduler_gone", "scheduler", situation.schedulers),
    ):
        gone = [peer for peer in known if peer.silent_s > limits.gone_s]
        if gone:
            level = Level.DOWN if len(gone) == len(known) else Level.DEGRADED
            silent_s = max(peer.silent_s for peer in gone)
            text = f"{len(gone)} of {_number(len(known), kind)} silent for {silent_s:.0f} s"
            cause = _listed([peer.name for peer in gone])
            yield Problem(what, level, text, cause, value=silent_s, limit=limits.gone_s)
    asked = sum(situation.predictions.values())
    guessed = asked - situation.predictions.get("classifier", 0)
    if asked >= limits.least_requests and guessed > limits.fallback_share * asked:
        none = situation.predictions.get("none", 0)
        cause = "no predictor answers" if none > guessed / 2 else "its classifier does not answer, or is not believed"
        by = " by the classifier" if none < guessed else ""
        text, limit = f"{_share(guessed / asked)} of output lengths not predicted{by}", limits.fallback_share
        yield Problem("predictor_fallback", Level.DEGRADED, text, cause, value=guessed / asked, limit=limit)


def _missed_targets(situation: Situation, limits: Thresholds) -> Iterator[Problem]:
    """Targets that too few requests meet: of each kind the class that does worst."""
    for target in _TARGETS:
        worst = target.worst(situation, limits)
        if worst is None or (share := target.share(worst)) >= limits.attainment:
            continue
        near = 100.0 * share > round(100.0 * limits.attainment) - 0.5  # rounded it would look as if it were met
        text = f"{target.name} met by {f'{100.0 * share:.4g} %' if near else _share(share)}"
        target_s = target.target_s(worst)
        about = [f"target {duration(target_s)}"] if target_s is not None else []
        about += [f"class {worst.slo}"] if worst.slo and len(situation.classes) > 1 else []
        text += f" ({', '.join(about)})" if about else ""
        yield Problem(target.what, Level.DEGRADED, text, value=share, limit=limits.attainment)


def _capacity(situation: Situation, limits: Thresholds) -> Iterator[Problem]:
    """KV memory and queues by role."""
    for role in Role:
        there = [one for one in situation.instances if one.role is role and one.state in _ALIVE]
        if not there:
            continue
        full = [one for one in there if one.kv_used is not None and one.kv_used >= limits.kv_used and one.waiting]
        if full:
            used = sum(one.kv_used or 0.0 for one in there) / len(there)
            of = "" if len(full) == len(there) else f" ({len(full)} of {len(there)} full)"
            text = f"{role.value} KV {_share(used)}{of}, {sum(one.waiting for one in there)} waiting"
            stage = Stage.QUEUE if role is Role.PREFILL else Stage.DECODE_QUEUE
            names = [one.instance_id for one in full]
            yield _of_instances("kv_full", text, stage, names, value=used, limit=limits.kv_used)
        elif role is Role.DECODE:
            yield from _decode_queue(there, limits)
        if role is Role.PREFILL:
            yield from _prefill_queue(situation, there, limits)


def _decode_queue(there: Sequence[Standing], limits: Thresholds) -> Iterator[Problem]:
    queued = sum(one.waiting - one.importing for one in there)
    running = sum(one.running for one in there)
    if queued < limits.least_requests or queued <= limits.waiting_share * running:
        return
    names = [one.instance_id for one in there if one.waiting > limits.waiting_share * one.running]
    text = f"{_number(queued, 'decode')} wait{'s' if queued == 1 else ''} beside {running} that run"
    share = queued / running if running else float(queued)
    yield _of_instances("queue_long", text, Stage.DECODE_QUEUE, names, value=share, limit=limits.waiting_share)


def _prefill_queue(situation: Situation, there: Sequence[Standing], limits: Thresholds) -> Iterator[Problem]:
    targets = [one.ttft_target_s for one in situation.classes if one.requests and one.ttft_target_s]
    limit_s = limits.queue_share * min(targets, default=2.0)
    long = [one for one in there if one.queue_s > limit_s]
    if not long:
        return
    most, jobs = max(one.queue_s for one in long), sum(one.queued_prefill for one in there)
    where = f"{len(long)} of {_number(len(there), 'prefill instance')}"
    text = f"{_number(jobs, 'prompt')} wait{'s' if jobs == 1 else ''} for up to {duration(most)} at {where}"
    names = [one.instance_id for one in long]
    yield _of_instances("queue_long", text, Stage.QUEUE, names, value=most, limit=limit_s)


def _transfers(situation: Situation, limits: Thresholds) -> Iterator[Problem]:
    """KV transfers that fail or are slow."""
    number, failed = situation.transfers, situation.transfers_failed
    if number >= limits.least_requests and failed > limits.transfers_failing * number:
        text, limit = (
            f"{_share(failed / number)} of KV transfers failed ({failed} of {number})",
            limits.transfers_failing,
        )
        cause, faults = "decode instances compute these prompts again", situation.transfer_faults
        if faults:
            fault = _most(faults)
            cause = f"{_FAULTS.get(fault, fault)} ({faults[fault]} {fault}); {cause}"
        share = failed / number
        yield Problem("transfers_failing", Level.DEGRADED, text, cause, Stage.TRANSFER, value=share, limit=limit)
    seen = situation.stages.get(Stage.TRANSFER)
    targets = [one.ttft_target_s for one in situation.classes if one.requests and one.ttft_target_s]
    if seen is None or seen.p50_s is None or not targets or seen.requests < limits.least_requests:
        return
    limit_s = limits.transfers_share * min(targets)
    if seen.p50_s > limit_s:
        text, cause = f"half of the KV transfers take over {duration(seen.p50_s)}", ""
        if number and situation.transfer_bytes and seen.total_s > 0.0:  # is there much to carry, or a slow link?
            sent = situation.transfer_bytes
            cause = f"{size(sent / number)} each on average, at {size(sent / seen.total_s)}/s"
        yield Problem("transfers_slow", Level.DEGRADED, text, cause, Stage.TRANSFER, value=seen.p50_s, limit=limit_s)


# Causes of the problems that clients notice.


def _with_cause(problem: Problem, situation: Situation, found: Sequence[Problem], limits: Thresholds) -> Problem:
    if problem.what == "errors":
        return _by_code(problem, situation.failed, _FAILED, found)
    if problem.what == "refusals":
        return _by_code(problem, situation.refused, _REFUSED, found)
    for target in _TARGETS:
        if problem.what == target.what:
            why = _why_first_token_late if target.name == "TTFT" else _why_tokens_late
            return why(problem, situation, found, target.worst(situation, limits))
    return problem


def _why_first_token_late(
    problem: Problem, situation: Situation, found: Sequence[Problem], worst: ClassSeen | None
) -> Problem:
    """The stage that took the most time before the first tokens of the worst class, and what is wrong there."""
    stages = _stages(situation, worst)
    spent = dict(worst.before_first) if worst is not None else {}
    spent = spent or {stage.value: stages[stage].total_s for stage in _BEFORE_FIRST if stage in stages}
    longest = _longest(spent)
    if longest in _ELSEWHERE:
        share = spent[longest] / sum(spent.values())
        return msgspec.structs.replace(problem, cause=f"{_ELSEWHERE[longest]} ({100 * share:.0f} % of the time)")
    return _by_stage(problem, stages, found, Stage(longest) if longest in set(Stage) else None)


def _why_tokens_late(
    problem: Problem, situation: Situation, found: Sequence[Problem], worst: ClassSeen | None
) -> Problem:
    """What delays the tokens after the first: room to decode, KV on its way, or the decode steps themselves."""
    stages = _stages(situation, worst)
    if any(one.what in ("kv_full", "queue_long") and one.stage is Stage.DECODE_QUEUE for one in found):
        return _by_stage(problem, stages, found, Stage.DECODE_QUEUE)
    before = worst.before_first if worst is not None else {}
    after = {one.value: stages[one].total_s - before.get(one.value, 0.0) for one in _AFTER_FIRST if one in stages}
    longest = _longest(after)
    return _by_stage(problem, stages, found, Stage(longest) if longest else None)


def _stages(situation: Situation, worst: ClassSeen | None) -> Mapping[Stage, StageSeen]:
    """The stages of the class that misses its target; other classes may wait elsewhere."""
    return worst.stages if worst is not None and worst.stages else situation.stages


def _longest(spent: Mapping[str, float]) -> str:
    """Where the most time went; empty where none did."""
    return max(spent, key=lambda each: spent[each]) if spent and max(spent.values()) > 0.0 else ""


def _by_stage(
    problem: Problem, stages: Mapping[Stage, StageSeen], found: Sequence[Problem], stage: Stage | None
) -> Problem:
    """The problem with a stage as its cause, and the problems at that stage or at the instances of its role."""
    if stage is None:
        return problem
    seen, cause = stages.get(stage), _STAGE_NAMES[stage]
    if seen is not None and seen.p50_s is not None:
        # Where a few wait long and most do not at all, the median alone would hide it.
        tail = f", {duration(seen.p99_s)} at the 99th percentile" if seen.p99_s is not None else ""
        cause += f" ({stage.value.replace('_', ' ')}: {duration(seen.p50_s)} in the middle{tail})"
    there = [one for one in found if one.stage is not None and _together(one.stage, stage) and one.what != problem.what]
    there.sort(key=lambda one: one.stage is not stage)
    cause = "; ".join((cause, *map(_named, there[:2])))
    instances = next((one.instances for one in there if one.instances), ())
    return msgspec.structs.replace(problem, cause=cause, stage=stage, instances=instances)


def _together(one: Stage, other: Stage) -> bool:
    """Whether two stages are at the same instances: both of prefill, both transfers, or both of decode."""
    prefill = (Stage.QUEUE, Stage.PREFILL)
    return (one in prefill) == (other in prefill) and (one is Stage.TRANSFER) == (other is Stage.TRANSFER)


def _by_code(
    problem: Problem, counts: Mapping[str, int], words: Mapping[str, str], found: Sequence[Problem]
) -> Problem:
    """The problem with the most common error code as its cause, and what is gone or full."""
    code = _most(counts)
    gone = [one for one in found if one.what in ("role_empty", "instances_dead", "kv_full", "queue_long")]
    cause = "; ".join((f"{words.get(code, code)} ({counts[code]} {code})", *map(_named, gone[:2])))
    return msgspec.structs.replace(problem, cause=cause, instances=gone[0].instances if gone else ())


def _of_instances(what: str, text: str, stage: Stage, names: Iterable[str], *, value: float, limit: float) -> Problem:
    """A problem of some instances, with their names as its cause."""
    ordered = tuple(sorted(names))
    return Problem(what, Level.DEGRADED, text, _listed(ordered), stage, ordered, value, limit)


def _named(one: Problem) -> str:
    return f"{one.text} ({one.cause})" if one.instances else one.text


def _most(counts: Mapping[str, int]) -> str:
    return max(counts, key=lambda code: counts[code])


def _number(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _share(share: float) -> str:
    percent = 100.0 * share
    return f"{percent:.0f} %" if percent >= 1.0 or percent == 0.0 else f"{percent:.1g} %"


def _listed(names: Sequence[str], most: int = 4) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
