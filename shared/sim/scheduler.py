"""What an engine's next step computes: continuous batching with chunked prefill, paged KV and preemption.

The order of work is that of vLLM's V1 scheduler with our policies. Decodes and prefill chunks share one token budget:
decodes first, then streams that are computed again or wait to join, then prompts under way, then prompts that wait; in
each of these, heavier SLO classes go first. When blocks run out, the youngest prompt of the lightest class is
preempted, or its youngest stream where the class has no prompt. The scheduler has no clock: `now` is an argument.
"""

from collections.abc import Callable
from math import inf

from shared.domain.rates import StepRates
from shared.policy.decode_admission import DecodeAdmission, Greedy
from shared.policy.prefill_order import PrefillOrder, PrefillQueue, WaitingJob, heaviest_first, victim
from shared.policy.step_budget import StepLoad, gap_target_s, joining_gap_s, prefill_tokens
from shared.sim.group import DecodeGroup
from shared.sim.memory import AdmissionGate, KvMemory
from shared.sim.request import Leg, rank_of
from shared.sim.spec import EngineLimits

Chunk = tuple[Leg, int]  # a leg and how many of its tokens the step computes


class Scheduler:
    """Which legs wait, which run, and which hold blocks.

    A leg is in exactly one of `waiting`, `awaiting`, `arrived` and `running`. A running leg is in `prefilling` until
    its prompt is computed, and then in `group`. `admitted` is called with a leg whose blocks are reserved and whose KV
    may come; `preempted` with one that lost its blocks.
    """

    def __init__(
        self,
        limits: EngineLimits,
        memory: KvMemory,
        waiting: "WaitingLegs",
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
        self.prefilling: dict[Leg, None] = {}
        self.group = DecodeGroup(limits.block_tokens)
        self.fresh: list[Leg] = []  # of the group, those whose present gap began before the coming step
        self.leaving: list[Leg] = []  # cancelled while running
        self.queued_jobs = 0  # legs whose prefill is not done
        self.queued_tokens = 0  # prompt tokens of those, not yet computed
        self._gate: AdmissionGate | None = None
        if not isinstance(admission, Greedy):  # for greedy the blocks decide
            self._gate = AdmissionGate(admission, memory, self.group, limits.block_tokens)
        self._chunks: list[Chunk] = []
        self._now = 0.0
        self._preempting = False  # the last plan preempted a leg, so that none could start

    @property
    def blocked(self) -> int:
        """Legs that wait for blocks, a seat or their KV."""
        return self.waiting.count + len(self.awaiting) + len(self.arrived)

    @property
    def begun_tokens(self) -> int:
        """Computed tokens of legs that hold blocks and do not decode yet."""
        return sum(leg.computed for leg in (*self.prefilling, *self.awaiting, *self.arrived))

    @property
    def count(self) -> int:
        return len(self.running) + self.blocked

    def add(self, leg: Leg) -> None:
        self.waiting.push(leg)
        if not leg.remote:
            self._queued(1, leg.missing - leg.saved)

    def kv_arrived(self, leg: Leg) -> None:
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
            self._prefill(self._prompt_budget(joined, now), now)
        return self._chunks

    def decodes_with(self, chunks: list[Chunk]) -> bool:
        """Whether the group has a part in a step of these chunks."""
        return self.group.count > 0 and not (chunks and self._limits.prefill_first)

    def let_wait(self, now: float) -> None:
        """A step begins now without the group: the gap to its next tokens is longer than a step."""
        waiting = set(self.fresh)
        for leg in self.running:
            if leg not in self.prefilling and leg not in waiting:
                leg.last_token_s = now
                self.fresh.append(leg)

    def join(self, leg: Leg) -> None:
        self.group.join(leg)
        if self._limits.prefill_first:  # perhaps not at once
            self.fresh.append(leg)

    def steps_ahead(self) -> int:
        """Decode steps until the batch changes by itself: a leg is done, blocks run out, or others may start."""
        # Steps of the same batch may be enough for another leg to start: then each step is looked at.
        if self.waiting.count and (self._preempting or (self._gate is not None and self._gate.needs_running)):
            return 1
        most = self.group.steps_to_finish()
        return most if self._limits.reserves_output else self.group.affordable(self.memory.free, most)

    def could_change(self) -> bool:
        """Whether the batch could change at the next step."""
        if self.leaving:
            return True
        if len(self.running) >= self._limits.sequences:
            return False
        if self.arrived:
            return True
        leg = self.waiting.peek()
        return leg is not None and self.memory.could_start(leg)

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
        return self.memory.growth(self.group, steps) <= self.memory.free

    def admit_streams(self, now: float) -> None:
        """Reserve blocks for waiting streams during a step that computes prompts; its decodes have their blocks."""
        if not self._preempting:
            self._admit(0, now, streams=True)

    def cancel(self, leg: Leg) -> bool:
        """Forget a leg. Returns whether it runs: then it leaves with the next plan."""
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
        del self.running[leg]
        self.memory.release(leg)

    def stop(self, last_s: float) -> None:
        """The engine ends: bring the counts of its decodes up to date. `last_s`: when the last step ended."""
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
        """Seat legs whose KV has arrived: streams before prompts, heavier classes first. Returns the seated legs."""
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
        """Reserve blocks for the decodes of the coming step. Returns whether a leg had to be preempted for that."""
        if self._limits.reserves_output or not self.group.count:
            return False
        preempted = False
        while (wanted := self.group.blocks_for(1)) > self.memory.free:
            self._preempt()
            preempted = True
        self.memory.reserved = wanted
        return preempted

    def _prompt_budget(self, joined: list[Leg], now: float) -> int:
        """Prompt tokens of the coming step: what the decodes leave of its tokens, or fewer for the gap targets of those
        that get a token from it and of the streams that are about to join. joined: legs whose first step here this is.
        """
        budget = self._limits.batched_tokens - self.group.count
        if not self._limits.step_budget:
            return budget
        next_prompt, stream = self.waiting.peek(), self.waiting.stream
        # A prompt that lacks one token after some context costs as much as a decode.
        ends = [leg for leg in self.prefilling if leg.missing == 1 and leg.computed]
        prompts = [leg for leg in self.prefilling if leg.decodes and leg not in ends]
        if len(self.prefilling) == len(ends) and next_prompt is not None and next_prompt.decodes:
            prompts = [next_prompt]
        here = [leg for leg in joined if leg.started]
        decodes = [leg for leg in self.running if leg not in self.prefilling and leg not in here]
        decodes += [leg for leg in ends if leg.decodes and leg not in here]
        joining = [leg for leg in self.awaiting if leg.started]
        joining += [stream] if stream is not None else []
        gaps_s = [gap_target_s(leg.request.job.slo) for leg in (*prompts, *decodes)]
        for legs, is_here in ((here, True), (joining, False)):
            # A stream waits since it was handed over; of one that was preempted here no wait is counted.
            waits = ((leg.request.job.slo, now - leg.last_token_s if leg.remote else 0.0) for leg in legs)
            gaps_s += [joining_gap_s(slo, waited_s, here=is_here) for slo, waited_s in waits]
        before = max((leg.computed for leg in self.prefilling if leg not in ends), default=0)
        context = self.group.context_tokens + sum(leg.computed for leg in ends if leg.decodes)
        context += sum(leg.tokens for leg in joining)
        load = StepLoad(len(decodes) + len(here) + len(joining), context, min(gaps_s, default=inf), before)
        return prefill_tokens(self._rates, load, max(0, budget - len(ends))) + len(ends)

    def _prefill(self, budget: int, now: float) -> None:
        """Chunks for legs that run, and for legs that may start, unless blocks ran out; streams first."""
        for streams in (True, False):
            if self.prefilling:
                budget = self._continue_prefills(budget, streams=streams)
            if self.waiting.count and not self._preempting:
                budget = self._admit(budget, now, streams=streams)

    def _continue_prefills(self, budget: int, *, streams: bool) -> int:
        """Chunks of the streams, or of the prompts without a token, that run. Returns what is left of the budget."""
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
        """Preempt the `victim`. It waits before the others of its class, a stream before all prompts."""
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
        """Start legs that may start, with `streams` only streams. Returns what is left of the budget."""
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
        """Whether a seat is left for the leg; a prompt leaves one for each stream whose KV is under way."""
        if leg.started or len(self.running) + len(self.awaiting) + len(self.arrived) < self._limits.sequences:
            return True
        coming = sum(one.started for one in (*self.awaiting, *self.arrived))
        return len(self.running) + coming < self._limits.sequences


class WaitingLegs:
    """All legs that wait: preempted ones first, then streams, then prompts without a token, in the policy's order.

    A prompt that is only computed here also waits until its KV has room among `staging_tokens`, and holds that room
    until its KV is sent; a prompt that is longer than all of them holds none. No leg overtakes one that has its room.
    Live, a worker's engine and its export ledger do the same.
    """

    __slots__ = ("_line", "_staged", "_staging", "_staging_free")

    def __init__(self, order: PrefillOrder, staging_tokens: int | None = None) -> None:
        self._line: PrefillQueue[Leg] = PrefillQueue(order)
        self._staging = staging_tokens
        self._staging_free = staging_tokens or 0
        self._staged: dict[Leg, int] = {}  # until their KV is sent

    @property
    def decode_tokens(self) -> int:
        """Context of those that are to decode here."""
        return sum(leg.tokens for leg in self._line.everyone() if leg.decodes)

    @property
    def count(self) -> int:
        return len(self._line)

    def push(self, leg: Leg) -> None:
        self._line.push(leg, WaitingJob(leg.request.job, leg.missing, leg.started))

    def push_front(self, leg: Leg) -> None:
        """Put a leg back at the head of its class, a stream at the head of the streams of its class."""
        self._line.put_back(leg, leg.request.job.slo.weight, started=leg.started)

    @property
    def stream(self) -> Leg | None:
        return self._line.stream

    def started(self, leg: Leg) -> bool:
        """The client of a leg has its first token from elsewhere: the leg goes before all prompts, if it waits here."""
        if not self._line.remove(leg):
            return False
        self.push(leg)
        return True

    def peek(self) -> Leg | None:
        """The next leg, whether its KV has room or not."""
        return self._line.peek() if len(self._line) else None

    def next(self) -> Leg | None:
        """The next leg, which stays in the queue; None when none waits, or its KV has no room."""
        leg = self.peek()
        if leg is None or self._staging is None or leg.decodes or leg.request.decode_tokens == 0:
            return leg
        if leg not in self._staged:
            tokens = leg.tokens if leg.tokens <= self._staging else 0
            if tokens > self._staging_free:
                return None
            self._staging_free -= tokens
            self._staged[leg] = tokens
        return self._line.hold()

    def pop(self) -> Leg:
        return self._line.pop()

    def remove(self, leg: Leg) -> bool:
        """Take a leg out; False when it is not here."""
        return self._line.remove(leg)

    def sent(self, leg: Leg) -> bool:
        """No KV of the leg is here any more. Returns whether another leg may have waited for the room."""
        if leg not in self._staged:
            return False
        self._staging_free += self._staged.pop(leg)
        return len(self._line) > 0
