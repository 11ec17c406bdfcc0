"""From a request's arrival to its first leg on an engine: what the gateway and the global scheduler do live."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import msgspec

from shared.domain.demand import DemandSecond, Shift
from shared.domain.instance import InstanceView, Role
from shared.domain.job import WhenFull, itl_met
from shared.domain.route import Route
from shared.errors import Delayed, InvalidRequest, Overloaded, PolyphaseError, Unavailable
from shared.policy.decode_admission import is_heavy
from shared.policy.demand import DemandBook, DemandCounter
from shared.policy.fair_queue import FairQueue, Line, Waiter, excess_jobs, excess_tokens, retry_s
from shared.policy.fair_share import TokenCounters
from shared.policy.index import ClusterIndex
from shared.policy.overload import decide
from shared.policy.role_flip import FlipContext, FlipDecision, FlipHistory, RoleFlip
from shared.policy.saved_tokens import saved_tokens
from shared.policy.split import freedom
from shared.policy.truth import FEWEST_TOKENS, Compared
from shared.sim.events import NEVER, EventLoop, Handler
from shared.sim.fleet import Fleet
from shared.sim.instance import SimInstance
from shared.sim.outcomes import RoleFlipped, Status
from shared.sim.pulls import Pulls
from shared.sim.record import Record
from shared.sim.request import Leg, SimRequest
from shared.sim.spec import FirstToken, RunSpec

_DEMAND_DELAY_S = 1.0  # from the end of a second until schedulers have reported its demand


@dataclass(frozen=True, slots=True)
class Context:
    """What all parts of a run work with."""

    run: RunSpec
    loop: EventLoop
    fleet: Fleet
    legs: "Legs"
    record: Record
    rng: Random


class Part:
    """A part of a run."""

    def __init__(self, context: Context) -> None:
        self._run = context.run
        self._loop = context.loop
        self._fleet = context.fleet
        self._legs = context.legs
        self._record = context.record
        self._rng = context.rng


class Intake(Part):
    """Lets requests in as the workload says, holds those that no instance can take now, and ends all of them."""

    def __init__(self, context: Context, pulls: Pulls, flips: "AutoFlips | None") -> None:
        super().__init__(context)
        self._pulls = pulls
        self._flips = flips
        self._shares = TokenCounters()
        self.patience = Patience(context.run.patience_s, context.loop)
        self.unserved = Unserved(context.run)
        self.delayed = DelayedRequests(context.loop, self._shares, self._try_place)
        self.held: deque[SimRequest] = deque()  # no instance can take them now

    def start(self) -> None:
        if not self._run.concurrency:
            self._loop.at(self._record.placement_s(0), self._arrive, 0)
        for row in range(min(self._run.concurrency, self._record.count)):
            self._loop.at(self._record.send(row, 0.0), self._arrive, row)

    def admit(self, request: SimRequest, now: float) -> None:
        """Place the request, or hold it until it can be placed."""
        if not self._place(request, now):
            self.held.append(request)
            self.patience.begin(request, now, self._refuse_held)

    def move(self, request: SimRequest, leg: Leg, pause_s: float, now: float) -> bool:
        """Continue a stream elsewhere whose decode leg is paused for `pause_s` more; False where it stays."""
        index, job, given = self._fleet.index(now), request.job, int(request.carried) + leg.given_tokens
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
        self._start(request, route, index, now)
        return True

    def retry(self, now: float) -> None:
        """Try to place held requests, in order: an instance has become free, or has come."""
        while self.held and not self._fleet.all_full():
            request = self.held.popleft()
            if not self._place(request, now):
                self.held.appendleft(request)
                return
            self.patience.end(request, now)

    def prompt_computed(self, instance: SimInstance) -> None:
        """An instance has computed a prompt: it may take another one."""
        if self.held and not instance.full:
            self._retry_soon()

    def end(self, request: SimRequest, status: Status, now: float) -> None:
        """The request is over. In a closed loop its client sends the next one."""
        request.over = True
        self.unserved.remove(request)
        self._record.end(request, status, now)
        answer = self._record.output_tokens(request.row) if status is Status.COMPLETED else 0
        self._shares.charge(request.caller, 0, answer)
        self._shares.left(request.caller, now)
        if status is Status.COMPLETED and (compared := self._compared(request, now)) is not None:
            self._fleet.ledger.errors.add(compared)
        self._fleet.ledger.complete(request.job.job_id, answer, self._met(request, status, now), now)
        if self._flips is not None:
            self._flips.ended(request.job.job_id, answer, now)
        if (row := self._record.next_to_send()) is not None:
            self._loop.at(self._record.send(row, now), self._arrive, row)

    def stop(self, request: SimRequest, status: Status, now: float) -> None:
        """End a request that has not got all of its tokens, wherever it is."""
        self.patience.end(request, now)
        self._legs.drop(request, now)
        self.end(request, status, now)
        if self.held:
            self._retry_soon()

    def _retry_soon(self) -> None:
        self._loop.at(self._loop.now_s, lambda _, now: self.retry(now), None)

    def _arrive(self, row: int, now: float) -> None:
        if row + 1 < self._record.count and not self._run.concurrency:
            self._loop.at(self._record.placement_s(row + 1), self._arrive, row + 1)
        request = self._record.request(row)
        self._shares.came(request.caller, now)
        delayed = request.job.slo.when_full is WhenFull.DELAY
        if not delayed and not self.unserved.add(request):
            self.end(request, Status.REFUSED, now)
            return
        if self._run.job_timeout_s != NEVER:
            self._loop.at(now + self._run.job_timeout_s, self._time_out, request)
        if delayed:
            self.delayed.join(request, now)
            if self._run.delay_s != NEVER:
                self._loop.at(now + self._run.delay_s, self._refuse_delayed, request)
        else:
            self._enter(request, now)

    def _enter(self, request: SimRequest, now: float) -> None:
        if request.over:  # it timed out before its client sent it again
            return
        if self.held or self._fleet.all_full():
            self.held.append(request)
            self.patience.begin(request, now, self._refuse_held)
        elif self.delayed.others_wait(request):
            self.delayed.join(request, now)
        else:
            try:
                self.admit(request, now)
            except Delayed as delay:
                self.delayed.join_delayed(request, retry_s(delay), now)

    def _try_place(self, request: SimRequest, now: float) -> float | None:
        """Place a delayed request, or hold it. Returns the seconds until it may try again, None if it need not."""
        try:
            self.admit(request, now)
        except Delayed as delay:
            return retry_s(delay)
        return None

    def _refuse_delayed(self, request: SimRequest, now: float) -> None:
        if self.delayed.remove(request):
            self.end(request, Status.REFUSED, now)

    def _refuse_held(self, request: SimRequest, now: float) -> None:
        self.held.remove(request)
        self.stop(request, Status.REFUSED, now)

    def _time_out(self, request: SimRequest, now: float) -> None:
        if not request.over:
            if request in self.held:
                self.held.remove(request)
            self.delayed.remove(request)
            self.stop(request, Status.TIMED_OUT, now)

    def _place(self, request: SimRequest, now: float) -> bool:
        """Whether placement is decided: the request has a place, is refused, or never can have one.

        Raises Delayed where a request of its class has to wait.
        """
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
            if request.returns < self._run.returns:  # its client sends it again at the time that it was given
                request.returns += 1
                self._loop.at(now + (refusal.retry_after_s or 0.0), self._enter, request)
            else:
                self.end(request, Status.REFUSED, now)
            return True
        except Unavailable:
            return False
        if not request.job.begun:
            self._shares.charge(request.caller, request.job.prompt_tokens, 0)
            request.job = msgspec.structs.replace(request.job, begun=True)
            request.placed_s, request.estimated = now, route.estimated
        self._start(request, route, index, now)
        if self._flips is not None and request.attempt == 1:
            self._flips.placed(request, route, now)
        return True

    def _start(self, request: SimRequest, route: Route, index: ClusterIndex, now: float) -> None:
        """Book the route, and start the first leg on it."""
        job = request.job = msgspec.structs.replace(request.job, answer_tokens=route.answer_tokens)
        for assignment in self._fleet.ledger.add(job, route, now):
            index.book(assignment)
        request.split, request.keep_tokens = route.split, route.keep_tokens
        request.carried = self._run.first_token is FirstToken.PREFILL and route.split == job.prompt_tokens
        if route.decode is not None:
            request.decode = self._fleet.position(route.decode.instance_id)
        if route.prefill is None:
            instance = self._fleet.instance(request.decode)
            leg = request.decode_leg = Leg(
                request,
                tokens=job.prompt_tokens,
                output_left=request.output_left,
                cached_tokens=route.decode_saved,
                prefix=request.prefix,
                last_token_s=request.last_token_s,
            )
        else:
            request.prefill = self._fleet.position(route.prefill.instance_id)
            instance = self._fleet.instance(request.prefill)
            leg = request.prefill_leg = Leg(
                request,
                tokens=request.split,
                output_left=1,
                decodes=False,
                exports=request.decode_tokens > 0,
                cached_tokens=route.prefill_saved,
                prefix=request.prefix,
                last_token_s=request.last_token_s if request.carried else -1.0,
            )
        if route.pull is not None:
            self._pulls.begin(leg, instance, route.pull, now)
        request.waits_prefill = True
        instance.prefills += 1
        self._legs.start(instance, leg, now)

    def _compared(self, request: SimRequest, now: float) -> Compared | None:
        """The estimate of a request's first placement beside its outcome; None where it was resumed elsewhere."""
        tokens = self._record.output_tokens(request.row)
        if request.estimated is None or request.attempt > 1 or tokens < 1:
            return None
        first_s, prompt = request.first_token_s, request.first_prompt_tokens
        tpot_s = (now - first_s) / (tokens - 1) if tokens >= FEWEST_TOKENS else None
        ttft_s = max(0.0, first_s + self._run.token_s - request.placed_s)
        return Compared(request.estimated, prompt, ttft_s, tpot_s)

    def _met(self, request: SimRequest, status: Status, now: float) -> bool | None:
        """Whether the request met its targets; None if it never had a place."""
        if not request.job.begun:
            return None
        slo, first_s, more = request.job.slo, request.first_token_s, self._record.output_tokens(request.row) - 1
        in_time = status is Status.COMPLETED and first_s - request.arrived_s <= slo.ttft_s
        steady = more < 1 or now - first_s <= slo.tpot_s * more
        return in_time and steady and itl_met(max(0, more), request.gaps_over)


