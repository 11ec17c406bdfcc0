"""A run: a workload through a cluster in virtual time, under the policies that serve it live.

A request arrives and is placed (`intake`), its prompt is computed on the prefill instance, `Handover` chooses the
decode instance and sends the KV, and the request decodes to its end. A stream whose KV blocks were taken back may go on
at another instance (`Moves`), and running decodes migrate with their KV (`Migrations`). `Changes` flips and loses
instances on the way.
"""

from collections.abc import Callable, Sequence
from random import Random

import msgspec

from shared.domain.instance import InstanceState
from shared.domain.job import FirstTokenOut
from shared.domain.kv import wire_share
from shared.errors import InvalidRequest, Unavailable
from shared.policy.codec import choose_codec
from shared.policy.decode_admission import is_heavy
from shared.policy.dispatch import choose_decode
from shared.policy.ledger import Assignment
from shared.policy.overload import MOVE_LEAST_S, PAUSE_NEWS_S
from shared.sim.events import NEVER, EventLoop, Handler
from shared.sim.fleet import Fleet
from shared.sim.instance import SimInstance
from shared.sim.intake import AutoFlips, Context, Intake, Legs, Part
from shared.sim.migrations import Migrations
from shared.sim.outcomes import Gaps, SimResult, Status
from shared.sim.pulls import Pulls
from shared.sim.record import Record, Sampler
from shared.sim.request import Leg, SimRequest
from shared.sim.spec import Flip, InstanceSpec, Loss, RunSpec
from shared.sim.workload import Workload

_IDLE_FLIPS_S = 600.0  # how long a flip policy is asked while requests wait and no other event is planned


def simulate(
    workload: Workload,
    instances: Sequence[InstanceSpec],
    run: RunSpec = RunSpec(),
    progress: Callable[[int], None] | None = None,
    before: Workload | None = None,
) -> SimResult:
    """Run `workload` through `instances`. Deterministic: equal arguments give an equal result.

    before: requests that came and ended before the run; prefix caches begin with what these have left there.
    `progress` is called now and then with the number of requests that have ended. Raises InvalidRequest when the specs
    make no sense; requests that no instance can hold end as IMPOSSIBLE.
    """
    simulation = _Simulation(workload, instances, run, progress)
    if before is not None:
        simulation.fill_caches(before)
    return simulation.result()


