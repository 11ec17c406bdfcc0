"""A job: one request's life through the cluster, as policies and the status table see it."""

import re
from enum import StrEnum

import msgspec

from shared.domain.kv import Codec
from shared.domain.numbers import Finite

PREDICTED_FROM = 256  # tokens of a prompt: a length predictor looks at no more, its head and its tail
HEAD_SHARE = 4  # one in so many of them is the head's
OPEN_END = 2**31 - 1  # upper end of a range that has none
ITL_LEAST_S = 0.25  # a class that names no target for gaps has this one, or `ITL_FACTOR` times that of its TPOT
ITL_FACTOR = 1.25
ITL_SPARED = 100  # of so many gaps of a stream one may exceed the target: the target is for the 99th percentile
LOST = "lost"  # outcome of a failed job whose gateway is gone; a later word of the job itself takes its place

NAME_CHARS = 128  # of a client's name of a request, that ids of jobs keep
_NAME = re.compile(r"[\w.:=+@-]*", re.ASCII)
_UNNAMED = re.compile(rb"[^\w.:=+@-]")


def job_name(request_id: str) -> str:
    """A client's name of a request as it is in ids of jobs: letters, digits and _.:=+@- are kept.

    Every other byte of its UTF-8 is "=" and two hexadecimal digits, so a part of a name gives a part of an id. The
    bytes of a header, which HTTP reads as Latin-1, are taken for UTF-8 where they can be.
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
    """Head and tail of a prompt that is longer than `most` tokens: what is asked stands at either end of it."""
    if len(tokens) <= most:
        return tokens
    head = most // HEAD_SHARE
    return tokens[:head] + tokens[len(tokens) - (most - head) :]


def _stretch(lower: int, upper: int) -> tuple[float, float]:
    """Of a range, with a lower end above 0: no answer has no token."""
    if upper >= OPEN_END:
        upper = 2 * max(1, lower)
    upper = max(upper, lower + 1)
    return max(float(lower), min(1.0, upper / 2)), float(upper)


def default_itl_s(tpot_s: float) -> float:
    """The target for gaps between tokens of a class that names none: 0.25 s, or 1.25 times its TPOT if that is more."""
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
    """Where a job is. The last three are final."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        """Whether nothing can follow."""
        return self in (Phase.COMPLETED, Phase.CANCELLED, Phase.FAILED)


class WhenFull(StrEnum):
    """What may be done to a job while the cluster is full."""

    REJECT = "reject"  # refused at once when it would miss its targets, and told when to come again
    DELAY = "delay"  # waits in its gateway while it would be in the way of heavier classes
    NEVER = "never"  # placed whatever the load


class FirstTokenOut(StrEnum):
    """When a client gets the first token of an answer whose prompt another instance has computed."""

    EARLY = "early"  # as soon as it is there; the second follows when its KV has been handed over
    SMOOTH = "smooth"  # together with the second: the wait is before the first token and not after it


class Slo(msgspec.Struct, frozen=True):
    """A job's class: its targets in seconds, and what may be done to it.

    itl_s: for the 99th percentile of the gaps between the tokens of a stream (`itl_met`); 0 stands for the default,
    which takes its place at once. weight: harm to it counts so much; heavier classes go first. lossy_kv: the coarsest
    codec its KV may be sent with.
    """

    name: str = "default"
    ttft_s: Finite = 2.0
    tpot_s: Finite = 0.2
    weight: Finite = 1.0
    when_full: WhenFull = WhenFull.NEVER
    lossy_kv: Codec = Codec.RAW
    itl_s: Finite = 0.0
    first_token: FirstTokenOut = FirstTokenOut.EARLY

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
    """Predicted output length: tokens lie in [lower, upper), the likeliest bucket, with that confidence.

    shares: the probability of each bucket of `width_tokens`, from 0 tokens up; the last one ends at `most_tokens`, or
    is open where that is 0. None where nobody knows more than the range. model: which classifier was asked, and
    `classified` the bucket that it says, also where it is not believed; empty and -1 where it did not answer.
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
        """Tokens that the answer stays within with this probability, in (0, 1]; evenly spread within a bucket.

        Of a mere range that range is spread evenly. An open end counts as twice its lower one.
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
        """Expected tokens, by the same reading of a bucket."""
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
    """What an engine needs of a request beside its tokens; whoever is between them hands it on.

    `sampling` is the front end's sampling parameters, encoded. `arrived_s` is unix seconds. Of structured outputs:
    `reasoning_ended` says whether the prompt ends outside of reasoning, so that the grammar holds from the first token
    (None: the engine looks), and `reasoning` is the arguments of the engine's reasoning parser, encoded; empty where
    the front end has no such parser.
    """

    sampling: bytes
    arrived_s: Finite
    cache_salt: str = ""
    reasoning_ended: bool | None = None
    reasoning: bytes = b""


class Loss(msgspec.Struct, frozen=True):
    """An attempt that failed after `position` tokens of the answer. generation: of the instance's process."""

    position: int
    instance_id: str = ""  # empty where no instance had it
    generation: int = 0


class JobView(msgspec.Struct, frozen=True):
    """What a policy may know of a job. prefix: hashes of its prompt's blocks, see `shared.domain.prompt`.

    begun: it has been placed before, so that it is not refused any more. over_share: whoever sent it has had more than
    others who ask at the same gateway. answer_tokens: for which room is kept, as its scheduler said; 0: max_tokens.
    can_wait: its gateway lets it wait for its place, whatever its class (versions before do not). waited_s: since it
    arrived. started: its client has a token of the answer, and would see a pause. pause_s: expected until its next
    token where it is, because its KV blocks were taken back there; it is placed elsewhere only where it goes on clearly
    sooner. 0: it is not paused.
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
