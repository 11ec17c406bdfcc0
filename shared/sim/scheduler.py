"""What an engine's next step computes: continuous batching with chunked prefill, paged KV and preemption.

The order of work is that of vLLM's V1 scheduler under our seam, with one token budget for decodes and prefill chunks:
decodes first, then streams that are computed again or wait at the door, then prompts under way, then prompts that wait;
in each, heavier SLO classes go first. When blocks run out the youngest prompt of the lightest class gives its blocks
up, or the youngest stream where the class has no prompt, and is computed again. Knows no time but the `now` that
policies are asked with.
"""

from collections.abc import Callable, Iterable
from math import inf

from shared.domain.rates import StepRates
from shared.policy.decode_admission import DecodeAdmission, Greedy
from shared.policy.preemption import heaviest_first, victim
from shared.policy.prefill_order import PrefillOrder, WaitingJob
from shared.policy.step_budget import StepLoad, gap_target_s, joining_gap_s, prefill_tokens
from shared.policy.waiting_line import WaitingLine
from shared.sim.group import DecodeGroup
from shared.sim.memory import AdmissionGate, KvMemory
from shared.sim.request import Leg, rank_of
from shared.sim.spec import EngineLimits

# MERGED budget.py
# How many prompt tokens an engine's next step may compute.


def prompt_budget(
    limits: EngineLimits,
    rates: StepRates | None,
    group: DecodeGroup,
    running: Iterable[Leg],
    prefilling: dict[Leg, None],
    coming: Iterable[Leg],
    joined: Iterable[Leg],
    stream: Leg | None,
    next_prompt: Leg | None,
    now: float,
) -> int:
    """What the decodes leave of the step's tokens, or less for the sake of their TPOT and gap targets, and of those of
    the streams that join: of `joined`, whose first step here this is, of `coming`, whose KV is under way, and of the
    next that waits; and for those that may be handed over while prompts are computed that are to decode here.
    """
    most = limits.batched_tokens - group.count
    if not limits.step_budget:
        return most
    ends = [leg for leg in prefilling if leg.missing == 1 and leg.computed]  # a token after some context: a decode
    prompts = [leg for leg in prefilling if leg.decodes and leg not in ends]
    if len(prefilling) == len(ends) and next_prompt is not None and next_prompt.decodes:
        prompts = [next_prompt]
    here = [leg for leg in joined if leg.started]
    decodes = [leg for leg in running if leg not in prefilling and leg not in here]
    decodes += [leg for leg in ends if leg.decodes and leg not in here]
    joining = [leg for leg in coming if leg.started]
    joining += [stream] if stream is not None else []
    gaps_s = [gap_target_s(leg.request.job.slo) for leg in (*prompts, *decodes)]
    gaps_s += [joining_gap_s(leg.request.job.slo, _waited_s(leg, now), here=True) for leg in here]
    gaps_s += [joining_gap_s(leg.request.job.slo, _waited_s(leg, now), here=False) for leg in joining]
    before = max((leg.computed for leg in prefilling if leg not in ends), default=0)
    context = group.context_tokens + sum(leg.computed for leg in ends if leg.decodes)
    context += sum(leg.tokens for leg in joining)
    load = StepLoad(len(decodes) + len(here) + len(joining), context, min(gaps_s, default=inf), before)
    return prefill_tokens(rates, load, max(0, most - len(ends))) + len(ends)


def _waited_s(leg: Leg, now: float) -> float:
    """Since it was handed over; of one that was preempted here nothing is counted."""
    return now - leg.last_token_s if leg.remote else 0.0


# MERGED waiting.py
# The legs that wait at one engine.


