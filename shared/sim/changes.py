"""What happens to instances during a run: role flips with their drains, losses, returns; and samples of the load."""

from typing import TYPE_CHECKING

from shared.domain.instance import InstanceState
from shared.errors import InvalidRequest
from shared.sim.instance import SimInstance
from shared.sim.sampling import Sampler
from shared.sim.spec import Flip, Loss

if TYPE_CHECKING:
    from shared.sim.cluster import Handler, Simulation

PATIENCE_S = 600.0  # how long a flip policy may look on while requests wait and nothing else happens


class Changes:
    """Carries out orders and policies that concern whole instances."""

    def __init__(self, simulation: "Simulation") -> None:
        self._sim = simulation
        self._run = simulation.run
        self._policy = self._run.role_flip
        self._state = self._policy.start() if self._policy is not None else None
        self._periodic = 0
        self._worked_s = 0.0
        self.sampler = Sampler(simulation.fleet) if self._run.sample_s > 0.0 else None

    def start(self) -> None:
        """Plan what the spec orders. Raises InvalidRequest for an instance that is not there."""
        for loss in self._run.losses:
            self._known(loss.instance_id, "loss")
            self._sim.at(loss.at_s, self._lose, loss)
        for flip in self._run.flips:
            self._known(flip.instance_id, "flip")
            self._sim.at(flip.at_s, self._order, flip)
        if self._policy is not None:
            self._again(self._run.role_flip_every_s, self._ask)
        if self.sampler is not None:
            self._again(0.0, self._sample)

    def left(self, instance: SimInstance, now: float) -> None:
        """A request has left; if it was the last one of a drain, the role changes."""
        if instance.state is InstanceState.DRAINING and not instance.flights:
            self._sim.at(now + self._run.flip_s, self._flipped, (instance, instance.generation))

    def flip(self, instance: SimInstance, now: float) -> None:
        """Give the instance no new work; once it has none, it takes the other role."""
        if instance.state is not InstanceState.READY:
            return
        instance.state = InstanceState.DRAINING
        self._sim.fleet.changed()
        self.left(instance, now)

    def _known(self, instance_id: str, what: str) -> None:
        if instance_id not in self._sim.fleet.by_id:
            raise InvalidRequest(f"{what}: there is no instance {instance_id!r}")

    def _order(self, flip: Flip, now: float) -> None:
        self.flip(self._sim.fleet.by_id[flip.instance_id], now)

    def _flipped(self, subject: tuple[SimInstance, int], now: float) -> None:
        instance, generation = subject
        if instance.state is not InstanceState.DRAINING or instance.generation != generation:
            return  # it died meanwhile
        instance.take_role(instance.role.other, now)
        instance.state = InstanceState.READY
        self._sim.fleet.changed()
        self._sim.handover.retry(now)
        self._sim.intake.retry(now)

    def _lose(self, loss: Loss, now: float) -> None:
        instance = self._sim.fleet.by_id[loss.instance_id]
        if instance.state is InstanceState.DEAD:
            return
        lost = instance.die(now)
        self._sim.fleet.changed()
        if loss.back_s is not None:
            self._sim.at(max(now, loss.back_s), self._return, instance)
        for flight in lost:
            self._sim.restart(flight, now)

    def _return(self, instance: SimInstance, now: float) -> None:
        instance.revive(now)
        self._sim.fleet.changed()
        self._sim.handover.retry(now)
        self._sim.intake.retry(now)

    def _ask(self, _: None, now: float) -> None:
        self._periodic -= 1
        assert self._policy is not None
        assert self._state is not None
        self._state, decision = self._policy.step(self._state, self._sim.fleet.view(now), now)
        if decision is not None:
            self.flip(self._sim.fleet.by_id[decision.instance_id], now)
        if self._others_ahead():
            self._worked_s = now
        if now - self._worked_s < PATIENCE_S:
            self._again(now + self._run.role_flip_every_s, self._ask)

    def _sample(self, _: None, now: float) -> None:
        self._periodic -= 1
        assert self.sampler is not None
        self.sampler.take(now)
        if self._others_ahead():
            self._again(now + self._run.sample_s, self._sample)

    def _again(self, time_s: float, handler: "Handler") -> None:
        self._periodic += 1
        self._sim.at(time_s, handler, None)

    def _others_ahead(self) -> bool:
        """Whether anything but this class's own clockwork is still to happen."""
        return self._sim.pending > self._periodic
