"""Whether a job that has a route may take it now: refused early, delayed for heavier classes, or placed.

It rests on the same estimate as placement, of the route that was chosen, whatever policy chose it.
"""

from collections.abc import Collection, Sequence
from math import ceil
from random import Random
from typing import NamedTuple

import msgspec

from shared.domain.instance import InstanceView
from shared.domain.job import FirstTokenOut, JobView, Slo, WhenFull
from shared.domain.rates import UNKNOWN_STEPS, StepRates
from shared.domain.route import Reason, Route
from shared.errors import Delayed, InvalidRequest, Overloaded, Stays, Unavailable
from shared.policy.adaptive import AdaptiveSplit, saved_at
from shared.policy.decode_admission import Ahead, ahead_of, fits_after, takes_tokens
from shared.policy.estimate import ENDLESS, HOLD_S, DecodeSide, Option, PrefillSide, local, pair
from shared.policy.index import ClusterIndex
from shared.policy.placement import Policies, place

# MERGED pause.py
# A stream whose KV blocks were taken back for others: how long its pause lasts here, and whether to move it.
#
# Wherever the stream goes on, its prompt and its tokens have to be computed again, so that a move costs no more
# work than staying. What differs is how soon there is room and how long the computing takes.


MOVE_SHARE = 0.5  # of the pause here, that a move may take at most: either estimate may be off by a third
MOVE_LEAST_S = 0.1  # that a move has to save at least: less is within the age of the loads that it rests on
PAUSE_NEWS_S = 1.0  # so often the instance tells how long the pause is expected to last, and a place is looked for
STEADY_TOKENS = 16  # that it has to have room for beside its context: one that fits for a step only is paused again


class Beside(NamedTuple):
    """The jobs that have blocks where a stream is paused: what they will hold (`kv_ahead`), how many they are, and
    their context.
    """

    ahead: Ahead
    jobs: int
    context_tokens: int

    @classmethod
    def of(cls, jobs: Sequence[tuple[int, int]], block_size: int, part: float = 1.0) -> "Beside":
        """Of jobs with (tokens held now, tokens to come). part: see `own_part`."""
        return cls(ahead_of(jobs, block_size, part), len(jobs), ceil(part * sum(now for now, _ in jobs)))


