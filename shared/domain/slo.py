"""SLO attainment as the monitor reports it."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SloReport:
    """Attainment of one class over one window: shares in 0..1, None without requests; seconds.

    longest_gap_s: of each request's longest gap; its "max" is exact.
    """

    slo: str
    window_s: float
    requests: int
    ttft_attainment: float | None
    tpot_attainment: float | None
    attainment: float | None
    ttft_s: dict[str, float | None] = field(default_factory=dict)  # "p50", "p90", "p99"
    tpot_s: dict[str, float | None] = field(default_factory=dict)
    ttft_target_s: float | None = None  # of the request that ended last
    tpot_target_s: float | None = None
    itl_attainment: float | None = None
    longest_gap_s: dict[str, float | None] = field(default_factory=dict)  # and "max"
    itl_target_s: float | None = None
