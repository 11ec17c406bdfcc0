"""What was clicked in a table."""

import streamlit as st

from dashboard.tables import clicked


def test_it_is_the_row_that_was_shown(monkeypatch: object) -> None:
    state = {"t": {"selection": {"cells": [(1, "name")]}}, "t-shown": ("a", "b")}
    for name, value in state.items():
        st.session_state[name] = value
    assert clicked("t") == "b"
    st.session_state["t-shown"] = ("a",)
    assert clicked("t") is None
    st.session_state["t"] = {"selection": {"cells": []}}
    assert clicked("t") is None
    assert clicked("never") is None
