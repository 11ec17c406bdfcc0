"""Answers of a global scheduler's HTTP API. Times are unix seconds, durations seconds."""

from msgspec import Struct

from shared.domain.job import Phase
from shared.domain.route import PolicySpec


class RequestRow(Struct, frozen=True, kw_only=True):
    """The state of one request. caller: the name of the API key, empty without one. outcome: the finish reason, or the
    code of the error. longest_gap_s, gaps, gaps_over: see `shared.timeline.RequestTimeline`.
    """

    phase: Phase
    job_id: str
    gateway_id: str
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    prefill_instance: str
    decode_instance: str
    split: int
    slo: str
    outcome: str
    ttft_s: float | None
    tpot_s: float | None
    slo_met: bool | None
    caller: str
    longest_gap_s: float | None
    gaps: int
    gaps_over: int


class StoredRequest(RequestRow, frozen=True, kw_only=True):
    """A row of the table `requests`, without the timeline. final: whether its phase is. updated_s: of the report."""

    scheduler_id: str
    final: bool
    updated_s: float


class RequestPage(Struct, frozen=True):
    """Requests that a search found. more: there are results beyond these."""

    rows: list[StoredRequest]
    more: bool = False


class FollowedPolicies(Struct, frozen=True):
    """The policies that the scheduler follows. trouble: why it does not follow newer ones."""

    revision: int
    trouble: str
    placement: PolicySpec
    split: PolicySpec
    dispatch: PolicySpec