class WaitingLegs:
    """All legs that wait: streams before prompts without a token, prompts in the policy's order; preempted ones come
    first. `count`: how many.

    A prompt that is only computed here also waits until its KV has room among `staging_tokens`, which it holds until it
    is sent; one that is longer than all of them holds none. Nobody overtakes one that has its room. Live, a worker's
    engine and its export ledger do the same.
    """

    __slots__ = ("_line", "_staged", "_staging", "_staging_free")

    def __init__(
        self,
        order: PrefillOrder,
        staging_tokens: int | None = None,
        rates: Callable[[], StepRates | None] = lambda: None,
    ) -> None:
        self._line: WaitingLine[Leg] = WaitingLine(order, rates)
        self._staging = self._staging_free = staging_tokens
        self._staged: dict[Leg, int] = {}  # until their KV is sent

    @property
    def decode_tokens(self) -> int:
        """Context of those that are to decode here."""
        return sum(leg.tokens for leg in self._line.everyone() if leg.decodes)

    @property
    def count(self) -> int:
        """See above."""
        return len(self._line)

    def push(self, leg: Leg) -> None:
        """Add one that has just come."""
        request = leg.request
        self._line.push(leg, WaitingJob(request.job, leg.missing, leg.computed, request.arrived_s, leg.started))

    def push_front(self, leg: Leg) -> None:
        """Put back at the head of its class, a stream at the head of the streams of its class."""
        self._line.put_back(leg, leg.request.job.slo.weight, started=leg.started)

    @property
    def stream(self) -> Leg | None:
        """The next stream; None where none waits."""
        return self._line.stream

    def started(self, leg: Leg) -> bool:
        """Its client has its first token from elsewhere: it goes before all prompts. Whether it waits here."""
        if not self._line.remove(leg):
            return False
        self.push(leg)
        return True

    def peek(self) -> Leg | None:
        """The next one, whether its KV has room or not."""
        return self._line.peek() if len(self._line) else None

    def next(self) -> Leg | None:
        """The next one for the engine, which stays; None when nobody waits, or there is no room for its KV."""
        leg = self.peek()
        if leg is None or not self._stages(leg):
            return leg
        if not self._stage(leg):
            return None
        return self._line.hold()

    def pop(self) -> Leg:
        """Take the next one."""
        return self._line.pop()

    def remove(self, leg: Leg) -> bool:
        """Take a leg out; False when it is not here."""
        return self._line.remove(leg)

    def sent(self, leg: Leg) -> bool:
        """Nothing of its KV is here any more. Whether somebody may have waited for the room."""
        if self._staging_free is None or leg not in self._staged:
            return False
        self._staging_free += self._staged.pop(leg)
        return len(self._line) > 0

    def _stages(self, leg: Leg) -> bool:
        return self._staging is not None and not leg.decodes and leg.request.decode_tokens > 0

    def _stage(self, leg: Leg) -> bool:
        """Whether its KV has room; from now on it has."""
        assert self._staging is not None
        assert self._staging_free is not None
        if leg in self._staged:
            return True
        tokens = leg.tokens if leg.tokens <= self._staging else 0
        if tokens > self._staging_free:
            return False
        self._staging_free -= tokens
        self._staged[leg] = tokens
        return True


Chunk = tuple[Leg, int]  # and how many of its tokens the step computes