def pause_s(
    beside: Beside, room_tokens: int, held: int, left: int, block_size: int, rates: StepRates | None, chunk: int
) -> float:
    """Seconds until a stream of `held` tokens, with `left` to come, gives its next token where it was paused.

    room_tokens: of all blocks, less what paused streams hold that get blocks first. chunk: tokens of a step.
    """
    rates = rates or UNKNOWN_STEPS
    decodes, context = beside.jobs, beside.context_tokens
    steps = fits_after(beside.ahead, room_tokens, held, min(left, STEADY_TOKENS), block_size)
    room_s = steps * rates.decode_s(decodes, context)
    budget = max(1, chunk - decodes)
    count = -(-held // budget)
    each = held / count
    return room_s + sum(rates.mixed_s(each, each * at, decodes, context) for at in range(count))


def moves(here_s: float, elsewhere_s: float) -> bool:
    """Whether a stream that is paused for `here_s` more should go on where its next token comes in `elsewhere_s`."""
    return elsewhere_s <= MOVE_SHARE * here_s and here_s - elsewhere_s >= MOVE_LEAST_S


LOOKS = 3
QUEUE_S = 0.5  # of prefill that delayed classes may queue: enough to keep an instance busy until they ask again
SLOWER = 1.1  # times an empty instance's time: a job that has no better anywhere is not refused for that
OVER_SHARE = 0.5  # of its limits, for a caller who has had more than its share
SOON_S, LATE_S = 0.05, 2.0  # bounds of when to ask again for a delayed job
IN_TIME = 0.9  # of its TTFT target, by which a held job begins all the same
HOLD_MOST_S = 30.0  # a job that has been held so long begins all the same
HOLD_LOOK_S = 0.25  # a job that is held looks again at least so often: answers end earlier than expected, too


class Obstacle(NamedTuple):
    """Why a job should not start: what is full, by how much, and in how many seconds that is likely to be over."""

    cause: str
    seconds: float
    said: str
    instance_id: str = ""  # where that is so; of all instances if empty


def decide(
    job: JobView, index: ClusterIndex, policies: Policies, now: float, rng: Random, exclude: Collection[str] = ()
) -> Route:
    """The route of `job`, as `place` chooses it, if it may take it now. A job that has begun always may.

    A class that yields looks further where its first choice would be in the way: up to `LOOKS` times without the
    instance at fault, but never against a fixed policy for splits.
    Raises what `place` raises; Overloaded with when to come again, for a class that may be refused and would miss its
    targets; Delayed with when to ask again, for a class that yields; Stays for a paused job that would not go on
    clearly sooner on the route. `exclude` then names where it is paused.
    """
    route = place(job, index, policies, now, rng, exclude)
    slo = job.slo
    if job.pause_s > 0.0:
        return _sooner(job, route, index, now, exclude)
    if job.begun:
        return route
    if slo.when_full is not WhenFull.DELAY:
        index.ledger.needs.asked(job, now)
    if slo.when_full is WhenFull.NEVER:
        return _held_back(job, route, index, now)
    found = obstacle(job, route, index, now)
    if found is None:
        return _held_back(job, route, index, now)
    said = f"{found.said} (SLO class {slo.name!r})"
    if slo.when_full is WhenFull.REJECT:
        index.ledger.needs.refused(slo)
        raise Overloaded(said, cause=found.cause, retry_after_s=max(SOON_S, found.seconds))
    other, seconds = _elsewhere(job, route, found, index, policies, now, rng, exclude)
    if other is None:
        if found.cause == "room":
            _hold(job, route, index, now)
        raise Delayed(said, cause=found.cause, retry_after_s=min(LATE_S, max(SOON_S, seconds)))
    return _held_back(job, other, index, now)


def _sooner(job: JobView, route: Route, index: ClusterIndex, now: float, exclude: Collection[str]) -> Route:
    """The route of a paused job, with what it saves among its reasons. Raises Stays where that is too little."""
    option = _option(job, route, index, now, exclude)
    if option is None:
        raise Stays("no estimate of the route is known; the job stays where it is paused")
    elsewhere_s = max(option.ttft_s, option.decode.room_s)
    if not moves(job.pause_s, elsewhere_s):
        raise Stays(
            f"the next token is expected in {job.pause_s:.2f} s where the job is paused and in {elsewhere_s:.2f} s "
            "elsewhere; it stays"
        )
    figures: dict[str, float | str] = {"pause_s": round(job.pause_s, 4), "elsewhere_s": round(elsewhere_s, 4)}
    return msgspec.structs.replace(route, reasons=(Reason("sooner", figures), *route.reasons))


def _held_back(job: JobView, route: Route, index: ClusterIndex, now: float) -> Route:
    """The route, unless its KV would find no room: then the job waits before its prompt is computed.

    A class that wants its first token early waits only as long as that can be in time, and no job longer than
    `HOLD_MOST_S`. Long before that, room that becomes free is kept for it (`shared.policy.claims`).
    """
    slo = job.slo
    if route.hold_s <= HOLD_S or not job.can_wait or index.ledger.claims.held_s(job.job_id, now) >= HOLD_MOST_S:
        return route
    first_s = job.waited_s + route.ttft_s
    if slo.first_token is FirstTokenOut.EARLY and IN_TIME * slo.ttft_s - HOLD_LOOK_S < first_s <= slo.ttft_s:
        return route
    _hold(job, route, index, now)
    said = f"room for its KV is expected in {route.hold_s:.2f} s at the earliest"
    raise Delayed(said, cause="room", retry_after_s=min(HOLD_LOOK_S, max(SOON_S, route.hold_s)))


def steps_aside(slo: Slo, waited_s: float, again_s: float) -> bool:
    """Whether a job that has to ask again leaves the line of its class to those that may still be in time: it wants its
    first token early, and that is late by then.
    """
    return slo.first_token is FirstTokenOut.EARLY and waited_s + again_s > slo.ttft_s


def _hold(job: JobView, route: Route, index: ClusterIndex, now: float) -> None:
    """Remember that the job waits for room."""
    if route.decode is None or not job.can_wait:
        return
    claims, view = index.ledger.claims, index.decode.get(route.decode.instance_id)
    tokens = takes_tokens(view, job.prompt_tokens, route.decode_saved) if view is not None else job.prompt_tokens
    claims.hold(job, route.decode.instance_id, tokens, route.answer_tokens or job.max_tokens, now)
    if index.decode.get(claims.instance_of(job.job_id)) is None:
        claims.move(job.job_id, route.decode.instance_id)


def _elsewhere(
    job: JobView,
    route: Route,
    found: Obstacle,
    index: ClusterIndex,
    policies: Policies,
    now: float,
    rng: Random,
    exclude: Collection[str],
) -> tuple[Route | None, float]:
    """Another route on which nothing is in the way of heavier classes, None if a few tries find none; and in how many
    seconds the first of the obstacles that were met is likely to be over.
    """
    free, without, seconds = isinstance(policies.split, AdaptiveSplit), set(exclude), found.seconds
    for _ in range(LOOKS):
        if not found.instance_id:
            break
        without.add(found.instance_id)
        try:
            other = place(job, index, policies, now, rng, without)
        except (Unavailable, InvalidRequest):
            break
        if other.prefill is None and route.prefill is not None and not free:
            break
        obstacle_there = obstacle(job, other, index, now)
        if obstacle_there is None:
            return other, 0.0
        found = obstacle_there
        seconds = min(seconds, found.seconds)
    return None, seconds


def obstacle(job: JobView, route: Route, index: ClusterIndex, now: float) -> Obstacle | None:
    """What keeps the job from starting now on this route; None if nothing does, or if nothing is known of it."""
    option = _option(job, route, index, now)
    if option is None:
        return None
    if job.slo.when_full is WhenFull.DELAY:
        return _in_the_way(job, option, index, now)
    return _misses(job, option, index, now)


def _misses(job: JobView, option: Option, index: ClusterIndex, now: float) -> Obstacle | None:
    """Whether the job would miss its own targets, because of what is before it."""
    slo, needs, decode = job.slo, index.ledger.needs, option.decode
    there = decode.view.instance_id
    margin = needs.margin(slo)
    limit_s = margin * slo.ttft_s
    alone_s = _alone_s(option)
    limit_s = max(limit_s, alone_s + limit_s / 4.0)
    if job.over_share:
        limit_s = alone_s + OVER_SHARE * (limit_s - alone_s)
    if option.ttft_s > limit_s:
        said = f"the first token is predicted after {option.ttft_s:.2f} s, {limit_s:.2f} s are allowed"
        return Obstacle("ttft", option.ttft_s - limit_s, said, there)
    limit_s = max(margin * slo.tpot_s, SLOWER * decode.alone_s)
    if job.over_share:
        limit_s = decode.alone_s + OVER_SHARE * (limit_s - decode.alone_s)
    if option.tpot_s > limit_s:
        said = f"a token is predicted to take {option.tpot_s:.4f} s, {limit_s:.4f} s are allowed"
        return Obstacle("tpot", (1.0 - limit_s / option.tpot_s) * _stay_s(decode), said, there)
    if job.over_share and (spread := needs.spread(slo, now)) > (room := _room_for(job, slo, index, now)):
        said = f"there is room for {room:.1f} jobs, of which {spread:.1f} are for callers who have had less"
        return Obstacle("share", _stay_s(decode) / max(1, decode.running), said)
    return None


def _in_the_way(job: JobView, option: Option, index: ClusterIndex, now: float) -> Obstacle | None:
    """Whether the job would be in the way of heavier classes, or in its own."""
    decode, needs = option.decode, index.ledger.needs
    others = decode.slo
    there = decode.view.instance_id
    computes: PrefillSide | DecodeSide = option.prefill or decode
    limit_s = min(QUEUE_S, others.ttft_s / 2.0)
    if computes.wait_s > limit_s:
        said = f"prompts for {computes.wait_s:.2f} s wait, {limit_s:.2f} s may"
        return Obstacle("prefill", computes.wait_s - limit_s, said, computes.view.instance_id)
    late_s = decode.room_s - _alone_s(option)  # its KV is not there before
    if late_s > limit_s:
        return Obstacle("room", late_s - limit_s, f"there is no room to decode for {decode.room_s:.2f} s", there)
    stay_s = _stay_s(decode)
    each_s = stay_s / max(1, decode.running)
    limit_s = max(others.tpot_s, SLOWER * decode.alone_s)
    step_s = decode.after_s + decode.beside_s
    if step_s > limit_s:
        said = f"a token of others would take {step_s:.4f} s, {limit_s:.4f} s are allowed"
        return Obstacle("tpot", each_s, said, there)
    missing = needs.missing(job.slo, now)
    if missing > 0.0:
        room = _room_for(job, others, index, now) - 1.0
        if room < missing:
            said = f"there is room for {room:.1f} jobs, of which heavier classes are likely to need {missing:.1f}"
            return Obstacle("reserve", each_s, said)
    return None


def _option(
    job: JobView, route: Route, index: ClusterIndex, now: float, exclude: Collection[str] = ()
) -> Option | None:
    """The estimate of a route. Where a dispatcher is to choose the decode instance, that of the least pressed one that
    it may choose.
    """
    ledger, answers = index.ledger, index.ledger.answers
    own, others = answers.expected(job), ledger.needs.others(job.slo, now)
    if route.decode is not None:
        view = index.decode.get(route.decode.instance_id)
    else:
        firsts = (next((key for key in keys if key[2] not in exclude), None) for keys in index.pressures.classes())
        best = min((key for key in firsts if key is not None), default=None)
        view = index.decode.get(best[2]) if best is not None else None
    if view is None:
        return None
    saved, bound = saved_at(index, view, job), answers.bound(job)
    kept = ledger.claims.before(job, now).get(view.info.instance_id, ())
    decode = DecodeSide.of(view, job, own, answers.all, saved, others, limited=index.limited, bound=bound, kept=kept)
    if route.prefill is None:
        return local(job, decode, decode.terms(0))
    computes = index.prefill.get(route.prefill.instance_id)
    if computes is None:
        return None
    prefill = PrefillSide.of(computes, saved_at(index, computes, job))
    return pair(job, own, prefill, prefill.part(route.split, others), decode, decode.terms(route.split))


def _alone_s(option: Option) -> float:
    """The job's TTFT without what waits before it."""
    waits_s = option.decode.wait_s if option.split < option.decode.job.prompt_tokens else 0.0
    if option.prefill is not None:
        waits_s = max(waits_s, option.prefill.wait_s)
    return max(0.0, option.ttft_s - waits_s - option.decode.room_s)


def _stay_s(decode: DecodeSide) -> float:
    return decode.usual.mean * decode.after_s


def _room_for(job: JobView, others: Slo, index: ClusterIndex, now: float) -> float:
    """How many more usual jobs the decode instances could take within those targets; summed once a broadcast."""
    answer = index.ledger.answers.all.mean
    needs = index.ledger.needs
    prompt = needs.prompt_tokens(job.slo, now)
    total, placed = index.cached(
        ("room", others.name),
        lambda: (sum(_room_at(view, others.tpot_s, prompt, answer) for view in index.decode.views), needs.placements),
    )
    return total - (needs.placements - placed)


def _room_at(view: InstanceView, tpot_s: float, prompt: float, answer: float) -> float:
    """The same at one instance: by its step time, its seats, and its KV once those that run have ended."""
    info, load = view.info, view.load
    form, tokens = (info.rates.step or UNKNOWN_STEPS).decode, prompt + answer / 2.0
    step_s = form.fixed_s + form.sequence_s * load.decoding + form.context_s * load.context_tokens
    each_s = form.sequence_s + form.context_s * tokens
    room = (tpot_s - step_s) / each_s if each_s > 0.0 else float(ENDLESS)
    free = load.free_blocks * info.block_size - load.waiting_tokens - load.decoding * answer / 2.0
    room = min(room, (info.max_seqs or ENDLESS) - load.decoding, free / (prompt + answer))
    return max(0.0, room)
