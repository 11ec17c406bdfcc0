"""The page Predictor."""

import streamlit as st

from dashboard import frame, look
from dashboard.console import Console
from dashboard.lengths.output_lengths import output_lengths

NOT_THERE = (
    "No predictor is configured: POLYPHASE_DASHBOARD_PREDICTOR_URL is empty. With one, this page shows how its "
    "predictions of output lengths compare with what the answers became."
)


def predictor(console: Console) -> None:
    """One run of the page."""
    if not console.settings.predictor_url:
        frame.header(console, "Predictor", [], every_s=frame.NEVER_S)
        st.html(look.empty(NOT_THERE))
        return
    st.fragment(_live, run_every=max(5.0, console.settings.refresh_s))(console)


def _live(console: Console) -> None:
    asked = console.api.predictor()
    assert asked is not None
    read = asked.result()
    every_s = max(5.0, console.settings.refresh_s)
    frame.header(console, "Predictor", [frame.of_predictor(console, read)], every_s=every_s)
    output_lengths(read)
