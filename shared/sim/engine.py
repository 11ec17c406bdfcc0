"""One engine in virtual time: when its steps begin and end, and what they bring.

Decode steps between which nothing can change are one event (`Glide`). With `stepwise` every step is an event of its
own; the results are the same.
"""

from dataclasses import dataclass, field
from typing import Protocol

from shared.cost.step import Batch, Segment, StepTimes
from shared.domain.rates import StepRates
from shared.policy.decode_admission import DecodeAdmission
from shared.policy.prefill_order import PrefillShare
from shared.sim.events import NEVER
from shared.sim.group import Glide, without_first
from shared.sim.memory import KvMemory
from shared.sim.outcomes import Gaps
from shared.sim.request import Leg
from shared.sim.scheduler import Chunk, Scheduler, WaitingLegs
from shared.sim.spec import EngineLimits


class EngineEvents(Protocol):
    """What an engine reports to its driver, and when it happened."""

    def admitted(self, leg: Leg, now: float) -> None:
        """Blocks are reserved for a leg that receives its KV from the network."""
        ...

    def chunk(self, leg: Leg, now: float) -> None:
        """A prefill chunk of a leg is computed, and more are to come."""
        ...

    def token(self, leg: Leg, now: float) -> None:
        """A leg has its first output token on this engine, at `now`; reported when the event ends."""
        ...

    def done(self, leg: Leg, now: float) -> None:
        """A leg has given all of its tokens, and its blocks are free."""
        ...

    def preempted(self, leg: Leg) -> None:
        """A leg lost its blocks and waits to be computed again."""
        ...


