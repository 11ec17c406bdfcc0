"""Requests: what the scheduler of an engine keeps of each, and a simulated request with its parts. State alone.

Instances are named by their position, as in `SimResult.instances`. A time that has not come is -1.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

import msgspec

from shared.domain.estimated import Estimated
from shared.domain.job import JobView, LengthPrediction
from shared.policy.prefill_order import Rank


class State(Enum):
    """A request waits, computes its prompt, decodes and is finished. A request whose KV comes from another instance is
    RECEIVING and then RECEIVED before it runs. A running request that loses its blocks waits again.
    """

    WAITING = auto()  # in the queue; holds no blocks
    RECEIVING = auto()  # has blocks; its KV is on the way
    RECEIVED = auto()  # its KV is here; it joins the batch in the next step that has a place
    PREFILLING = auto()  # in the batch; some of its tokens are not computed
    DECODING = auto()  # in the batch; each step gives it a token
    FINISHED = auto()  # complete or cancelled


@dataclass(slots=True, eq=False, kw_only=True)
class ScheduledRequest(ABC):
    """A request on one engine, as its scheduler sees it. The engine extends it by what the engine needs."""

    tokens: int  # of the prompt and of the output so far
    output_left: int  # output tokens that it is to get here
    decodes: bool = True  # whether it goes on here after its first token
    exports: bool = False  # whether the KV of its prompt is for another instance
    computed_tokens: int = 0  # of `tokens`, those whose KV is here, or comes; for decodes see `DecodeGroup.context`
    import_tokens: int = 0  # those up to which another instance sends KV; 0 after a preemption
    import_start: int = 0  # what it sends begins behind these, which are to be in the prefix cache
    pulled_tokens: int = 0  # those of the prefix that another instance's cache sends while it waits; as above
    pulling: bool = False  # whether the KV of `pulled_tokens` is on its way
    cached_tokens: int = 0  # those that the prefix cache is expected to hold; from the start on, those that it held
    last_token_s: float = -1.0  # when its client got its last token; not up to date while it decodes
    state: State = State.WAITING
    cancelled: bool = False
    blocks: int = 0  # that it holds; not up to date while it decodes
    prefix: tuple[int, ...] = ()  # ids of the blocks of its prompt, for the prefix cache
    shared_ids: tuple[int, ...] = ()  # of these, those that other requests may use while it has blocks
    base: int = 0  # of `DecodeGroup`: its context less the steps of the group
    finish_step: int = 0  # of `DecodeGroup`: the step with its last token
    output_tokens: int = field(init=False)  # that it was to get here at first

    def __post_init__(self) -> None:
        self.output_tokens = self.output_left

    @property
    @abstractmethod
    def job(self) -> JobView:
        """What policies know of it."""

    @property
    @abstractmethod
    def remaining_job(self) -> JobView:
        """The same where the output so far counts as prompt."""

    @property
    @abstractmethod
    def is_stream(self) -> bool:
        """Whether its client has a token, from this instance or another."""

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens to compute before the next output token."""
        return self.tokens - self.computed_tokens

    @property
    def imports(self) -> bool:
        """Whether it needs KV that is not here yet."""
        return self.import_tokens > 0 or self.pulling

    @property
    def given_tokens(self) -> int:
        """Output tokens that it has got here; not up to date while it decodes."""
        return self.output_tokens - self.output_left


def rank_of(request: ScheduledRequest) -> Rank:
    """The rank by which the scheduler serves a request and spares its blocks."""
    return request.job.slo.weight, request.is_stream


class LatePrediction(NamedTuple):
    """A predicted output length that arrives after the placement, at `comes_s`."""

    prediction: LengthPrediction
    comes_s: float


