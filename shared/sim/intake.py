"""From the arrival of a request to its first leg on an engine: the gateway and the global scheduler of a run."""

from collections import deque
from random import Random

from shared.domain.route import Route
from shared.errors import Busy, InvalidRequest, Unavailable
from shared.policy.placement import assignments, place
from shared.sim.events import NEVER, EventLoop
from shared.sim.fleet import Fleet
from shared.sim.instance import SimInstance
from shared.sim.legs import Legs
from shared.sim.outcomes import Status
from shared.sim.record import Record
from shared.sim.request import Leg, SimRequest
from shared.sim.spec import FirstToken, RunSpec


class Intake:
    """Lets requests in as the workload says, places them, keeps those that nobody can take, and sees them out."""

    def __init__(self, run: RunSpec, loop: EventLoop, fleet: Fleet, legs: Legs, record: Record, rng: Random) -> None:
        self._run = run
        self._loop = loop
        self._fleet = fleet
        self._legs = legs
        self._record = record
        self._rng = rng
        self.held: deque[SimRequest] = deque()  # no instance can take them now

    def start(self) -> None:
        """The first arrivals; each brings about the next."""
        if not self._run.concurrency:
            self._loop.at(self._record.arrival_s(0), self._arrive, 0)
        for row in range(min(self._run.concurrency, self._record.count)):
            self._send(row, 0.0)

    def end(self, request: SimRequest, status: Status, now: float) -> None:
        """The request is over, one way or another: in a closed loop its client sends the next one."""
        self._record.end(request, status, now)
        self._fleet.ledger.complete(request.job.job_id)
        if (row := self._record.next_to_send()) is not None:
            self._send(row, now)

    def computed(self, instance: SimInstance, now: float) -> None:
        """A prompt is computed there: another one may take its place."""
        if self.held and not instance.full:
            self._loop.at(now, self._retry, None)

    def retry(self, now: float) -> None:
        """Something has become free, or an instance has come: who waits may try again, in order."""
        while self.held and not self._fleet.all_full():
            request = self.held.popleft()
            if not self.place(request, now):
                self.held.rotate(1)  # `_hold` put it last; it is first in line
                return

    def place(self, request: SimRequest, now: float) -> bool:
        """Whether the request has a place now, or never will have."""
        index = self._fleet.index(now)
        try:
            route = place(request.job, index, self._run.policies, now, self._rng, self._fleet.full_ids())
        except InvalidRequest:
            self.end(request, Status.IMPOSSIBLE, now)
            return True
        except (Busy, Unavailable):
            self._hold(request)
            return False
        for assignment in assignments(request.job, route, now):
            index.book(assignment)
        self._fleet.ledger.add(request.job.job_id, route, now)
        self._begin(request, route, now)
        return True

    def _send(self, row: int, now: float) -> None:
        """A client of a closed loop sends its next request."""
        self._loop.at(self._record.sent(row, now), self._arrive, row)

    def _arrive(self, row: int, now: float) -> None:
        if row + 1 < self._record.count and not self._run.concurrency:
            self._loop.at(self._record.arrival_s(row + 1), self._arrive, row + 1)
        request = self._record.request(row)
        if self.held or self._fleet.all_full():
            self._hold(request)
        else:
            self.place(request, now)

    def _hold(self, request: SimRequest) -> None:
        self.held.append(request)
        if self._run.patience_s != NEVER:
            self._loop.at(self._record.arrival_s(request.row) + self._run.patience_s, self._lose_patience, request)

    def _lose_patience(self, request: SimRequest, now: float) -> None:
        if request in self.held:
            self.held.remove(request)
            self.end(request, Status.REFUSED, now)

    def _retry(self, _: None, now: float) -> None:
        self.retry(now)

    def _begin(self, request: SimRequest, route: Route, now: float) -> None:
        job = request.job
        request.split = route.split
        request.carried = self._run.first_token is FirstToken.PREFILL and route.split == job.prompt_tokens
        if route.decode is not None:
            request.decode = self._fleet.position(route.decode.instance_id)
        last_token_s = request.last_token_s
        if route.prefill is None:
            instance = self._fleet.instance(request.decode)
            leg = request.decode_leg = Leg(
                request, job.prompt_tokens, request.output_left, prefix=request.prefix, last_token_s=last_token_s
            )
        else:
            request.prefill = self._fleet.position(route.prefill.instance_id)
            instance = self._fleet.instance(request.prefill)
            last_token_s = last_token_s if request.carried else -1.0
            leg = Leg(request, request.split, 1, prefix=request.prefix, last_token_s=last_token_s)
            request.prefill_leg = leg
        request.waits_prefill = True
        instance.prefills += 1
        self._legs.start(instance, leg, now)
