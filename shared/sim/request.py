"""A request on its way through the cluster, and its legs: the parts of it that run on one engine each. State alone.

Instances are named by their position, as in `SimResult.instances`. A time that has not come is -1.
"""

from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

import msgspec

from shared.domain.job import JobView, LengthPrediction
from shared.policy.prefill_order import Rank


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
    stepped_aside: bool = False  # it waits in the queue of delayed requests that others may overtake
    waits_from_s: float = -1.0  # since when it waits for an instance that can take it
    waited_s: float = 0.0  # how long it waited so before, since its last token
    first_token_s: float = -1.0
    last_token_s: float = -1.0
    longest_gap_s: float = 0.0  # between two of its tokens
    gaps_over: int = 0  # gaps longer than its class's target
    late: LatePrediction | None = None

    # Of the present attempt.
    moved_from: str = field(init=False)  # the instance where it was paused, which is not to decode it now
    split: int = field(init=False)
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
        self.begin(self.job, self.output_left)

    def begin(self, job: JobView, output_left: int) -> None:
        """Start a new attempt, with nothing computed."""
        self.job = job
        self.output_left = output_left
        self.moved_from = ""
        self.split = 0
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
class Leg:
    """One part of a request, on one engine.

    tokens: tokens whose KV must be there before the next output token. computed: those that have it. left: output
    tokens to give here. remote: `computed` tokens come over the network, after blocks are reserved for all of `tokens`.
    saved: tokens that the instance is known to hold; once KV may come, tokens that it does hold.
    """

    request: SimRequest
    tokens: int
    left: int
    computed: int = 0
    _: KW_ONLY
    remote: bool = False
    prefix: tuple[int, ...] = ()
    saved: int = 0
    last_token_s: float = -1.0  # of the output token before
    blocks: int = 0
    used: tuple[int, ...] = ()  # ids of its prompt's blocks that it shares, or may share
    base: int = 0  # while decoding: context less the group's steps
    finish_step: int = 0  # while decoding: the group's step after which it is done
    joined_at: int = 0  # with `joined_over`, what `Pauses` had counted when it joined
    joined_over: int = 0
    wanted: int = field(init=False)  # output tokens that it was to give at first
    lane: int | None = None  # which of its instance's engines has it; None on the way there
    cancelled: bool = False
    pause: int = 0  # number of its last preemption in this run: of paused legs, the highest gets blocks first

    def __post_init__(self) -> None:
        self.wanted = self.left

    @property
    def started(self) -> bool:
        """Whether it is a stream: its client has a token, given here or elsewhere."""
        return self.last_token_s >= 0.0 or self.request.first_token_s >= 0.0

    @property
    def decodes(self) -> bool:
        """Whether the request decodes here; else its prompt is only computed."""
        return self is not self.request.prefill_leg

    @property
    def given(self) -> int:
        """Output tokens given here; not up to date while it decodes."""
        return self.wanted - self.left

    @property
    def missing(self) -> int:
        """Tokens to compute before the next output token; 1 means that it decodes."""
        return self.tokens - self.computed


def rank_of(leg: Leg) -> Rank:
    """The rank by which the scheduler serves a leg and spares its blocks."""
    return leg.request.job.slo.weight, leg.started
