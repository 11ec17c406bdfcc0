"""The timeline of a request: its spans, decisions and transfers, as recorded by the gateway."""

from collections import Counter, defaultdict
from enum import StrEnum
from math import inf

import msgspec

from shared.domain.estimated import Estimated
from shared.domain.kv import TransferOutcome, TransferReport
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


class TimelineSums(msgspec.Struct, frozen=True):
    """What statistics need of a timeline. seconds: by kind of span; before_first: the part of them before the first
    token. whole_s: arrival to end. transfers: of KV from other instances. transfer_faults: how many of the failed ones
    had each code.
    """

    seconds: dict[str, float] = {}
    before_first: dict[str, float] = {}
    whole_s: float = 0.0
    transfers: int = 0
    transfers_failed: int = 0
    transfer_bytes: int = 0
    transfer_faults: dict[str, int] = {}

    @classmethod
    def of(cls, timeline: RequestTimeline) -> "TimelineSums":
        seconds: dict[str, float] = defaultdict(float)
        before: dict[str, float] = defaultdict(float)
        first_s = timeline.first_token_s or inf
        for span in timeline.spans:
            seconds[span.span.value] += max(0.0, span.ended_s - span.started_s)
            if span.started_s < first_s:
                before[span.span.value] += max(0.0, min(span.ended_s, first_s) - span.started_s)
        moved = [transfer for transfer in timeline.transfers if transfer.outcome is not TransferOutcome.LOCAL]
        failed = [transfer for transfer in moved if transfer.outcome is TransferOutcome.RECOMPUTED]
        return cls(
            seconds=dict(seconds),
            before_first=dict(before),
            whole_s=max(0.0, timeline.ended_s - timeline.arrived_s) if timeline.ended_s else 0.0,
            transfers=len(moved),
            transfers_failed=len(failed),
            transfer_bytes=sum(transfer.wire_bytes for transfer in moved),
            transfer_faults=dict(Counter(_fault(transfer.error) for transfer in failed)),
        )


def _fault(error: str) -> str:
    """The code that an import's error begins with (`services.worker.kv.KvFault`)."""
    code = error.partition(":")[0].strip()
    return code if code.isidentifier() else "unknown"


def clock_shift_s(first_s: float, last_s: float, called_s: float, replied_s: float) -> float:
    """What to add to moments of another host, of which the outer two are given, to have them on the caller's clock.

    It is the least that puts them between call and reply: none where the clocks agree. A stretch longer than the call
    begins with it.
    """
    return max(called_s - first_s, min(replied_s - last_s, 0.0))
