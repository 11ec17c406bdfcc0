"""What all sessions of the dashboard's process share."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import streamlit as st

from dashboard.accounts import KeyFile, Tickets
from dashboard.dashboard_settings import DashboardSettings
from dashboard.data import Api

OPERATIONS, CHATS, QUESTIONS = 16, 32, 4  # under way at once, over all sessions

_BY_VALUE: dict[str | type[Any], Callable[[Any], Any]] = {DashboardSettings: DashboardSettings.model_dump_json}


@st.cache_resource(show_spinner=False, hash_funcs=_BY_VALUE, on_release=Api.close)
def api(settings: DashboardSettings) -> Api:
    """The services' APIs."""
    return Api(settings)


@st.cache_resource(show_spinner=False)
def operations() -> ThreadPoolExecutor:
    """Threads for actions: a flip takes as long as its drain, and the page goes on meanwhile."""
    return ThreadPoolExecutor(OPERATIONS, thread_name_prefix="operation")


@st.cache_resource(show_spinner=False)
def chats() -> ThreadPoolExecutor:
    """Threads for answers that come, apart from those of actions: open chats hold up no flip."""
    return ThreadPoolExecutor(CHATS, thread_name_prefix="chat")


@st.cache_resource(show_spinner=False)
def questions() -> ThreadPoolExecutor:
    """Threads for what the planner computes for a person, and changes nothing."""
    return ThreadPoolExecutor(QUESTIONS, thread_name_prefix="question")


@st.cache_resource(show_spinner=False)
def key_file(file: Path) -> KeyFile:
    """The keys of people."""
    return KeyFile(file)


@st.cache_resource(show_spinner=False)
def tickets() -> Tickets:
    """Of those who have logged in."""
    return Tickets()