class Engine:
    """State of one engine. The driver calls `run` at `due_s`, which any call may change."""

    def __init__(
        self,
        model: StepTimes,
        limits: EngineLimits,
        kv_tokens: int,
        waiting: WaitingLegs,
        admission: DecodeAdmission,
        events: EngineEvents,
        *,
        rates: StepRates | None = None,
        prefix_block_tokens: int = 0,
        stepwise: bool = False,
    ) -> None:
        self._model = model
        self._events = events
        self._stepwise = stepwise
        memory = KvMemory(limits, kv_tokens, prefix_block_tokens)
        self.scheduler = Scheduler(limits, memory, waiting, admission, events.admitted, self._preempted, rates)
        self._chunks: list[Chunk] = []  # of the step under way
        self._decodes = False  # whether that step has the group in it
        self._started_s = 0.0
        self._glide: Glide | None = None  # instead of a step
        self._glide_steps = 0  # how many steps it has
        self._look_steps = 0  # after how many of them the engine looks for changes; 0: it does not
        self.due_s = NEVER
        self.booked_s = NEVER  # the driver's: the time of its next event for this engine
        self.tally = Tally()
        self._share = PrefillShare()

    def add(self, leg: Leg, now: float) -> None:
        """Queue a leg. A leg whose KV is to come is admitted at once if there is room beside the step under way."""
        self.scheduler.add(leg)
        glide = self._glide
        if leg.remote and glide is not None:
            steps = max(1, min(glide.steps_begun(now), self._glide_steps))
            if self.scheduler.admit_beside(steps, now) and self.scheduler.has_room(self._glide_steps):
                return
            if steps < self._glide_steps:  # the steps after the one under way may lack the blocks that it has taken
                self._glide_steps, self._look_steps = steps, 0
                self.due_s = max(now, glide.end_s(steps))
            return
        if leg.started and self._chunks:
            self.scheduler.admit_streams(now)
        self._disturb(now)

    def kv_arrived(self, leg: Leg, now: float) -> None:
        self.scheduler.kv_arrived(leg)
        self._disturb(now)

    def started(self, leg: Leg, now: float) -> None:
        """The client of a leg that may wait here has its first token, from elsewhere."""
        if self.scheduler.waiting.started(leg):
            self._disturb(now)

    def sent(self, leg: Leg, now: float) -> None:
        """The KV of a prompt that was computed here has left: another prompt may begin."""
        if self.scheduler.waiting.sent(leg):
            self._disturb(now)

    def run(self, now: float) -> None:
        """The step or glide that is due at `now` ends; the next one begins."""
        if self._glide is not None:
            if self._look_steps and self.scheduler.admit_beside(self._glide_steps, now):
                self._look_steps = 0
                self.due_s = self._glide.end_s(self._glide_steps)
                return
            self._end_glide()
        elif self._chunks:
            self._end_step(now)
        self._begin(now)

    def cancel(self, leg: Leg, now: float) -> None:
        """Forget a leg; if it runs, it leaves at the end of the step under way."""
        if self.scheduler.cancel(leg) and self._glide is not None:
            self._disturb(now)
        elif self.due_s == NEVER:
            self._begin(now)  # its blocks may have been what another waits for

    def halt(self, now: float) -> None:
        """The engine dies: what was here is as of the last step that has ended."""
        if self._glide is not None:
            self._glide_steps, self._look_steps = min(self._glide_steps, self._glide.steps_done(now)), 0
            last_s = self._glide.end_s(self._glide_steps)
            if self._glide_steps:
                self._end_glide()
        else:
            last_s = self._started_s
        self.due_s = NEVER
        self.scheduler.stop(last_s)

    def state_at(self, now: float) -> tuple[int, int]:
        """Total context of the decodes and free blocks, as of the last step that has ended."""
        group, free = self.scheduler.group, self.scheduler.memory.free
        if self._glide is None:
            return group.context_tokens, free
        done = min(self._glide.steps_done(now), self._glide_steps)
        return group.context_tokens + done * group.count, free - self.scheduler.memory.growth(group, done)

    def progress(self, leg: Leg, now: float) -> tuple[int, int]:
        """Context of a leg, and the output tokens that it has given here, as of the last step that has ended."""
        group = self.scheduler.group
        if leg.finish_step <= group.steps:
            return leg.tokens, leg.given
        done = min(self._glide.steps_done(now), self._glide_steps) if self._glide is not None else 0
        steps = group.steps + done
        return leg.base + steps, leg.wanted - (leg.finish_step - steps)

    def prefill_share_at(self, now: float) -> float:
        glide = self._glide
        return self._share.after(min(glide.steps_done(now), self._glide_steps) if glide is not None else 0)

    def _disturb(self, now: float) -> None:
        """Something has changed: begin at once when idle, else at the end of the decode step under way."""
        if self.due_s == NEVER:
            self._begin(now)
        elif self._glide is not None and not self._look_steps and self.scheduler.could_change():
            # The engine looks when the step under way ends. If it then only reserves blocks, the glide goes on.
            steps = self._glide.steps_begun(now)
            if steps < self._glide_steps:
                self._look_steps = steps
                self.due_s = max(now, self._glide.end_s(steps))  # the last bit may be lost in rounding

    def _begin(self, now: float) -> None:
        scheduler = self.scheduler
        chunks = scheduler.plan(now)
        group = scheduler.group
        if chunks:
            self._chunks, self._decodes, self._started_s = chunks, scheduler.decodes_with(chunks), now
            if group.count and not self._decodes:
                scheduler.let_wait(now)
            prefill = tuple((tokens, leg.computed) for leg, tokens in chunks)
            decodes, context = (group.count, group.context_tokens) if self._decodes else (0, 0)
            self.due_s = now + self._model.step_time_s(Batch(prefill, decodes, context))
        elif group.count:
            steps = 1 if self._stepwise else scheduler.steps_ahead()
            self._glide = Glide(now, self._model.decode_segments(group.count, group.context_tokens, steps))
            self._glide_steps = steps
            self.due_s = self._glide.end_s(steps)
        else:
            self.due_s = NEVER

    def _end_glide(self) -> None:
        glide, steps = self._glide, self._look_steps or self._glide_steps
        assert glide is not None
        self._glide, self._look_steps = None, 0
        now = glide.end_s(steps)
        runs = glide.runs(steps)
        self.tally.glide(glide, runs, self.scheduler.group.count, len(self.scheduler.fresh))
        self.tally.busy_s += now - glide.start_s
        self._share.plain(steps)
        self._end_decodes(runs, glide.start_s + glide.first_step_s, now)

    def _end_step(self, now: float) -> None:
        chunks, self._chunks = self._chunks, []
        took_s = now - self._started_s
        self.tally.busy_s += took_s
        self.tally.steps += 1
        if self._decodes:
            self._decodes = False
            self._share.mixed()
            self.tally.decodes(took_s, self.scheduler.group.count, len(self.scheduler.fresh))
            self._end_decodes(((1, took_s, took_s),), now, now)
        for leg, tokens in chunks:
            self._end_chunk(leg, tokens, now)

    def _end_decodes(self, runs: tuple[Segment, ...], first_s: float, now: float) -> None:
        """`runs`: the steps. `first_s`: when the first of them ends and gives fresh legs their first token here."""
        scheduler = self.scheduler
        steps, pauses = sum(run[0] for run in runs), scheduler.group.pauses
        fresh, scheduler.fresh = scheduler.fresh, []
        if fresh:
            for leg in fresh:
                pauses.leave(leg)  # the gap that ends now is longer than the step
                self._token(leg, first_s)
            pauses.add(((1, runs[0][1], runs[0][1]),))
            for leg in fresh:
                pauses.join(leg)
            runs = without_first(runs)
        if runs:
            pauses.add(runs)
        scheduler.memory.grow(scheduler.group, steps)
        self.tally.peak(scheduler.memory)
        for leg in scheduler.group.advance(steps):
            leg.last_token_s = now
            self._done(leg, now)

    def _end_chunk(self, leg: Leg, tokens: int, now: float) -> None:
        scheduler = self.scheduler
        leg.computed += tokens
        scheduler.queued_tokens -= tokens
        self.tally.prefill_tokens += tokens
        if leg.cancelled:
            return
        if leg.missing > 0:
            self._events.chunk(leg, now)
            return
        del scheduler.prefilling[leg]
        scheduler.queued_jobs -= 1
        scheduler.memory.keep_prefix(leg)
        leg.tokens += 1
        leg.left -= 1
        self._token(leg, now)
        if leg.left > 0:
            scheduler.join(leg)
        else:
            self._done(leg, now)

    def _token(self, leg: Leg, now: float) -> None:
        if leg.last_token_s >= 0.0:
            gap_s = now - leg.last_token_s
            self.tally.gaps.add(gap_s)
            if not leg.cancelled:
                leg.request.add_gaps(gap_s, int(gap_s > leg.request.job.slo.itl_s))
        leg.last_token_s = now
        if not leg.cancelled:
            self._events.token(leg, now)

    def _done(self, leg: Leg, now: float) -> None:
        self.scheduler.finish(leg)
        if not leg.cancelled:
            self._events.done(leg, now)

    def _preempted(self, leg: Leg) -> None:
        self.tally.preemptions += 1
        self._events.preempted(leg)


@dataclass(slots=True)
class Tally:
    """Running totals. `gaps` counts each gap between two tokens of a request once."""

    gaps: Gaps = field(default_factory=Gaps)
    busy_s: float = 0.0
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    peak_share: float = 0.0

    def decodes(self, took_s: float, count: int, fresh: int) -> None:
        """A step in which `count` requests got a token; the gaps of `fresh` ones are counted by the engine."""
        self.decode_tokens += count
        if count > fresh:
            self.gaps.add(took_s, count - fresh)

    def glide(self, glide: Glide, runs: tuple[Segment, ...], count: int, fresh: int) -> None:
        """The decode steps `runs` of one batch; only in the first of them any are fresh."""
        steps = sum(run[0] for run in runs)
        self.steps += steps
        self.decode_tokens += steps * count
        if fresh:
            self.gaps.add(glide.first_step_s, -fresh)
        for length, first, last in runs:
            self.gaps.add((first + last) / 2.0, length * count)

    def peak(self, memory: KvMemory) -> None:
        self.peak_share = max(self.peak_share, 1.0 - memory.free / memory.total)
