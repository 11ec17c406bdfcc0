"""What happens to instances during a run: role flips with their drains, losses, returns; and samples of the load."""

import msgspec

from shared.domain.instance import InstanceState
from shared.errors import InvalidRequest
from shared.sim.auto_flips import AutoFlips
from shared.sim.events import NEVER, EventLoop, Handler
from shared.sim.fleet import Fleet
from shared.sim.handover import Handover
from shared.sim.instance import SimInstance
from shared.sim.intake import Intake
from shared.sim.legs import Legs
from shared.sim.outcomes import LoadTimeline
from shared.sim.record import Sampler
from shared.sim.request import SimRequest
from shared.sim.spec import Flip, Loss, RunSpec

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
