"""A run: requests through a cluster in virtual time, by the policies that serve them live.

One request's way: it arrives and is placed (`intake`), is computed on the prefill instance, handed over (`handover`:
dispatch and KV transfer) and decoded to its end; a stream that is paused for want of KV blocks may go on elsewhere
(`moves`). What happens to instances on the way (flips, losses) is in `changes`.
"""

from collections.abc import Callable, Sequence
from random import Random

import msgspec

from shared.domain.instance import InstanceState
from shared.domain.job import FirstTokenOut
from shared.domain.kv import wire_share
from shared.errors import InvalidRequest, Unavailable
from shared.policy.assignment import Assignment
from shared.policy.codec import choose_codec
from shared.policy.decode_admission import is_heavy
from shared.policy.dispatch import choose_decode
from shared.policy.overload import MOVE_LEAST_S, PAUSE_NEWS_S
from shared.sim.events import NEVER, EventLoop, Handler
from shared.sim.fleet import Fleet
from shared.sim.instance import SimInstance
from shared.sim.intake import AutoFlips, Intake, Legs, Patience
from shared.sim.outcomes import Gaps, LoadTimeline, SimResult, Status
from shared.sim.record import Record, Sampler
from shared.sim.request import Leg, SimRequest
from shared.sim.spec import Flip, InstanceSpec, Loss, RunSpec
from shared.sim.workload import Workload

# MERGED handover.py
# From the prefill instance to the decode instance: dispatch, reservation, KV transfer.


class Handover:
    """Takes a request over when its first chunk or its prefill is done, and brings it to a decode instance."""

    def __init__(
        self,
        run: RunSpec,
        loop: EventLoop,
        fleet: Fleet,
        legs: Legs,
        record: Record,
        intake: Intake,
        patience: Patience,
        rng: Random,
    ) -> None:
        self._run = run
        self._loop = loop
        self._fleet = fleet
        self._legs = legs
        self._record = record
        self._intake = intake
        self._patience = patience
        self._rng = rng
        self._fixed_share = wire_share(run.codec)
        self._waiting: dict[SimRequest, None] = {}  # no decode instance can take them now; in order
        self.kv_bytes = 0.0

    def retry(self, now: float) -> None:
        """Requests that found no decode instance may try again, in order."""
        for request in self.waiting:
            self.dispatch(request, now)

    @property
    def waiting(self) -> list[SimRequest]:
        """Requests that found no decode instance."""
        return [request for request in self._waiting if not request.over]

    def forget(self, request: SimRequest, now: float) -> None:
        """The request waits for no decode instance any more."""
        self._waiting.pop(request, None)
        self._patience.end(request, now)

    def dispatch(self, request: SimRequest, now: float) -> None:
        """Give the request its decode instance, and have that reserve memory."""
        if request.decode_tokens == 0 or request.decode_leg is not None or request.prefill is None:
            return
        request.hear(now)
        if request.decode is not None and self._fleet.instances[request.decode].state is InstanceState.DEAD:
            request.decode = None  # it was bound at placement and has died since
        if request.decode is None:
            index = self._fleet.dispatch_index(request.prefill, now)
            without = (request.moved_from,) if request.moved_from else ()
            try:
                choice = choose_decode(self._run.policies.dispatch, request.job, index, without, now, self._rng)
            except Unavailable:
                self._wait(request, now)
                return
            self.forget(request, now)
            chosen = choice.instance.instance_id
            request.decode = self._fleet.position(chosen)
            tokens, heavy = request.job.prompt_tokens, is_heavy(request.job)
            index.book(Assignment(chosen, now, decode_tokens=tokens, heavy=heavy))
        request.wire_share = self._share(request, now)
        request.decode_leg = _decode_leg(request)
        self._legs.start(self._fleet.instances[request.decode], request.decode_leg, now)

    def _share(self, request: SimRequest, now: float) -> float:
        """Of the KV's bytes, what goes over the wire: by the run's codec, or as live by its class and the link."""
        job, leg = request.job, request.prefill_leg
        if self._run.codec.lossy or not job.slo.lossy_kv.lossy or request.decode is None:
            return self._fixed_share
        source = self._fleet.instance(request.prefill)
        target = self._fleet.instance(request.decode).info.instance_id
        receiver = self._fleet.index(now).decode.get(target)
        if receiver is None:
            return 1.0
        left = leg.tokens - leg.computed if leg is not None and request.prefill_done_s < 0.0 else 0
        return wire_share(choose_codec(job, request.split, left, source.info, receiver).codec)

    def _wait(self, request: SimRequest, now: float) -> None:
        """Without a decode instance: while its prompt is computed nothing is lost, then its patience runs."""
        self._waiting[request] = None
        if request.prefill_done_s >= 0.0:
            self._patience.begin(request, now, self._give_up)

    def _give_up(self, request: SimRequest, now: float) -> None:
        del self._waiting[request]
        self._intake.stop(request, Status.REFUSED, now)

    def admitted(self, leg: Leg, now: float) -> None:
        """The decode instance has blocks for the KV (see `EngineEvents`)."""
        request = leg.request
        request.admitted = True
        request.sent_tokens = min(leg.saved, request.split)
        if request.prefill_done_s >= 0.0:
            self.send(request, request.split, now)
        elif self._run.streaming and request.prefill_leg is not None:
            self.send(request, request.prefill_leg.computed, now)

    def send(self, request: SimRequest, computed: int, now: float) -> None:
        """Send what is computed, and neither sent yet nor held there, once there is room for it."""
        tokens, last = max(0, computed - request.sent_tokens), computed == request.split
        if not request.admitted or request.kv_sent or not (tokens or last):
            return
        source, target = self._fleet.instance(request.prefill), self._fleet.instance(request.decode)
        request.sent_tokens += tokens
        request.kv_sent = last
        wire_bytes = tokens * source.spec.kv_bytes_per_token * request.wire_share
        self.kv_bytes += wire_bytes
        arrives = self._fleet.wires.send(source.index, target.index, wire_bytes, now)
        if last:
            self._loop.at(arrives, self._kv_arrived, request.decode_leg)

    def _kv_arrived(self, leg: Leg, now: float) -> None:
        request = leg.request
        if leg.cancelled or leg is not request.decode_leg or leg.lane is None:
            return
        self._record.transferred(request, now)
        self._legs.leave(self._fleet.instance(request.prefill), request, now)
        self._legs.kv_arrived(leg, now)


