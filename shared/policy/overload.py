"""Overload control: whether a job that has a route may start now. It is placed, refused early, delayed for heavier
classes, held until there is room for its KV, or, when it is paused, left where it is.

`decide` is the entry point. It rests on the estimate by which placement chose the route, or, where another policy chose
it, on the same estimate of that route.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from random import Random
from typing import NamedTuple

import msgspec

from shared.domain.instance import InstanceView
from shared.domain.job import FirstTokenOut, JobView, Slo, WhenFull
from shared.domain.rates import UNKNOWN_STEPS, StepRates
from shared.domain.route import Reason, Route
from shared.errors import Delayed, InvalidRequest, Overloaded, Stays, Unavailable
from shared.policy.adaptive import AdaptiveSplit
from shared.policy.decode_admission import Ahead, ahead_of, fits_after, takes_tokens, with_job
from shared.policy.estimate import ENDLESS, HOLD_S, DecodeSide, JobContext, Option, PrefillSide, local, pair
from shared.policy.index import ClusterIndex, InstanceIds
from shared.policy.placement import Placed, Policies, place
from shared.policy.saved_tokens import loaded_tokens, saved_tokens

LOOKS = 3  # other routes that are tried for a job of a class that yields
QUEUE_S = 0.5  # of prefill that delayed classes may queue: enough to keep an instance busy until they ask again
SLOWER = 1.1  # times an empty instance's time: a job that is served no faster anywhere is not refused for that
OVER_SHARE = 0.5  # of its limits, for a caller who has had more than its share
SOON_S, LATE_S = 0.05, 2.0  # bounds of the retry time of a delayed job
IN_TIME = 0.9  # of its TTFT target, by which a held job starts all the same
HOLD_MOST_S = 30.0  # a job that has been held for this long starts all the same
HOLD_LOOK_S = 0.25  # a held job asks again at least this often: answers end earlier than expected, too

MOVE_SHARE = 0.5  # of the pause here, that a move may take at most: either estimate may be off by a third
MOVE_LEAST_S = 0.1  # a move has to save at least this: less is within the age of the loads that the estimate rests on
PAUSE_NEWS_S = 1.0  # so often the instance reports the expected pause, and another place is looked for
FASTER_SHARE = 0.75  # of a job's time per token that another instance may need for the job to migrate there for that
STEADY_TOKENS = 16  # for which there has to be room beside a stream's context: else it is paused again at once


def decide(
    job: JobView, index: ClusterIndex, policies: Policies, now: float, rng: Random, exclude: InstanceIds = ()
) -> Route:
    """The route of `job`, as `place` chooses it among the instances that can compute it, if the job may start now. A
    job that has begun always may.

    For a class that yields, up to `LOOKS` other routes are tried without the instance at fault, but not against a fixed
    split policy. Raises what `place` raises; Overloaded with a retry time, for a class that may be refused and would
    miss its targets; Delayed with a retry time, for a class that yields; Stays for a paused job that would not go on
    clearly sooner on the route, and for a job that would migrate where no instance has room for it, or none is clearly
    faster. `exclude` then names the instance where it is.
    """
    if unable := index.unable(job):
        exclude = unable.union(exclude)
    decision = _Decision(job, index, policies, now, rng, exclude)
    return decision.with_estimate(decision.route())


def steps_aside(slo: Slo, waited_s: float, again_s: float) -> bool:
    """Whether a job that has to ask again leaves the queue of its class to jobs that may still be in time: it wants its
    first token early, and that is late by then.
    """
    return slo.first_token is FirstTokenOut.EARLY and waited_s + again_s > slo.ttft_s


class _Obstacle(NamedTuple):
    """Why a job should not start: what is full, in how many seconds that is likely to be over, and where; without an
    instance it is true of all of them.
    """

    cause: str
    seconds: float
    message: str
    instance_id: str = ""


@dataclass(slots=True)
class _Decision:
    """The decision on one job."""

    job: JobView
    index: ClusterIndex
    policies: Policies
    now: float
    rng: Random
    exclude: InstanceIds

    def route(self) -> Route:
        job, index = self.job, self.index
        placed = self._place(self.exclude)
        slo, needs, route = job.slo, index.ledger.class_demand, placed.route
        if job.leaves:
            return self._fitting(placed)
        if job.pause_s > 0.0:
            return self._sooner(placed)
        if job.begun:
            return route
        if slo.when_full is not WhenFull.DELAY:
            needs.arrived(job, self.now)
        if slo.when_full is WhenFull.NEVER:
            return self._with_room(route)
        obstacle = self._obstacle(placed)
        if obstacle is None:
            return self._with_room(route)
        message = f"{obstacle.message} (SLO class {slo.name!r})"
        if slo.when_full is WhenFull.REJECT:
            needs.refused(slo)
            raise Overloaded(message, cause=obstacle.cause, retry_after_s=max(SOON_S, obstacle.seconds))
        other, seconds = self._elsewhere(route, obstacle)
        if other is None:
            if obstacle.cause == "room":
                self._hold(route)
            raise Delayed(message, cause=obstacle.cause, retry_after_s=min(LATE_S, max(SOON_S, seconds)))
        return self._with_room(other)

    def with_estimate(self, route: Route) -> Route:
        """The route of a first placement with what its estimate predicts, corrected by what came of earlier ones. Where
        the policy that chose the route makes no estimate, one is made of a route that names its decode instance.
        """
        estimated = route.estimated
        if self.job.begun or self.job.warms:
            return route
        if estimated is None and route.decode is not None:
            option = self._estimate(Placed(route, None))
            estimated = option.estimated if option is not None else None
        if estimated is None:
            return route
        corrected = self.index.ledger.errors.corrected(estimated)
        return route if corrected is route.estimated else msgspec.structs.replace(route, estimated=corrected)

    def _place(self, exclude: InstanceIds) -> Placed:
        return place(self.job, self.index, self.policies, self.now, self.rng, exclude)

    def _fitting(self, placed: Placed) -> Route:
        """The route of a job that migrates. Raises Stays."""
        here_s, option = self.job.tpot_s, self._estimate(placed, self.exclude)
        if option is None or option.decode.room_s > HOLD_S or spare_share(option.decode) < self.job.spare_share:
            raise Stays("no other decode instance has room for the job; it stays")
        reason = Reason("migration", {"tpot_s": round(option.tpot_s, 5)})
        if here_s > 0.0:
            if option.tpot_s > FASTER_SHARE * here_s:
                raise Stays(
                    f"a token takes {here_s:.3f} s where the job is and {option.tpot_s:.3f} s elsewhere; it stays"
                )
            reason = Reason("migration", {"here_s": round(here_s, 5), **reason.figures})
        return msgspec.structs.replace(placed.route, reasons=(reason, *placed.route.reasons))

    def _sooner(self, placed: Placed) -> Route:
        """The route of a paused job, with what it saves among its reasons. Raises Stays when that is too little."""
        pause_s, option = self.job.pause_s, self._estimate(placed, self.exclude)
        if option is None:
            raise Stays("no estimate of the route is known; the job stays where it is paused")
        elsewhere_s = max(option.ttft_s, option.decode.room_s)
        if not moves(pause_s, elsewhere_s):
            raise Stays(
                f"the next token is expected in {pause_s:.2f} s where the job is paused and in {elsewhere_s:.2f} s "
                "elsewhere; it stays"
            )
        reason = Reason("sooner", {"pause_s": round(pause_s, 4), "elsewhere_s": round(elsewhere_s, 4)})
        return msgspec.structs.replace(placed.route, reasons=(reason, *placed.route.reasons))

    def _with_room(self, route: Route) -> Route:
        """The route. Raises Delayed while its KV would find no room: the job then waits before its prompt is computed.

        A class that wants its first token early waits only as long as the token can still be in time, and no job
        longer than `HOLD_MOST_S`. Long before that, room that becomes free is kept for it (`Claims`).
        """
        job, slo, claims = self.job, self.job.slo, self.index.ledger.claims
        if route.hold_s <= HOLD_S or not job.can_wait or claims.held_s(job.job_id, self.now) >= HOLD_MOST_S:
            return route
        first_s = job.waited_s + route.ttft_s
        if slo.first_token is FirstTokenOut.EARLY and IN_TIME * slo.ttft_s - HOLD_LOOK_S < first_s <= slo.ttft_s:
            return route
        self._hold(route)
        message = f"room for its KV is expected in {route.hold_s:.2f} s at the earliest"
        raise Delayed(message, cause="room", retry_after_s=min(HOLD_LOOK_S, max(SOON_S, route.hold_s)))

    def _hold(self, route: Route) -> None:
        job, ready, claims = self.job, self.index.decode, self.index.ledger.claims
        if route.decode is None or not job.can_wait:
            return
        instance_id = route.decode.instance_id
        view = ready.get(instance_id)
        tokens = takes_tokens(view, job.prompt_tokens, route.decode_saved) if view is not None else job.prompt_tokens
        claims.hold(job, instance_id, tokens, route.answer_tokens or job.max_tokens, self.now)
        if ready.get(claims.instance_of(job.job_id)) is None:
            claims.move(job.job_id, instance_id)

    def _elsewhere(self, route: Route, obstacle: _Obstacle) -> tuple[Route | None, float]:
        """Another route without an obstacle, None when a few tries find none; and in how many seconds the first of the
        obstacles on the way is likely to be over.
        """
        without, seconds = set(self.exclude), obstacle.seconds
        for _ in range(LOOKS):
            if not obstacle.instance_id:
                break
            without.add(obstacle.instance_id)
            try:
                other = self._place(without)
            except (Unavailable, InvalidRequest):
                break
            split_is_free = isinstance(self.policies.split, AdaptiveSplit)
            if other.route.prefill is None and route.prefill is not None and not split_is_free:
                break
            found = self._obstacle(other)
            if found is None:
                return other.route, 0.0
            obstacle = found
            seconds = min(seconds, obstacle.seconds)
        return None, seconds

    def _obstacle(self, placed: Placed) -> _Obstacle | None:
        """What keeps the job from starting now on this route; None if nothing does, or no estimate is known."""
        option = self._estimate(placed)
        if option is None:
            return None
        return self._in_the_way(option) if self.job.slo.when_full is WhenFull.DELAY else self._misses(option)

    def _misses(self, option: Option) -> _Obstacle | None:
        """The reason for which the job would miss its own targets, if it is what is ahead of the job."""
        job, slo, needs, decode = self.job, self.job.slo, self.index.ledger.class_demand, option.decode
        there, margin = decode.view.instance_id, needs.margin(slo)

        def limited(limit_s: float, alone_s: float) -> float:
            return alone_s + OVER_SHARE * (limit_s - alone_s) if job.over_share else limit_s

        alone_s = _alone_s(option)
        limit_s = margin * slo.ttft_s
        limit_s = limited(max(limit_s, alone_s + limit_s / 4.0), alone_s)
        if option.ttft_s > limit_s:
            message = f"the first token is predicted after {option.ttft_s:.2f} s, {limit_s:.2f} s are allowed"
            return _Obstacle("ttft", option.ttft_s - limit_s, message, there)
        limit_s = limited(max(margin * slo.tpot_s, SLOWER * decode.alone_s), decode.alone_s)
        if option.tpot_s > limit_s:
            message = f"a token is predicted to take {option.tpot_s:.4f} s, {limit_s:.4f} s are allowed"
            return _Obstacle("tpot", (1.0 - limit_s / option.tpot_s) * _stay_s(decode), message, there)
        if job.over_share and (spread := needs.spread(slo, self.now)) > (room := self._room_for(slo)):
            message = f"there is room for {room:.1f} jobs, of which {spread:.1f} are for callers who have had less"
            return _Obstacle("share", _stay_s(decode) / max(1, decode.running), message)
        return None

    def _in_the_way(self, option: Option) -> _Obstacle | None:
        """The reason for which the job would be in the way of heavier classes, or of its own."""
        decode, others = option.decode, option.decode.context.others
        there = decode.view.instance_id
        computes: PrefillSide | DecodeSide = option.prefill or decode
        limit_s = min(QUEUE_S, others.ttft_s / 2.0)
        if computes.wait_s > limit_s:
            message = f"prompts for {computes.wait_s:.2f} s wait, {limit_s:.2f} s may"
            return _Obstacle("prefill", computes.wait_s - limit_s, message, computes.view.instance_id)
        late_s = decode.room_s - _alone_s(option)  # its KV does not arrive before
        if late_s > limit_s:
            message = f"there is no room to decode for {decode.room_s:.2f} s"
            return _Obstacle("room", late_s - limit_s, message, there)
        each_s = _stay_s(decode) / max(1, decode.running)
        limit_s = max(others.tpot_s, SLOWER * decode.alone_s)
        step_s = decode.after_s + decode.beside_s
        if step_s > limit_s:
            message = f"a token of others would take {step_s:.4f} s, {limit_s:.4f} s are allowed"
            return _Obstacle("tpot", each_s, message, there)
        missing = self.index.ledger.class_demand.missing(self.job.slo, self.now)
        if missing > 0.0 and (room := self._room_for(others) - 1.0) < missing:
            message = f"there is room for {room:.1f} jobs, of which heavier classes are likely to need {missing:.1f}"
            return _Obstacle("reserve", each_s, message)
        return None

    def _estimate(self, placed: Placed, exclude: InstanceIds = ()) -> Option | None:
        """The estimate of a route. Where a dispatcher is to choose the decode instance, that of the instance with the
        least pressure which it may choose.
        """
        if placed.estimate is not None:
            return placed.estimate
        job, index, route = self.job, self.index, placed.route
        if route.decode is not None:
            view = index.decode.get(route.decode.instance_id)
        else:
            firsts = (next((key for key in keys if key[2] not in exclude), None) for keys in index.pressures.classes())
            best = min((key for key in firsts if key is not None), default=None)
            view = index.decode.get(best[2]) if best is not None else None
        if view is None:
            return None
        context = JobContext.learned(job, index.ledger, self.now, limited=index.limited)
        saved = saved_tokens(index.prefixes, view, job)
        decode = DecodeSide(view, context, saved, loaded=loaded_tokens(index.prefixes, view, job, saved))
        if route.prefill is None:
            return local(decode, decode.terms(0))
        computes = index.prefill.get(route.prefill.instance_id)
        if computes is None:
            return None
        saved = saved_tokens(index.prefixes, computes, job)
        prefill = PrefillSide(computes, saved, loaded_tokens(index.prefixes, computes, job, saved))
        return pair(prefill, prefill.part(route.split, context.others), decode, decode.terms(route.split))

    def _room_for(self, others: Slo) -> float:
        """How many more usual jobs the decode instances could take within those targets; summed once a broadcast."""
        needs, decodes = self.index.ledger.class_demand, self.index.decode
        answer, prompt = self.index.ledger.output_lengths.all.mean, needs.prompt_tokens(self.job.slo, self.now)

        def summed() -> tuple[float, int]:
            return sum(_room_at(view, others.tpot_s, prompt, answer) for view in decodes.views), needs.placements

        total, placed = self.index.cached(("room", others.name), summed)
        return total - (needs.placements - placed)


def _alone_s(option: Option) -> float:
    """The job's TTFT without what is ahead of it."""
    decode = option.decode
    waits_s = decode.wait_s if option.split < decode.context.job.prompt_tokens else 0.0
    if option.prefill is not None:
        waits_s = max(waits_s, option.prefill.wait_s)
    return max(0.0, option.ttft_s - waits_s - decode.room_s)


