"""Clicks in tables, and the names and imports of the dashboard's files."""

import ast
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import streamlit as st

from dashboard.layout import clicked_row

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
