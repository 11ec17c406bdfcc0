"""What can be wrong with a cluster: one check each, from what is known to problems."""

from collections.abc import Iterator, Sequence

from shared.domain.instance import InstanceState, Role
from shared.domain.situation import ClassSeen, Peer, Situation, StageSeen, Standing
from shared.domain.verdict import Count, Level, Problem, Stage, Thresholds
from shared.domain.words import duration, size

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
