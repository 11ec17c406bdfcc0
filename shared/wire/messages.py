"""The messages of the RPC and the broadcasts, the methods of the RPC, and the pages of a worker's step log.

Times are unix seconds and durations seconds. A field that is added needs a default; a change that older processes
cannot read raises the wire version (`shared.runtime.wire_version`).
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

import msgspec

from shared.domain.adapters import AdapterSet
from shared.domain.estimated import Estimated
from shared.domain.instance import InstanceLoad, Promised, Role
from shared.domain.job import Generation, JobView, LengthPrediction, Loss, Phase
from shared.domain.kv import Codec, KvHandle, TransferReport
from shared.domain.numbers import Finite
from shared.domain.prompt import PrefixDelta, length, whole
from shared.domain.rates import Rates
from shared.domain.route import InstanceRef, PolicySpec, Reason, Route
from shared.timeline import RequestTimeline, TimelineSums


class PlaceRequest(msgspec.Struct):
    """Request a route."""

    job: JobView
    exclude: tuple[str, ...] = ()  # ids of instances that the job failed on, or leaves: not to be chosen
    trace: str = ""  # the caller's span (`shared.runtime.otlp`); empty: the work is not traced
    to: str = ""  # the id of the only decode instance that may be chosen; empty: any


class JobReport(msgspec.Struct):
    """A gateway's report of one job, sent at each change of the job's phase.

    timeline_json: its `RequestTimeline` so far, as the database stores it and HTTP answers have it. sums: of a timeline
    that has ended; only in the report of a final phase.
    """

    job_id: str
    gateway_id: str
    phase: Phase
    arrived_s: Finite
    prompt_tokens: int
    output_tokens: int = 0
    prefill_instance: str = ""
    decode_instance: str = ""
    split: int = 0
    slo: str = "default"  # name of the SLO class
    outcome: str = ""  # finish reason, or the code of the error
    ttft_s: Finite | None = None
    tpot_s: Finite | None = None
    slo_met: bool | None = None
    timeline_json: str = ""
    sums: TimelineSums | None = None
    max_tokens: int = 0
    prediction: LengthPrediction | None = None  # of the answer's length; only in the report of a final phase
    caller: str = ""  # name of the API key
    asked: bool = False  # whether the gateway requested a prediction, even if none came
    losses: list[Loss] = []  # the failed attempts, oldest first
    # Gaps between deliveries of tokens to the client, as in `RequestTimeline`, which defines them:
    longest_gap_s: Finite | None = None  # None where there was no gap
    gaps: int = 0  # how many there were
    gaps_over: int = 0  # how many of them exceeded the target `itl_s` of the SLO class
    placed_s: Finite = 0.0  # these two as in `RequestTimeline`
    estimated: Estimated | None = None

    def timeline(self) -> RequestTimeline:
        """Raises msgspec.DecodeError where there is none."""
        return msgspec.json.decode(self.timeline_json, type=RequestTimeline)

    @property
    def predicted_ttft_s(self) -> float | None:
        """As in `RequestTimeline`."""
        return self.placed_s - self.arrived_s + self.estimated.ttft_s if self.estimated is not None else None

    @property
    def predicted_tpot_s(self) -> float | None:
        return self.estimated.tpot_s if self.estimated is not None else None


class Refused(msgspec.Struct, frozen=True):
    """Requests that a gateway refused before they became jobs."""

    key: str  # identifies this message, which may come twice
    slo: str  # name of the SLO class
    code: str  # of the error
    count: int


class JobReports(msgspec.Struct):
    """Reports of one gateway, gathered over a short while; an empty message says that the gateway is alive."""

    reports: list[JobReport]
    origin: str = ""  # identifies the gateway's process; another one after a restart
    gateway_id: str = ""
    refused: list[Refused] = []
    leaving: bool = False  # the gateway is stopping


class PredictRequest(msgspec.Struct):
    """Request a prediction of an answer's length."""

    prompt_token_ids: list[int]  # the ends of the prompt (`shared.domain.job.ends_of`)
    prompt_tokens: int  # of the whole prompt
    max_tokens: int