def _decode_leg(request: SimRequest) -> Leg:
    prompt, left, last_token_s = request.job.prompt_tokens, request.decode_tokens, request.last_token_s
    if request.carried:
        return Leg(request, prompt + 1, left, prompt, remote=True, prefix=request.prefix, last_token_s=last_token_s)
    computed = min(request.split, prompt - 1)
    return Leg(request, prompt, left, computed, remote=computed > 0, prefix=request.prefix, last_token_s=last_token_s)


# MERGED changes.py
# What happens to instances during a run: role flips with their drains, losses, returns; and samples of the load.


_LOOKS_ON_S = 600.0  # how long a flip policy may look on while requests wait and nothing else happens


class Changes:
    """Carries out orders and policies that concern whole instances."""

    def __init__(
        self,
        run: RunSpec,
        loop: EventLoop,
        fleet: Fleet,
        legs: Legs,
        intake: Intake,
        handover: Handover,
        auto: AutoFlips | None,
    ) -> None:
        self._run = run
        self._loop = loop
        self._fleet = fleet
        self._legs = legs
        self._intake = intake
        self._handover = handover
        self._auto = auto
        self._periodic = 0
        self._worked_s = 0.0
        self._sampler = Sampler(fleet.instances) if self._run.sample_s > 0.0 else None

    def start(self) -> None:
        """Plan what the spec orders. Raises InvalidRequest for an instance that is not there."""
        for loss in self._run.losses:
            self._known(loss.instance_id, "loss")
            self._loop.at(loss.at_s, self._lose, loss)
        for flip in self._run.flips:
            self._known(flip.instance_id, "flip")
            self._loop.at(flip.at_s, self._order, flip)
        if self._auto is not None:
            self._again(self._run.role_flip_every_s, self._ask)
        if self._sampler is not None:
            self._again(0.0, self._sample)

    def left(self, instance: SimInstance, now: float) -> None:
        """A request has left; if it was the last one of a drain, the role changes."""
        if instance.state is InstanceState.DRAINING and not instance.requests:
            self._loop.at(now + self._run.flip_s, self._flipped, (instance, instance.drains))

    def flip(self, instance: SimInstance, now: float) -> None:
        """Give the instance no new work; once it has none, it takes the other role."""
        if instance.state is not InstanceState.READY:
            return
        instance.state = InstanceState.DRAINING
        instance.drains += 1
        self._fleet.changed()
        if self._run.drain_timeout_s != NEVER:
            self._loop.at(now + self._run.drain_timeout_s, self._give_up, (instance, instance.drains))
        self.left(instance, now)

    def timeline(self) -> LoadTimeline | None:
        """The samples, if there are any."""
        return self._sampler.timeline() if self._sampler is not None else None

    def _known(self, instance_id: str, what: str) -> SimInstance:
        try:
            return self._fleet.instance(self._fleet.position(instance_id))
        except KeyError:
            raise InvalidRequest(f"{what}: there is no instance {instance_id!r}") from None

    def _order(self, flip: Flip, now: float) -> None:
        instance = self._known(flip.instance_id, "flip")
        if self._auto is not None:
            self._auto.ordered(instance.view(now), now)
        self.flip(instance, now)

    def _flipped(self, subject: tuple[SimInstance, int], now: float) -> None:
        instance, drain = subject
        if instance.state is InstanceState.DRAINING and instance.drains == drain:  # else it died meanwhile
            instance.take_role(instance.role.other, now)
            self._ready(instance, now)

    def _give_up(self, subject: tuple[SimInstance, int], now: float) -> None:
        """The drain has taken too long: the instance goes on in the role that it has."""
        instance, drain = subject
        if instance.state is InstanceState.DRAINING and instance.drains == drain and instance.requests:
            self._ready(instance, now)

    def _ready(self, instance: SimInstance, now: float) -> None:
        instance.state = InstanceState.READY
        self._fleet.changed()
        self._handover.retry(now)
        self._intake.retry(now)

    def _lose(self, loss: Loss, now: float) -> None:
        instance = self._known(loss.instance_id, "loss")
        if instance.state is InstanceState.DEAD:
            return
        lost = instance.die(now)
        self._fleet.changed()
        if loss.back_s is not None:
            self._loop.at(max(now, loss.back_s), self._return, instance)
        for request in lost:
            self._restart(request, now)

    def _restart(self, request: SimRequest, now: float) -> None:
        """An instance that the request was on is lost: begin anew with the tokens that the client has."""
        given = self._legs.drop(request, now)
        self._handover.forget(request, now)
        request.hear(now)
        job = request.job
        again = msgspec.structs.replace(
            job, prompt_tokens=job.prompt_tokens + given, max_tokens=max(0, job.max_tokens - given)
        )
        request.begin(again, request.output_left - given)
        request.attempt += 1
        self._intake.admit(request, now)

    def _return(self, instance: SimInstance, now: float) -> None:
        instance.revive(now)
        self._ready(instance, now)

    def _ask(self, _: None, now: float) -> None:
        self._periodic -= 1
        assert self._auto is not None
        decision = self._auto.ask(now)
        if decision is not None:
            self.flip(self._known(decision.instance_id, "flip"), now)
        if self._others_ahead():
            self._worked_s = now
        if now - self._worked_s < _LOOKS_ON_S:
            self._again(now + self._run.role_flip_every_s, self._ask)

    def _sample(self, _: None, now: float) -> None:
        self._periodic -= 1
        assert self._sampler is not None
        self._sampler.take(now)
        if self._others_ahead():
            self._again(now + self._run.sample_s, self._sample)

    def _again(self, time_s: float, handler: Handler) -> None:
        self._periodic += 1
        self._loop.at(time_s, handler, None)

    def _others_ahead(self) -> bool:
        """Whether anything but this class's own clockwork is still to happen."""
        return self._loop.pending > self._periodic


