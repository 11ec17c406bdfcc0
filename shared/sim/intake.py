"""From the arrival of a request to its first leg on an engine: the gateway and the global scheduler of a run."""

from collections import deque
from random import Random

from shared.domain.route import Route
from shared.errors import InvalidRequest, Unavailable
from shared.policy.assignment import assignments
from shared.policy.placement import place
from shared.sim.auto_flips import AutoFlips
from shared.sim.events import NEVER, EventLoop, Handler
from shared.sim.fleet import Fleet
from shared.sim.instance import SimInstance
from shared.sim.legs import Legs
from shared.sim.outcomes import Status
from shared.sim.record import Record
from shared.sim.request import Leg, SimRequest
from shared.sim.spec import FirstToken, RunSpec


class Queued:
    """Requests without a first token, of which the gateway takes so many, with so many prompt tokens."""

    def __init__(self, run: RunSpec) -> None:
        self._most, self._most_tokens = run.max_queued_jobs, run.max_queued_tokens
        self._tokens: dict[SimRequest, int] = {}
        self._sum = 0

    def take(self, request: SimRequest) -> bool:
        """Whether there is room for one more. One that nobody is before always has it."""
        tokens = request.job.prompt_tokens
        if self._most is not None and len(self._tokens) >= self._most:
            return False
        if self._most_tokens is not None and self._sum and self._sum + tokens > self._most_tokens:
            return False
        self._tokens[request] = tokens
        self._sum += tokens
        return True

    def leave(self, request: SimRequest) -> None:
        """It has its first token, or will not get one."""
        self._sum -= self._tokens.pop(request, 0)


class Patience:
    """How long requests wait for an instance: `patience_s` in all since their last token."""

    def __init__(self, run: RunSpec, loop: EventLoop) -> None:
        self._patience_s = run.patience_s
        self._loop = loop

    def begin(self, request: SimRequest, now: float, give_up: Handler) -> None:
        """The request waits from now on, if it did not already; `give_up(request, then)` once it has waited enough."""
        if request.waits_from_s < 0.0:
            request.waits_from_s = now
            if self._patience_s != NEVER:
                ends_s = max(now, now + (self._patience_s - request.waited_s))
                self._loop.at(ends_s, self._over, (request, now, give_up))

    def end(self, request: SimRequest, now: float) -> None:
        """It waits no more."""
        if request.waits_from_s >= 0.0:
            request.waited_s += now - request.waits_from_s
            request.waits_from_s = -1.0

    def _over(self, subject: tuple[SimRequest, float, Handler], now: float) -> None:
        request, since_s, give_up = subject
        if request.waits_from_s == since_s:
            give_up(request, now)


class Intake:
    """Lets requests in as the workload says, keeps those that nobody can take, and sees all of them out."""

    def __init__(
        self,
        run: RunSpec,
        loop: EventLoop,
        fleet: Fleet,
        legs: Legs,
        record: Record,
        patience: Patience,
        rng: Random,
        auto: AutoFlips | None,
    ) -> None:
        self._run = run
        self._loop = loop
        self._fleet = fleet
        self._legs = legs
        self._record = record
        self._patience = patience
        self._rng = rng
        self._auto = auto
        self._queued = Queued(run)
        self.held: deque[SimRequest] = deque()  # no instance can take them now

    def start(self) -> None:
        """The first arrivals; each brings about the next."""
        if not self._run.concurrency:
            self._loop.at(self._record.arrival_s(0), self._arrive, 0)
        for row in range(min(self._run.concurrency, self._record.count)):
            self._loop.at(self._record.sent(row, 0.0), self._arrive, row)

    def admit(self, request: SimRequest, now: float) -> None:
        """Place the request, or let it wait until it can be."""
        if not self._place(request, now):
            self._hold(request, now)

    def retry(self, now: float) -> None:
        """Something has become free, or an instance has come: who waits may try again, in order."""
        while self.held and not self._fleet.all_full():
            request = self.held.popleft()
            if not self._place(request, now):
                self.held.appendleft(request)
                return
            self._patience.end(request, now)

    def computed(self, instance: SimInstance) -> None:
        """A prompt is computed there: another one may take its place."""
        if self.held and not instance.full:
            self._retry_soon()

    def first_token(self, request: SimRequest, now: float) -> None:
        """The client has its first token."""
        request.first_token_s = now
        self._queued.leave(request)
        self._record.first_token(request, now)

    def end(self, request: SimRequest, status: Status, now: float) -> None:
        """The request is over, one way or another: in a closed loop its client sends the next one."""
        request.over = True
        self._queued.leave(request)
        self._record.end(request, status, now)
        answer = self._record.output_tokens(request.row) if status is Status.COMPLETED else 0
        self._fleet.ledger.complete(request.job.job_id, answer)
        if self._auto is not None:
            self._auto.ended(request.job.job_id, answer, now)
        if (row := self._record.next_to_send()) is not None:
            self._loop.at(self._record.sent(row, now), self._arrive, row)

    def stop(self, request: SimRequest, status: Status, now: float) -> None:
        """End a request that has not got all of its tokens, wherever it is."""
        self._patience.end(request, now)
        self._legs.drop(request, now)
        self.end(request, status, now)
        if self.held:
            self._retry_soon()

    def _retry_soon(self) -> None:
        self._loop.at(self._loop.now_s, lambda _, now: self.retry(now), None)

    def _arrive(self, row: int, now: float) -> None:
        if row + 1 < self._record.count and not self._run.concurrency:
            self._loop.at(self._record.arrival_s(row + 1), self._arrive, row + 1)
        request = self._record.request(row)
        if not self._queued.take(request):
            self.end(request, Status.REFUSED, now)
            return
        if self._run.job_timeout_s != NEVER:
            self._loop.at(now + self._run.job_timeout_s, self._time_out, request)
        if self.held or self._fleet.all_full():
            self._hold(request, now)
        else:
            self.admit(request, now)

    def _time_out(self, request: SimRequest, now: float) -> None:
        if not request.over:
            if request in self.held:
                self.held.remove(request)
            self.stop(request, Status.TIMED_OUT, now)

    def _hold(self, request: SimRequest, now: float) -> None:
        self.held.append(request)
        self._patience.begin(request, now, self._refuse)

    def _refuse(self, request: SimRequest, now: float) -> None:
        self.held.remove(request)
        self.stop(request, Status.REFUSED, now)

    def _place(self, request: SimRequest, now: float) -> bool:
        """Whether the request has a place now, or never will have."""
        index = self._fleet.index(now)
        try:
            route = place(request.job, index, self._run.policies, now, self._rng, self._fleet.full_ids())
        except InvalidRequest:
            self.end(request, Status.IMPOSSIBLE, now)
            return True
        except Unavailable:
            return False
        self._fleet.ledger.add(request.job, route, now)
        for assignment in assignments(request.job, route, now):
            index.book(assignment)
        if self._auto is not None and request.attempt == 1:
            self._auto.placed(request, route, now)
        self._begin(request, route, now)
        return True

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