class Unserved:
    """Requests that do not decode yet, and the gateway's limits on their number and their prompt tokens."""

    def __init__(self, run: RunSpec) -> None:
        self._max_requests, self._max_tokens = run.max_queued_jobs, run.max_queued_tokens
        self._tokens_of: dict[SimRequest, int] = {}
        self._tokens = 0

    def add(self, request: SimRequest) -> bool:
        """Count the request; False when a limit forbids it. The token limit never refuses the only request."""
        tokens = request.job.prompt_tokens
        if excess_jobs(len(self._tokens_of), 1, self._max_requests) > 0:
            return False
        if excess_tokens(self._tokens, tokens, self._max_tokens) > 0:
            return False
        self._tokens_of[request] = tokens
        self._tokens += tokens
        return True

    def remove(self, request: SimRequest) -> None:
        """The request decodes, or never will."""
        self._tokens -= self._tokens_of.pop(request, 0)


class DelayedRequests:
    """Requests of classes that wait while the cluster is full: the gateway's fair queue, in virtual time.

    `try_place(request, now)` gives the seconds until the request may try again, or None once it waits no more.
    """

    def __init__(
        self, loop: EventLoop, shares: TokenCounters, try_place: Callable[[SimRequest, float], float | None]
    ) -> None:
        self._loop = loop
        self._try_place = try_place
        self._queue: FairQueue[SimRequest] = FairQueue(shares)
        self._waiters: dict[SimRequest, Waiter[SimRequest]] = {}

    def join(self, request: SimRequest, now: float) -> None:
        self._run(self._queue.join(self._waiter(request)), now)

    def join_delayed(self, request: SimRequest, again_s: float, now: float) -> None:
        """Queue a request that had no others before it, has tried already and may try again in `again_s` seconds."""
        if (line := self._queue.join_delayed(self._waiter(request))) is not None:
            self._rest(line, now + again_s)

    def others_wait(self, request: SimRequest) -> bool:
        return self._queue.is_waiting(request.job.slo.name)

    def remove(self, request: SimRequest) -> bool:
        """The request gives up; False when it does not wait here."""
        waiter = self._waiters.pop(request, None)
        return waiter is not None and self._queue.leave(waiter) is not None

    def clear(self) -> list[SimRequest]:
        self._waiters.clear()
        return list(self._queue.clear())

    def _waiter(self, request: SimRequest) -> Waiter[SimRequest]:
        waiter = self._waiters[request] = Waiter(request, request.job.slo, request.caller)
        return waiter

    def _run(self, line: Line[SimRequest], now: float) -> None:
        while (waiter := line.turn()) is not None:
            request = waiter.item
            again_s = self._try_place(request, now)
            if again_s is None:
                self.remove(request)
            elif (rests := self._queue.delay(waiter, now - request.arrived_s, again_s)) is not None:
                self._rest(rests, now + again_s)

    def _rest(self, line: Line[SimRequest], until_s: float) -> None:
        self._loop.at(until_s, self._wake, line)

    def _wake(self, line: Line[SimRequest], now: float) -> None:
        self._queue.wake(line)
        self._run(line, now)


