"""From the arrival of a request to its first leg on an engine: the gateway and the global scheduler of a run."""

from collections import deque
from typing import TYPE_CHECKING

from shared.domain.route import Route
from shared.errors import Busy, InvalidRequest, Unavailable
from shared.policy.placement import assignments, place
from shared.sim.engine import NEVER
from shared.sim.entry import Entry
from shared.sim.flight import Flight
from shared.sim.instance import SimInstance
from shared.sim.outcomes import Status

if TYPE_CHECKING:
    from shared.sim.cluster import Simulation


class Intake:
    """Lets requests in as the workload says, places them, and keeps those that nobody can take."""

    def __init__(self, simulation: "Simulation") -> None:
        self._sim = simulation
        self._run = simulation.run
        self._record = simulation.record
        self.held: deque[Flight] = deque()  # no instance can take them now

    def start(self) -> None:
        """The first arrivals; each brings about the next."""
        if not self._run.concurrency:
            self._sim.at(self._record.arrival_s(0), self._arrive, 0)
        for row in range(min(self._run.concurrency, self._record.count)):
            self._send(row, 0.0)

    def ended(self, now: float) -> None:
        """A request is over: in a closed loop its client sends the next one."""
        if (row := self._record.next_to_send()) is not None:
            self._send(row, now)

    def computed(self, instance: SimInstance, now: float) -> None:
        """A prompt is computed there: another one may take its place."""
        if self.held and not instance.full:
            self._sim.at(now, self._retry, None)

    def retry(self, now: float) -> None:
        """Something has become free, or an instance has come: who waits may try again, in order."""
        while self.held and not self._sim.fleet.all_full():
            flight = self.held.popleft()
            if not self.place(flight, now):
                self.held.rotate(1)  # `_hold` put it last; it is first in line
                return

    def place(self, flight: Flight, now: float) -> bool:
        """Whether the request has a place now, or never will have."""
        sim = self._sim
        index = sim.fleet.index(now)
        try:
            route = place(flight.job, index, self._run.policies, now, sim.rng, sim.fleet.full_ids())
        except InvalidRequest:
            sim.end(flight, Status.IMPOSSIBLE, now)
            return True
        except (Busy, Unavailable):
            self._hold(flight)
            return False
        for assignment in assignments(flight.job, route, now):
            index.book(assignment)
        sim.fleet.ledger.add(flight.job.job_id, route, now)
        self._begin(flight, route, now)
        return True

    def _send(self, row: int, now: float) -> None:
        """A client of a closed loop sends its next request."""
        self._sim.at(self._record.sent(row, now), self._arrive, row)

    def _arrive(self, row: int, now: float) -> None:
        if row + 1 < self._record.count and not self._run.concurrency:
            self._sim.at(self._record.arrival_s(row + 1), self._arrive, row + 1)
        flight = self._record.flight(row)
        if self.held or self._sim.fleet.all_full():
            self._hold(flight)
        else:
            self.place(flight, now)

    def _hold(self, flight: Flight) -> None:
        self.held.append(flight)
        if self._run.patience_s != NEVER:
            self._sim.at(self._record.arrival_s(flight.row) + self._run.patience_s, self._lose_patience, flight)

    def _lose_patience(self, flight: Flight, now: float) -> None:
        if flight in self.held:
            self.held.remove(flight)
            self._sim.end(flight, Status.REFUSED, now)

    def _retry(self, _: None, now: float) -> None:
        self.retry(now)

    def _begin(self, flight: Flight, route: Route, now: float) -> None:
        flight.split = route.split
        if route.decode is not None:
            flight.decode = self._sim.fleet.by_id[route.decode.instance_id]
        if route.prefill is None:
            assert flight.decode is not None
            self._sim.count_decode(flight, flight.decode)
            self._wait_prefill(flight, flight.decode)
            flight.decode_entry = Entry(
                flight,
                flight.job.prompt_tokens,
                flight.output_left,
                prefix=flight.prefix,
                last_token_s=flight.last_token_s,
            )
            self._sim.submit(flight.decode, flight.decode_entry, now)
            return
        flight.prefill = self._sim.fleet.by_id[route.prefill.instance_id]
        flight.prefill.flights[flight] = None
        self._wait_prefill(flight, flight.prefill)
        last_token_s = flight.last_token_s if self._sim.handover.carried(flight) else -1.0
        flight.prefill_entry = Entry(flight, flight.split, 1, prefix=flight.prefix, last_token_s=last_token_s)
        self._sim.submit(flight.prefill, flight.prefill_entry, now)

    def _wait_prefill(self, flight: Flight, instance: SimInstance) -> None:
        flight.waits_prefill = True
        instance.prefills += 1