class Scheduler:
    """Who waits, who runs, and who holds which blocks.

    `admitted` is called with a leg whose blocks are reserved and whose KV may come; `preempted` with one that lost
    its blocks.
    """

    def __init__(
        self,
        limits: EngineLimits,
        memory: KvMemory,
        waiting: WaitingLegs,
        admission: DecodeAdmission,
        admitted: Callable[[Leg, float], None],
        preempted: Callable[[Leg], None],
        rates: StepRates | None = None,
    ) -> None:
        self._limits = limits
        self._rates = rates
        self._admitted = admitted
        self._preempted = preempted
        self.memory = memory
        self.waiting = waiting
        self.awaiting: dict[Leg, None] = {}  # blocks reserved, KV under way
        self.arrived: list[Leg] = []  # their KV is here; they join with the next step
        self.running: dict[Leg, None] = {}  # in order of admission
        self.prefilling: dict[Leg, None] = {}  # of those, the ones whose prompt is not computed yet
        self.group = DecodeGroup(limits.block_tokens)  # of those, the others
        self.fresh: list[Leg] = []  # of the group, those that the coming step decodes for the first time
        self.leaving: list[Leg] = []  # cancelled while running
        self.queued_jobs = 0  # legs whose prefill is not done
        self.queued_tokens = 0  # prompt tokens of those, not yet computed
        self._gate: AdmissionGate | None = None
        if not isinstance(admission, Greedy):  # for greedy the blocks decide
            self._gate = AdmissionGate(admission, memory, self.group, limits.block_tokens)
        self._chunks: list[Chunk] = []
        self._now = 0.0
        self._preempting = False  # in the last plan, so that nobody could start

    @property
    def blocked(self) -> int:
        """Requests that wait for blocks, a place or their KV."""
        return self.waiting.count + len(self.awaiting) + len(self.arrived)

    @property
    def begun_tokens(self) -> int:
        """Of prompts that hold blocks and whose requests do not decode yet."""
        return sum(leg.computed for leg in (*self.prefilling, *self.awaiting, *self.arrived))

    @property
    def count(self) -> int:
        """Requests here."""
        return len(self.running) + self.blocked

    def add(self, leg: Leg) -> None:
        """Queue a leg."""
        self.waiting.push(leg)
        if not leg.remote:
            self._queued(1, leg.missing - leg.saved)

    def kv_arrived(self, leg: Leg) -> None:
        """The KV of an admitted leg is here."""
        del self.awaiting[leg]
        self.arrived.append(leg)
        if leg.missing > 1:
            self._queued(1, leg.missing)
        else:
            self.memory.keep_prefix(leg)

    def plan(self, now: float) -> list[Chunk]:
        """The prefill chunks of the coming step. The group decodes beside them, unless prefill goes first."""
        self._chunks, self._now, self._preempting = [], now, False
        self.memory.reserved = 0
        if self.leaving:
            self._drop_leaving()
        joined = self._take_arrived() if self.arrived else []
        if self._limits.prefill_first:
            self._prefill(self._limits.batched_tokens, now)
            if not self._chunks:
                self._preempting |= self._make_room()
        else:
            self._preempting = self._make_room()
            budget = prompt_budget(
                self._limits,
                self._rates,
                self.group,
                self.running,
                self.prefilling,
                self.awaiting,
                joined,
                self.waiting.stream,
                self.waiting.peek(),
                now,
            )
            self._prefill(budget, now)
        return self._chunks

    def decodes_with(self, chunks: list[Chunk]) -> bool:
        """Whether the group has a part in a step of these chunks."""
        return self.group.count > 0 and not (chunks and self._limits.prefill_first)

    def let_wait(self, now: float) -> None:
        """The group is passed over by a step that begins now: the gap to its next tokens is longer than a step."""
        waiting = set(self.fresh)
        for leg in self.running:
            if leg not in self.prefilling and leg not in waiting:
                leg.last_token_s = now
                self.fresh.append(leg)

    def join(self, leg: Leg) -> None:
        """A prompt is computed: it decodes from now on."""
        self.group.join(leg)
        if self._limits.prefill_first:  # perhaps not at once
            self.fresh.append(leg)

    def steps_ahead(self) -> int:
        """Decode steps until the batch changes by itself: somebody is done, blocks run out, others may start."""
        if self.waiting.count and self._waiters_may_change():
            return 1
        most = self.group.steps_to_finish()
        return most if self._limits.reserves_output else self.group.affordable(self.memory.free, most)

    def could_change(self) -> bool:
        """Whether somebody who does not run could join at the next step."""
        if self.leaving:
            return True
        if len(self.running) >= self._limits.sequences:
            return False
        if self.arrived:
            return True
        leg = self.waiting.peek()
        return leg is not None and self.memory.could_start(leg)

    def _waiters_may_change(self) -> bool:
        """Whether steps of the same batch may be enough for another one to start: each has to be looked at then."""
        return self._preempting or (self._gate is not None and self._gate.may_open_by_itself())

    def admit_beside(self, steps: int, now: float) -> bool:
        """Reserve blocks for waiting legs whose KV is elsewhere, while the group takes its `steps` steps.

        False when anything else has to change, or when blocks are so few that the group might feel it.
        """
        if self.arrived or self.leaving or self._gate is not None:
            return False
        self.memory.reserved = self.memory.growth(self.group, steps)
        while len(self.running) < self._limits.sequences and (leg := self.waiting.next()) is not None:
            if not self._has_seat(leg):
                break
            if not leg.remote or not self.memory.start(leg, 0):
                return False
            self.awaiting[self.waiting.pop()] = None
            self._admitted(leg, now)
        return True

    def has_room(self, steps: int) -> bool:
        """Whether there are blocks for so many steps of the group."""
        return self.memory.growth(self.group, steps) <= self.memory.free

    def admit_streams(self, now: float) -> None:
        """The same during a step that computes prompts, whose decodes have their blocks already."""
        if not self._preempting:
            self._admit(0, now, streams=True)

    def cancel(self, leg: Leg) -> bool:
        """Forget a leg. True when it runs: then it leaves with the next plan."""
        leg.cancelled = True
        if leg in self.running:
            self.leaving.append(leg)
            return True
        if self.waiting.remove(leg):
            if not leg.remote:
                self._queued(-1, leg.saved - leg.missing)
        elif leg in self.awaiting:
            del self.awaiting[leg]
            self.memory.release(leg)
        elif leg in self.arrived:
            self.arrived.remove(leg)
            if leg.missing > 1:
                self._queued(-1, -leg.missing)
            self.memory.release(leg)
        return False

    def finish(self, leg: Leg) -> None:
        """A running leg is done."""
        del self.running[leg]
        self.memory.release(leg)

    def stop(self, last_s: float) -> None:
        """The engine ends: bring the counts of its decodes up to date. `last_s`: of the last step."""
        for leg in self.running:
            if leg not in self.prefilling:
                self.group.leave(leg)
                if leg not in self.fresh:  # else the step that would have given it a token has not ended
                    leg.last_token_s = last_s

    def _queued(self, jobs: int, tokens: int) -> None:
        self.queued_jobs += jobs
        self.queued_tokens += tokens

    def _drop_leaving(self) -> None:
        for leg in self.leaving:
            if leg not in self.running:
                continue  # it was done in that very step
            if leg in self.prefilling:
                del self.prefilling[leg]
                self._queued(-1, -leg.missing)
            else:
                self.group.leave(leg)
            self.finish(leg)
        self.leaving.clear()

    def _take_arrived(self) -> list[Leg]:
        """Streams take seats before prompts, heavier classes first. Those that have a seat now."""
        self.arrived.sort(key=lambda leg: (leg.started, leg.request.job.slo.weight), reverse=True)
        joined = []
        while self.arrived and len(self.running) < self._limits.sequences:
            leg = self.arrived.pop(0)
            joined.append(leg)
            self.running[leg] = None
            if leg.missing == 1:
                self.group.join(leg)
                self.fresh.append(leg)
            else:
                self.prefilling[leg] = None
        return joined

    def _make_room(self) -> bool:
        """Set blocks apart for the decodes of the coming step; whether anybody had to be preempted for it."""
        if self._limits.reserves_output or not self.group.count:
            return False
        preempted = False
        while (wanted := self.group.blocks_for(1)) > self.memory.free:
            self._preempt()
            preempted = True
        self.memory.reserved = wanted
        return preempted

    def _prefill(self, budget: int, now: float) -> None:
        """Chunks for those that run, and for those that may start, unless blocks ran out; streams first."""
        for streams in (True, False):
            if self.prefilling:
                budget = self._continue_prefills(budget, streams=streams)
            if self.waiting.count and not self._preempting:
                budget = self._admit(budget, now, streams=streams)

    def _continue_prefills(self, budget: int, *, streams: bool) -> int:
        """Chunks of the streams, or of the prompts without a token, that are being computed. What is left of the
        budget.
        """
        for leg in heaviest_first([leg for leg in self.prefilling if leg.started is streams], rank_of):
            if budget <= 0:
                break
            tokens = min(leg.missing, budget)
            while leg in self.running and not self.memory.hold(leg, leg.computed + tokens):
                self._preempt()
                self._preempting = True
            if leg in self.running:
                self._chunks.append((leg, tokens))
                budget -= tokens
        return budget

    def _preempt(self) -> None:
        """See `victim`; it waits before the others of its class, a stream before all prompts."""
        leg = victim(self.running, rank_of)
        del self.running[leg]
        if leg in self.prefilling:
            del self.prefilling[leg]
            self._queued(-1, -leg.missing)
            self._chunks = [chunk for chunk in self._chunks if chunk[0] is not leg]
        else:
            self.group.leave(leg)
            if leg in self.fresh:  # its last token is older than the last step
                self.fresh.remove(leg)
            elif leg.last_token_s >= 0.0:
                leg.last_token_s = self._now
            if self.memory.reserved:
                self.memory.reserved = self.group.blocks_for(1)
        self.memory.release(leg)
        leg.computed = 0
        leg.remote = False
        self._queued(1, leg.missing)
        self.waiting.push_front(leg)
        self._preempted(leg)

    def _admit(self, budget: int, now: float, *, streams: bool) -> int:
        """Take in what may start, with `streams` nothing but streams. What is left of the budget."""
        while len(self.running) < self._limits.sequences:
            if streams and self.waiting.stream is None:
                return budget
            leg = self.waiting.next()
            if leg is None or (streams and not leg.started) or not self._has_seat(leg):
                return budget
            if self._gate is not None and not self._gate.opens(leg, now, (*self.running, *self.awaiting)):
                return budget
            if leg.remote:
                if not self.memory.start(leg, 0):
                    return budget
                self.awaiting[self.waiting.pop()] = None
                self._admitted(leg, now)
                continue
            if budget <= 0:
                return budget
            self.queued_tokens += leg.saved - self.memory.take_cached(leg)
            leg.saved = 0
            tokens = min(leg.missing, budget)
            if not self.memory.start(leg, tokens):
                return budget
            self.running[self.waiting.pop()] = None
            self.prefilling[leg] = None
            self._chunks.append((leg, tokens))
            budget -= tokens
        return budget

    def _has_seat(self, leg: Leg) -> bool:
        """Whether one is left; a prompt leaves one for each stream whose KV is under way."""
        if leg.started or len(self.running) + len(self.awaiting) + len(self.arrived) < self._limits.sequences:
            return True
        coming = sum(one.started for one in (*self.awaiting, *self.arrived))
        return len(self.running) + coming < self._limits.sequences