class Patience:
    """How long requests wait for an instance: `patience_s` in all since their last token."""

    def __init__(self, patience_s: float, loop: EventLoop) -> None:
        self._patience_s = patience_s
        self._loop = loop

    def begin(self, request: SimRequest, now: float, give_up: Handler) -> None:
        """Start the wait, unless it runs; `give_up(request, then)` is called once the request has waited enough."""
        if request.waits_from_s < 0.0:
            request.waits_from_s = now
            if self._patience_s != NEVER:
                ends_s = max(now, now + (self._patience_s - request.waited_s))
                self._loop.at(ends_s, self._over, (request, now, give_up))

    def end(self, request: SimRequest, now: float) -> None:
        if request.waits_from_s >= 0.0:
            request.waited_s += now - request.waits_from_s
            request.waits_from_s = -1.0

    def _over(self, subject: tuple[SimRequest, float, Handler], now: float) -> None:
        request, since_s, give_up = subject
        if request.waits_from_s == since_s:
            give_up(request, now)


class Legs:
    """Puts legs on engines, and takes them off.

    `left` is called with an instance that a request has left, and the time.
    """

    def __init__(self, run: RunSpec, loop: EventLoop, fleet: Fleet, left: Callable[[SimInstance, float], None]) -> None:
        self._loop = loop
        self._fleet = fleet
        self._hop_s = run.hop_s
        self._left = left

    def start(self, instance: SimInstance, leg: Leg, now: float) -> None:
        """Give an instance a leg; it counts there at once, and reaches an engine after `hop_s`."""
        instance.requests[leg.request] = None
        if leg.decodes:
            instance.decoding += 1
            self._fleet.ledger.arrived(leg.request.job.job_id)
            instance.heavy += is_heavy(leg.request.job)
        if self._hop_s > 0.0:
            self._loop.at(now + self._hop_s, self._enter, (instance, leg))
        else:
            self._enter((instance, leg), now)

    def leave(self, instance: SimInstance, request: SimRequest, now: float) -> None:
        if request not in instance.requests:
            return
        del instance.requests[request]
        if instance.index == request.decode and request.decode_leg is not None:
            instance.decoding -= 1
            instance.heavy -= is_heavy(request.job)
        leg = request.prefill_leg
        if instance.index == request.prefill and leg is not None and leg.lane is not None:
            self._fleet.engine(leg).sent(leg, now)
        self._left(instance, now)

    def drop(self, request: SimRequest, now: float) -> int:
        """Stop the request wherever it is. Returns how many output tokens this attempt has given to the client."""
        given = int(request.carried and request.prefill_done_s >= 0.0)
        computes = request.decode if request.prefill is None else request.prefill
        for leg, position in ((request.prefill_leg, request.prefill), (request.decode_leg, request.decode)):
            if leg is None or position is None:
                continue
            instance = self._fleet.instances[position]
            if leg.decodes:
                given += leg.given_tokens
                request.last_token_s = max(request.last_token_s, leg.last_token_s)
            if request in instance.requests:
                if leg.lane is not None:
                    self._fleet.engine(leg).cancel(leg, now)
                if request.waits_prefill and position == computes:
                    instance.prefills -= 1
            leg.cancelled = True
            self.leave(instance, request, now)
        return given

    def _enter(self, subject: tuple[SimInstance, Leg], now: float) -> None:
        instance, leg = subject
        if not leg.cancelled and instance.engines:
            leg.lane = instance.next_lane()
            instance.engines[leg.lane].add(leg, now)


