"""What was clicked in a table."""

import streamlit as st

from dashboard.frame import clicked


def test_it_is_the_row_that_was_shown() -> None:
    selected = {"selection": {"cells": [(1, "name")]}}
    st.session_state["t-shown"], st.session_state["t-0"] = ("a", "b"), selected
    assert clicked("t") == "b"
    assert clicked("t") is None  # once, although the run of the page may be cut off before Streamlit forgets it
    st.session_state["t-1"] = selected
    assert clicked("t") == "b"
    st.session_state["t-shown"], st.session_state["t-2"] = ("a",), selected
    assert clicked("t") is None
    st.session_state["t-2"] = {"selection": {"cells": []}}
    assert clicked("t") is None
    assert clicked("never") is None
