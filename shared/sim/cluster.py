"""A run: requests through a cluster in virtual time, by the policies that serve them live.

One request's way: it arrives and is placed (`intake`), is computed on the prefill instance, handed over (`handover`:
dispatch and KV transfer) and decoded to its end; a stream that is paused for want of KV blocks may go on elsewhere
(`moves`). What happens to instances on the way (flips, losses) is in `changes`.
"""

from collections.abc import Callable, Sequence
from random import Random

from shared.domain.job import FirstTokenOut
from shared.sim.auto_flips import AutoFlips
from shared.sim.changes import Changes
from shared.sim.events import EventLoop
from shared.sim.fleet import Fleet
from shared.sim.handover import Handover
from shared.sim.instance import SimInstance
from shared.sim.intake import Intake, Patience
from shared.sim.legs import Legs
from shared.sim.moves import Moves
from shared.sim.outcomes import Gaps, SimResult, Status
from shared.sim.record import Record
from shared.sim.request import Leg, SimRequest
from shared.sim.spec import InstanceSpec, RunSpec
from shared.sim.workload import Workload


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
