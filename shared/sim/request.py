"""One request on its way through the cluster, and its legs on engines: state alone.

Instances are named by their position, as in `SimResult.instances`.
"""

from typing import NamedTuple

import msgspec

from shared.domain.job import JobView, LengthPrediction
from shared.policy.preemption import Rank


class LatePrediction(NamedTuple):
    """A prediction of the answer's length that is not there yet."""

    prediction: LengthPrediction
    comes_s: float


class SimRequest:
    """State of a request between its arrival and its last token.

    `job` is what policies see of the present attempt: after a lost instance its prompt has grown by the tokens that the
    client already has, and `output_left` has shrunk by them.
    """

    __slots__ = (
        "admitted",
        "arrived_s",
        "attempt",
        "caller",
        "carried",
        "decode",
        "decode_leg",
        "first_token_s",
        "gaps_over",
        "job",
        "kv_sent",
        "last_token_s",
        "late",
        "longest_gap_s",
        "moved_from",
        "moves",
        "output_left",
        "over",
        "prefill",
        "prefill_done_s",
        "prefill_leg",
        "prefix",
        "returns",
        "row",
        "sent_tokens",
        "split",
        "waited_s",
        "waits_from_s",
        "waits_prefill",
        "wire_share",
    )

    def __init__(
        self,
        row: int,
        job: JobView,
        output_tokens: int,
        prefix: tuple[int, ...],
        arrived_s: float = 0.0,
        caller: str = "",
    ) -> None:
        self.row = row
        self.caller = caller
        self.returns = 0  # how often it came again after it was refused
        self.arrived_s = arrived_s  # when its client sent it
        self.prefix = prefix
        self.attempt = 1
        self.moves = 0  # how often it went on elsewhere because it was paused
        self.over = False
        self.waits_from_s = -1.0  # for an instance that can take it; negative while it has one
        self.waited_s = 0.0  # so, before that, since its last token
        self.first_token_s = -1.0
        self.last_token_s = -1.0  # as far as it is known: while it decodes, its engine knows better
        self.longest_gap_s = 0.0  # between two of its tokens; while it decodes, its engine knows better
        self.gaps_over = 0  # of those, longer than its class's target
        self.late: LatePrediction | None = None
        self.begin(job, output_tokens)

    def begin(self, job: JobView, output_left: int) -> None:
        """A new attempt, with nothing computed."""
        self.job = job
        self.output_left = output_left
        self.moved_from = ""  # the instance where it was paused, and is not to decode now
        self.split = 0
        self.carried = False  # the prefill instance gives an output token, from which decode goes on
        self.prefill: int | None = None
        self.decode: int | None = None
        self.prefill_leg: Leg | None = None
        self.decode_leg: Leg | None = None
        self.prefill_done_s = -1.0
        self.sent_tokens = 0  # of the split, on the wire or over it, or held there before
        self.kv_sent = False  # all of that
        self.admitted = False  # the decode instance has blocks for the KV
        self.wire_share = 1.0  # of its KV's bytes: by codec
        self.waits_prefill = False  # counts as a prompt that an instance has not computed yet

    def hear(self, now: float) -> None:
        """Take a prediction in that has come after the placement."""
        if self.late is not None and self.late.comes_s <= now:
            self.job = msgspec.structs.replace(self.job, prediction=self.late.prediction)
            self.late = None

    def paused(self, longest_s: float, over: int) -> None:
        """It had gaps between tokens: the longest, and how many exceeded its class's target."""
        self.longest_gap_s = max(self.longest_gap_s, longest_s)
        self.gaps_over += over

    @property
    def decode_tokens(self) -> int:
        """Output tokens that are left to the decode instance."""
        return self.output_left - self.carried


class Leg:
    """One leg of a request on one engine.

    tokens: tokens whose KV must be there before the next output token. computed: those that have it. left: output
    tokens to give here. remote: `computed` tokens come over the network, after blocks are reserved for all of `tokens`.
    lane: which of its instance's engines has it; None on the way there.
    """

    __slots__ = (
        "base",
        "blocks",
        "cancelled",
        "computed",
        "finish_step",
        "joined_at",
        "joined_over",
        "lane",
        "last_token_s",
        "left",
        "pause",
        "prefix",
        "remote",
        "request",
        "saved",
        "tokens",
        "used",
        "wanted",
    )

    def __init__(
        self,
        request: SimRequest,
        tokens: int,
        left: int,
        computed: int = 0,
        *,
        remote: bool = False,
        prefix: tuple[int, ...] = (),
        saved: int = 0,
        last_token_s: float = -1.0,
    ) -> None:
        self.request = request
        self.tokens = tokens
        self.left = left
        self.computed = computed
        self.remote = remote
        self.prefix = prefix
        self.saved = saved  # tokens that its instance is known to hold; once KV may come, that it does hold
        self.last_token_s = last_token_s  # of the output token before; negative when there is none
        self.blocks = 0
        self.used: tuple[int, ...] = ()  # ids of its prompt's blocks that it shares, or may
        self.base = 0  # while decoding: context less the group's steps
        self.finish_step = 0  # while decoding: the group's step after which it is done
        self.joined_at = self.joined_over = 0  # of `Pauses`
        self.wanted = left
        self.lane: int | None = None
        self.cancelled = False
        self.pause = (
            0  # counts up over all legs of a run: the last one that was paused is the next to have blocks again
        )

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
        """Output tokens that it has given here; while it decodes, its group knows better."""
        return self.wanted - self.left

    @property
    def missing(self) -> int:
        """Tokens to compute before the next output token; 1 means that it decodes."""
        return self.tokens - self.computed


def rank_of(leg: Leg) -> Rank:
    """By which it is served, and keeps its blocks."""
    return leg.request.job.slo.weight, leg.started