class AutoFlips:
    """Role flips that a policy decides, from what the live monitor would know at that moment."""

    def __init__(self, run: RunSpec, fleet: Fleet, policy: RoleFlip) -> None:
        self._run = run
        self._fleet = fleet
        self._policy = policy
        self._history = FlipHistory()
        self._counter = DemandCounter("scheduler", -1.0, pause_s=float("inf"))
        self._split = freedom(run.policies.split)
        self._book = DemandBook()
        self._unreported: list[DemandSecond] = []
        self._by_operators: list[tuple[float, str, Role]] = []
        self.made: list[RoleFlipped] = []
        self.shifts: list[tuple[float, Shift]] = []

    def placed(self, request: SimRequest, route: Route, now: float) -> None:
        index, job, first = self._fleet.index(now), request.job, route.prefill or route.decode
        assert first is not None
        held = 0
        if job.prefix:
            view = self._fleet.instance(self._fleet.position(first.instance_id)).view(now)
            held = saved_tokens(index.prefixes, view, job)
            held = max(held, route.pull.tokens) if route.pull is not None else held
        self._counter.count_request(job, held, self._fleet.ledger.output_lengths.expected(job).mean, self._split, now)

    def ended(self, job_id: str, output_tokens: int, now: float) -> None:
        """A request is over; `output_tokens` of a whole answer, else 0."""
        self._counter.count_end(job_id, output_tokens, now)

    def ordered(self, view: InstanceView, now: float) -> None:
        """The run's spec orders a flip, as an operator would."""
        self._by_operators.append((now, view.instance_id, view.role.other))

    def decide(self, now: float) -> FlipDecision | None:
        self._unreported += self._counter.pop_finished(now)
        reported = [one for one in self._unreported if one.second + 1 + _DEMAND_DELAY_S <= now]
        del self._unreported[: len(reported)]
        self._book.add(reported, now)
        self.shifts += [(now, shift) for shift in self._book.advance(now)]
        respects_s = self._run.role_flip_respects_s
        context = FlipContext.after_flips(self._book.demand(now), self._by_operators, now, respects_s)
        decision = self._policy.propose(self._fleet.view(now), now, self._history, context)
        if decision is not None:
            self.made.append(RoleFlipped(now, decision.instance_id, decision.to.value, decision.reasons))
        return decision
