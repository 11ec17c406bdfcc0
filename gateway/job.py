"""The state of one job: what the client asked, what it already has, and the record of how it went."""

import secrets
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gateway.lengths import Asked, LengthClient
from gateway.tracing import JobTrace
from shared.domain.job import FirstTokenOut, Generation, JobView, LengthPrediction, Loss, Phase, Slo, itl_met
from shared.domain.prompt import hashes_of, packed
from shared.domain.route import InstanceRef, Reason, Route
from shared.errors import Delayed, PolyphaseError
from shared.policy.decode_admission import remaining_tokens
from shared.timeline import Decision, RequestTimeline, Span, SpanRecord
from shared.wire.messages import JobReport, Pause, Reused, TokenStep

# MERGED gaps.py
# Gaps between the tokens of answers, counted where each step passes: it costs one search in a short list.


# As vLLM counts them: vllm.v1.metrics.buckets. Seconds.
GAP_BOUNDS_S = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)


class Gaps:
    """How many gaps came to at most each bound, and, last, to more. Their sum is known otherwise: an answer's gaps add
    up to the time from its first token to its last.
    """

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = [0] * (len(GAP_BOUNDS_S) + 1)

    def add(self, gap_s: float) -> None:
        """One gap, of a step that brought tokens."""
        self.counts[bisect_left(GAP_BOUNDS_S, gap_s)] += 1

    def cumulative(self) -> list[tuple[str, float]]:
        """As Prometheus has it: bound, and how many came to at most that."""
        total, found = 0, []
        for bound, count in zip((*map(str, GAP_BOUNDS_S), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


Emit = Callable[[TokenStep], None]
PAUSES_TOLD = 32  # of one leg, in its timeline; the time of later ones counts as decode


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What does not change. `carry`: later tokens depend on earlier ones only through the prompt.

    A job that can be carried goes on anywhere from prompt + tokens. One that cannot (penalties, a seed, a grammar)
    is produced by one engine from its first token on; after a loss another one runs it again from the start, is made to
    repeat the tokens that the client has, which are not sent twice, and goes on from there.
    """

    job_id: str
    prompt_token_ids: list[int]
    generation: Generation
    max_tokens: int
    carry: bool
    local_only: bool
    slo: Slo
    caller: str = ""
    prompt: bytes = field(init=False)  # its tokens, packed

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", packed(self.prompt_token_ids))

    @property
    def arrived_s(self) -> float:
        """Unix seconds."""
        return self.generation.arrived_s


@dataclass(slots=True)
class Paused:
    """A time without blocks. Unix seconds; 0 while it is not so yet."""

    began_s: float
    computed_s: float = 0.0  # when it had blocks again
    ended_s: float = 0.0


@dataclass(slots=True, eq=False)
class Job:
    """The gateway's view of one request; the pipeline advances it."""

    spec: JobSpec
    emit: Emit
    gateway_id: str
    deadline_s: float  # of the monotonic clock
    attempt: int = 0
    phase: Phase = Phase.QUEUED
    finish_reason: str = ""  # set once the client has all
    waited_s: float = 0.0  # without an instance, since the last token
    begun: bool = False  # it has been placed
    _kept: list[TokenStep] = field(default_factory=list)  # that are handed on together with the next
    expected_tokens: int = 0  # of its answer in all, as its scheduler reckons for the room that it keeps; 0: not known
    delays: int = 0  # how often it was told to ask again
    losses: list[Loss] = field(default_factory=list)  # attempts that failed, over its whole life
    tokens: list[int] = field(default_factory=list)  # what the client already has
    failed_instances: list[str] = field(default_factory=list)
    asked: Asked = field(default_factory=Asked)  # for the length of its answer
    gaps: Gaps = field(default_factory=Gaps)  # where the gaps between its tokens are counted
    streamed: bool = False  # a plain stream reports when its tokens leave (`delivered`); else they leave as they come
    delivered_s: float = 0.0  # when tokens last left for the client
    broken: str = ""  # code of what ended it in the gateway, while its engine was well
    siblings: Any = None  # what vLLM knows of the request, where it is one of several answers to it
    trace: JobTrace | None = None  # where it is traced
    prefill_instance: str = ""
    decode_instance: str = ""
    leg_instance: InstanceRef | None = None  # has the attempt's prefill or decode at present, or failed in it
    pauses: list[Paused] = field(default_factory=list)  # of the leg
    paused: Paused | None = None  # at present
    on_pause: Callable[[Pause], None] | None = None  # told of each word of a pause, by the leg's instance
    moves: int = 0  # how often it went on elsewhere because it was paused
    moved_from: str = ""  # where it was paused, and is not placed again until an attempt fails
    split: int = 0
    timeline: RequestTimeline = field(init=False)
    mark_s: float = field(init=False)  # where the stretches of the timeline end so far
    leg_first_step_s: float = 0.0
    _computed: list[tuple[int, int]] = field(default_factory=list)  # ranges of the prompt, by all instances so far
    _created: int = 0  # tokens that they put into their prefix caches
    _prefix: tuple[int, ...] | None = None
    _nonce: str = field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        spec = self.spec
        self.timeline = RequestTimeline(spec.job_id, spec.arrived_s, len(spec.prompt_token_ids), itl_s=spec.slo.itl_s)
        self.mark_s = self.spec.arrived_s

    def begin_attempt(self) -> None:
        """Start over where the client's tokens end."""
        self.attempt += 1
        self.leg_instance = None
        if self.trace is not None:
            self.trace.attempt(self.mark_s)

    @property
    def wire_trace(self) -> str:
        """What goes with calls of this attempt; empty where it is not traced."""
        return self.trace.wire if self.trace is not None else ""

    @property
    def placement_trace(self) -> str:
        """What goes with the question for a place."""
        return self.trace.placing(self.mark_s) if self.trace is not None else ""

    @property
    def finished(self) -> bool:
        """Whether the client has all."""
        return bool(self.finish_reason)

    @property
    def prediction(self) -> LengthPrediction | None:
        """Of its answer's length, if it is here by now."""
        return self.asked.prediction

    @property
    def left_s(self) -> float:
        """Until the deadline."""
        return self.deadline_s - time.monotonic()

    @property
    def ttft_left_s(self) -> float:
        """Until its first token should be there."""
        return self.spec.arrived_s + self.spec.slo.ttft_s - time.time()

    @property
    def prompt(self) -> bytes:
        """What to compute from, packed: the prompt and, where the job can be carried, the tokens so far."""
        return self.spec.prompt + packed(self.tokens) if self.spec.carry and self.tokens else self.spec.prompt

    @property
    def known(self) -> bytes:
        """What an engine is to repeat, packed: the tokens so far, where they are not part of `prompt`."""
        return b"" if self.spec.carry else packed(self.tokens)

    @property
    def prompt_tokens(self) -> int:
        """Its length."""
        return len(self.spec.prompt_token_ids) + (len(self.tokens) if self.spec.carry else 0)

    @property
    def remaining(self) -> int:
        """How many tokens an engine that starts from `prompt` may produce."""
        return self.spec.max_tokens - (len(self.tokens) if self.spec.carry else 0)

    @property
    def transfer_id(self) -> str:
        """One an attempt, so that a late message of an earlier one cannot be mistaken.

        Unlike any of another gateway, or of this one before its restart, for which clients may repeat their ids.
        """
        return f"{self.spec.job_id}/{self._nonce}/{self.attempt}"

    @property
    def excluded(self) -> tuple[str, ...]:
        """Instances that are not to have it now."""
        failed = tuple(self.failed_instances)
        return (*failed, self.moved_from) if self.moved_from and self.moved_from not in failed else failed

    def view(self, *, decode_only: bool = False) -> JobView:
        """What policies may know. `decode_only`: its prefill is done."""
        whole = decode_only or self.spec.local_only
        spec, prompt = self.spec, self.prompt_tokens
        given, expected = len(self.tokens) if spec.carry else 0, self.expected_tokens
        return JobView(
            spec.job_id,
            prompt,
            self.remaining,
            spec.slo,
            self.prediction,
            whole,
            begun=self.begun,
            answer_tokens=remaining_tokens(given, expected, spec.max_tokens) if expected else 0,
            can_wait=True,
            waited_s=max(0.0, time.time() - spec.arrived_s),
            started=bool(self.tokens),
        )

    @property
    def prefix(self) -> tuple[int, ...]:
        """Hashes of its prompt's blocks, for placement; none where an engine would not look for them. Computed once."""
        if self._prefix is None:
            spec = self.spec
            self._prefix = () if spec.local_only else hashes_of(spec.prompt, spec.generation.cache_salt)
        return self._prefix

    def reuses(self, reused: Reused | None, end: int) -> None:
        """An instance has computed the prompt up to `end` tokens, but for what it reused."""
        prompt = len(self.spec.prompt_token_ids)
        start, end = min(reused.tokens if reused is not None else 0, prompt), min(end, prompt)
        if start < end:
            self._computed.append((start, end))
        self._created += reused.created if reused is not None else 0

    @property
    def reused(self) -> Reused:
        """What no instance had to compute of the prompt for this request, and what new prefixes it has left behind."""
        prompt, computed, covered = len(self.spec.prompt_token_ids), 0, 0
        for start, end in sorted(self._computed):
            computed += max(0, end - max(start, covered))
            covered = max(covered, end)
        return Reused(prompt - computed, min(self._created, computed))

    def accept(self, step: TokenStep) -> None:
        """Take a step of an engine and hand it on; engines send what the client does not have yet."""
        if self.finished:
            return
        now = time.time()
        if step.pause is not None:
            self._heard_of_pause(step.pause, now)
            return
        if self.paused is not None:
            self.end_pause(now)
        if not self.leg_first_step_s and self.phase is Phase.DECODE:
            self.reuses(step.reused, self.prompt_tokens)
        self.leg_first_step_s = self.leg_first_step_s or now
        tokens, timeline = step.tokens, self.timeline
        if self.phase is Phase.PREFILL and not step.finish_reason and not timeline.first_token_s and self._smooth:
            self.tokens += tokens
            self._kept.append(step)
            return
        for kept in self._kept:  # the second token is here
            self.emit(kept)
        kept_some, self._kept = bool(self._kept), []
        if kept_some and self.finished:  # by a stop string
            return
        if tokens:
            if timeline.first_token_s:
                self.gaps.add(now - timeline.last_token_s)
            else:
                timeline.first_token_s = now
            timeline.last_token_s = now
            self.tokens += tokens
            self.waited_s = 0.0
            if not self.streamed:
                self._count_gap(now, len(tokens))
        self.finish_reason = step.finish_reason  # first: what takes the step may find that a stop string ended it
        self.emit(step)

    def _heard_of_pause(self, pause: Pause, now: float) -> None:
        if self.paused is None:
            if pause.computing:
                return  # a token that was under way has ended the pause
            self.paused = Paused(now)
        if pause.computing:
            self.paused.computed_s = self.paused.computed_s or now
        else:
            self.paused.computed_s = 0.0  # its blocks were taken back once more
        if self.on_pause is not None:
            self.on_pause(pause)

    def end_pause(self, now: float) -> None:
        """The pause, if there is one, has ended: with a token, or with the leg."""
        if self.paused is not None:
            self.paused.ended_s = now
            if len(self.pauses) < PAUSES_TOLD:
                self.pauses.append(self.paused)
            self.paused = None

    def begin_leg(self, instance: InstanceRef) -> None:
        """A call of an instance begins."""
        self.leg_first_step_s = 0.0
        self.leg_instance = instance
        self.pauses, self.paused = [], None

    @property
    def _smooth(self) -> bool:
        return self.spec.slo.first_token is FirstTokenOut.SMOOTH

    def delivered(self, tokens: int) -> None:
        """The newest `tokens` of the answer leave for the client, in one event."""
        self._count_gap(time.time(), tokens)

    def _count_gap(self, now: float, tokens: int) -> None:
        before_s, self.delivered_s = self.delivered_s, now
        if not before_s:
            return
        timeline, gap_s = self.timeline, now - before_s
        timeline.gaps += 1
        if gap_s > timeline.itl_s:
            timeline.gaps_over += 1
        if gap_s > timeline.longest_gap_s:
            timeline.longest_gap_s, timeline.longest_gap_at_s = gap_s, now
            timeline.longest_gap_after = len(self.tokens) - tokens

    def stop(self) -> None:
        """The front end found a stop string: the client has its answer, whatever its engine produced after it."""
        self.finish_reason = "stop"

    def broke(self, code: str) -> None:
        """What its engine gave could not be handed on. It is to be cancelled, and has failed with this code."""
        self.finish_reason, self.broken = "", code

    def record(self, span: Span, started_s: float, ended_s: float, instance_id: str = "") -> None:
        """Add a stretch to the timeline."""
        self.timeline.spans.append(SpanRecord(span, started_s, ended_s, instance_id, max(1, self.attempt)))
        self.mark_s = max(self.mark_s, ended_s)
        if span is Span.PLACEMENT and self.trace is not None:
            self.trace.placed(self.mark_s)

    def spent(self, span: Span, until_s: float, instance_id: str = "") -> None:
        """Add the time since the last stretch, so that there is no gap."""
        self.record(span, self.mark_s, max(until_s, self.mark_s), instance_id)

    def decided(self, kind: str, chosen: str, reasons: tuple[Reason, ...]) -> None:
        """Add a decision to the timeline."""
        self.timeline.decisions.append(Decision(time.time(), kind, chosen, reasons))

    def spent_here(self, span: Span, until_s: float, instance_id: str) -> None:
        """The same of a leg's time at its engine, in which pauses are stretches of their own."""
        carved = False
        while self.pauses and self.pauses[0].began_s < until_s:
            pause = self.pauses.pop(0)
            self.spent(span, pause.began_s, instance_id)
            self.spent(Span.PAUSED, pause.computed_s or pause.ended_s, instance_id)
            if pause.computed_s:
                self.spent(Span.RECOMPUTED, pause.ended_s, instance_id)
            carved = True
        if until_s > self.mark_s or not carved:
            self.spent(span, until_s, instance_id)

    def lose(self) -> None:
        """Record that the attempt failed, with the instance that had it."""
        ref = self.leg_instance
        generation = ref.generation if ref is not None else 0
        self.losses.append(Loss(len(self.tokens), ref.instance_id if ref is not None else "", generation))

    def open_losses(self, forgiven_tokens: int) -> int:
        """Losses that the answer's progress has not made up for: every `forgiven_tokens` since a loss forgive one."""
        count = last = 0
        for loss in self.losses:
            count = max(0, count - (loss.position - last) // forgiven_tokens) + 1
            last = loss.position
        return count

    def lost_since(self, position: int) -> list[str]:
        """The instances, each of its processes once, that were lost after `position` tokens of the answer or later."""
        lost = (one for one in self.losses if one.instance_id and one.position >= position)
        return [name for name, _ in dict.fromkeys((one.instance_id, one.generation) for one in lost)]

    def resumes(self, error: PolyphaseError) -> None:
        """The attempt is lost, and another one follows."""
        figures: dict[str, float | str] = {"error": error.message, "tokens": len(self.tokens)}
        self.decided("resume", "", (Reason(error.code, figures),))
        if self.trace is not None:
            self.trace.failed(error)

    def moving(self, instance_id: str, waited_s: float, pause: Pause, route: Route) -> None:
        """It leaves an instance where it has been paused for `waited_s`, and goes on by another route."""
        self.moves += 1
        self.moved_from = instance_id
        chosen = route.decode.instance_id if route.decode is not None else ""  # else the dispatcher is to choose it
        figures: dict[str, float | str] = {
            "from": instance_id,
            "tokens": len(self.tokens),
            "waited_s": round(waited_s, 4),
            "pause_s": round(pause.expected_s, 4),
        }
        self.decided("move", chosen, (Reason("paused", figures),))
        if self.trace is not None:
            self.trace.moved()

    def ended(self, outcome: str) -> None:
        """It is over. outcome: the code of what ended it, unless it has finished."""
        if self.finished:
            self.phase, outcome = Phase.COMPLETED, self.finish_reason
        else:
            outcome = self.broken or outcome
            self.phase = Phase.CANCELLED if outcome == "cancelled" else Phase.FAILED
        self.timeline.ended_s = time.time()
        self.timeline.outcome = outcome
        self.timeline.output_tokens = len(self.tokens)
        if self.trace is not None:
            error = outcome if self.phase is Phase.FAILED else ""
            self.trace.ended(self.timeline, self.split, self.finish_reason, error)

    def ask(self, lengths: LengthClient, instance_id: str = "") -> None:
        """Request its length, where predictors stand beside instances from the one beside that instance."""
        self.asked.cancel()
        self.asked = lengths.ask(self.spec.prompt_token_ids, self.spec.max_tokens, instance_id)
        self.asked.then(self._predicted)

    def _predicted(self, found: LengthPrediction) -> None:
        figures: dict[str, float | str] = {
            "confidence": found.confidence,
            "lower_tokens": found.lower_tokens,
            "upper_tokens": found.upper_tokens,
            "expected_tokens": found.mean,
        }
        self.decided("prediction", f"{found.lower_tokens} tokens or more", (Reason(found.source, figures),))

    def delayed(self, error: Delayed) -> None:
        """It is to ask again later; the first time is told in its timeline."""
        if not self.delays:
            self.decided("delay", "", (Reason(error.message, {"cause": error.cause or error.code}),))
        self.delays += 1

    def placed(self, route: Route) -> None:
        """Take in a placement."""
        self.begun = True
        if route.answer_tokens:
            self.expected_tokens = route.answer_tokens + (len(self.tokens) if self.spec.carry else 0)
        self.split = route.split
        self.prefill_instance = route.prefill.instance_id if route.prefill else ""
        self.decode_instance = route.decode.instance_id if route.decode else ""
        chosen = self.prefill_instance or self.decode_instance
        self.decided("placement", chosen, route.reasons)

    def report(self, outcome: str = "") -> JobReport:
        """The row of the status table, with the timeline so far."""
        timeline, final = self.timeline, self.phase.final
        timeline.output_tokens = len(self.tokens)
        slo = self.spec.slo
        ttft, tpot = timeline.ttft_s, timeline.tpot_s
        met = None
        if self.phase is Phase.COMPLETED:
            met = ttft is not None and ttft <= slo.ttft_s and (tpot is None or tpot <= slo.tpot_s)
            met = met and itl_met(timeline.gaps, timeline.gaps_over)
        return JobReport(
            self.spec.job_id,
            self.gateway_id,
            self.phase,
            self.spec.arrived_s,
            len(self.spec.prompt_token_ids),
            len(self.tokens),
            self.prefill_instance,
            self.decode_instance,
            self.split,
            slo.name,
            outcome,
            ttft,
            tpot,
            met,
            timeline,
            self.spec.max_tokens,
            self.prediction if final else None,
            self.spec.caller,
            self.asked.begun,
            list(self.losses),
            timeline.longest_gap_s if timeline.gaps else None,
            timeline.gaps,
            timeline.gaps_over,
        )
