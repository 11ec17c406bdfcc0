"""One engine in virtual time: when its steps begin and end, and what they bring.

Decode steps between which nothing can change are one event (`Glide`). With `stepwise` every step is an event of its
own; the results are the same.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from shared.cost.step import Batch, Segment, StepTimes
from shared.domain.kv import EXPORT_SHARE
from shared.domain.rates import StepRates
from shared.policy.decode_admission import DecodeAdmission, Greedy
from shared.policy.prefill_order import PrefillOrder, PrefillShare, PromptTime
from shared.sim.events import NEVER, EventLoop
from shared.sim.group import Glide, MeasuredGroup, without_first
from shared.sim.memory import ExportRoom, KvMemory
from shared.sim.outcomes import Gaps
from shared.sim.request import Leg, State
from shared.sim.scheduler import Scheduler, Step
from shared.sim.spec import EngineLimits

_RECENT_STEPS = 32
_ROUNDING_S = 1e-9  # by which sums of step times may differ


class EngineEvents(Protocol):
    """What an engine reports, and when it happened."""

    def admitted(self, leg: Leg, now: float) -> None:
        """Blocks are reserved for a leg that another instance hands over."""
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

    def decoding(self) -> None:
        """A step with decodes begins, or several."""
        ...

    def left(self, leg: Leg, now: float) -> None:
        """A leg that was to go on elsewhere (`Engine.leave`) has done so, with the step that ended at `now`."""
        ...

    def preempted(self, leg: Leg) -> None:
        """A leg lost its blocks and waits to be computed again."""
        ...


class Engine:
    """One engine, whose steps are events of `loop`. staging_tokens: room for the KV of prompts that are computed for
    other instances.
    """

    def __init__(
        self,
        loop: EventLoop,
        model: StepTimes,
        limits: EngineLimits,
        kv_tokens: int,
        order: PrefillOrder,
        admission: DecodeAdmission,
        events: EngineEvents,
        *,
        rates: StepRates | None = None,
        staging_tokens: int | None = None,
        prefix_block_tokens: int = 0,
        stepwise: bool = False,
    ) -> None:
        self._loop = loop
        self._model = model
        self._events = events
        self._stepwise = stepwise
        self._export_room = ExportRoom(staging_tokens) if staging_tokens is not None else None
        self._group = MeasuredGroup(limits.block_tokens)
        self.memory = KvMemory(limits, kv_tokens, prefix_block_tokens)
        self.scheduler: Scheduler[Leg] = Scheduler(
            limits,
            self.memory,
            self._group,
            self,
            order,
            admission,
            rates=lambda: rates,
            reserve_export=self._export_room.reserve if self._export_room is not None else None,
        )
        self._fresh: list[Leg] = []  # decodes whose present gap between tokens began before the coming step
        self._step: Step[Leg] | None = None  # the step with chunks that is under way
        self._started_s = 0.0
        self._glide: Glide | None = None
        self._glide_steps = 0  # how many steps of the glide are taken
        self._look_steps = 0  # after how many of them the engine looks for changes; 0: it does not
        self._due_s = NEVER  # when the step or glide under way ends, or is looked at
        self._planned_s = NEVER  # the time of the event for that
        self._gather_s = 0.0  # of the engine's time, that exports from the cache are still to take
        self.tally = Tally()
        self._share = PrefillShare()
        self._prompts = PromptTime()
        self._recent: deque[Segment] = deque(maxlen=_RECENT_STEPS)  # the last steps with decodes

    def add(self, leg: Leg, now: float) -> None:
        """Queue a leg. A leg whose KV is to come is admitted at once if there is room beside the step under way."""
        self.scheduler.add(leg)
        glide = self._glide
        if leg.import_tokens and glide is not None:
            steps = max(1, min(glide.steps_begun(now), self._glide_steps))
            if self._admit_beside(steps, now) and self._growth(self._glide_steps) <= self.memory.free:
                return
            if steps < self._glide_steps:  # the steps after the one under way may lack the blocks that it has taken
                self._glide_steps, self._look_steps = steps, 0
                self._set_due(max(now, glide.end_s(steps)))
            return
        if leg.is_stream and self._step is not None:
            self.scheduler.admit_streams(now)
        self._disturb(now)

    def kv_arrived(self, leg: Leg, now: float) -> None:
        self.scheduler.kv_arrived(leg)
        if leg.uncomputed_tokens == 1:
            self.memory.keep_prefix(leg)
        self._disturb(now)

    def pull_failed(self, leg: Leg, now: float) -> None:
        """The prefix of a leg does not come from elsewhere."""
        self.scheduler.pull_failed(leg)
        if leg.state is State.RECEIVED:
            self._disturb(now)

    def export(self, seconds: float, now: float) -> float:
        """Gather blocks of the prefix cache for so many seconds of the engine's time, between its steps; beside decodes
        they have a share of it. `now`: a step has just ended, and the next one has begun. Returns when they are
        gathered.
        """
        if self.idle:
            return now + seconds
        self._gather_s += seconds
        glide = self._glide
        if glide is not None:
            steps = min(glide.steps_begun(now + _ROUNDING_S), self._glide_steps)
            self._glide_steps, self._look_steps = steps, 0
            self._set_due(max(now, glide.end_s(steps)))
        return now + (self._gather_s / EXPORT_SHARE if self._group.count else self._gather_s)

    def step_end_s(self, now: float) -> float:
        """When the step under way ends; now if there is none."""
        glide = self._glide
        if glide is not None:
            return max(now, glide.end_s(max(1, min(glide.steps_begun(now), self._glide_steps))))
        return now if self.idle else max(now, self._due_s)

    def became_stream(self, leg: Leg, now: float) -> None:
        """The client of a leg that may wait here has its first token, from elsewhere."""
        if self.scheduler.became_stream(leg):
            self._disturb(now)

    def sent(self, leg: Leg, now: float) -> None:
        """The KV of a prompt that was computed here has left: another prompt may begin."""
        if self._export_room is not None and self._export_room.free(leg) and len(self.scheduler.waiting):
            self._disturb(now)

    @property
    def idle(self) -> bool:
        return self._due_s == NEVER

    def _set_due(self, due_s: float) -> None:
        self._due_s = due_s
        if due_s != self._planned_s:
            self._planned_s = due_s
            if due_s != NEVER:
                self._loop.at(due_s, self._run, None)

    def _run(self, _: None, now: float) -> None:
        """The step or glide that is due now ends, and the next one begins."""
        if self._due_s != now:
            return  # the step was cut short, or the engine is dead
        if self._glide is not None:
            if self._look_steps and self._admit_beside(self._glide_steps, now):
                self._look_steps = 0
                self._set_due(self._glide.end_s(self._glide_steps))
                return
            self._end_glide()
        elif self._step is not None:
            self._end_step(now)
        self._begin(now)

    def cancel(self, leg: Leg, now: float) -> None:
        """Forget a leg; if it runs, it leaves at the end of the step under way."""
        self.scheduler.cancel(leg)
        if leg.state is not State.FINISHED and self._glide is not None:
            self._disturb(now)
        elif self.idle:
            self._begin(now)  # its blocks may have been what another waits for

    def leave(self, leg: Leg, now: float) -> None:
        """A decode goes on elsewhere: it leaves at the end of the step under way, with the token of that."""
        self.scheduler.leave(leg)
        self._disturb(now)

    @property
    def decoding(self) -> int:
        return self._group.count

    def recent_token_s(self, now: float) -> float:
        """Mean seconds of the newest steps with decodes, at most `_RECENT_STEPS`; 0 where there are none."""
        done = self.steps_done(now)
        running = self._glide.runs(done) if self._glide is not None and done else ()
        count, seconds = 0, 0.0
        for length, first, last in chain(reversed(running), reversed(self._recent)):
            taken = min(length, _RECENT_STEPS - count)
            growth = (last - first) / (length - 1) if length > 1 else 0.0
            count, seconds = count + taken, seconds + taken * (last - growth * (taken - 1) / 2.0)
            if count == _RECENT_STEPS:
                break
        return seconds / count if count else 0.0

    def halt(self, now: float) -> None:
        """The engine dies: what was here is as of the last step that has ended."""
        if self._glide is not None:
            self._glide_steps, self._look_steps = min(self._glide_steps, self._glide.steps_done(now)), 0
            last_s = self._glide.end_s(self._glide_steps)
            if self._glide_steps:
                self._end_glide()
        else:
            last_s = self._started_s
        self._set_due(NEVER)
        self._gather_s = 0.0
        for leg in self.scheduler.running:
            if leg.state is State.DECODING:
                self._group.leave(leg)
                if leg not in self._fresh:  # else the step that would have given it a token has not ended
                    leg.last_token_s = last_s

    def steps_done(self, now: float) -> int:
        """Steps of the glide under way that have ended, which its decodes have not been brought up to date with."""
        return min(self._glide.steps_done(now), self._glide_steps) if self._glide is not None else 0

    def context_after(self, steps: int) -> int:
        """Total context of the decodes after so many more steps."""
        return self._group.context_tokens + steps * self._group.count

    def free_after(self, steps: int) -> int:
        """Free blocks after so many more steps."""
        return self.memory.free - self._growth(steps) if steps else self.memory.free

    def progress_after(self, steps: int, leg: Leg) -> tuple[int, int]:
        """Context of a leg, and the output tokens that it has given here, after so many more steps."""
        if leg.state is not State.DECODING:
            return leg.tokens, leg.given_tokens
        steps += self._group.steps
        return leg.base + steps, leg.output_tokens - (leg.finish_step - steps)

    def busy_share(self, now: float) -> float:
        return self._prompts.at(now)

    def prefill_share_after(self, steps: int) -> float:
        return self._share.after(steps)

    def admitted(self, request: Leg, now: float) -> None:
        if request.import_tokens:
            self._events.admitted(request, now)

    def preempted(self, request: Leg, now: float) -> None:
        if request in self._fresh:  # its last token is older than the last step
            self._fresh.remove(request)
        elif request.state is State.DECODING and request.last_token_s >= 0.0 and request not in self.scheduler.joined:
            request.last_token_s = now
        self.tally.preemptions += 1
        self._events.preempted(request)

    # Glides: decode steps between which nothing can change

    def _growth(self, steps: int) -> int:
        """Blocks that the decodes take in so many steps."""
        return 0 if self.scheduler.limits.reserves_output else self._group.blocks_for(steps)

    def _steps_ahead(self, step: Step[Leg]) -> int:
        """Decode steps until the batch changes by itself: a leg is done, blocks run out, or others may start."""
        scheduler = self.scheduler
        # Steps of the same batch may be enough for another leg to start: then each step is looked at.
        if self._stepwise or self._gather_s > 0.0 or self.memory.has_copied:
            return 1
        if len(scheduler.waiting) and (step.has_preempted or scheduler.admission.needs_running):
            return 1
        most = self._group.steps_to_finish()
        return most if scheduler.limits.reserves_output else self._group.affordable(self.memory.free, most)

    def _disturb(self, now: float) -> None:
        """Something has changed: begin at once when idle, else at the end of the decode step under way."""
        if self.idle:
            self._begin(now)
        elif self._glide is not None and not self._look_steps and self._could_change():
            # The engine looks when the step under way ends. If it then only reserves blocks, the glide goes on.
            steps = self._glide.steps_begun(now)
            if steps < self._glide_steps:
                self._look_steps = steps
                self._set_due(max(now, self._glide.end_s(steps)))  # the last bit may be lost in rounding

    def _could_change(self) -> bool:
        """Whether the batch could change at the next step."""
        scheduler = self.scheduler
        if scheduler.leaving:
            return True
        if len(scheduler.running) >= scheduler.limits.sequences:
            return False
        if scheduler.received:
            return True
        return len(scheduler.waiting) > 0 and self.memory.could_start(scheduler.waiting.peek())

    def _admit_beside(self, steps: int, now: float) -> bool:
        """Reserve blocks for waiting legs whose KV is elsewhere, while the group takes its `steps` steps.

        False when anything else has to change, or when blocks are so few that the group might feel it.
        """
        scheduler = self.scheduler
        if scheduler.received or scheduler.leaving or not isinstance(scheduler.admission, Greedy):
            return False
        self.memory.reserve_for_decodes(self._growth(steps))
        return scheduler.admit_imports(now)

    # Steps

    def _begin(self, now: float) -> None:
        group = self._group
        step = self.scheduler.plan(now)
        if group.count:
            self._events.decoding()
        if self.scheduler.joined:
            self._fresh += [leg for leg in self.scheduler.joined if leg.state is State.DECODING]
        if step.chunks:
            self._step, self._started_s = step, now
            if group.count and not step.has_decodes:
                self._let_wait(now)
            prefill = tuple((tokens, leg.computed_tokens) for leg, tokens in step.chunks)
            decodes, context = (group.count, group.context_tokens) if step.has_decodes else (0, 0)
            step_s = self._model.step_time_s(Batch(prefill, decodes, context)) + self.memory.take_copied_s()
            self._set_due(now + step_s + (self._gathering_s(step_s) if self._gather_s > 0.0 else 0.0))
        elif group.count:
            steps = self._steps_ahead(step)
            segments = self._model.decode_segments(group.count, group.context_tokens, steps)
            if self._gather_s > 0.0 or self.memory.has_copied:
                step_s = segments[0][1] + self.memory.take_copied_s()
                step_s += self._gathering_s(step_s)
                segments = ((1, step_s, step_s),)
            self._glide = Glide(now, segments)
            self._glide_steps = steps
            self._set_due(self._glide.end_s(steps))
        else:
            self._set_due(NEVER)
        for leg in self.scheduler.left:
            if leg in self._fresh:
                self._fresh.remove(leg)  # its last token is older than the last step
            else:
                leg.last_token_s = now
            self._events.left(leg, now)

    def _gathering_s(self, step_s: float) -> float:
        """The time of a step that exports from the cache take, besides its own."""
        most_s = step_s * EXPORT_SHARE / (1.0 - EXPORT_SHARE) if self._group.count else self._gather_s
        taken_s = min(self._gather_s, most_s)
        self._gather_s -= taken_s
        return taken_s

    def _let_wait(self, now: float) -> None:
        """A step begins now without the decodes: the gap to their next tokens is longer than a step."""
        waiting = set(self._fresh)
        for leg in self.scheduler.running:
            if leg.state is State.DECODING and leg not in waiting:
                leg.last_token_s = now
                self._fresh.append(leg)

    def _end_glide(self) -> None:
        glide, steps = self._glide, self._look_steps or self._glide_steps
        assert glide is not None
        self._glide, self._look_steps = None, 0
        now = glide.end_s(steps)
        runs = glide.runs(steps)
        self.tally.glide(glide, runs, self._group.count, len(self._fresh))
        self.tally.busy_s += now - glide.start_s
        self._share.plain(steps)
        self._recent.extend(runs)
        self._end_decodes(runs, glide.start_s + glide.first_step_s, now)

    def _end_step(self, now: float) -> None:
        step, self._step = self._step, None
        assert step is not None
        took_s = now - self._started_s
        self.tally.busy_s += took_s
        self.tally.steps += 1
        if step.has_decodes:
            self._share.mixed()
            self._recent.append((1, took_s, took_s))
            self.tally.decodes(took_s, self._group.count, len(self._fresh))
            self._end_decodes(((1, took_s, took_s),), now, now)
        if step.chunks:
            self._prompts.add(took_s, now)
        for leg, tokens in step.chunks:
            self._end_chunk(leg, tokens, now)

    def _end_decodes(self, runs: tuple[Segment, ...], first_s: float, now: float) -> None:
        """`runs`: the steps. `first_s`: when the first of them ends and gives fresh legs their first token here."""
        steps, pauses = sum(run[0] for run in runs), self._group.pauses
        fresh, self._fresh = self._fresh, []
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
        done = self.scheduler.end_decodes(steps)
        self.tally.peak(self.memory)
        for leg in done:
            leg.last_token_s = now
            self._done(leg, now)

    def _end_chunk(self, leg: Leg, tokens: int, now: float) -> None:
        leg.computed_tokens += tokens
        self.tally.prefill_tokens += tokens
        if leg.cancelled:
            return
        if leg.uncomputed_tokens > 0:
            self._events.chunk(leg, now)
            return
        self.memory.keep_prefix(leg)
        leg.tokens += 1
        leg.output_left -= 1
        self._token(leg, now)
        if leg.output_left > 0:
            self.scheduler.start_decoding(leg)
            if self.scheduler.limits.prefill_first:  # its next token perhaps does not come with the next step
                self._fresh.append(leg)
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
        request = leg.request
        if leg.decodes and request.answer and request.attempt == 1 and not request.moves:
            self.memory.keep_answer(leg, leg.prefix, request.answer)
        if request.job.session:
            self.memory.keep_session(leg, request.answer if leg.decodes else (), now)
        self.scheduler.finish(leg)
        if not leg.cancelled:
            self._events.done(leg, now)


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
