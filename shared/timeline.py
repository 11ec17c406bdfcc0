"""The timeline of a request: its spans, decisions and transfers, as recorded by the gateway."""

from enum import StrEnum

import msgspec

from shared.domain.estimated import Estimated
from shared.domain.kv import TransferReport
from shared.domain.route import Reason


class Span(StrEnum):
    """The kinds of spans of a request. From arrival to first token they follow each other without a gap.

    Only TRANSFER may overlap others: the KV of a prompt of several chunks is pulled while the rest is computed.
    """

    INTAKE = "intake"  # read, rendered, tokenised; and waiting for its turn among the jobs of one body
    PLACEMENT = "placement"  # until a scheduler returned a route, with all waiting for it
    HANDOVER = "handover"  # from the gateway to an instance
    QUEUE = "queue"
    PREFILL = "prefill"
    REPLY = "reply"  # from an instance to the gateway
    TRANSFER = "transfer"  # until its KV had arrived at the decode instance
    # Until there was room for its KV; and from the arrival of its KV until its first step there has ended, including
    # prefill where there was none before.
    DECODE_QUEUE = "decode_queue"
    DECODE = "decode"
    PAUSED = "paused"  # its KV blocks were taken back for others: until there was room again, or it moved
    RECOMPUTED = "recomputed"  # after that, until its next token
    LOST = "lost"  # on an instance that did not complete it


class SpanRecord(msgspec.Struct, frozen=True):
    """A span on one instance. Attempts count from 1; a resume is a new attempt."""

    span: Span
    started_s: float
    ended_s: float
    instance_id: str = ""
    attempt: int = 1


class Decision(msgspec.Struct, frozen=True):
    """A decision on the request, with its reasons."""

    time_s: float
    kind: str  # "placement", "dispatch", "split", "full", "resume", "move", "precision", …
    chosen: str
    reasons: tuple[Reason, ...] = ()


class RequestTimeline(msgspec.Struct):
    """The whole record. Times are unix seconds.

    gaps: between the deliveries of its tokens to the client; gaps_over of them exceeded the target itl_s. The
    longest one took longest_gap_s and ended at longest_gap_at_s; the client had longest_gap_after tokens before it.
    A gap ends when the tokens after it are written to the client's connection; tokens that share an event share a
    gap. placed_s, estimated: when the gateway received the first placement, and what the estimate of it predicted.
    """

    job_id: str
    arrived_s: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    ended_s: float = 0.0
    outcome: str = ""
    spans: list[SpanRecord] = []
    decisions: list[Decision] = []
    transfers: list[TransferReport] = []
    itl_s: float = 0.0
    gaps: int = 0
    gaps_over: int = 0
    longest_gap_s: float = 0.0
    longest_gap_at_s: float = 0.0
    longest_gap_after: int = 0
    placed_s: float = 0.0
    estimated: Estimated | None = None

    @property
    def predicted_ttft_s(self) -> float | None:
        """The TTFT by the estimate of the first placement: what passed before it, and what it predicted from then on.
        None without an estimate.
        """
        if self.estimated is None:
            return None
        return self.placed_s - self.arrived_s + self.estimated.ttft_s

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token; None while there is none."""
        return self.first_token_s - self.arrived_s if self.first_token_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between tokens after the first; None with fewer than two."""
        if self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def jct_s(self) -> float | None:
        """Arrival to last token."""
        return self.last_token_s - self.arrived_s if self.last_token_s else None


def clock_shift_s(first_s: float, last_s: float, called_s: float, replied_s: float) -> float:
    """What to add to moments of another host, of which the outer two are given, to have them on the caller's clock.

    It is the least that puts them between call and reply: none where the clocks agree. A stretch longer than the call
    begins with it.
    """
    return max(called_s - first_s, min(replied_s - last_s, 0.0))
