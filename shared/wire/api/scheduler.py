"""Answers of a global scheduler's HTTP API. Times are unix seconds, durations seconds."""

from msgspec import Struct

from shared.domain.estimated import ErrorFigures, PromptSize, RouteKind
from shared.domain.job import Phase
from shared.domain.route import PolicySpec


class RequestRow(Struct, frozen=True, kw_only=True):
    """The state of one request. caller: the name of the API key, empty without one. outcome: the finish reason, or the
    code of the error. longest_gap_s, gaps, gaps_over: see `shared.timeline.RequestTimeline`. predicted_ttft_s,
    predicted_tpot_s: by the estimate of its first placement, to compare with ttft_s and tpot_s.
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
    predicted_ttft_s: float | None = None
    predicted_tpot_s: float | None = None


class StoredRequest(RequestRow, frozen=True, kw_only=True):
    """A row of the table `requests`, without the timeline. final: whether its phase is. updated_s: of the report."""

    scheduler_id: str
    final: bool
    updated_s: float


class RequestPage(Struct, frozen=True):
    """Requests that a search found. more: there are results beyond these."""

    rows: list[StoredRequest]
    more: bool = False


class InstanceErrors(Struct, frozen=True):
    """Of the estimates for one instance: TTFT where it computed the beginning of the prompt, TPOT where it decoded."""

    instance_id: str
    ttft: ErrorFigures | None = None
    tpot: ErrorFigures | None = None

    @property
    def known(self) -> bool:
        return self.ttft is not None or self.tpot is not None


class KindErrors(Struct, frozen=True):
    """Of the estimates for one kind of request, by its route and the length of its prompt."""

    route: RouteKind
    prompt: PromptSize
    ttft: ErrorFigures | None = None
    tpot: ErrorFigures | None = None

    @property
    def known(self) -> bool:
        return self.ttft is not None or self.tpot is not None


class Predictions(Struct, frozen=True):
    """The relative errors of the estimates of a scheduler's last placements."""

    instances: list[InstanceErrors]
    kinds: list[KindErrors]


class FollowedPolicies(Struct, frozen=True):
    """The policies that the scheduler follows. trouble: why it does not follow newer ones."""

    revision: int
    trouble: str
    placement: PolicySpec
    split: PolicySpec
    dispatch: PolicySpec