def _stay_s(decode: DecodeSide) -> float:
    return decode.context.usual.mean * decode.after_s


def spare_share(decode: DecodeSide) -> float:
    """The share of an instance's KV memory that stays free beside the job and the answers that decode there."""
    job, info, load = decode.context.job, decode.view.info, decode.view.load
    room, left = info.total_blocks * info.block_size, decode.context.bound or job.max_tokens
    peak = max(with_job(load.kv_ahead, job.prompt_tokens, left, info.block_size))
    used = job.prompt_tokens + room - (load.free_blocks * info.block_size - load.waiting_tokens)
    return 1.0 - max(peak, used) / room if room else 0.0


def _room_at(view: InstanceView, tpot_s: float, prompt: float, answer: float) -> float:
    """How many more usual jobs an instance could take: by its step time, its seats, and its KV once those that run have
    ended.
    """
    info, load = view.info, view.load
    form, tokens = (info.rates.step or UNKNOWN_STEPS).per_token, prompt + answer / 2.0
    token_s = form.fixed_s + form.sequence_s * load.decoding + form.context_s * load.context_tokens
    each_s = form.sequence_s + form.context_s * tokens
    room = (tpot_s - token_s) / each_s if each_s > 0.0 else float(ENDLESS)
    free = load.free_blocks * info.block_size - load.waiting_tokens - load.decoding * answer / 2.0
    room = min(room, (info.max_seqs or ENDLESS) - load.decoding, free / (prompt + answer))
    return max(0.0, room)


