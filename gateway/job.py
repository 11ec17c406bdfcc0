"""The state of one job: what the client requested, the tokens that it already has, the record of its attempts, and the
histogram of the gaps between its tokens. `gateway.pipeline` advances it.
"""

import secrets
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.lengths import LengthClient, PendingPrediction
from gateway.tracing import JobTrace
from shared.domain.job import FirstTokenOut, Generation, JobView, LengthPrediction, Loss, Phase, Slo, itl_met
from shared.domain.kv import KvHandle
from shared.domain.prompt import hashes_of, modalities, packed, whole_items
from shared.domain.route import InstanceRef, Reason, Route
from shared.errors import Delayed, PolyphaseError
from shared.policy.decode_admission import remaining_tokens
from shared.timeline import Decision, RequestTimeline, Span, SpanRecord, TimelineSums, clock_shift_s
from shared.wire.messages import DecodeReply, JobReport, Leave, Pause, PrefillReply, Reused, TokenStep

Emit = Callable[[TokenStep], None]
MAX_PAUSES = 32  # of one call that its timeline shows; the time of later pauses counts as decode
# Seconds, as vLLM counts them: vllm.v1.metrics.buckets.
GAP_BOUNDS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)


class Gaps:
    """A histogram of the gaps between tokens: `counts` by bound, and, last, longer ones. A gap costs one search.

    Their sum is known otherwise: the gaps of an answer add up to the time from its first token to its last.
    """

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = [0] * (len(GAP_BOUNDS_S) + 1)

    def add(self, gap_s: float) -> None:
        """Count the gap before a step that brought tokens."""
        self.counts[bisect_left(GAP_BOUNDS_S, gap_s)] += 1

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus's buckets: each bound, and the number of gaps up to it."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, GAP_BOUNDS_S), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets


@dataclass(frozen=True, slots=True)
class JobSpec:
    """The parts of a job that stay the same from its arrival to its end.

    `carry` says how the job continues on another instance. If it is true, the tokens of the answer so far are appended
    to the prompt, and any engine continues from there with the same result. It is false where an engine treats tokens
    of the answer differently from tokens of the prompt (penalties, a seed, a grammar). Then one engine produces the
    whole answer. If that engine is lost, another one starts again from the prompt, has to repeat the tokens that the
    client already has, and continues; the client gets no token twice.
    """

    job_id: str
    prompt_token_ids: list[int]
    generation: Generation
    max_tokens: int
    carry: bool
    local_only: bool
    slo: Slo
    caller: str = ""
    one_precision: bool = False  # as in JobView
    session: str = ""  # as in JobView
    prompt: bytes = field(init=False)  # its tokens, packed
    media: tuple[str, ...] = field(init=False)  # the modalities of its media items

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", packed(self.prompt_token_ids))
        items = self.generation.items
        object.__setattr__(self, "media", modalities(items) if items else ())

    @property
    def arrived_s(self) -> float:
        """Unix seconds."""
        return self.generation.arrived_s


@dataclass(slots=True)
class Paused:
    """A time in which a decoding job had no KV blocks. Unix seconds; 0 for what has not happened yet."""

    began_s: float
    computed_s: float = 0.0  # when it got blocks again and its KV was computed again
    ended_s: float = 0.0


@dataclass(slots=True, eq=False)
class EngineCall:
    """The current call of an instance, a prefill or a decode; a failed call stays until the next one."""

    instance: InstanceRef | None = None  # None: there was no call, or it succeeded
    first_step_s: float = 0.0
    pauses: list[Paused] = field(default_factory=list)  # that have ended, and are not in the timeline yet
    paused: Paused | None = None
    on_pause: Callable[[Pause], None] | None = None  # called for each message about a pause
    on_leave: Callable[[Leave], None] | None = None  # called where the instance wants the job to migrate
    on_predicted: Callable[[LengthPrediction], None] | None = None  # called if the length is predicted meanwhile