@dataclass(slots=True, eq=False)
class SimRequest:
    """A request between its arrival and its last token.

    `job` is what policies see of the present attempt: after a lost instance its prompt has grown by the tokens that the
    client already has, and `output_left` has shrunk by them. `last_token_s`, `longest_gap_s` and `gaps_over` lag while
    the request decodes: its engine then knows better.
    """

    row: int
    job: JobView
    output_left: int
    prefix: tuple[int, ...]
    arrived_s: float = 0.0  # when its client sent it
    caller: str = ""
    over: bool = False
    attempt: int = 1
    returns: int = 0  # how often its client sent it again after a refusal
    moves: int = 0  # how often it went on at another instance because it was paused
    migrated_s: float = float("-inf")  # when it was last placed elsewhere, to go on there with its KV
    waits_from_s: float = -1.0  # since when it waits for an instance that can take it
    waited_s: float = 0.0  # how long it waited so before, since its last token
    placed_s: float = -1.0  # when it had its first placement, and what the estimate of that predicted
    estimated: Estimated | None = None
    first_token_s: float = -1.0
    last_token_s: float = -1.0
    longest_gap_s: float = 0.0  # between two of its tokens
    gaps_over: int = 0  # gaps longer than its class's target
    late: LatePrediction | None = None
    answer: tuple[int, ...] = ()  # ids of the blocks that its answer fills, after those of its prompt

    first_prompt_tokens: int = field(init=False)

    # Of the present attempt.
    moved_from: str = field(init=False)  # the instance where it was paused, which is not to decode it now
    split: int = field(init=False)
    keep_tokens: int = field(init=False)  # of the answer, that the prefill instance decodes; see `Route`
    carried: bool = field(init=False)  # the prefill instance gives an output token, from which decode goes on
    prefill: int | None = field(init=False)
    decode: int | None = field(init=False)
    prefill_leg: "Leg | None" = field(init=False)
    decode_leg: "Leg | None" = field(init=False)
    prefill_done_s: float = field(init=False)
    sent_tokens: int = field(init=False)  # tokens of the split whose KV is sent, or was at the decode instance before
    kv_sent: bool = field(init=False)  # the KV of the whole split is sent
    admitted: bool = field(init=False)  # the decode instance has blocks for the KV
    wire_share: float = field(init=False)  # bytes on the wire over bytes of its KV: by codec
    waits_prefill: bool = field(init=False)  # counts among the prompts that its instance has yet to compute

    def __post_init__(self) -> None:
        self.first_prompt_tokens = self.job.prompt_tokens
        self.begin(self.job, self.output_left)

    def begin(self, job: JobView, output_left: int) -> None:
        """Start a new attempt, with nothing computed."""
        self.job = job
        self.output_left = output_left
        self.moved_from = ""
        self.split = self.keep_tokens = 0
        self.carried = False
        self.prefill = self.decode = None
        self.prefill_leg = self.decode_leg = None
        self.prefill_done_s = -1.0
        self.sent_tokens = 0
        self.kv_sent = self.admitted = False
        self.wire_share = 1.0
        self.waits_prefill = False

    def receive_prediction(self, now: float) -> None:
        """Apply the late prediction, if it has arrived by `now`."""
        if self.late is not None and self.late.comes_s <= now:
            self.job = msgspec.structs.replace(self.job, prediction=self.late.prediction)
            self.late = None

    def add_gaps(self, longest_s: float, over: int) -> None:
        """Count gaps between tokens: the longest of them, and how many exceeded the target of the request's class."""
        self.longest_gap_s = max(self.longest_gap_s, longest_s)
        self.gaps_over += over

    @property
    def decode_tokens(self) -> int:
        """Output tokens that are left to the decode instance."""
        return self.output_left - self.carried


@dataclass(slots=True, eq=False)
class Leg(ScheduledRequest):
    """One part of a simulated request, on one engine."""

    request: SimRequest
    lane: int | None = None  # which of its instance's engines has it; None on the way there
    pause: int = 0  # number of its last preemption in this run: of paused legs, the highest gets blocks first
    asked_s: float = float("-inf")  # when its instance last wanted it to migrate
    joined_at: int = 0  # with `joined_over`, what `Pauses` had counted when it joined
    joined_over: int = 0

    @property
    def job(self) -> JobView:
        return self.request.job

    @property
    def remaining_job(self) -> JobView:
        job = self.request.job
        if not self.given_tokens:
            return job
        return msgspec.structs.replace(job, prompt_tokens=self.tokens, max_tokens=self.output_left)

    @property
    def is_stream(self) -> bool:
        return self.last_token_s >= 0.0 or self.request.first_token_s >= 0.0
