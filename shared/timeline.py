"""What happened to one request, when, and why: the record behind the waterfall."""

from enum import StrEnum

import msgspec

from shared.domain.kv import TransferReport
from shared.domain.route import Reason


class Span(StrEnum):
    """The stretches of a request's time."""

    PLACEMENT = "placement"
    QUEUE = "queue"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE_QUEUE = "decode_queue"
    DECODE = "decode"


class SpanRecord(msgspec.Struct, frozen=True):
    """One stretch on one instance. Attempts count from 1; a resume is a new attempt."""

    span: Span
    started_s: float
    ended_s: float
    instance_id: str = ""
    attempt: int = 1


class Decision(msgspec.Struct, frozen=True):
    """A choice that was made for the request, with what it rested on."""

    time_s: float
    kind: str  # "placement", "dispatch", "split", "resume"
    chosen: str
    reasons: tuple[Reason, ...] = ()


class RequestTimeline(msgspec.Struct):
    """All of it. Times are unix seconds."""

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
