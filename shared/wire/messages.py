"""Every message of the RPC and the broadcasts. Times are unix seconds, durations seconds, unless a suffix says else.

`trace` names the span that the work is done for, see `shared.runtime.otlp`; empty: it is not traced.
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
    """Ask for a route. `exclude` names instances that just failed this job."""

    job: JobView
    exclude: tuple[str, ...] = ()
    trace: str = ""


class JobReport(msgspec.Struct):
    """What a gateway tells of one job, as often as its phase changes.

    Each carries the timeline so far, the last one all of it and what was predicted of its answer's length. caller: the
    name of its API key. asked: somebody was asked for that length. losses: the attempts that failed, oldest first.
    longest_gap_s, gaps, gaps_over: see `shared.timeline.RequestTimeline`; None without a gap.
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
    """Requests that a gateway turned away before they were jobs. It may come twice: `key` tells one from another."""

    key: str
    slo: str
    code: str  # of the error
    count: int


class JobReports(msgspec.Struct):
    """Reports of one gateway, gathered over a short while; none at all says that it lives.

    `origin` names its process: a gateway that was started again is another one. leaving: it stops in good order.
    """

    reports: list[JobReport]
    origin: str = ""
    gateway_id: str = ""
    refused: list[Refused] = []
    leaving: bool = False


class PredictRequest(msgspec.Struct):
    """Ask for the length of an answer. prompt_token_ids: of `prompt_tokens`, see `shared.domain.job.ends_of`."""

    prompt_token_ids: list[int]
    prompt_tokens: int
    max_tokens: int


class PrefillRequest(msgspec.Struct):
    """Compute KV of the `prompt`, packed, and, if `want_token`, the first token.

    `export` says whether anybody will pull the KV. `decode` is set when placement chose it already; else the
    dispatcher of the prefill instance does, by the policy `dispatch` of the route. `codec`: of the KV, if it is lossy;
    else what the job's class allows. `saved`: prompt tokens whose KV the instance is known to hold.
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
        """Its length."""
        return length(self.prompt)


class PrefillStarted(msgspec.Struct):
    """The first chunk is computed and the decode instance is known; the KV can be fetched while the rest follows."""

    decode: InstanceRef
    handle: KvHandle
    reasons: tuple[Reason, ...] = ()


class Reused(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Of a prompt, the first `tokens` that an engine did not compute, `imported` of them since another instance had
    computed them for this request. created: tokens that it computed and put into its prefix cache.
    """

    tokens: int
    created: int = 0
    imported: int = 0


class PrefillReply(msgspec.Struct):
    """The end of a prefill. `tokens` holds the first token, or nothing when it was not wanted.

    A `handle` without a `decode`: no decode instance could be had, for the reasons given; the KV is staged and waits
    for its lease. Neither of them: nothing is to be decoded.
    """

    tokens: list[int]
    decode: InstanceRef | None
    handle: KvHandle | None
    finish_reason: str = ""  # "stop" when the first token ends the answer
    stop_reason: int | str | None = None
    logprobs: bytes = b""
    queued_s: Finite = 0.0  # time at which the engine got it
    started_s: Finite = 0.0
    ended_s: Finite = 0.0
    reasons: tuple[Reason, ...] = ()
    codec: Reason | None = None  # why the KV is coded as it is, where there was a choice
    reused: Reused | None = None


class Predicted(msgspec.Struct):
    """The length of an answer, predicted while its prompt is being computed or it decodes.

    Unknown ones are ignored: transfers by a prefill instance, jobs by a decode instance.
    """

    transfer_id: str
    prediction: LengthPrediction
    job_id: str = ""


class ReleaseRequest(msgspec.Struct):
    """Free what these transfers hold here, staged or prefetched; unknown ones are ignored."""

    transfer_ids: list[str]


class PrefetchRequest(msgspec.Struct):
    """Start pulling a handle into host memory; answered once that has begun.

    What comes is kept until its job's decode takes it, it is released, the caller is gone, or `keep_s` is over: what is
    left of the job's time.
    """

    handle: KvHandle
    keep_s: Finite = 600.0


class ExpectRequest(msgspec.Struct):
    """A decode is bound to this instance and comes when its prompt is computed elsewhere: its load says so until then.

    Forgotten when it comes, when the transfer is released, when the caller is gone, or when `keep_s` is over.
    """

    transfer_id: str
    promised: Promised
    keep_s: Finite = 600.0


class DecodeRequest(msgspec.Struct):
    """Produce tokens after the `prompt`, packed, of which the KV of the first `handle.tokens` can be pulled.

    `saved`: prompt tokens whose KV the instance is known to hold. `known`: the tokens that the client has of an answer
    that cannot be carried, packed; the engine repeats them, and they are not among the items. tell_pauses: the caller
    understands items that say that the job is paused. `if_room`: refuse with NoRoom where there is no KV memory for the
    job to the end of its answer.
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
        """Its length."""
        return length(self.prompt)


class Pause(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The blocks of a stream were taken back for others: its next token is expected after `expected_s`.

    computing: it has blocks again, and its tokens are being computed.
    """

    expected_s: Finite
    computing: bool = False


