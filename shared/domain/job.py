"""A job: one request on its way through the cluster, as policies and the status table see it."""

import re
from enum import StrEnum

import msgspec

from shared.domain.kv import Codec
from shared.domain.numbers import Finite
from shared.domain.prompt import MediaItem

PREDICTED_FROM = 256  # tokens of a prompt that a length predictor uses at most, from its head and its tail
HEAD_SHARE = 4  # one in so many of them is from the head
OPEN_END = 2**31 - 1  # upper end of an open range
ITL_LEAST_S = 0.25  # default target for gaps, or `ITL_FACTOR` times the TPOT target if that is more
ITL_FACTOR = 1.25
ITL_SPARED = 100  # one in so many gaps of a stream may exceed the target, which is for the 99th percentile
LOST = "lost"  # outcome of a failed job whose gateway is gone; a later report of the job replaces it

NAME_CHARS = 128  # of a client's request id, that are kept in job ids
_NAME = re.compile(r"[\w.:=+@-]*", re.ASCII)
_UNNAMED = re.compile(rb"[^\w.:=+@-]")


def job_name(request_id: str) -> str:
    """A client's request id as a part of job ids: letters, digits and _.:=+@- are kept.

    Other bytes of its UTF-8 become "=" and two hexadecimal digits, so that a part of a request id gives a part of a job
    id. The bytes of a header, which HTTP reads as Latin-1, are read as UTF-8 where they are valid.
    """
    if _NAME.fullmatch(request_id):
        return request_id
    try:
        text = request_id.encode("latin-1")
        text.decode()
    except UnicodeError:
        text = request_id.encode(errors="surrogatepass")
    return _UNNAMED.sub(lambda byte: b"=%02X" % byte[0][0], text).decode()


def ends_of(tokens: list[int], most: int = PREDICTED_FROM) -> list[int]:
    """Head and tail of a prompt that is longer than `most` tokens: the question is usually at one of its ends."""
    if len(tokens) <= most:
        return tokens
    head = most // HEAD_SHARE
    return tokens[:head] + tokens[len(tokens) - (most - head) :]


def _stretch(lower: int, upper: int) -> tuple[float, float]:
    """A range of tokens as floats, its lower end above 0, because answers have at least one token."""
    if upper >= OPEN_END:
        upper = 2 * max(1, lower)
    upper = max(upper, lower + 1)
    return max(float(lower), min(1.0, upper / 2)), float(upper)


def default_itl_s(tpot_s: float) -> float:
    """The default target for gaps between tokens: 0.25 s, or 1.25 times the TPOT target if that is more."""
    return max(ITL_LEAST_S, ITL_FACTOR * tpot_s)


def tight_gaps(itl_s: float, tpot_s: float) -> str:
    """What is wrong with a target for gaps below that for their mean; empty where nothing is."""
    if itl_s >= tpot_s:
        return ""
    return (
        f"itl_s must be at least tpot_s ({tpot_s:g}), got {itl_s:g}: gaps of tpot_s on average have a 99th percentile "
        "above it; raise itl_s or lower tpot_s"
    )


def itl_met(gaps: int, over: int) -> bool:
    """Whether a stream with so many gaps between deliveries, of which `over` exceed the target, meets it.

    One gap in a hundred may exceed it, rounded down: of fewer than 100 gaps none may.
    """
    return over * ITL_SPARED <= gaps


