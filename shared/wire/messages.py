"""The messages of the RPC and the broadcasts, the methods of the RPC, and the pages of a worker's step log.

Times are unix seconds and durations seconds. `trace` names the span of the caller (`shared.runtime.otlp`); empty: the
work is not traced. A field that is added needs a default; a change that older processes cannot read raises the wire
version (`shared.runtime.wire_version`).
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from shared.domain.instance import InstanceLoad, Promised, Role
from shared.domain.job import Generation, JobView, LengthPrediction, Loss, Phase
from shared.domain.kv import Codec, KvHandle, TransferReport
from shared.domain.numbers import Finite
from shared.domain.prompt import PrefixDelta, length, whole
from shared.domain.rates import Rates
from shared.domain.route import InstanceRef, PolicySpec, Reason, Route
from shared.timeline import RequestTimeline


class PlaceRequest(msgspec.Struct):
    """Request a route. `exclude` names instances that just failed this job."""

    job: JobView
    exclude: tuple[str, ...] = ()
    trace: str = ""


class JobReport(msgspec.Struct):
    """A gateway's report of one job, for each change of its phase, with the timeline so far.

    The last report also has the prediction of the answer's length. caller: the name of the API key. asked: whether the
    prediction was requested. losses: the failed attempts, oldest first. longest_gap_s, gaps, gaps_over: see
    `shared.timeline.RequestTimeline`; None without a gap.
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
    slo: str = "default"
    outcome: str = ""  # finish reason, or the code of the error
    ttft_s: Finite | None = None
    tpot_s: Finite | None = None
    slo_met: bool | None = None
    timeline: RequestTimeline | None = None
    max_tokens: int = 0
    prediction: LengthPrediction | None = None
    caller: str = ""
    asked: bool = False
    losses: list[Loss] = []
    longest_gap_s: Finite | None = None
    gaps: int = 0
    gaps_over: int = 0


class Refused(msgspec.Struct, frozen=True):
    """Requests that a gateway refused before they became jobs. The message may come twice; `key` identifies it."""

    key: str
    slo: str
    code: str  # of the error
    count: int


class JobReports(msgspec.Struct):
    """Reports of one gateway, gathered over a short while; an empty message says that the gateway is alive.

    `origin` identifies its process, also after a restart. leaving: the gateway is stopping.
    """

    reports: list[JobReport]
    origin: str = ""
    gateway_id: str = ""
    refused: list[Refused] = []
    leaving: bool = False


class PredictRequest(msgspec.Struct):
    """Request a prediction of an answer's length. prompt_token_ids: the ends of the prompt
    (`shared.domain.job.ends_of`).
    """

    prompt_token_ids: list[int]
    prompt_tokens: int
    max_tokens: int


class PrefillRequest(msgspec.Struct):
    """Compute KV of the packed `prompt` and, if `want_token`, the first token.

    `export`: whether an instance will pull the KV. `decode`: set when placement chose it; else the dispatcher of the
    prefill instance chooses, by the policy `dispatch` of the route. `codec`: of the KV, if it is lossy; else by the
    job's class. `saved`: prompt tokens whose KV the instance is known to hold.
    """

    job: JobView
    transfer_id: str
    prompt: bytes
    generation: Generation
    want_token: bool = True
    export: bool = True
    codec: Codec = Codec.RAW
    decode: InstanceRef | None = None
    exclude: tuple[str, ...] = ()
    dispatch: PolicySpec | None = None
    saved: int = 0
    trace: str = ""

    def __post_init__(self) -> None:
        whole(self.prompt)

    @property
    def prompt_tokens(self) -> int:
        return length(self.prompt)


class PrefillStarted(msgspec.Struct):
    """The first chunk is computed and the decode instance is chosen: the KV can be pulled while the rest is
    computed.
    """

    decode: InstanceRef
    handle: KvHandle
    reasons: tuple[Reason, ...] = ()


