"""From the arrival of a request to its first leg on an engine: the gateway and the global scheduler of a run."""

from collections import deque
from random import Random

import msgspec

from shared.domain.job import WhenFull, itl_met
from shared.domain.route import Route
from shared.errors import Delayed, InvalidRequest, Overloaded, PolyphaseError, Unavailable
from shared.policy.assignment import assignments
from shared.policy.fair_share import Shares
from shared.policy.index import ClusterIndex
from shared.policy.overload import decide
from shared.sim.auto_flips import AutoFlips
from shared.sim.events import NEVER, EventLoop, Handler
from shared.sim.fleet import Fleet
from shared.sim.gate import DelayLines, Queued
from shared.sim.instance import SimInstance
from shared.sim.legs import Legs
from shared.sim.outcomes import Status
from shared.sim.record import Record
from shared.sim.request import Leg, SimRequest
from shared.sim.spec import FirstToken, RunSpec


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
        self._shares = Shares()
        self._lines = DelayLines(loop, self._shares, self._ask)
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

    def move(self, request: SimRequest, leg: Leg, pause_s: float, now: float) -> bool:
        """Place a stream elsewhere whose decode leg is paused for `pause_s` more; False where it stays."""
        index, job, given = self._fleet.index(now), request.job, int(request.carried) + leg.given
        here = self._fleet.instance(request.decode).spec.instance_id
        prompt, left = job.prompt_tokens + given, max(0, job.max_tokens - given)
        job = msgspec.structs.replace(job, prompt_tokens=prompt, max_tokens=left, pause_s=pause_s, started=True)
        try:
            route = decide(job, index, self._run.policies, now, self._rng, self._fleet.full_ids() | {here})
        except PolyphaseError:
            return False
        output_left = request.output_left - self._legs.drop(request, now)
        request.begin(msgspec.structs.replace(job, pause_s=0.0), output_left)
        request.moves += 1
        request.moved_from = here
        self._take_place(request, route, index, now)
        return True

    def retry(self, now: float) -> None:
        """Something has become free, or an instance has come: who waits may try again, in order."""
        while self.held and not self._fleet.all_full():
            request = self.held.popleft()
            if not self._place(request, now):
                self.held.appendleft(request)
                return
            self._patience.end(request, now)

    def delayed(self) -> list[SimRequest]:
        """Those that wait in a line to its end."""
        return self._lines.left()

    def computed(self, instance: SimInstance) -> None:
        """A prompt is computed there: another one may take its place."""
        if self.held and not instance.full:
            self._retry_soon()

    def first_token(self, request: SimRequest, now: float) -> None:
        """The client has its first token."""
        request.first_token_s = now
        self._record.first_token(request, now)

    def decodes(self, request: SimRequest) -> None:
        """It has a token of the instance that decodes it: it waits no more."""
        self._queued.leave(request)

    def end(self, request: SimRequest, status: Status, now: float) -> None:
        """The request is over, one way or another: in a closed loop its client sends the next one."""
        request.over = True
        self._queued.leave(request)
        self._record.end(request, status, now)
        answer = self._record.output_tokens(request.row) if status is Status.COMPLETED else 0
        self._shares.charge(request.caller, 0, answer)
        self._shares.left(request.caller, now)
        self._fleet.ledger.complete(request.job.job_id, answer, self._met(request, status, now), now)
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
        self._shares.came(request.caller, now)
        delayed = request.job.slo.when_full is WhenFull.DELAY
        if not delayed and not self._queued.take(request):
            self.end(request, Status.REFUSED, now)
            return
        if self._run.job_timeout_s != NEVER:
            self._loop.at(now + self._run.job_timeout_s, self._time_out, request)
        if delayed:
            self._lines.join(request, now)
            if self._run.delay_s != NEVER:
                self._loop.at(now + self._run.delay_s, self._waited_enough, request)
        else:
            self._come(request, now)

    def _come(self, request: SimRequest, now: float) -> None:
        if self.held or self._fleet.all_full():
            self._hold(request, now)
        elif self._lines.waiting(request):
            self._lines.join(request, now)
        else:
            try:
                self.admit(request, now)
            except Delayed as delay:
                self._lines.join_asleep(request, delay.retry_after_s or 0.0, now)

    def _ask(self, request: SimRequest, now: float) -> float | None:
        """A delayed request asks for its place; in how many seconds it is to ask again, None if it need not."""
        try:
            if not self._place(request, now):
                self._hold(request, now)
        except Delayed as delay:
            return delay.retry_after_s or 0.0
        return None

    def _waited_enough(self, request: SimRequest, now: float) -> None:
        if self._lines.leave(request):
            self.end(request, Status.REFUSED, now)

    def _come_again(self, request: SimRequest, now: float) -> None:
        if not request.over:
            self._come(request, now)

    def _time_out(self, request: SimRequest, now: float) -> None:
        if not request.over:
            if request in self.held:
                self.held.remove(request)
            self._lines.leave(request)
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
        over_share = self._shares.over(request.caller, now)
        if over_share is not request.job.over_share:
            request.job = msgspec.structs.replace(request.job, over_share=over_share)
        if not request.job.begun:
            request.job = msgspec.structs.replace(request.job, waited_s=now - request.arrived_s)
        try:
            route = decide(request.job, index, self._run.policies, now, self._rng, self._fleet.full_ids())
        except InvalidRequest:
            self.end(request, Status.IMPOSSIBLE, now)
            return True
        except Delayed:
            raise
        except Overloaded as refusal:
            self._refused(request, refusal.retry_after_s or 0.0, now)
            return True
        except Unavailable:
            return False
        if not request.job.begun:
            self._shares.charge(request.caller, request.job.prompt_tokens, 0)
            request.job = msgspec.structs.replace(request.job, begun=True)
        self._take_place(request, route, index, now)
        if self._auto is not None and request.attempt == 1:
            self._auto.placed(request, route, now)
        return True

    def _take_place(self, request: SimRequest, route: Route, index: ClusterIndex, now: float) -> None:
        request.job = msgspec.structs.replace(request.job, answer_tokens=route.answer_tokens)
        self._fleet.ledger.add(request.job, route, now)
        for assignment in assignments(request.job, route, now):
            index.book(assignment)
        self._begin(request, route, now)

    def _refused(self, request: SimRequest, retry_after_s: float, now: float) -> None:
        """Its client comes again when it was told to, or not at all."""
        if request.returns < self._run.returns:
            request.returns += 1
            self._loop.at(now + retry_after_s, self._come_again, request)
        else:
            self.end(request, Status.REFUSED, now)

    def _met(self, request: SimRequest, status: Status, now: float) -> bool | None:
        """Whether it kept its targets; None if it never had a place."""
        if not request.job.begun:
            return None
        slo, first_s, more = request.job.slo, request.first_token_s, self._record.output_tokens(request.row) - 1
        in_time = status is Status.COMPLETED and first_s - request.arrived_s <= slo.ttft_s
        steady = more < 1 or now - first_s <= slo.tpot_s * more
        return in_time and steady and itl_met(max(0, more), request.gaps_over)

    def _begin(self, request: SimRequest, route: Route, now: float) -> None:
        job = request.job
        request.split = route.split
        request.carried = self._run.first_token is FirstToken.PREFILL and route.split == job.prompt_tokens
        if route.decode is not None:
            request.decode = self._fleet.position(route.decode.instance_id)
        last_token_s = request.last_token_s
        if route.prefill is None:
            instance = self._fleet.instance(request.decode)
            tokens, saved = job.prompt_tokens, route.decode_saved
            leg = request.decode_leg = Leg(
                request, tokens, request.output_left, prefix=request.prefix, saved=saved, last_token_s=last_token_s
            )
        else:
            request.prefill = self._fleet.position(route.prefill.instance_id)
            instance = self._fleet.instance(request.prefill)
            last_token_s = last_token_s if request.carried else -1.0
            saved = route.prefill_saved
            leg = Leg(request, request.split, 1, prefix=request.prefix, saved=saved, last_token_s=last_token_s)
            request.prefill_leg = leg
        request.waits_prefill = True
        instance.prefills += 1
        self._legs.start(instance, leg, now)
