"""SLO attainment of each class over each window, with percentiles."""

import streamlit as st

from dashboard import look, units
from dashboard.frame import NO_MONITOR
from dashboard.reads import Read
from dashboard.records import ClusterSummary
from shared.policy.slo import SloReport

_PERCENTILES = ("p50", "p90", "p99")


def slo(cluster: Read[ClusterSummary], slo_goal: float) -> None:
    """Attainment of each class over each window, with percentiles."""
    st.subheader("SLO attainment", anchor=False)
    if cluster.value is None:
        st.html(look.empty(NO_MONITOR))
        return
    if not any(report.requests for report in cluster.value.slo):
        st.html(look.empty("No request has ended within the windows."))
        return
    every = f"All met (goal {units.share(slo_goal)})"
    heads = ["Class", "Window", "Requests", "Targets TTFT / TPOT / ITL", every, "TTFT met", "TPOT met", "ITL met"]
    heads += ["TTFT p50 / p90 / p99", "TPOT p50 / p90 / p99", "Longest gap p50 / p90 / p99 / worst"]
    rows = [_slo_row(report, slo_goal) for report in cluster.value.slo]
    st.html(look.page(look.table(heads, rows), stale=cluster.stale))


def _attained(value: float | None, goal: float) -> tuple[str, str]:
    """Attainment in words, and the colour of what they mean."""
    if value is None or value >= goal:
        return units.share(value), look.GOOD
    return f"✕ {units.share(value)}", look.BAD


def _slo_row(report: SloReport, goal: float) -> list[str]:
    shares = (report.attainment, report.ttft_attainment, report.tpot_attainment, report.itl_attainment)
    met = [look.bar("", value, *_attained(value, goal)) for value in shares]
    percentiles = [
        " / ".join(look.text(units.duration(figures.get(p))) for p in which)
        for figures, which in (
            (report.ttft_s, _PERCENTILES),
            (report.tpot_s, _PERCENTILES),
            (report.longest_gap_s, (*_PERCENTILES, "max")),
        )
    ]
    targets = " / ".join(
        units.duration(target) for target in (report.ttft_target_s, report.tpot_target_s, report.itl_target_s)
    )
    about = (units.duration(report.window_s), units.count(report.requests), targets)
    return [look.strong(report.slo), *(look.text(value) for value in about), *met, *percentiles]