class Reused(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The first `tokens` of a prompt that an engine did not have to compute; `imported` of them were computed by
    another instance for this request. created: tokens that the engine computed and put into its prefix cache.
    """

    tokens: int
    created: int = 0
    imported: int = 0


class PrefillReply(msgspec.Struct):
    """The end of a prefill. `tokens` holds the first token, or nothing when it was not wanted.

    A `handle` without a `decode`: no decode instance was available, for the given reasons; the KV stays staged for its
    lease. Neither of them: there is nothing to decode.
    """

    tokens: list[int]
    decode: InstanceRef | None
    handle: KvHandle | None
    finish_reason: str = ""  # "stop" when the first token ends the answer
    stop_reason: int | str | None = None
    logprobs: bytes = b""
    queued_s: Finite = 0.0  # when the engine got it
    started_s: Finite = 0.0
    ended_s: Finite = 0.0
    reasons: tuple[Reason, ...] = ()
    codec: Reason | None = None  # of the KV, where there was a choice
    reused: Reused | None = None


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

    The KV is kept until the job's decode uses it, it is released, the caller is gone, or `keep_s`, the rest of the
    job's time, is over.
    """

    handle: KvHandle
    keep_s: Finite = 600.0


class ExpectRequest(msgspec.Struct):
    """Announce a decode that is bound to this instance while its prompt is computed elsewhere: the load shows it.

    It is forgotten when the decode arrives, the transfer is released, the caller is gone, or `keep_s` is over.
    """

    transfer_id: str
    promised: Promised
    keep_s: Finite = 600.0


class DecodeRequest(msgspec.Struct):
    """Produce tokens after the packed `prompt`; the KV of its first `handle.tokens` can be pulled.

    `saved`: prompt tokens whose KV the instance is known to hold. `known`: packed tokens that the client has of an
    answer that cannot be carried; the engine repeats them, and they are not among the items. tell_pauses: the caller
    understands items about pauses. `if_room`: refuse with NoRoom when there is no KV memory for the job to the end of
    its answer.
    """

    job: JobView
    prompt: bytes
    generation: Generation
    handle: KvHandle | None = None
    saved: int = 0
    trace: str = ""
    known: bytes = b""
    tell_pauses: bool = False
    if_room: bool = False

    def __post_init__(self) -> None:
        whole(self.prompt)
        whole(self.known)

    @property
    def prompt_tokens(self) -> int:
        return length(self.prompt)


class Pause(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A stream is paused because its blocks were taken back for others; its next token is expected after `expected_s`.

    computing: the stream has blocks again, and its tokens are being computed.
    """

    expected_s: Finite
    computing: bool = False


class TokenStep(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The tokens of one job from one engine step, or a pause. The last step of a job carries its finish reason.

    A gateway gets the finish reasons "stop", "length" and "repetition"; "abort", "error" and "refused" (with the cause
    as `stop_reason`) go from an engine to its worker, which turns them into errors. `logprobs` and `prompt_logprobs`
    are opaque here. `reused` comes with the first tokens.
    """

    tokens: list[int]
    finish_reason: str = ""
    stop_reason: int | str | None = None
    logprobs: bytes = b""
    prompt_logprobs: bytes = b""
    pause: Pause | None = None
    reused: Reused | None = None


class DecodeReply(msgspec.Struct):
    """The end of a decode; its tokens and finish reason came as items before."""

    transfer: TransferReport
    queued_s: Finite = 0.0
    started_s: Finite = 0.0
    ended_s: Finite = 0.0


class PrefixesRequest(msgspec.Struct):
    """Report the prefix cache as `PrefixDelta` items: the whole cache, then each change, for as long as the call
    lasts.
    """


class DrainRequest(msgspec.Struct):
    """Accept no new work; answered when all accepted work has ended, or after `timeout_s`.

    epoch, here and below: of the requesting monitor; an outdated one is refused.
    """

    timeout_s: Finite
    epoch: int = 0


class DrainReply(msgspec.Struct):
    """`drained` is False when work was left at the timeout; the instance continues to drain."""

    drained: bool
    duration_s: Finite
    remaining: int


class ResumeRequest(msgspec.Struct):
    """Accept work again in the present role."""

    epoch: int = 0


class FlipRequest(msgspec.Struct):
    """Change to `role`; the instance must be drained."""

    role: Role
    epoch: int = 0


class FlipReply(msgspec.Struct):
    """The new role, and the duration of the change itself."""

    role: Role
    duration_s: Finite


class Heartbeat(msgspec.Struct, array_like=True):
    """A worker's state, published every 100 ms while it changes, else three times a second; with the rates only after a
    change and every few seconds.

    policies_revision: of the policies that its engine follows; policies_trouble: why it does not follow newer ones.
    chunk_size: current tokens of its steps; 0: not known. epoch: the highest of a monitor that it has obeyed.
    """

    instance_id: str
    generation: int
    role: Role
    draining: bool
    load: InstanceLoad
    rates: Rates | None = None
    policies_revision: int = 0
    policies_trouble: str = ""
    chunk_size: int = 0
    epoch: int = 0


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

# Worker, by the global schedulers.
PREFIXES = Method("prefixes", PrefixesRequest, _Nothing, PrefixDelta)

# Worker, by the cluster monitor.
DRAIN = Method("drain", DrainRequest, DrainReply, _Nothing)
RESUME = Method("resume", ResumeRequest, _Nothing, _Nothing)
FLIP = Method("flip", FlipRequest, FlipReply, _Nothing)


class LogprobRows(msgspec.Struct, array_like=True, gc=False):
    """Log probabilities, a row for each token position: candidate ids, their values, and the rank of the chosen token.

    Packed, little-endian: ids int32 and values float32 of shape [positions][candidates], ranks int32 [positions]. A
    prompt of one token has no positions.
    """

    candidates: int
    ids: bytes
    values: bytes
    ranks: bytes


_decoder = msgspec.msgpack.Decoder(LogprobRows)


def encode_rows(rows: LogprobRows) -> bytes:
    return msgspec.msgpack.encode(rows)


def decode_rows(data: bytes) -> LogprobRows:
    """Raises msgspec.MsgspecError for malformed bytes."""
    return _decoder.decode(data)


class StepRecord(msgspec.Struct, frozen=True):
    """One engine step that computed tokens, for calibration and inspection.

    `seconds`: from the start of the step, its new requests accepted, until its tokens were on their way. `prefill`:
    (tokens computed now, tokens computed before) of each chunk; a single token after some context counts as a decode.
    `decode_context_tokens` is without the tokens under way.
    """

    number: int  # counts up from 0 while the instance lives
    ended_s: Finite  # unix time
    seconds: Finite
    cpu_s: Finite  # CPU time of the engine's own thread; 0 where it is not meaningful (emulated, remote ranks)
    prefill: tuple[tuple[int, int], ...]
    decode_count: int
    decode_context_tokens: int


class StepPage(msgspec.Struct, frozen=True):
    """Steps in order, from the requested number on; continue with `next`. `lost` counts requested steps that are
    already forgotten.
    """

    instance_id: str
    generation: int
    steps: tuple[StepRecord, ...]
    next: int
    lost: int
