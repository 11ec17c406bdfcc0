"""From the arrival of a request to its first leg on an engine: the gateway and the global scheduler of a run."""

from collections import deque
from collections.abc import Callable
from random import Random

import msgspec

from shared.domain.demand import DemandSecond, Shift
from shared.domain.instance import InstanceView, Role
from shared.domain.job import WhenFull, itl_met
from shared.domain.route import Route
from shared.errors import Delayed, InvalidRequest, Overloaded, PolyphaseError, Unavailable
from shared.policy.assignment import assignments
from shared.policy.decode_admission import is_heavy
from shared.policy.demand import DemandBook, DemandCounter
from shared.policy.fair_share import FairLine, Shares
from shared.policy.index import ClusterIndex
from shared.policy.overload import decide, steps_aside
from shared.policy.prefix_index import saved_tokens
from shared.policy.role_flip import FlipDecision, RoleFlip, Seen
from shared.policy.split import freedom
from shared.sim.engine import Engine
from shared.sim.events import NEVER, EventLoop, Handler
from shared.sim.fleet import Fleet
from shared.sim.instance import SimInstance
from shared.sim.outcomes import RoleFlipped, Status
from shared.sim.record import Record
from shared.sim.request import Leg, SimRequest
from shared.sim.spec import FirstToken, RunSpec

# MERGED gate.py
# The gateway of a run: how many requests it takes, and the lines of those that are delayed.


_ASIDE = "\0aside"  # after a class's name: its line of those that have stepped aside


class Queued:
    """Requests that wait to be computed or decoded, of which the gateway takes so many, with so many prompt tokens."""

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
        """It decodes, or never will."""
        self._sum -= self._tokens.pop(request, 0)


class DelayLines:
    """One line for each class. Only the head asks, when it was told to; the next follows at once. Those that step aside
    (see `shared.policy.overload.steps_aside`) have a line of their own.

    `ask(request, now)` gives the seconds until the request may ask again, or None once it waits no more.
    """

    def __init__(self, loop: EventLoop, shares: Shares, ask: Callable[[SimRequest, float], float | None]) -> None:
        self._loop = loop
        self._shares = shares
        self._ask = ask
        self._lines: dict[str, FairLine[SimRequest]] = {}
        self._asleep: set[str] = set()  # lines whose head was told when to ask again
        self._aside: dict[SimRequest, None] = {}

    def join(self, request: SimRequest, now: float) -> None:
        """The request waits for its turn, which may be now."""
        self._push(request)
        self._turns(self._name(request), now)

    def join_asleep(self, request: SimRequest, again_s: float, now: float) -> None:
        """The same for the first of a line, which has asked already and is to ask again in so many seconds."""
        self._push(request)
        name = self._name(request)
        self._asleep.add(name)
        self._loop.at(now + again_s, self._wake, name)

    def waiting(self, request: SimRequest) -> bool:
        """Whether others of its class wait."""
        line = self._lines.get(self._name(request))
        return line is not None and len(line) > 0

    def _name(self, request: SimRequest) -> str:
        name = request.job.slo.name
        return name + _ASIDE if request in self._aside else name

    def _push(self, request: SimRequest) -> None:
        name = self._name(request)
        line = self._lines.get(name)
        if line is None:
            line = self._lines[name] = FairLine(self._shares)
        line.push(request, request.caller)

    def leave(self, request: SimRequest) -> bool:
        """The request gives up; False when it does not wait here."""
        line = self._lines.get(self._name(request))
        self._aside.pop(request, None)
        return line is not None and line.remove(request, request.caller)

    def left(self) -> list[SimRequest]:
        """Everybody who waits; they leave."""
        found = []
        for line in self._lines.values():
            while (request := line.head()) is not None:
                line.remove(request, request.caller)
                found.append(request)
        return found

    def _turns(self, name: str, now: float) -> None:
        line = self._lines[name]
        while name not in self._asleep and (request := line.head()) is not None:
            again_s = self._ask(request, now)
            if again_s is None:
                line.remove(request, request.caller)
                self._aside.pop(request, None)
            elif request not in self._aside and steps_aside(request.job.slo, now - request.arrived_s, again_s):
                line.remove(request, request.caller)
                self._aside[request] = None
                if self.waiting(request):
                    self._push(request)
                else:
                    self.join_asleep(request, again_s, now)
            else:
                self._asleep.add(name)
                self._loop.at(now + again_s, self._wake, name)
                return

    def _wake(self, name: str, now: float) -> None:
        self._asleep.discard(name)
        self._turns(name, now)


# MERGED legs.py
# The legs of requests on the engines of their instances: how they get there, step, and leave.


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


# MERGED auto_flips.py
# Role flips that a policy decides in a run, from what the live monitor would know at that moment.


TELL_S = 1.0  # schedulers tell of a second when it is over, once a second


class AutoFlips:
    """The policy with its state, and the profile of what clients ask for, as old as live."""

    def __init__(self, run: RunSpec, fleet: Fleet, policy: RoleFlip) -> None:
        self._run = run
        self._fleet = fleet
        self._policy = policy
        self._state = policy.start()
        self._counter = DemandCounter("scheduler", -1.0, pause_s=float("inf"))
        self._split = freedom(run.policies.split)
        self._book = DemandBook()
        self._untold: list[DemandSecond] = []
        self._ordered: list[tuple[float, str, Role]] = []
        self.made: list[RoleFlipped] = []
        self.shifts: list[tuple[float, Shift]] = []

    def placed(self, request: SimRequest, route: Route, now: float) -> None:
        """A request was placed for the first time."""
        index, job, first = self._fleet.index(now), request.job, route.prefill or route.decode
        assert first is not None
        view = self._fleet.instance(self._fleet.position(first.instance_id)).view(now) if job.prefix else None
        held = saved_tokens(index.prefixes, view, job) if view is not None else 0
        self._counter.add(job, held, self._fleet.ledger.answers.expected(job).mean, self._split, now)

    def ended(self, job_id: str, output_tokens: int, now: float) -> None:
        """A request is over; `output_tokens` of a whole answer, else 0."""
        self._counter.ended(job_id, output_tokens, now)

    def ordered(self, view: InstanceView, now: float) -> None:
        """A flip that the run's spec orders, as a person would."""
        self._ordered.append((now, view.instance_id, view.role.other))

    def ask(self, now: float) -> FlipDecision | None:
        """What the policy decides now."""
        self._untold += self._counter.take(now)
        told = [one for one in self._untold if one.second + 1 + TELL_S <= now]
        del self._untold[: len(told)]
        self._book.take(told, now)
        self.shifts += [(now, shift) for shift in self._book.advance(now)]
        seen = Seen.of(self._book.demand(now), self._ordered, now, self._run.role_flip_respects_s)
        self._state, decision = self._policy.step(self._state, self._fleet.view(now), now, seen)
        if decision is not None:
            self.made.append(RoleFlipped(now, decision.instance_id, decision.to.value, decision.reasons))
        return decision


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
