"""Clicks in tables, the first time range, and the names and imports of the dashboard's files."""

import ast
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import streamlit as st

from dashboard.layout import clicked_row, shortest_range
from shared.wire.api.monitor import History

FOLDER = Path(__file__).parents[2] / "dashboard"


def test_a_click_is_returned_once() -> None:
    selected = {"selection": {"cells": [(1, "name")]}}
    st.session_state["t-shown"], st.session_state["t-0"] = ("a", "b"), selected
    assert clicked_row("t") == "b"
    assert clicked_row("t") is None
    st.session_state["t-1"] = selected
    assert clicked_row("t") == "b"
    st.session_state["t-shown"], st.session_state["t-2"] = ("a",), selected
    assert clicked_row("t") is None
    st.session_state["t-2"] = {"selection": {"cells": []}}
    assert clicked_row("t") is None
    assert clicked_row("unknown") is None


def test_no_file_hides_a_package() -> None:
    """Streamlit puts `dashboard/` first on `sys.path`."""
    path = [entry for entry in sys.path if Path(entry).resolve() != FOLDER]
    for file in FOLDER.glob("*.py"):
        if file.stem != "__init__":
            assert file.stem not in sys.stdlib_module_names
            assert PathFinder.find_spec(file.stem, path) is None, file.name


def test_of_our_packages_only_shared_is_imported() -> None:
    ours = {"services", "gateway", "predictor"}
    for file in FOLDER.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not ours & {module.split(".")[0] for module in modules}, file.name


@pytest.mark.parametrize(
    ("known_from", "chosen"), [(0, "1 h"), (40, "1 h"), (44, "1 h"), (46, "15 min"), (56, "5 min"), (60, "5 min")]
)
def test_the_first_range_is_the_shortest_that_holds_what_is_known(known_from: int, chosen: str) -> None:
    """known_from: minutes after the start of an hour of history."""
    column = [None if minute < known_from else 1.0 for minute in range(60)]
    times = [60 * minute for minute in range(60)]
    history = History(0, 3600, 60, times, {"running": column}, {}, {}, {}, [])
    assert shortest_range(history) == chosen


def test_the_first_range_of_an_unknown_history() -> None:
    assert shortest_range(None) == "1 h"