class PrefillRequest(msgspec.Struct):
    """Compute the KV of a prompt and, if wanted, the first token of the answer."""

    job: JobView
    transfer_id: str
    prompt: bytes  # packed (`shared.domain.prompt`)
    generation: Generation
    want_token: bool = True
    export: bool = True  # whether another instance will pull the KV
    # The prefill instance uses a lossy codec that is named here. With RAW it chooses itself: any codec up to the loss
    # that `job.slo.lossy_kv` permits, or none.
    codec: Codec = Codec.RAW
    decode: InstanceRef | None = None  # None: the dispatcher of the prefill instance chooses the decode instance
    exclude: tuple[str, ...] = ()  # ids of instances that the dispatcher must not choose
    dispatch: PolicySpec | None = None  # the policy by which it chooses; required then
    saved: int = 0  # prompt tokens whose KV the prefill instance is known to hold
    trace: str = ""  # as in PlaceRequest
    handle: KvHandle | None = None  # the KV of the first `handle.tokens` of the prompt, to be pulled

    def __post_init__(self) -> None:
        whole(self.prompt)

    @property
    def prompt_tokens(self) -> int:
        return length(self.prompt)

    @property
    def known(self) -> int:
        """Prompt tokens that the instance need not compute."""
        return max(self.saved, self.handle.tokens if self.handle is not None else 0)


class PrefillStarted(msgspec.Struct):
    """The first chunk is computed and the decode instance is chosen: the KV can be pulled while the rest is
    computed.
    """

    decode: InstanceRef
    handle: KvHandle
    reasons: tuple[Reason, ...] = ()


