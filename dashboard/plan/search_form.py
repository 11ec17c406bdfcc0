"""The form that has a plan searched for."""

from collections.abc import Mapping
from typing import Any

import streamlit as st

from dashboard.plan.plan_session import PlanSession
from dashboard.plan.wishes import Act, Wish
from shared.domain.job import tight_gaps

# As in shared/plan/methods/registry.py, which would bring the planner's whole code into the dashboard's process.
METHODS = ("best", "tabu", "joint", "exhaustive", "coupled", "thirds", "single_type", "bruteforce")

EXAMPLE = """nodes:
  - {name: a40, accelerator: A40, count: 4}
  - {name: ti, accelerator: RTX-3090Ti, count: 4}
network:
  between: {gbps: 40}
"""


def search_form(session: PlanSession, stale: bool) -> None:
    """Behind a fold: few visitors want it. What is missing is said beside it."""
    with st.expander("Search for a plan"), st.form("search", border=False):
        left, right = st.columns([3, 2], gap="medium")
        left.text_area("Inventory (YAML)", key="wanted_inventory", height=300, placeholder=EXAMPLE)
        with right:
            st.text_input("Model", key="wanted_model", placeholder="Llama-3-8B")
            st.text_input("Workload", "azure-conv", key="wanted_workload")
            first, second = st.columns(2)
            first.number_input("TTFT, s", min_value=0.001, value=2.0, step=0.1, format="%.3f", key="wanted_ttft_s")
            second.number_input("TPOT, s", min_value=0.001, value=0.1, step=0.01, format="%.3f", key="wanted_tpot_s")
            first.number_input(
                "ITL, s",
                min_value=0.001,
                value=None,
                step=0.05,
                format="%.3f",
                key="wanted_itl_s",
                placeholder="default",
                help="99th percentile of the gaps between tokens. Empty: the larger of 0.25 and 1.25 times TPOT",
            )
            second.number_input(
                "Requests/s", min_value=0.0, value=0.0, step=1.0, key="wanted_rate", help="0: near goodput"
            )
            st.selectbox("Method", METHODS, key="wanted_method")
        wrong = wrong_in(st.session_state.to_dict())
        if wrong and st.session_state.get("wanted_tried"):
            st.warning(wrong, icon=":material/warning:")
        off = stale or not session.may_operate
        st.form_submit_button("Search", key="search_wanted", disabled=off, on_click=_want, args=(session,))


def missing_of(state: Mapping[str, Any]) -> str:
    """The first field that is needed and empty."""
    needed = {"wanted_inventory": "The inventory", "wanted_model": "The model", "wanted_workload": "The workload"}
    return next((name for key, name in needed.items() if not str(state.get(key) or "").strip()), "")


def wrong_in(state: Mapping[str, Any]) -> str:
    """What the form cannot be sent with, in a sentence; empty where nothing is wrong."""
    if missing := missing_of(state):
        return f"{missing} is missing."
    itl_s = state.get("wanted_itl_s")
    tight = tight_gaps(float(itl_s), float(state["wanted_tpot_s"])) if itl_s is not None else ""
    return f"ITL is too short: {tight}." if tight else ""


def body_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the request, out of what the form's fields hold."""
    slo = {"ttft_s": float(state["wanted_ttft_s"]), "tpot_s": float(state["wanted_tpot_s"])}
    if state.get("wanted_itl_s") is not None:
        slo["itl_s"] = float(state["wanted_itl_s"])
    return {
        "inventory": str(state["wanted_inventory"]),
        "model": str(state["wanted_model"]).strip(),
        "workload": str(state["wanted_workload"]).strip(),
        "slo": slo,
        "rate": float(state["wanted_rate"]),
        "method": str(state["wanted_method"]),
    }


def _want(session: PlanSession) -> None:
    st.session_state["wanted_tried"] = True
    if not wrong_in(st.session_state.to_dict()):
        body = body_of(st.session_state.to_dict())
        session.want(Wish(Act.SUBMIT, words=f"{body['model']} for {body['workload']}, {body['method']}", body=body))