# MERGED moves.py
# Streams whose KV blocks were taken back: as live, they go on at another instance where that is clearly sooner.


class Moves:
    """Looks for another place when a stream is paused, and again while that lasts."""

    def __init__(self, run: RunSpec, loop: EventLoop, fleet: Fleet, intake: Intake) -> None:
        self._most = run.moves
        self._loop = loop
        self._fleet = fleet
        self._intake = intake
        self._pauses = 0

    def preempted(self, leg: Leg) -> None:
        """A leg has lost its blocks; the step that it lost them to is only being planned."""
        self._pauses += 1
        leg.pause = self._pauses
        if leg.decodes and leg.started:
            self._loop.at(self._loop.now_s, self._look, (leg, leg.pause))

    def _look(self, subject: tuple[Leg, int], now: float) -> None:
        leg, pause = subject
        request = leg.request
        paused = leg.pause == pause and not leg.blocks and not leg.cancelled
        if not paused or request.over or leg.lane is None or request.moves >= self._most:
            return
        instance = self._fleet.instance(request.decode)
        here_s = instance.pause_s(leg, now)
        if here_s >= MOVE_LEAST_S and self._intake.move(request, leg, here_s, now):
            return
        if instance.engines[leg.lane].due_s != NEVER:  # else nothing changes there
            self._loop.at(now + PAUSE_NEWS_S, self._look, subject)


def simulate(
    workload: Workload,
    instances: Sequence[InstanceSpec],
    run: RunSpec = RunSpec(),
    progress: Callable[[int], None] | None = None,
) -> SimResult:
    """Run `workload` through `instances`. Deterministic: equal arguments give an equal result.

    `progress` is called now and then with the number of requests that have ended. Raises InvalidRequest when the specs
    make no sense; requests that no instance can hold end as IMPOSSIBLE.
    """
    return _Simulation(workload, instances, run, progress).result()