class Phase(StrEnum):
    """The phase of a job. The last three are final."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        return self in (Phase.COMPLETED, Phase.CANCELLED, Phase.FAILED)


class WhenFull(StrEnum):
    """How a job is treated while the cluster is full."""

    REJECT = "reject"  # refused at once when it would miss its targets, with a retry time
    DELAY = "delay"  # waits in its gateway while it would be in the way of heavier classes
    NEVER = "never"  # placed whatever the load


class FirstTokenOut(StrEnum):
    """When a client gets the first token of an answer whose prompt another instance has computed."""

    EARLY = "early"  # at once; the second follows when the KV has been transferred
    SMOOTH = "smooth"  # together with the second, so that the wait is before the first token


class Slo(msgspec.Struct, frozen=True):
    """An SLO class: its targets in seconds, and its treatment under overload.

    itl_s: for the 99th percentile of the gaps between the tokens of a stream (`itl_met`); 0 is replaced by the default.
    weight: of SLO cost to its jobs; heavier classes go first. lossy_kv: the coarsest codec for the KV of its jobs.
    mixed_precision: a job may be computed by instances of several precisions, where the cluster has them.
    """

    name: str = "default"
    ttft_s: Finite = 2.0
    tpot_s: Finite = 0.2
    weight: Finite = 1.0
    when_full: WhenFull = WhenFull.NEVER
    lossy_kv: Codec = Codec.RAW
    itl_s: Finite = 0.0
    first_token: FirstTokenOut = FirstTokenOut.EARLY
    mixed_precision: bool = True

    def __post_init__(self) -> None:
        if not self.itl_s > 0.0:
            msgspec.structs.force_setattr(self, "itl_s", default_itl_s(self.tpot_s))

    @property
    def targets(self) -> dict[str, float]:
        """As a cluster file has them."""
        return {"ttft_s": self.ttft_s, "tpot_s": self.tpot_s, "itl_s": self.itl_s}

    def slower(self, factor: float) -> "Slo":
        """The same class with all targets so many times as long."""
        return msgspec.structs.replace(
            self, ttft_s=factor * self.ttft_s, tpot_s=factor * self.tpot_s, itl_s=factor * self.itl_s
        )


class LengthPrediction(msgspec.Struct, frozen=True):
    """Predicted output length: the tokens are in [lower, upper), the most likely bucket, with that confidence.

    shares: the probability of each bucket of `width_tokens`, from 0 tokens up; the last one ends at `most_tokens`,
    or is open where that is 0. Empty where only the range is known. model: the classifier that was queried;
    classified: its bucket, also where it is not used; empty and -1 where it did not answer.
    """

    bucket: int
    lower_tokens: int
    upper_tokens: int
    confidence: Finite
    source: str  # "classifier" or "observed"
    width_tokens: int = 0
    shares: tuple[Finite, ...] = ()
    most_tokens: int = 0
    model: str = ""
    classified: int = -1

    def quantile(self, share: float) -> float:
        """The length that the answer does not exceed with this probability, in (0, 1], evenly spread within a bucket.

        Without shares the range is spread evenly. An open end counts as twice the lower one.
        """
        seen, most = 0.0, 0.0
        for lower, upper, part in self.spread():
            if part <= 0.0:
                continue
            most = float(upper)
            if seen + part >= share:
                return min(most, lower + (upper - lower) * (share - seen) / part)
            seen += part
        return most  # the parts add up to a little less than the share asked for

    @property
    def mean(self) -> float:
        """Expected tokens, with buckets spread in the same way."""
        return sum(part * (lower + upper) / 2.0 for lower, upper, part in self.spread())

    def spread(self) -> list[tuple[float, float, float]]:
        """Stretches of tokens [lower, upper) with their probabilities, which sum to 1."""
        if not self.shares:
            return [(*_stretch(self.lower_tokens, self.upper_tokens), 1.0)]
        width, last = self.width_tokens, len(self.shares) - 1
        total = sum(self.shares) or 1.0
        ends = [(at + 1) * width for at in range(last)] + [self.most_tokens or OPEN_END]
        stretches = [_stretch(at * width, end) for at, end in enumerate(ends)]
        return [(*stretch, share / total) for stretch, share in zip(stretches, self.shares, strict=True)]


class Generation(msgspec.Struct, frozen=True):
    """What an engine needs of a request besides its tokens; opaque to the processes between gateway and engine.

    `sampling`: the front end's sampling parameters, encoded. `arrived_s` is unix seconds. For structured outputs:
    `reasoning_ended` says whether the prompt ends outside of reasoning, so that the grammar applies from the first
    token (None: the engine finds out), and `reasoning` has the arguments of the engine's reasoning parser, encoded;
    empty where the front end has no such parser. `adapter`: the key of the LoRA adapter
    (`shared.domain.adapters`); empty: the base model.
    `items`: the prompt's images and other media, in order; `media`: their processed data, encoded.
    """

    sampling: bytes
    arrived_s: Finite
    cache_salt: str = ""
    reasoning_ended: bool | None = None
    reasoning: bytes = b""
    adapter: str = ""
    items: tuple[MediaItem, ...] = ()
    media: bytes = b""


class Loss(msgspec.Struct, frozen=True):
    """An attempt that failed after `position` tokens of the answer. generation: of the instance's process."""

    position: int
    instance_id: str = ""  # empty where no instance had it
    generation: int = 0


class JobView(msgspec.Struct, frozen=True):
    """A job as policies see it. prefix: hashes of its prompt's blocks (`shared.domain.prompt`).

    begun: it has been placed before, so that it is not refused. over_share: its caller has been served more than
    other callers of the same gateway. answer_tokens: for which room is kept, by its scheduler; 0: max_tokens.
    can_wait: its gateway can hold it until there is room, whatever its class (earlier versions cannot). waited_s:
    since its arrival. started: its client has a token of the answer, and would see a pause. pause_s: expected time
    until its next token where it is paused, because its KV blocks were taken back; it is moved only where it goes on
    clearly sooner; 0: it is not paused. adapter: as in Generation; only an instance that serves it can compute the job.
    one_precision: its prompt and its answer must be computed by instances of one precision, from when it has begun of
    that `precision` (`InstanceInfo.precision`).
    media: modalities of its prompt's media items; only an instance that processes all of them can compute the job.
    leaves: it decodes, and is to migrate with its KV to a decode instance that has room for it. tpot_s: its present
    time per token, of a job that leaves only for a clearly shorter one; 0: for any. spare_share: of the KV memory of
    the instance to which it migrates, that has to stay free beside it and the other answers there to their ends.
    session: a short hash of the session that it is a turn of, and of its caller; empty: of none. warms: it is not to be
    computed: its session's KV is to be brought where its next turn would be, and nothing is booked. migrates: it can go
    on at another instance with its KV after any token.
    """

    job_id: str
    prompt_tokens: int
    max_tokens: int
    slo: Slo = Slo()
    prediction: LengthPrediction | None = None
    local_only: bool = False  # must be computed whole by one instance (prompt logprobs)
    prefix: tuple[int, ...] = ()
    begun: bool = False
    over_share: bool = False
    answer_tokens: int = 0
    can_wait: bool = False
    waited_s: Finite = 0.0
    started: bool = False
    pause_s: Finite = 0.0
    adapter: str = ""
    one_precision: bool = False
    precision: str | None = None
    media: tuple[str, ...] = ()
    leaves: bool = False
    tpot_s: Finite = 0.0
    session: str = ""
    warms: bool = False
    spare_share: Finite = 0.0
    migrates: bool = False