class Beside(NamedTuple):
    """The jobs that have blocks where a stream is paused: the KV that they will hold (`kv_ahead`), their number, and
    their context.
    """

    ahead: Ahead
    jobs: int
    context_tokens: int

    @classmethod
    def from_jobs(cls, jobs: Sequence[tuple[int, int]], block_size: int, part: float = 1.0) -> "Beside":
        """Of jobs with (tokens held now, tokens to come). part: see `own_part`."""
        return cls(ahead_of(jobs, block_size, part), len(jobs), ceil(part * sum(now for now, _ in jobs)))


def pause_s(
    beside: Beside, room_tokens: int, held: int, left: int, block_size: int, rates: StepRates | None, chunk: int
) -> float:
    """Seconds until a paused stream of `held` tokens, with `left` to come, produces its next token where it is paused.

    Its KV blocks were taken back for others, so that wherever it goes on, its prompt and its tokens are computed again:
    a move costs no more work than staying. What differs is how soon there is room and how long the computing takes.
    room_tokens: of all blocks, less what paused streams hold that get blocks first. chunk: tokens of a step.
    """
    rates = rates or UNKNOWN_STEPS
    decodes, context = beside.jobs, beside.context_tokens
    steps = fits_after(beside.ahead, room_tokens, held, min(left, STEADY_TOKENS), block_size)
    room_s = steps * rates.token_s(decodes, context)
    budget = max(1, chunk - decodes)
    count = -(-held // budget)
    each = held / count
    return room_s + sum(rates.mixed_s(each, each * at, decodes, context) for at in range(count))


def moves(here_s: float, elsewhere_s: float) -> bool:
    """Whether a stream that is paused for `here_s` more should go on where its next token comes in `elsewhere_s`."""
    return elsewhere_s <= MOVE_SHARE * here_s and here_s - elsewhere_s >= MOVE_LEAST_S