class Reused(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How much of a prompt an engine did not have to compute."""

    tokens: int  # from the start of the prompt, not computed by this engine for this request
    created: int = 0  # tokens that the engine computed and put into its prefix cache
    imported: int = 0  # part of `tokens`: computed by another instance for this request


class PrefillReply(msgspec.Struct):
    """The end of a prefill.

    `handle` without `decode`: no decode instance was available; the KV stays staged for its lease. Neither of them:
    there is nothing to decode.
    """

    tokens: list[int]  # the first token; empty when it was not wanted
    decode: InstanceRef | None
    handle: KvHandle | None
    finish_reason: str = ""  # "stop" when the first token ends the answer
    stop_reason: int | str | None = None
    logprobs: bytes = b""
    queued_s: Finite = 0.0  # when the engine got it
    started_s: Finite = 0.0
    ended_s: Finite = 0.0
    reasons: tuple[Reason, ...] = ()  # for the choice of the decode instance, or why none was available
    codec: Reason | None = None  # for the choice of the KV's codec, where there was one
    reused: Reused | None = None
    transfer: TransferReport | None = None  # of the prompt's beginning that was to be pulled


class Predicted(msgspec.Struct):
    """The length of an answer, predicted while its prompt is computed or it decodes.

    Prefill instances find the job by its transfer, decode instances by its id; unknown ones are ignored.
    """

    transfer_id: str
    prediction: LengthPrediction
    job_id: str = ""


class ReleaseRequest(msgspec.Struct):
    """Free the staged or prefetched KV of these transfers; unknown ones are ignored."""

    transfer_ids: list[str]


class PrefetchRequest(msgspec.Struct):
    """Start pulling a handle into host memory; answered once the pull has started.

    The KV is kept until the job's decode uses it, it is released, the caller is gone, or `keep_s` is over.
    """

    handle: KvHandle
    keep_s: Finite = 600.0  # the rest of the job's time


class ExpectRequest(msgspec.Struct):
    """Announce a decode that is bound to this instance while its prompt is computed elsewhere: the load shows it.

    It is forgotten when the decode arrives, the transfer is released, the caller is gone, or `keep_s` is over.
    """

    transfer_id: str
    promised: Promised
    keep_s: Finite = 600.0  # the rest of the job's time


class DecodeRequest(msgspec.Struct):
    """Produce the tokens after a prompt."""

    job: JobView
    prompt: bytes  # packed (`shared.domain.prompt`)
    generation: Generation
    handle: KvHandle | None = None  # the KV of the first `handle.tokens` of the prompt, to be pulled
    saved: int = 0  # prompt tokens whose KV the instance is known to hold
    trace: str = ""  # as in PlaceRequest
    # Packed tokens that the client already has of an answer that cannot be carried. The engine produces them again;
    # they are not among the items.
    known: bytes = b""
    tell_pauses: bool = False  # whether to send a `Pause` among the items while the job's KV blocks are taken back
    if_room: bool = False  # refuse with NoRoom unless KV memory is expected for the job to the end of its answer
    # Of a job that has migrated: `known` are the tokens of its answer so far, whose KV the handle has, and the engine
    # goes on behind them in this state of the sampler (`Handover.state`) instead of producing them again.
    resumes: bool = False
    state: bytes = b""
    tell_leaves: bool = False  # whether to send a `Leave` among the items
    # As in Route: the instance may be a prefill instance, and then the job leaves it after so many tokens.
    keep_tokens: int = 0

    def __post_init__(self) -> None:
        whole(self.prompt)
        whole(self.known)

    @property
    def prompt_tokens(self) -> int:
        return length(self.prompt)


class Pause(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A stream is paused because its KV blocks were taken back for others."""

    expected_s: Finite  # until its next token
    computing: bool = False  # whether the stream has blocks again, and its tokens are being computed


class LeaveCause(StrEnum):
    """Why an instance wants a decode to go on elsewhere."""

    DRAIN = "drain"  # the instance drains, to stop or to change its role
    MEMORY = "memory"  # its KV memory will not hold all of its decodes to their ends
    TPOT = "tpot"  # its steps take longer than the job's target
    KEPT = "kept"  # it is a prefill instance, which was to decode the first tokens only or has prompts to compute again
    OPERATOR = "operator"


class Leave(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The instance wants the job to migrate. The decode goes on until its gateway calls `LEAVE`, if it does."""

    cause: LeaveCause
    to: str = ""  # the id of the instance to which it should; empty: any
    tpot_s: Finite = 0.0  # the time per token there, where that is the cause


class TokenStep(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The tokens of one job from one engine step, or a pause. The last step of a job carries its finish reason."""

    tokens: list[int]
    # A gateway receives "stop", "length" and "repetition". "abort", "error" and "refused" go from an engine to its
    # worker, which turns them into errors; their cause is the `stop_reason`.
    finish_reason: str = ""
    stop_reason: int | str | None = None
    logprobs: bytes = b""  # opaque here, as are the prompt's
    prompt_logprobs: bytes = b""
    pause: Pause | None = None
    reused: Reused | None = None  # comes with the first tokens
    leave: Leave | None = None


class Handover(msgspec.Struct, frozen=True):
    """What a decode leaves behind that goes on elsewhere: its tokens came as items before.

    handle: of the KV of the prompt and of these tokens, except for the last one; None: none of it was staged. state: of
    the sampler, opaque outside of the engine.
    """

    handle: KvHandle | None
    state: bytes = b""


class DecodeReply(msgspec.Struct):
    """The end of a decode; its tokens and finish reason came as items before. handover: it has not ended, but left."""

    transfer: TransferReport
    queued_s: Finite = 0.0
    started_s: Finite = 0.0
    ended_s: Finite = 0.0
    handover: Handover | None = None


class ExportRequest(msgspec.Struct):
    """Stage KV that the instance holds, from token `start` on, for another instance to pull.

    With a `job_id` it is that of a decode which runs there, as far as it is computed and goes on being computed;
    otherwise that of the prompt, as far as the prefix cache has it. The lease of what is staged begins at once.
    """

    transfer_id: str
    job_id: str = ""
    prompt: bytes = b""  # packed
    generation: Generation | None = None  # of the prompt
    start: int = 0

    def __post_init__(self) -> None:
        whole(self.prompt)


class ExportReply(msgspec.Struct):
    """The handle can be pulled while the KV is being staged. None: the instance holds nothing of it."""

    handle: KvHandle | None


class PullRequest(msgspec.Struct):
    """Pull KV into the prefix cache of the instance, ahead of a request whose prompt begins with these tokens.

    job: for which it is; refused with NoRoom where `if_room` and the job does not fit to the end of its answer.
    """

    job: JobView
    prompt: bytes  # packed; one token longer than the handle covers
    generation: Generation
    handle: KvHandle
    if_room: bool = False

    def __post_init__(self) -> None:
        whole(self.prompt)

    @property
    def prompt_tokens(self) -> int:
        return length(self.prompt)


class PullReply(msgspec.Struct):
    """The end of a pull. held: up to which token a request with that prompt finds KV in the prefix cache now."""

    transfer: TransferReport
    held: int = 0


class LeaveRequest(msgspec.Struct):
    """End a decode that runs there, to go on elsewhere: its KV from token `start` on is staged, and the reply of its
    `decode` call has the `Handover`. Raises NotFound for a job that does not decode there.
    """

    job_id: str
    transfer_id: str
    start: int = 0


class MoveRequest(msgspec.Struct):
    """Have the gateway of a decode that runs there migrate it: a `Leave` among its items. Raises NotFound for a job
    that does not decode there.
    """

    job_id: str
    to: str = ""  # as in `Leave`
    epoch: int = 0  # as in DrainRequest


class PrefixesRequest(msgspec.Struct):
    """Report the prefix cache as `PrefixDelta` items: the whole cache, then each change, for as long as the call
    lasts.
    """


class DrainRequest(msgspec.Struct):
    """Accept no new work; answered when all accepted work has ended, or after `timeout_s`."""

    timeout_s: Finite
    epoch: int = 0  # of the requesting monitor; the request of an outdated one is refused


class DrainReply(msgspec.Struct):
    """The end of a drain, or its timeout; after that the instance continues to drain."""

    drained: bool  # False when work was left at the timeout
    duration_s: Finite
    remaining: int  # jobs that were left


class ResumeRequest(msgspec.Struct):
    """Accept work again in the present role."""

    epoch: int = 0  # as in DrainRequest


class FlipRequest(msgspec.Struct):
    """Change to `role`; the instance must be drained."""

    role: Role
    epoch: int = 0  # as in DrainRequest


class FlipReply(msgspec.Struct):
    """The end of a role flip."""

    role: Role  # the new one
    duration_s: Finite  # 0: for monitors of older versions; a monitor measures the time of a flip itself


class AdaptersRequest(msgspec.Struct, frozen=True):
    """The adapters that were loaded at run time, as soon as their revision is another than `revision`, which the
    gateway follows, and at the latest after `wait_s`. in_use: keys of such adapters that its requests have.
    """

    gateway_id: str
    revision: int = 0
    in_use: tuple[str, ...] = ()
    wait_s: Finite = 0.0


class LoadRequest(msgspec.Struct, frozen=True):
    """Load an adapter on all instances. in_place: also in place of one of that name."""

    name: str
    path: str
    in_place: bool = False
    who: str = ""


class UnloadRequest(msgspec.Struct, frozen=True):
    """Have the cluster accept no more requests for an adapter."""

    name: str
    who: str = ""


class LoadAdapterRequest(msgspec.Struct, frozen=True):
    """Load the adapter in that folder. digest: that it must have; empty: any."""

    name: str
    path: str
    digest: str = ""
    epoch: int = 0  # as in DrainRequest


class LoadAdapterReply(msgspec.Struct, frozen=True):
    """The instance has the adapter. digest: of its configuration and weights."""

    digest: str


class UnloadAdapterRequest(msgspec.Struct, frozen=True):
    """Forget an adapter that was loaded at run time, once no request of the instance has it. An unknown key is
    ignored.
    """

    key: str
    epoch: int = 0  # as in DrainRequest


class Heartbeat(msgspec.Struct, array_like=True):
    """A worker's state, published every 100 ms while it changes, else three times a second."""

    instance_id: str
    generation: int
    role: Role
    draining: bool
    load: InstanceLoad
    rates: Rates | None = None  # only after a change and every few seconds
    policies_revision: int = 0  # of the policies that its engine follows
    policies_trouble: str = ""  # why its engine does not follow newer ones
    chunk_size: int = 0  # current tokens of its steps; 0: not known
    epoch: int = 0  # the highest of a monitor that it has obeyed
    adapters: dict[str, str] | None = None  # as in InstanceInfo; None: as it was registered


Request = TypeVar("Request")
Reply = TypeVar("Reply")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Method(Generic[Request, Reply, Item]):
    """A method of the RPC: its request, its reply, and the items that may come before the reply."""

    name: str
    request: type[Request]
    reply: type[Reply]
    item: type[Item]


_Nothing = type(None)

# Global scheduler.
PLACE = Method("place", PlaceRequest, Route, _Nothing)
REPORT = Method("report", JobReports, _Nothing, _Nothing)
ADAPTERS = Method("adapters", AdaptersRequest, AdapterSet, _Nothing)
LOAD = Method("load", LoadRequest, AdapterSet, _Nothing)
UNLOAD = Method("unload", UnloadRequest, AdapterSet, _Nothing)

# Predictor.
PREDICT = Method("predict", PredictRequest, LengthPrediction, _Nothing)

# Worker, as a prefill instance.
PREFILL = Method("prefill", PrefillRequest, PrefillReply, PrefillStarted)
PREDICTED = Method("predicted", Predicted, _Nothing, _Nothing)
RELEASE = Method("release", ReleaseRequest, _Nothing, _Nothing)

# Worker, as a decode instance.
EXPECT = Method("expect", ExpectRequest, _Nothing, _Nothing)
PREFETCH = Method("prefetch", PrefetchRequest, _Nothing, _Nothing)
DECODE = Method("decode", DecodeRequest, DecodeReply, TokenStep)
LEAVE = Method("leave", LeaveRequest, _Nothing, _Nothing)

# Worker, in either role.
EXPORT = Method("export", ExportRequest, ExportReply, _Nothing)
PULL = Method("pull", PullRequest, PullReply, _Nothing)

# Worker, by the global schedulers.
PREFIXES = Method("prefixes", PrefixesRequest, _Nothing, PrefixDelta)

# Worker, by the cluster monitor.
DRAIN = Method("drain", DrainRequest, DrainReply, _Nothing)
RESUME = Method("resume", ResumeRequest, _Nothing, _Nothing)
FLIP = Method("flip", FlipRequest, FlipReply, _Nothing)
LOAD_ADAPTER = Method("load_adapter", LoadAdapterRequest, LoadAdapterReply, _Nothing)
MOVE = Method("move", MoveRequest, _Nothing, _Nothing)
UNLOAD_ADAPTER = Method("unload_adapter", UnloadAdapterRequest, _Nothing, _Nothing)


class LogprobRows(msgspec.Struct, array_like=True, gc=False):
    """Log probabilities, a row for each token position, packed little-endian. A prompt of one token has no rows."""

    candidates: int  # in each row
    ids: bytes  # of the candidates: int32 [positions][candidates]
    values: bytes  # their log probabilities: float32 [positions][candidates]
    ranks: bytes  # of the chosen tokens: int32 [positions]

    def after(self, positions: int) -> "LogprobRows":
        """Without the rows of the first positions."""
        a_row, a_rank = 4 * self.candidates * positions, 4 * positions
        return LogprobRows(self.candidates, self.ids[a_row:], self.values[a_row:], self.ranks[a_rank:])


_decoder = msgspec.msgpack.Decoder(LogprobRows)


def encode_rows(rows: LogprobRows) -> bytes:
    return msgspec.msgpack.encode(rows)


def decode_rows(data: bytes) -> LogprobRows:
    """Raises msgspec.MsgspecError for malformed bytes."""
    return _decoder.decode(data)


class StepRecord(msgspec.Struct, frozen=True):
    """One engine step that computed tokens, for calibration and inspection."""

    number: int  # counts up from 0 while the instance lives
    ended_s: Finite
    seconds: Finite  # from the start of the step, its new requests accepted, until its tokens were on their way
    cpu_s: Finite  # CPU time of the engine's own thread; 0 where it is not meaningful (emulated, remote ranks)
    # (tokens computed now, tokens computed before) of each chunk. A single token after some context counts as a decode,
    # as do the drafted tokens behind it.
    prefill: tuple[tuple[int, int], ...]
    decode_count: int
    decode_context_tokens: int  # without the tokens under way


class StepPage(msgspec.Struct, frozen=True):
    """Steps in order, from the requested number on."""

    instance_id: str
    generation: int
    steps: tuple[StepRecord, ...]
    next: int  # the number with which to request the next page
    lost: int  # requested steps that are already forgotten
