"""The legs of requests on the engines of their instances: how they get there, step, and leave."""

from collections.abc import Callable

from shared.policy.lengths import is_heavy
from shared.sim.engine import Engine
from shared.sim.events import NEVER, EventLoop
from shared.sim.fleet import Fleet
from shared.sim.instance import SimInstance
from shared.sim.request import Leg, SimRequest
from shared.sim.spec import RunSpec


class Legs:
    """Puts legs on engines, runs the engines when their steps are due, and takes legs off.

    `left` is called with an instance that a request has left, and the time.
    """

    def __init__(self, run: RunSpec, loop: EventLoop, fleet: Fleet, left: Callable[[SimInstance, float], None]) -> None:
        self._loop = loop
        self._fleet = fleet
        self._hop_s = run.hop_s
        self._left = left

    def start(self, instance: SimInstance, leg: Leg, now: float) -> None:
        """Give an instance a leg of a request; it counts at once, and is there after `hop_s`."""
        instance.requests[leg.request] = None
        if leg.decodes:
            instance.decoding += 1
            self._fleet.ledger.arrived(leg.request.job.job_id)
            instance.heavy += is_heavy(leg.request.job)
        if self._hop_s > 0.0:
            self._loop.at(now + self._hop_s, self._enter, (instance, leg))
        else:
            self._enter((instance, leg), now)

    def kv_arrived(self, leg: Leg, now: float) -> None:
        """All of the KV that a decode waits for is at its instance."""
        engine = self._engine(leg)
        engine.kv_arrived(leg, now)
        self._wake(engine)

    def started(self, leg: Leg, now: float) -> None:
        """The client of a decode has its first token, from a prefill instance."""
        if leg.lane is not None:
            engine = self._engine(leg)
            engine.started(leg, now)
            self._wake(engine)

    def leave(self, instance: SimInstance, request: SimRequest, now: float) -> None:
        """The request has no leg on that instance any more."""
        if request in instance.requests:
            del instance.requests[request]
            if instance.index == request.decode and request.decode_leg is not None:
                instance.decoding -= 1
                instance.heavy -= is_heavy(request.job)
            leg = request.prefill_leg
            if instance.index == request.prefill and leg is not None and leg.lane is not None:
                engine = self._engine(leg)
                engine.sent(leg, now)
                self._wake(engine)
            self._left(instance, now)

    def drop(self, request: SimRequest, now: float) -> int:
        """Stop the request wherever it is. How many output tokens this attempt has given to the client."""
        given = int(request.carried and request.prefill_done_s >= 0.0)
        computes = request.decode if request.prefill is None else request.prefill
        for leg, position in ((request.prefill_leg, request.prefill), (request.decode_leg, request.decode)):
            if leg is None or position is None:
                continue
            instance = self._fleet.instances[position]
            if leg.decodes:
                given += leg.given
                request.last_token_s = max(request.last_token_s, leg.last_token_s)
            if request in instance.requests:
                if leg.lane is not None:
                    engine = self._engine(leg)
                    engine.cancel(leg, now)
                    self._wake(engine)
                if request.waits_prefill and position == computes:
                    instance.prefills -= 1
            leg.cancelled = True
            self.leave(instance, request, now)
        return given

    def _engine(self, leg: Leg) -> Engine:
        request = leg.request
        assert leg.lane is not None
        return self._fleet.instance(request.decode if leg.decodes else request.prefill).engines[leg.lane]

    def _enter(self, subject: tuple[SimInstance, Leg], now: float) -> None:
        instance, leg = subject
        if leg.cancelled or not instance.engines:
            return
        leg.lane = instance.next_lane()
        engine = instance.engines[leg.lane]
        engine.add(leg, now)
        self._wake(engine)

    def _wake(self, engine: Engine) -> None:
        """Have the engine run when its step is due."""
        if engine.due_s != engine.booked_s:
            engine.booked_s = engine.due_s
            if engine.due_s != NEVER:
                self._loop.at(engine.due_s, self._step, engine)

    def _step(self, engine: Engine, now: float) -> None:
        if engine.due_s == now:  # else it was cut short, or its instance is gone
            engine.run(now)
            self._wake(engine)
