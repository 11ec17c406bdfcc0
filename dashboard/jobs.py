"""Recent requests, and one of them in full. Not `requests.py`: that is a package's name."""

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from dashboard import look, units
from dashboard.data import Api
from dashboard.reads import Read
from dashboard.session import Session
from dashboard.waterfall import explanation, summary, waterfall
from shared.domain.job import Phase
from shared.timeline import RequestTimeline
from shared.wire.messages import JobReport

ANY = "any phase"
NEWEST = "newest finished"


def jobs(read: Read[list[JobReport]], api: Api, session: Session, now_s: float) -> None:
    """The newest requests, and the chosen one's waterfall below: side by side, a laptop's screen would cut both."""
    st.subheader("Requests", anchor=False)
    if read.value is None:
        st.html(look.empty("Nothing to show while the global scheduler does not answer."))
        return
    phases = [ANY, *(phase.value for phase in Phase)]
    st.selectbox("Phase", phases, key="phase", label_visibility="collapsed")
    if read.value:
        st.dataframe(
            frame(read.value, now_s),
            hide_index=True,
            height=320,
            key="requests",
            column_config={
                "request": st.column_config.TextColumn(width="medium"),
                "TTFT ms": st.column_config.NumberColumn(format="%.1f"),
                "TPOT ms": st.column_config.NumberColumn(format="%.1f"),
            },
        )
    else:
        st.html(look.empty("No request yet."))
    _one(read.value, api, session)


def chosen_phase() -> str:
    """The phase to ask for, or nothing; before the widget is drawn."""
    phase = st.session_state.get("phase", ANY)
    return "" if phase == ANY else str(phase)


def frame(reports: Sequence[JobReport], now_s: float) -> pd.DataFrame:
    """One line a request."""
    return pd.DataFrame(
        [
            {
                "request": report.job_id,
                "arrived": units.ago(report.arrived_s, now_s),
                "phase": report.phase.value,
                "prefill": report.prefill_instance or units.NONE,
                "decode": report.decode_instance or units.NONE,
                "prompt": report.prompt_tokens,
                "split": report.split,
                "output": report.output_tokens,
                "TTFT ms": None if report.ttft_s is None else report.ttft_s * 1000,
                "TPOT ms": None if report.tpot_s is None else report.tpot_s * 1000,
                "SLO": report.slo + {True: ": met", False: ": missed", None: ""}[report.slo_met],
                "outcome": report.outcome,
            }
            for report in reports
        ]
    )


def _one(reports: Sequence[JobReport], api: Api, session: Session) -> None:
    known = [report.job_id for report in reports]
    kept = st.session_state.get("chosen_job", NEWEST)
    options = [NEWEST, *known] if kept in (NEWEST, *known) else [NEWEST, kept, *known]
    chosen = st.selectbox("Request", options, key="chosen_job", label_visibility="collapsed")
    newest = next((report.job_id for report in reports if report.phase.final), None)
    job_id = newest if chosen == NEWEST else chosen
    if job_id is None:
        st.html(look.empty("The waterfall appears when a request has finished."))
        return
    timeline = _timeline(job_id, api, session)
    if timeline.value is None:
        st.html(look.empty(timeline.error))
        return
    st.html(summary(timeline.value))
    st.plotly_chart(waterfall(timeline.value), key="waterfall", config={"displayModeBar": False})
    st.html(explanation(timeline.value))


def _timeline(job_id: str, api: Api, session: Session) -> Read[RequestTimeline]:
    known = session.timeline
    if known is not None and known.job_id == job_id:
        return Read(known)
    read = api.timeline(job_id)
    if read.value is not None:
        session.timeline = read.value
    return read