class _Simulation:
    """One run, put together. It receives the events of all engines (see `EngineEvents`)."""

    def __init__(
        self,
        workload: Workload,
        instances: Sequence[InstanceSpec],
        run: RunSpec,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._run = run
        self._workload_name = workload.name
        rng = Random(run.seed)
        prefix_tokens = workload.prefix_block_tokens if workload.prefixes is not None else 0
        self._loop = EventLoop()
        self._record = Record(workload, run, progress)
        self._fleet = Fleet(instances, run, self._loop, self, prefix_tokens, rng)
        self._legs = Legs(run, self._loop, self._fleet, lambda instance, now: self._changes.left(instance, now))
        context = Context(run, self._loop, self._fleet, self._legs, self._record, rng)
        self._flips = AutoFlips(run, self._fleet, run.role_flip) if run.role_flip is not None else None
        self._pulls = Pulls(run, self._loop, self._fleet)
        self._intake = Intake(context, self._pulls, self._flips)
        self._handover = Handover(context, self._intake)
        self._migrations = Migrations(context, self._intake, prefix_tokens)
        self._changes = Changes(context, self._intake, self._handover, self._migrations, self._flips)
        self._moves = Moves(context, self._intake)

    def fill_caches(self, before: Workload) -> None:
        self._fleet.fill_caches(before)

    def result(self) -> SimResult:
        self._intake.start()
        self._changes.start()
        self._loop.run(self._record.complete)
        now, instances, record, flips = self._loop.now_s, self._fleet.instances, self._record, self._flips
        for instance in instances:
            instance.end_role(now)
        for request in (*self._intake.held, *self._intake.delayed.clear(), *self._handover.waiting):
            record.end(request, Status.REFUSED, now)
        outcomes, done = record.outcomes, record.outcomes.completed
        begun = float(outcomes.arrival_s[0])
        return SimResult(
            workload=self._workload_name,
            label=self._run.label,
            outcomes=outcomes,
            instances=tuple(instance.use() for instance in instances),
            gaps=Gaps().merge(instance.gaps() for instance in instances),
            duration_s=float(outcomes.last_token_s[done].max()) - begun if done.any() else now - begun,
            events=self._loop.handled,
            kv_bytes=self._handover.kv_bytes + self._pulls.wire_bytes + self._migrations.wire_bytes,
            pulls=self._pulls.count,
            pulled_tokens=self._pulls.tokens,
            migrations=self._migrations.count,
            timeline=self._changes.sampler.timeline() if self._changes.sampler is not None else None,
            role_flips=tuple(flips.made) if flips is not None else (),
            shifts=tuple(flips.shifts) if flips is not None else (),
        )

    def admitted(self, leg: Leg, now: float) -> None:
        if not self._migrations.admitted(leg, now):
            self._handover.admitted(leg, now)

    def chunk(self, leg: Leg, now: float) -> None:
        if not leg.decodes and self._run.streaming:
            if leg.request.decode_leg is None:
                self._handover.dispatch(leg.request, now)
            self._handover.send(leg.request, leg.computed_tokens, now)

    def token(self, leg: Leg, now: float) -> None:
        request = leg.request
        if request.waits_prefill:
            request.waits_prefill = False
            instance = self._fleet.instance(request.decode if leg.decodes else request.prefill)
            instance.prefills -= 1
            self._intake.prompt_computed(instance)
        if leg.decodes:
            self._intake.unserved.remove(request)
        else:
            if not request.carried or (request.decode_tokens and request.job.slo.first_token is FirstTokenOut.SMOOTH):
                return  # the client gets its first token from the decode instance
            if (stream := request.decode_leg) is not None:
                stream.last_token_s = now
                if stream.lane is not None:
                    self._fleet.engine(stream).became_stream(stream, now)
        request.last_token_s = now
        request.waited_s = 0.0
        if request.first_token_s < 0.0:
            request.first_token_s = now
            self._record.first_token(request, now)

    def decoding(self) -> None:
        self._migrations.look_on()

    def left(self, leg: Leg, now: float) -> None:
        self._migrations.left(leg, now)

    def preempted(self, leg: Leg) -> None:
        self._record.preempted(leg.request)
        self._moves.preempted(leg)

    def done(self, leg: Leg, now: float) -> None:
        request = leg.request
        if not leg.decodes:
            request.prefill_done_s = now
        if leg.decodes or request.decode_tokens == 0:
            self._intake.end(request, Status.COMPLETED, now)
            for position in (request.prefill, request.decode):
                if position is not None:
                    self._legs.leave(self._fleet.instances[position], request, now)
            request.prefill_leg = request.decode_leg = None  # they and the request hold each other
            return
        if request.decode_leg is None:
            self._handover.dispatch(request, now)
        self._handover.send(request, request.split, now)


class Handover(Part):
    """Brings a request to a decode instance, once its first chunk or its whole prompt is computed.

    It chooses the instance, has that reserve memory, and sends the KV.
    """

    def __init__(self, context: Context, intake: Intake) -> None:
        super().__init__(context)
        self._intake = intake
        self._fixed_share = wire_share(context.run.codec)
        self._waiting: dict[SimRequest, None] = {}  # no decode instance can take them now; in order
        self.kv_bytes = 0.0  # on the wire, in all

    @property
    def waiting(self) -> list[SimRequest]:
        """Requests that found no decode instance, in order."""
        return [request for request in self._waiting if not request.over]

    def retry(self, now: float) -> None:
        for request in self.waiting:
            self.dispatch(request, now)

    def forget(self, request: SimRequest, now: float) -> None:
        """The request does not wait for a decode instance any more."""
        self._waiting.pop(request, None)
        self._intake.patience.end(request, now)

    def dispatch(self, request: SimRequest, now: float) -> None:
        """Choose the request's decode instance and start its decode leg there, or let the request wait."""
        if request.decode_tokens == 0 or request.decode_leg is not None or request.prefill is None:
            return
        request.receive_prediction(now)
        if request.decode is not None and self._fleet.instances[request.decode].state is InstanceState.DEAD:
            request.decode = None  # it was bound at placement and has died since
        if request.decode is None:
            index = self._fleet.dispatch_index(request.prefill, now)
            without = (request.moved_from,) if request.moved_from else ()
            try:
                choice = choose_decode(self._run.policies.dispatch, request.job, index, without, now, self._rng)
            except Unavailable:
                self._waiting[request] = None
                if request.prefill_done_s >= 0.0:  # before that it loses no time, and its patience does not run
                    self._intake.patience.begin(request, now, self._refuse)
                return
            self.forget(request, now)
            chosen = choice.instance.instance_id
            request.decode = self._fleet.position(chosen)
            tokens, heavy = request.job.prompt_tokens, is_heavy(request.job)
            index.book(Assignment(chosen, now, decode_tokens=tokens, heavy=heavy))
        request.wire_share = self._wire_share(request, now)
        prompt, carried = request.job.prompt_tokens, request.carried
        sent = prompt if carried else min(request.split, prompt - 1)
        request.decode_leg = Leg(
            request,
            tokens=prompt + carried,
            output_left=request.decode_tokens,
            computed_tokens=sent,
            import_tokens=sent,
            prefix=request.prefix,
            last_token_s=request.last_token_s,
        )
        self._legs.start(self._fleet.instances[request.decode], request.decode_leg, now)

    def admitted(self, leg: Leg, now: float) -> None:
        """The decode instance has blocks for the KV."""
        request = leg.request
        request.admitted = True
        request.sent_tokens = min(leg.cached_tokens, request.split)
        if request.prefill_done_s >= 0.0:
            self.send(request, request.split, now)
        elif self._run.streaming and request.prefill_leg is not None:
            self.send(request, request.prefill_leg.computed_tokens, now)

    def send(self, request: SimRequest, computed: int, now: float) -> None:
        """Send KV that is computed, not sent, and not at the decode instance, once that has blocks for it."""
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
        self._fleet.engine(leg).kv_arrived(leg, now)

    def _wire_share(self, request: SimRequest, now: float) -> float:
        """Bytes on the wire over bytes of KV: by the run's codec, or as live by the request's class and the link."""
        job, leg = request.job, request.prefill_leg
        if self._run.codec.lossy or not job.slo.lossy_kv.lossy or request.decode is None:
            return self._fixed_share
        source = self._fleet.instance(request.prefill)
        target = self._fleet.instance(request.decode).info.instance_id
        receiver = self._fleet.index(now).decode.get(target)
        if receiver is None:
            return 1.0
        left = leg.uncomputed_tokens if leg is not None and request.prefill_done_s < 0.0 else 0
        return wire_share(choose_codec(job, request.split, left, source.info, receiver).codec)

    def _refuse(self, request: SimRequest, now: float) -> None:
        del self._waiting[request]
        self._intake.stop(request, Status.REFUSED, now)


class Changes(Part):
    """Changes to whole instances: role flips with their drains, losses, returns. Also samples the load."""

    def __init__(
        self, context: Context, intake: Intake, handover: Handover, migrations: Migrations, flips: AutoFlips | None
    ) -> None:
        super().__init__(context)
        self._intake = intake
        self._handover = handover
        self._migrations = migrations
        self._flips = flips
        self._periodic = 0  # events of this class that come again and again
        self._active_s = 0.0  # when other events were planned, at last
        self.sampler = Sampler(context.fleet.instances) if context.run.sample_s > 0.0 else None

    def start(self) -> None:
        """Plan what the spec orders. Raises InvalidRequest that names an instance which does not exist."""
        for loss in self._run.losses:
            self._instance(loss.instance_id, "loss")
            self._loop.at(loss.at_s, self._lose, loss)
        for flip in self._run.flips:
            self._instance(flip.instance_id, "flip")
            self._loop.at(flip.at_s, self._flip_as_ordered, flip)
        if self._flips is not None:
            self._again(self._run.role_flip_every_s, self._decide_flip)
        if self.sampler is not None:
            self._again(0.0, self._sample)

    def left(self, instance: SimInstance, now: float) -> None:
        """A request has left; if it was the last one of a drain, the role changes."""
        if instance.state is InstanceState.DRAINING and not instance.requests:
            self._loop.at(now + self._run.flip_s, self._flipped, (instance, instance.drains))

    def _flip(self, instance: SimInstance, now: float) -> None:
        """Drain the instance: it takes no new work, and changes its role once it has none."""
        if instance.state is not InstanceState.READY:
            return
        instance.state = InstanceState.DRAINING
        instance.drains += 1
        self._fleet.changed()
        if self._run.drain_timeout_s != NEVER:
            self._loop.at(now + self._run.drain_timeout_s, self._give_up_drain, (instance, instance.drains))
        self.left(instance, now)
        self._migrations.drain(instance, now)

    def _instance(self, instance_id: str, order: str) -> SimInstance:
        try:
            return self._fleet.instance(self._fleet.position(instance_id))
        except KeyError:
            raise InvalidRequest(f"{order}: there is no instance {instance_id!r}") from None

    def _flip_as_ordered(self, flip: Flip, now: float) -> None:
        instance = self._instance(flip.instance_id, "flip")
        if self._flips is not None:
            self._flips.ordered(instance.view(now), now)
        self._flip(instance, now)

    def _flipped(self, subject: tuple[SimInstance, int], now: float) -> None:
        instance, drain = subject
        if instance.state is InstanceState.DRAINING and instance.drains == drain:  # else it died meanwhile
            instance.take_role(instance.role.other, now)
            self._ready(instance, now)

    def _give_up_drain(self, subject: tuple[SimInstance, int], now: float) -> None:
        """The drain has taken too long: the instance keeps its role."""
        instance, drain = subject
        if instance.state is InstanceState.DRAINING and instance.drains == drain and instance.requests:
            self._ready(instance, now)

    def _ready(self, instance: SimInstance, now: float) -> None:
        instance.state = InstanceState.READY
        self._fleet.changed()
        self._handover.retry(now)
        self._intake.retry(now)

    def _lose(self, loss: Loss, now: float) -> None:
        """The instance dies; its requests restart elsewhere with the tokens that their clients have."""
        instance = self._instance(loss.instance_id, "loss")
        if instance.state is InstanceState.DEAD:
            return
        lost = instance.die(now)
        self._fleet.changed()
        if loss.back_s is not None:
            self._loop.at(max(now, loss.back_s), self._return, instance)
        for request in lost:
            given = self._legs.drop(request, now)
            self._handover.forget(request, now)
            request.receive_prediction(now)
            job = request.job
            prompt, left = job.prompt_tokens + given, max(0, job.max_tokens - given)
            job = msgspec.structs.replace(job, prompt_tokens=prompt, max_tokens=left)
            request.begin(job, request.output_left - given)
            request.attempt += 1
            self._intake.admit(request, now)

    def _return(self, instance: SimInstance, now: float) -> None:
        instance.revive(now)
        self._ready(instance, now)

    def _decide_flip(self, _: None, now: float) -> None:
        self._periodic -= 1
        assert self._flips is not None
        decision = self._flips.decide(now)
        if decision is not None:
            self._flip(self._instance(decision.instance_id, "flip"), now)
        if self._others_planned():
            self._active_s = now
        if now - self._active_s < _IDLE_FLIPS_S:
            self._again(now + self._run.role_flip_every_s, self._decide_flip)

    def _sample(self, _: None, now: float) -> None:
        self._periodic -= 1
        assert self.sampler is not None
        self.sampler.sample(now)
        if self._others_planned():
            self._again(now + self._run.sample_s, self._sample)

    def _again(self, time_s: float, handler: Handler) -> None:
        self._periodic += 1
        self._loop.at(time_s, handler, None)

    def _others_planned(self) -> bool:
        """Whether any event is planned that is not one of this class's periodic ones."""
        return self._loop.pending > self._periodic


class Moves(Part):
    """Streams whose KV blocks were taken back: as live, they go on at another instance where that is clearly sooner."""

    def __init__(self, context: Context, intake: Intake) -> None:
        super().__init__(context)
        self._intake = intake
        self._pauses = 0

    def preempted(self, leg: Leg) -> None:
        """A leg has lost its blocks. The event follows the step that is being planned and takes them."""
        self._pauses += 1
        leg.pause = self._pauses
        if leg.decodes and leg.is_stream:
            self._loop.at(self._loop.now_s, self._look, (leg, leg.pause))

    def _look(self, subject: tuple[Leg, int], now: float) -> None:
        """Move the stream, or look again while its pause lasts."""
        leg, pause = subject
        request = leg.request
        paused = leg.pause == pause and not leg.blocks and not leg.cancelled
        if not paused or request.over or leg.lane is None or request.moves >= self._run.moves:
            return
        instance = self._fleet.instance(request.decode)
        here_s = instance.pause_s(leg, now)
        if here_s >= MOVE_LEAST_S and self._intake.move(request, leg, here_s, now):
            return
        if not instance.engines[leg.lane].idle:  # else nothing changes there
            self._loop.at(now + PAUSE_NEWS_S, self._look, subject)
