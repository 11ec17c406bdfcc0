"""A run: requests through a cluster in virtual time, by the policies that serve them live.

One request's way: it arrives and is placed (`intake`), is computed on the prefill instance, handed over (`handover`:
dispatch and KV transfer) and decoded to its end. What happens to instances on the way (flips, losses) is in `changes`.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from random import Random
from typing import Any

import msgspec

from shared.policy.lengths import is_heavy
from shared.sim.changes import Changes
from shared.sim.engine import NEVER, Engine
from shared.sim.entry import Entry
from shared.sim.fleet import Fleet
from shared.sim.flight import Flight
from shared.sim.handover import Handover
from shared.sim.instance import SimInstance
from shared.sim.intake import Intake
from shared.sim.outcomes import Gaps, SimResult, Status
from shared.sim.record import Record
from shared.sim.spec import InstanceSpec, RunSpec
from shared.sim.workload import Workload

Handler = Callable[[Any, float], None]
PROGRESS_EVERY = 2000  # requests


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
    return Simulation(workload, instances, run, progress).result()


class Simulation:
    """State of one run; `result` drives it to its end."""

    def __init__(
        self,
        workload: Workload,
        instances: Sequence[InstanceSpec],
        run: RunSpec,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.run = run
        self._name = workload.name
        self._progress = progress
        self._heap: list[tuple[float, int, Handler, Any]] = []
        self._pushed = 0
        self._events = 0
        self.rng = Random(run.seed)
        self.record = Record(workload, run)
        prefix_tokens = workload.prefix_block_tokens if workload.prefixes is not None else 0
        self.fleet = Fleet(instances, run, self, prefix_tokens, self.rng)
        self._changes = Changes(self)
        self.intake = Intake(self)
        self.handover = Handover(self, instances)

    def result(self) -> SimResult:
        """Handle every event in order of time."""
        self.intake.start()
        self._changes.start()
        heap = self._heap
        now = 0.0
        while heap and not self.record.complete:
            now, _, handler, subject = heappop(heap)
            self._events += 1
            handler(subject, now)
        return self._report(now)

    def at(self, time_s: float, handler: Handler, subject: Any) -> None:
        """Call `handler(subject, time_s)` then. Events of one moment come in the order in which they were made."""
        self._pushed += 1
        heappush(self._heap, (time_s, self._pushed, handler, subject))

    # A leg of a request on an engine.

    def count_decode(self, flight: Flight, instance: SimInstance) -> None:
        """From now on the instance has the request's decode."""
        instance.flights[flight] = None
        instance.decoding += 1
        instance.heavy += is_heavy(flight.job)

    def submit(self, instance: SimInstance, entry: Entry, now: float) -> None:
        """Give an instance a leg of a request; it is there after `hop_s`."""
        if self.run.hop_s > 0.0:
            self.at(now + self.run.hop_s, self._enter, (instance, entry))
        else:
            self._enter((instance, entry), now)

    def _enter(self, subject: tuple[SimInstance, Entry], now: float) -> None:
        instance, entry = subject
        if entry.cancelled or not instance.engines:
            return
        entry.engine = instance.engine_for(entry)
        entry.engine.add(entry, now)
        self.wake(entry.engine)

    def wake(self, engine: Engine) -> None:
        """Have the engine run when its step is due."""
        if engine.due_s != engine.booked_s:
            engine.booked_s = engine.due_s
            if engine.due_s != NEVER:
                self.at(engine.due_s, self._step, engine)

    def _step(self, engine: Engine, now: float) -> None:
        if engine.due_s == now:  # else it was cut short, or its instance is gone
            engine.run(now)
            self.wake(engine)

    def chunk(self, entry: Entry, now: float) -> None:
        """A chunk of a prompt is computed (see `EngineEvents`)."""
        flight = entry.flight
        if entry is flight.prefill_entry and self.run.streaming:
            if flight.decode_entry is None:
                self.handover.dispatch(flight, now)
            self.handover.send(flight, entry.computed, now)

    def token(self, entry: Entry, now: float) -> None:
        """The first output token of a leg (see `EngineEvents`)."""
        flight = entry.flight
        if flight.waits_prefill:
            flight.waits_prefill = False
            instance = flight.prefill if entry is flight.prefill_entry else flight.decode
            assert instance is not None
            instance.prefills -= 1
            self.intake.computed(instance, now)
        if entry is flight.prefill_entry:
            if not self.handover.carried(flight):
                return
            if flight.decode_entry is not None:
                flight.decode_entry.last_token_s = now
        flight.last_token_s = now
        if flight.first_token_s < 0.0:
            flight.first_token_s = now
            self.record.first_token(flight, now)

    def admitted(self, entry: Entry, now: float) -> None:
        """See `EngineEvents`."""
        self.handover.admitted(entry, now)

    def preempted(self, entry: Entry) -> None:
        """See `EngineEvents`."""
        self.record.preempted(entry.flight)

    def done(self, entry: Entry, now: float) -> None:
        """A leg is over (see `EngineEvents`)."""
        flight = entry.flight
        if entry is flight.decode_entry:
            self._finish(flight, now)
            return
        flight.prefill_done_s = now
        if self.handover.tokens_to_decode(flight) == 0:
            self._finish(flight, now)
            return
        if flight.decode_entry is None:
            self.handover.dispatch(flight, now)
        self.handover.send(flight, flight.split, now)

    # The end.

    def _finish(self, flight: Flight, now: float) -> None:
        self.end(flight, Status.COMPLETED, now)
        for instance in (flight.prefill, flight.decode):
            if instance is not None:
                self.leave(instance, flight, now)
        flight.prefill_entry = flight.decode_entry = None  # the two hold each other

    def end(self, flight: Flight, status: Status, now: float) -> None:
        """The request is over, one way or another."""
        self.record.end(flight, status, now)
        self.fleet.ledger.complete(flight.job.job_id)
        if self._progress is not None and self.record.ended % PROGRESS_EVERY == 0:
            self._progress(self.record.ended)
        self.intake.ended(now)

    def leave(self, instance: SimInstance, flight: Flight, now: float) -> None:
        """The request has no leg on that instance any more."""
        if flight in instance.flights:
            del instance.flights[flight]
            if instance is flight.decode and flight.decode_entry is not None:
                instance.decoding -= 1
                instance.heavy -= is_heavy(flight.job)
            self._changes.left(instance, now)

    def restart(self, flight: Flight, now: float) -> None:
        """An instance that the request was on is lost: begin anew with the tokens that the client has."""
        given = int(self.handover.carried(flight) and flight.prefill_done_s >= 0.0)
        for entry, instance in ((flight.prefill_entry, flight.prefill), (flight.decode_entry, flight.decode)):
            if entry is None or instance is None:
                continue
            if entry is flight.decode_entry:
                given += entry.given
                flight.last_token_s = max(flight.last_token_s, entry.last_token_s)
            if entry.engine is not None and flight in instance.flights:
                entry.engine.cancel(entry, now)
                self.wake(entry.engine)
            entry.cancelled = True
            if flight.waits_prefill and instance is (flight.prefill or flight.decode) and flight in instance.flights:
                instance.prefills -= 1
            self.leave(instance, flight, now)
        self.handover.forget(flight)
        job = flight.job
        again = msgspec.structs.replace(
            job, prompt_tokens=job.prompt_tokens + given, max_tokens=max(0, job.max_tokens - given)
        )
        flight.begin(again, flight.output_left - given)
        flight.attempt += 1
        self.intake.place(flight, now)

    @property
    def pending(self) -> int:
        """Events to come."""
        return len(self._heap)

    def _report(self, now: float) -> SimResult:
        for instance in self.fleet.instances:
            instance.end_role(now)
        for flight in self.intake.held:
            self.record.end(flight, Status.REFUSED, now)
        outcomes = self.record.outcomes
        done = outcomes.completed
        begun = float(outcomes.arrival_s[0])
        return SimResult(
            workload=self._name,
            label=self.run.label,
            outcomes=outcomes,
            instances=tuple(instance.use() for instance in self.fleet.instances),
            gaps=Gaps().merge(instance.gaps() for instance in self.fleet.instances),
            duration_s=float(outcomes.last_token_s[done].max()) - begun if done.any() else now - begun,
            events=self._events,
            kv_bytes=self.handover.kv_bytes,
            timeline=self._changes.sampler.timeline() if self._changes.sampler is not None else None,
        )
