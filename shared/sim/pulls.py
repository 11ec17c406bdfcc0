"""Pulls of prefixes during a run: a holder exports KV from its prefix cache, and the puller computes the rest."""

from shared.domain.instance import InstanceState
from shared.domain.route import PrefixPull
from shared.policy.prefix_pull import gather_s
from shared.sim.engine import Engine
from shared.sim.events import EventLoop
from shared.sim.fleet import Fleet
from shared.sim.instance import SimInstance
from shared.sim.request import Leg, State
from shared.sim.spec import RunSpec


class Pulls:
    """Prefixes on their way. As live, a pull begins between two steps of the holder and runs while the leg waits in the
    queue of its engine. A holder that has died, or has evicted what was asked for, sends nothing: the leg computes.

    count, tokens, wire_bytes: of the pulls that brought something.
    """

    def __init__(self, run: RunSpec, loop: EventLoop, fleet: Fleet) -> None:
        self._loop = loop
        self._fleet = fleet
        self._hop_s = run.hop_s
        self.count = 0
        self.tokens = 0
        self.wire_bytes = 0.0

    def begin(self, leg: Leg, target: SimInstance, pull: PrefixPull, now: float) -> None:
        """The leg, which is about to go to the engine of `target`, pulls that."""
        leg.cached_tokens, leg.pulled_tokens, leg.pulling = pull.tokens, pull.tokens, True
        source = self._fleet.instance(self._fleet.position(pull.holder.instance_id))
        self._loop.at(now + self._hop_s, self._ask, _Pull(leg, source, target))

    def _ask(self, pull: "_Pull", now: float) -> None:
        if pull.is_possible:
            self._loop.at(pull.engine.step_end_s(now), self._ends, pull)
        else:
            self._fail(pull, now)

    def _ends(self, pull: "_Pull", now: float) -> None:
        """A step of the holder ends. The export follows whatever else is planned for this moment, as the next step."""
        self._loop.at(now, self._export, pull)

    def _export(self, pull: "_Pull", now: float) -> None:
        """The step of the holder has ended: what it still holds leaves, less what the puller has itself."""
        leg = pull.leg
        if leg.cancelled:
            return
        held = pull.held_tokens if pull.is_possible else 0
        fresh = held - pull.own_tokens
        if fresh <= 0:
            self._fail(pull, now)
            return
        leg.pulled_tokens = held
        if leg.state is State.RECEIVING:
            leg.computed_tokens = min(leg.computed_tokens, held)
        wire_bytes = fresh * pull.source.spec.kv_bytes_per_token
        self.count += 1
        self.tokens += fresh
        self.wire_bytes += wire_bytes
        gathers_s = gather_s(wire_bytes, pull.source.info.tensor_parallel)
        gathers_s += pull.engine.memory.export_s(leg.prefix, pull.own_tokens, held)
        gathered_s = pull.engine.export(gathers_s, now)
        arrives_s = self._fleet.wires.send(pull.source.index, pull.target.index, wire_bytes, now)
        self._loop.at(max(arrives_s, gathered_s), self._arrived, pull)

    def _arrived(self, pull: "_Pull", now: float) -> None:
        leg = pull.leg
        if leg.cancelled:
            return
        if not pull.is_possible:
            self._fail(pull, now)
            return
        leg.pulling = False
        if leg.state is State.RECEIVING:
            self._fleet.engine(leg).kv_arrived(leg, now)

    def _fail(self, pull: "_Pull", now: float) -> None:
        leg = pull.leg
        if leg.cancelled:
            return
        leg.cached_tokens = pull.own_tokens
        if leg.lane is not None:
            self._fleet.engine(leg).pull_failed(leg, now)
        else:
            leg.pulled_tokens, leg.pulling = 0, False


class _Pull:
    """One pull: of a leg that goes to `target`, from `source` as it is now."""

    __slots__ = ("_generation", "leg", "source", "target")

    def __init__(self, leg: Leg, source: SimInstance, target: SimInstance) -> None:
        self.leg, self.source, self.target = leg, source, target
        self._generation = source.generation

    @property
    def is_possible(self) -> bool:
        """Whether the holder is still there."""
        return self.source.state is not InstanceState.DEAD and self.source.generation == self._generation

    @property
    def engine(self) -> Engine:
        return self.source.engines[0]

    @property
    def held_tokens(self) -> int:
        return min(self.leg.pulled_tokens, self.engine.memory.matched_tokens(self.leg.prefix))

    @property
    def own_tokens(self) -> int:
        """Tokens that the puller holds itself."""
        return self.target.engines[self.leg.lane or 0].memory.matched_tokens(self.leg.prefix)