class _Simulation:
    """One run, put together; what engines tell (`EngineEvents`) goes on from here."""

    def __init__(
        self,
        workload: Workload,
        instances: Sequence[InstanceSpec],
        run: RunSpec,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._run = run
        self._name = workload.name
        rng = Random(run.seed)
        prefix_tokens = workload.prefix_block_tokens if workload.prefixes is not None else 0
        self._loop = loop = EventLoop()
        self._record = record = Record(workload, run, progress)
        self._fleet = fleet = Fleet(instances, run, self, prefix_tokens, rng)
        self._legs = legs = Legs(run, loop, fleet, self._left)
        patience = Patience(run, loop)
        self._auto = auto = AutoFlips(run, fleet, run.role_flip) if run.role_flip is not None else None
        self._intake = intake = Intake(run, loop, fleet, legs, record, patience, rng, auto)
        self._handover = Handover(run, loop, fleet, legs, record, intake, patience, rng)
        self._changes = Changes(run, loop, fleet, legs, intake, self._handover, auto)
        self._moves = Moves(run, loop, fleet, intake)

    def result(self) -> SimResult:
        """Handle every event in order of time."""
        self._intake.start()
        self._changes.start()
        self._loop.run(self._record.complete)
        return self._report(self._loop.now_s)

    def admitted(self, leg: Leg, now: float) -> None:
        """See `EngineEvents`."""
        self._handover.admitted(leg, now)

    def chunk(self, leg: Leg, now: float) -> None:
        """A chunk of a prompt is computed (see `EngineEvents`)."""
        if not leg.decodes and self._run.streaming:
            if leg.request.decode_leg is None:
                self._handover.dispatch(leg.request, now)
            self._handover.send(leg.request, leg.computed, now)

    def token(self, leg: Leg, now: float) -> None:
        """The first output token of a leg (see `EngineEvents`)."""
        request = leg.request
        if request.waits_prefill:
            request.waits_prefill = False
            instance = self._fleet.instance(request.decode if leg.decodes else request.prefill)
            instance.prefills -= 1
            self._intake.computed(instance)
        if leg.decodes:
            self._intake.decodes(request)
        else:
            if not request.carried or (request.decode_tokens and request.job.slo.first_token is FirstTokenOut.SMOOTH):
                return
            if request.decode_leg is not None:
                request.decode_leg.last_token_s = now
                self._legs.started(request.decode_leg, now)
        request.last_token_s = now
        request.waited_s = 0.0
        if request.first_token_s < 0.0:
            self._intake.first_token(request, now)

    def preempted(self, leg: Leg) -> None:
        """See `EngineEvents`."""
        self._record.preempted(leg.request)
        self._moves.preempted(leg)

    def done(self, leg: Leg, now: float) -> None:
        """A leg is over (see `EngineEvents`)."""
        request = leg.request
        if leg.decodes:
            self._finish(request, now)
            return
        request.prefill_done_s = now
        if request.decode_tokens == 0:
            self._finish(request, now)
            return
        if request.decode_leg is None:
            self._handover.dispatch(request, now)
        self._handover.send(request, request.split, now)

    def _left(self, instance: SimInstance, now: float) -> None:
        self._changes.left(instance, now)

    def _finish(self, request: SimRequest, now: float) -> None:
        self._intake.end(request, Status.COMPLETED, now)
        for position in (request.prefill, request.decode):
            if position is not None:
                self._legs.leave(self._fleet.instances[position], request, now)
        request.prefill_leg = request.decode_leg = None  # they and the request hold each other

    def _report(self, now: float) -> SimResult:
        instances = self._fleet.instances
        for instance in instances:
            instance.end_role(now)
        for request in (*self._intake.held, *self._intake.delayed(), *self._handover.waiting):
            self._record.end(request, Status.REFUSED, now)
        outcomes = self._record.outcomes
        done = outcomes.completed
        begun = float(outcomes.arrival_s[0])
        return SimResult(
            workload=self._name,
            label=self._run.label,
            outcomes=outcomes,
            instances=tuple(instance.use() for instance in instances),
            gaps=Gaps().merge(instance.gaps() for instance in instances),
            duration_s=float(outcomes.last_token_s[done].max()) - begun if done.any() else now - begun,
            events=self._loop.handled,
            kv_bytes=self._handover.kv_bytes,
            timeline=self._changes.timeline(),
            role_flips=tuple(self._auto.made) if self._auto is not None else (),
            shifts=tuple(self._auto.shifts) if self._auto is not None else (),
        )