class TokenStep(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Tokens that one engine step gave one job. The last step of a job carries its finish reason. Instead of tokens it
    may say that the job is paused.

    "abort", "error" and "refused" (with the cause as `stop_reason`) stay between an engine and its worker: a gateway
    gets "stop", "length" or "repetition", or an error. `logprobs` and `prompt_logprobs` are opaque here. `reused` comes
    with the first tokens.
    """

    tokens: list[int]
    finish_reason: str = ""
    stop_reason: int | str | None = None
    logprobs: bytes = b""
    prompt_logprobs: bytes = b""
    pause: Pause | None = None
    reused: Reused | None = None


class DecodeReply(msgspec.Struct):
    """The end of a decode; all tokens and the finish reason came as items before it."""

    transfer: TransferReport
    queued_s: Finite = 0.0
    started_s: Finite = 0.0
    ended_s: Finite = 0.0


class PrefixesRequest(msgspec.Struct):
    """Tell of the prefix cache, as `PrefixDelta` items: all of it, then each change, for as long as the call lasts."""


class DrainRequest(msgspec.Struct):
    """Take no new work and answer when all that was accepted has ended, or after `timeout_s`.

    epoch, here and below: of the monitor that asks; one that is not the last any more is refused.
    """

    timeout_s: Finite
    epoch: int = 0


class DrainReply(msgspec.Struct):
    """`drained` is False when work was left at the timeout; the instance goes on draining."""

    drained: bool
    duration_s: Finite
    remaining: int


class ResumeRequest(msgspec.Struct):
    """Take work again in the present role."""

    epoch: int = 0


class FlipRequest(msgspec.Struct):
    """Change to `role`; the instance must be drained."""

    role: Role
    epoch: int = 0


class FlipReply(msgspec.Struct):
    """How long the change itself took."""

    role: Role
    duration_s: Finite


class Heartbeat(msgspec.Struct, array_like=True):
    """What each worker publishes: every 100 ms while anything of it changes, else three times a second. Its rates come
    only when they have changed, and every few seconds.

    policies_revision: of the policies that its engine goes by; policies_trouble: why not by newer ones. chunk_size: the
    tokens of its steps at the moment; 0 says nothing. epoch: the highest of a monitor that it has obeyed.
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


# MERGED methods.py
# Every method of the RPC and its types, in one place.


Request = TypeVar("Request")
Reply = TypeVar("Reply")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Method(Generic[Request, Reply, Item]):
    """A method: what is asked, what is answered, and what may come in between."""

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

# MERGED logprobs.py
# Log probabilities on the wire: packed numbers, whose shape travels with them.


class LogprobRows(msgspec.Struct, array_like=True, gc=False):
    """One row a token position: candidate ids, their log probabilities, and the rank of the chosen one.

    Little-endian: ids int32 and values float32 of shape [positions][candidates], ranks int32 [positions]. There may be
    no positions: the prompt of one token has none.
    """

    candidates: int
    ids: bytes
    values: bytes
    ranks: bytes


_decoder = msgspec.msgpack.Decoder(LogprobRows)


def encode_rows(rows: LogprobRows) -> bytes:
    """Rows as opaque bytes."""
    return msgspec.msgpack.encode(rows)


def decode_rows(data: bytes) -> LogprobRows:
    """Raises msgspec.MsgspecError on anything else."""
    return _decoder.decode(data)


# MERGED steps.py
# What a worker tells of its engine's steps: raw material for calibration and for looking inside.


class StepRecord(msgspec.Struct, frozen=True):
    """One engine step that computed something.

    `seconds` is from the start of the step, new requests taken in, until its tokens were on their way. `prefill`:
    (tokens computed now, tokens computed before) of each chunk; a single token after some context counts as a decode.
    `decode_context_tokens` is without the tokens under way.
    """

    number: int  # counts up from 0 while the instance lives
    ended_s: Finite  # unix time
    seconds: Finite
    cpu_s: Finite  # of it, what the engine's own thread computed; 0 where that says nothing (emulated, remote ranks)
    prefill: tuple[tuple[int, int], ...]
    decode_count: int
    decode_context_tokens: int


class StepPage(msgspec.Struct, frozen=True):
    """Steps in order, from the number that was asked for. Ask for `next` to go on.

    `lost` counts steps that were asked for and are forgotten by now.
    """

    instance_id: str
    generation: int
    steps: tuple[StepRecord, ...]
    next: int
    lost: int