@dataclass(slots=True, eq=False)
class Job:
    """The gateway's state of one answer. Times are Unix seconds unless they say otherwise."""

    spec: JobSpec
    emit: Emit
    gateway_id: str
    deadline_mono: float  # of the monotonic clock
    phase: Phase = Phase.QUEUED
    tokens: list[int] = field(default_factory=list)  # that the client already has
    finish_reason: str = ""  # set once the client has all tokens
    failed_code: str = ""  # of an error in the gateway that ended the job while its engine was well
    siblings: Any = None  # vLLM's ParentRequest, where the request has several answers
    trace: JobTrace | None = None

    attempt: int = 0
    begun: bool = False  # it has been placed
    split: int = 0
    prefill_instance: str = ""
    decode_instance: str = ""
    precision: str | None = None  # of the instance that computes the answer; None: not known yet
    call: EngineCall = field(default_factory=EngineCall)
    delays: int = 0  # how often the scheduler delayed it
    waited_s: float = 0.0  # without an instance, since the last token
    losses: list[Loss] = field(default_factory=list)  # failed attempts, over its whole life
    failed_instances: list[str] = field(default_factory=list)
    moves: int = 0  # how often it continued elsewhere because it was paused
    migrations: int = 0  # how often it began to migrate
    migrated_mono: float = float("-inf")  # when the last migration began
    migration_cause: str = ""
    moved_from: str = ""  # where it was paused last; excluded from the placements of its attempt on the new route

    length: PendingPrediction = field(default_factory=PendingPrediction)
    expected_tokens: int = 0  # of the whole answer, for which its scheduler keeps room; 0: not known
    gaps: Gaps = field(default_factory=Gaps)  # where the gaps between its tokens are counted
    streamed: bool = False  # a plain stream reports when its tokens leave (`delivered`); else they leave as they arrive
    delivered_s: float = 0.0  # when tokens last left for the client
    timeline: RequestTimeline = field(init=False)
    mark_s: float = field(init=False)  # up to here the timeline has no gap
    migrated_by: dict[tuple[str, str], int] = field(default_factory=dict)  # migrations by cause and outcome
    _held_steps: list[TokenStep] = field(default_factory=list)  # of a smooth class, for the second token
    _computed: list[tuple[int, int]] = field(default_factory=list)  # ranges of the prompt, by all instances so far
    _created: int = 0  # tokens that they added to their prefix caches
    _prefix: tuple[int, ...] | None = None
    _nonce: str = field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        spec = self.spec
        self.timeline = RequestTimeline(spec.job_id, spec.arrived_s, len(spec.prompt_token_ids), itl_s=spec.slo.itl_s)
        self.mark_s = spec.arrived_s

    @property
    def finished(self) -> bool:
        """Whether the client has its whole answer."""
        return bool(self.finish_reason)

    @property
    def left_s(self) -> float:
        """The time until the deadline."""
        return self.deadline_mono - time.monotonic()

    @property
    def ttft_left_s(self) -> float:
        """The time until its first token should be there."""
        return self.spec.arrived_s + self.spec.slo.ttft_s - time.time()

    # What instances and schedulers receive

    @property
    def prompt(self) -> bytes:
        """The tokens to compute from, packed: the prompt and, where the job can be carried, the tokens so far."""
        return self.spec.prompt + packed(self.tokens) if self.spec.carry and self.tokens else self.spec.prompt

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of `prompt`."""
        return len(self.spec.prompt_token_ids) + (len(self.tokens) if self.spec.carry else 0)

    @property
    def repeated(self) -> bytes:
        """The tokens that an engine is to repeat, packed: those so far, where they are not part of `prompt`."""
        return b"" if self.spec.carry else packed(self.tokens)

    @property
    def remaining(self) -> int:
        """How many tokens an engine that starts from `prompt` may produce."""
        return self.spec.max_tokens - (len(self.tokens) if self.spec.carry else 0)

    @property
    def transfer_id(self) -> str:
        """One id for each attempt, so that a late message of an earlier attempt cannot be mistaken.

        It differs from the ids of other gateways, and of this one before a restart: clients may repeat request ids.
        """
        return f"{self.spec.job_id}/{self._nonce}/{self.attempt}"

    @property
    def excluded(self) -> tuple[str, ...]:
        """Instances on which the job must not be placed now."""
        failed = tuple(self.failed_instances)
        return (*failed, self.moved_from) if self.moved_from and self.moved_from not in failed else failed

    @property
    def wire_trace(self) -> str:
        """The tracing context for calls of this attempt; empty without tracing."""
        return self.trace.wire if self.trace is not None else ""

    @property
    def placement_trace(self) -> str:
        return self.trace.placing(self.mark_s) if self.trace is not None else ""

    @property
    def prefix(self) -> tuple[int, ...]:
        """Hashes of the prompt's blocks, for placement; empty where an engine would not look them up. Computed once."""
        if self._prefix is None:
            spec = self.spec
            self._prefix = ()
            if not spec.local_only:
                generation = spec.generation
                self._prefix = hashes_of(spec.prompt, generation.cache_salt, generation.adapter, generation.items)
        return self._prefix

    def view(self, *, decode_only: bool = False, migrates: bool = False) -> JobView:
        """The job as policies see it. decode_only: its prefill is done. migrates: its gateway lets decodes migrate."""
        spec, expected = self.spec, self.expected_tokens
        carried = len(self.tokens) if spec.carry else 0
        return JobView(
            spec.job_id,
            self.prompt_tokens,
            self.remaining,
            spec.slo,
            self.prediction,
            decode_only or spec.local_only,
            begun=self.begun,
            answer_tokens=remaining_tokens(carried, expected, spec.max_tokens) if expected else 0,
            can_wait=True,
            waited_s=max(0.0, time.time() - spec.arrived_s),
            started=bool(self.tokens),
            adapter=spec.generation.adapter,
            one_precision=spec.one_precision,
            precision=self.precision,
            media=spec.media,
            session=spec.session,
            migrates=migrates and not spec.local_only,
        )

    # The predicted length

    @property
    def prediction(self) -> LengthPrediction | None:
        """The predicted length of its answer, if it has arrived."""
        return self.length.prediction

    def request_length(self, lengths: LengthClient, instance_id: str = "") -> None:
        """Request a prediction, where predictors stand beside instances from the one beside that instance."""
        self.length.cancel()
        self.length = lengths.request(self.spec.prompt_token_ids, self.spec.max_tokens, self._predicted, instance_id)

    def _predicted(self, prediction: LengthPrediction) -> None:
        figures: dict[str, float | str] = {
            "confidence": prediction.confidence,
            "lower_tokens": prediction.lower_tokens,
            "upper_tokens": prediction.upper_tokens,
            "expected_tokens": prediction.mean,
        }
        least = f"{prediction.lower_tokens} tokens or more"
        self.decided("prediction", least, (Reason(prediction.source, figures),))
        if self.call.on_predicted is not None:
            self.call.on_predicted(prediction)

    # Placement and attempts

    def begin_attempt(self) -> None:
        """Start over where the client's tokens end."""
        self.attempt += 1
        self.call.instance = None
        if self.trace is not None:
            self.trace.attempt(self.mark_s)

    def delayed(self, error: Delayed) -> None:
        """The scheduler delayed the job; the timeline shows the first time."""
        if not self.delays:
            self.decided("delay", "", (Reason(error.message, {"cause": error.cause or error.code}),))
        self.delays += 1

    def with_whole_items(self, route: Route) -> Route:
        """The route with a split outside of media items: behind the item in which it would lie.

        The tokens of an item are computed together. In some models they attend to each other in both directions.
        """
        items = self.spec.generation.items
        if not items or route.prefill is None or (split := whole_items(route.split, items)) == route.split:
            return route
        return msgspec.structs.replace(route, split=split)

    def placed(self, route: Route) -> None:
        timeline = self.timeline
        if not self.begun:
            timeline.placed_s, timeline.estimated = time.time(), route.estimated
        self.begun = True
        if route.answer_tokens:
            self.expected_tokens = route.answer_tokens + (len(self.tokens) if self.spec.carry else 0)
        self.split = route.split
        self.prefill_instance = route.prefill.instance_id if route.prefill else ""
        self.decode_instance = route.decode.instance_id if route.decode else ""
        if self.spec.one_precision and self.precision is None and (first := route.prefill or route.decode):
            self.precision = first.precision
        self.decided("placement", self.prefill_instance or self.decode_instance, route.reasons)

    def can_move(self, max_moves: int) -> bool:
        """Whether it can continue elsewhere. A job that cannot be carried would repeat its tokens one by one."""
        spec = self.spec
        return spec.carry and not spec.local_only and bool(self.tokens) and self.moves < max_moves

    def moved(self, instance_id: str, waited_s: float, pause: Pause, route: Route) -> None:
        """It leaves an instance where it has been paused for `waited_s`, and continues on another route."""
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

    @property
    def can_migrate(self) -> bool:
        """Whether its decode can go on elsewhere with its KV. Log probabilities of a prompt come from one engine."""
        return bool(self.tokens) and not self.spec.local_only and not self.finished

    @property
    def known_tokens(self) -> list[int]:
        """Of the prompt and of the answer so far."""
        return self.spec.prompt_token_ids + self.tokens

    @property
    def known_count(self) -> int:
        """The number of `known_tokens`."""
        return len(self.spec.prompt_token_ids) + len(self.tokens)

    def migrates(self, source: str, target: str, cause: str) -> None:
        """It begins to migrate."""
        self.migration_cause = cause
        figures: dict[str, float | str] = {"from": source, "tokens": len(self.tokens)}
        self.decided("migration", target, (Reason(f"migration:{cause}", figures),))

    def migrated(self, outcome: str) -> None:
        """The migration has ended: done, stayed where the job was, or lost, so that the job is computed again."""
        key = (self.migration_cause, outcome)
        self.migrated_by[key] = self.migrated_by.get(key, 0) + 1

    def add_loss(self) -> None:
        """The attempt is lost, with the instance of the current call."""
        lost = self.call.instance
        instance_id, generation = (lost.instance_id, lost.generation) if lost is not None else ("", 0)
        self.losses.append(Loss(len(self.tokens), instance_id, generation))

    def resumes(self, error: PolyphaseError) -> None:
        """The attempt failed, and another one follows."""
        figures: dict[str, float | str] = {"error": error.message, "tokens": len(self.tokens)}
        self.decided("resume", "", (Reason(error.code, figures),))
        if self.trace is not None:
            self.trace.failed(error)

    def open_losses(self, forgiven_tokens: int) -> int:
        """Losses that the answer's progress has not made up for: every `forgiven_tokens` since a loss forgive one."""
        count = last = 0
        for loss in self.losses:
            count = max(0, count - (loss.position - last) // forgiven_tokens) + 1
            last = loss.position
        return count

    def lost_since(self, position: int) -> list[str]:
        """The instances, each of its processes once, that were lost after `position` tokens of the answer or later."""
        lost = (loss for loss in self.losses if loss.instance_id and loss.position >= position)
        return [name for name, _ in dict.fromkeys((loss.instance_id, loss.generation) for loss in lost)]

    # Tokens

    def accept(self, step: TokenStep) -> None:
        """Pass on a step of an engine; engines send only what the client does not have yet."""
        if self.finished:
            return
        now = time.time()
        if step.pause is not None:
            self._pause(step.pause, now)
            return
        if step.leave is not None:
            if self.call.on_leave is not None:
                self.call.on_leave(step.leave)
            return
        call = self.call
        if call.paused is not None:
            self.end_pause(now)
        if not call.first_step_s:
            if self.phase is Phase.DECODE:
                self.computed(step.reused, self.prompt_tokens)
            call.first_step_s = now
        tokens, timeline = step.tokens, self.timeline
        if self.phase is Phase.PREFILL and not step.finish_reason and not timeline.first_token_s and self._smooth:
            self.tokens += tokens
            self._held_steps.append(step)
            return
        if self._held_steps:  # the second token is here
            held, self._held_steps = self._held_steps, []
            for held_step in held:
                self.emit(held_step)
            if self.finished:  # by a stop string
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
        self.finish_reason = step.finish_reason  # before `emit`, which may find that a stop string ended the answer
        self.emit(step)

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

    def computed(self, reused: Reused | None, end: int) -> None:
        """An instance has computed the prompt up to `end` tokens, except for what it reused."""
        prompt = len(self.spec.prompt_token_ids)
        start, end = min(reused.tokens if reused is not None else 0, prompt), min(end, prompt)
        if start < end:
            self._computed.append((start, end))
        self._created += reused.created if reused is not None else 0

    @property
    def reused(self) -> Reused:
        """Prompt tokens that no instance had to compute for this request, and those newly added to prefix caches."""
        prompt, computed, covered = len(self.spec.prompt_token_ids), 0, 0
        for start, end in sorted(self._computed):
            computed += max(0, end - max(start, covered))
            covered = max(covered, end)
        return Reused(prompt - computed, min(self._created, computed))

    def stop(self) -> None:
        """The front end found a stop string: the client has its answer, whatever the engine produced after it."""
        self.finish_reason = "stop"

    def output_failed(self, code: str) -> None:
        """A step could not be passed on. The job is to be cancelled, and has failed with this code."""
        self.finish_reason, self.failed_code = "", code

    def decodes_at(self, instance: InstanceRef, handle: KvHandle | None) -> None:
        """An instance is to decode, from KV where there is a handle. The timeline shows if parts of the answer were
        computed at another precision.
        """
        parts = {} if handle is None else {"prompt": handle.precision}
        if self.tokens and self.precision is not None:
            parts["tokens so far"] = self.precision
        figures: dict[str, float | str] = {
            part: precision or "the model's" for part, precision in parts.items() if precision != instance.precision
        }
        if figures:
            figures["from here"] = instance.precision or "the model's"
            self.decided("precision", instance.instance_id, (Reason("mixed precision", figures),))
        self.precision = instance.precision

    # Calls and pauses

    def begin_call(self, instance: InstanceRef) -> EngineCall:
        self.call = EngineCall(instance)
        return self.call

    def _pause(self, pause: Pause, now: float) -> None:
        call = self.call
        if call.paused is None:
            if pause.computing:
                return  # a token that arrived meanwhile has ended the pause
            call.paused = Paused(now)
        if pause.computing:
            call.paused.computed_s = call.paused.computed_s or now
        else:
            call.paused.computed_s = 0.0  # its blocks were taken back once more
        if call.on_pause is not None:
            call.on_pause(pause)

    def end_pause(self, now: float) -> None:
        """The pause, if there is one, has ended: with a token, or with the call."""
        call = self.call
        if call.paused is not None:
            call.paused.ended_s = now
            if len(call.pauses) < MAX_PAUSES:
                call.pauses.append(call.paused)
            call.paused = None

    # The timeline: spans, on the gateway's clock, without a gap before the first token

    def record(self, span: Span, started_s: float, ended_s: float, instance_id: str = "") -> None:
        self.timeline.spans.append(SpanRecord(span, started_s, ended_s, instance_id, max(1, self.attempt)))
        self.mark_s = max(self.mark_s, ended_s)
        if span is Span.PLACEMENT and self.trace is not None:
            self.trace.placed(self.mark_s)

    def record_until(self, span: Span, until_s: float, instance_id: str = "") -> None:
        """Record a span from the end of the last one."""
        self.record(span, self.mark_s, max(until_s, self.mark_s), instance_id)

    def record_at_engine(self, span: Span, until_s: float, instance_id: str) -> None:
        """`record_until` for the time in an engine, in which pauses are spans of their own."""
        pauses, had_pause = self.call.pauses, False
        while pauses and pauses[0].began_s < until_s:
            pause = pauses.pop(0)
            self.record_until(span, pause.began_s, instance_id)
            self.record_until(Span.PAUSED, pause.computed_s or pause.ended_s, instance_id)
            if pause.computed_s:
                self.record_until(Span.RECOMPUTED, pause.ended_s, instance_id)
            had_pause = True
        if until_s > self.mark_s or not had_pause:
            self.record_until(span, until_s, instance_id)

    def record_prefill(self, instance_id: str, reply: PrefillReply) -> None:
        replied_s = time.time()
        shift_s = clock_shift_s(reply.queued_s, reply.ended_s, self.mark_s, replied_s)
        for span, until_s in (
            (Span.HANDOVER, reply.queued_s),
            (Span.QUEUE, reply.started_s),
            (Span.PREFILL, reply.ended_s),
        ):
            self.record_until(span, min(until_s + shift_s, replied_s), instance_id)
        self.record_until(Span.REPLY, replied_s, instance_id)

    def record_decode(self, instance_id: str, reply: DecodeReply) -> None:
        """Record the times of a decode that has just replied, with its transfer: first the wait for room for its KV,
        then the transfer, then the wait from the arrival of the KV to the end of the first step.
        """
        replied_s = time.time()
        shift_s = clock_shift_s(reply.queued_s, reply.ended_s, self.mark_s, replied_s)
        transfer = reply.transfer
        self.record_until(Span.HANDOVER, reply.queued_s + shift_s, instance_id)
        first_step_s = self.call.first_step_s or replied_s
        if transfer.started_s:
            transfer = msgspec.structs.replace(
                transfer, started_s=transfer.started_s + shift_s, ended_s=transfer.ended_s + shift_s
            )
            if transfer.started_s > self.mark_s:  # else the KV was prefetched
                self.record_at_engine(Span.DECODE_QUEUE, min(transfer.started_s, first_step_s), instance_id)
            self.record(Span.TRANSFER, transfer.started_s, transfer.ended_s, instance_id)
        self.timeline.transfers.append(transfer)
        self.record_at_engine(Span.DECODE_QUEUE, min(reply.started_s + shift_s, first_step_s), instance_id)
        if self.timeline.first_token_s == first_step_s:
            self.record_until(Span.REPLY, first_step_s, instance_id)
        self.record_at_engine(Span.DECODE, min(reply.ended_s + shift_s, replied_s), instance_id)

    def record_failed_call(self, instance_id: str, error: BaseException) -> None:
        """Record a call without a reply: it failed, or was cancelled because the client has its answer or left."""
        now_s = time.time()
        if self.trace is not None and isinstance(error, PolyphaseError):
            self.trace.leg_lost(instance_id, self.mark_s, now_s, error.code)
        self.end_pause(now_s)
        call = self.call
        first_s = call.first_step_s or (call.pauses[0].began_s if call.pauses else 0.0)
        if first_s:
            self.record_at_engine(Span.DECODE_QUEUE, first_s, instance_id)
            self.record_at_engine(Span.DECODE, now_s, instance_id)
        else:
            self.record_until(Span.LOST, now_s, instance_id)

    def decided(self, kind: str, chosen: str, reasons: tuple[Reason, ...]) -> None:
        self.timeline.decisions.append(Decision(time.time(), kind, chosen, reasons))

    def ended(self, outcome: str) -> None:
        """The job is over. outcome: the code of what ended it, unless it has finished."""
        if self.finished:
            self.phase, outcome = Phase.COMPLETED, self.finish_reason
        else:
            outcome = self.failed_code or outcome
            self.phase = Phase.CANCELLED if outcome == "cancelled" else Phase.FAILED
        self.timeline.ended_s = time.time()
        self.timeline.outcome = outcome
        self.timeline.output_tokens = len(self.tokens)
        if self.trace is not None:
            error = outcome if self.phase is Phase.FAILED else ""
            self.trace.ended(self.timeline, self.split, self.finish_reason, error)

    def report(self, outcome: str = "") -> JobReport:
        """The row of the status table, with the timeline so far."""
        spec, timeline, phase = self.spec, self.timeline, self.phase
        timeline.output_tokens = len(self.tokens)
        slo, ttft_s, tpot_s = spec.slo, timeline.ttft_s, timeline.tpot_s
        met = None
        if phase is Phase.COMPLETED:
            met = ttft_s is not None and ttft_s <= slo.ttft_s and (tpot_s is None or tpot_s <= slo.tpot_s)
            met = met and itl_met(timeline.gaps, timeline.gaps_over)
        return JobReport(
            job_id=spec.job_id,
            gateway_id=self.gateway_id,
            phase=phase,
            arrived_s=spec.arrived_s,
            prompt_tokens=len(spec.prompt_token_ids),
            output_tokens=len(self.tokens),
            prefill_instance=self.prefill_instance,
            decode_instance=self.decode_instance,
            split=self.split,
            slo=slo.name,
            outcome=outcome,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            slo_met=met,
            timeline_json=msgspec.json.encode(timeline).decode(),
            sums=TimelineSums.of(timeline) if phase.final else None,
            max_tokens=spec.max_tokens,
            prediction=self.prediction if phase.final else None,
            caller=spec.caller,
            asked=self.length.requested,
            losses=list(self.losses),
            longest_gap_s=timeline.longest_gap_s if timeline.gaps else None,
            gaps=timeline.gaps,
            gaps_over=timeline.gaps_over,
            placed_s=timeline.placed_s,
            estimated=timeline.estimated,
        )
