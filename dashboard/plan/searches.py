"""Searches for plans: the form that starts one, running searches, and their results."""

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from dashboard import look, units
from dashboard.plan.in_force import NO_PLANNER, rate
from dashboard.plan.operations import Act, Planner, PlanSession, Wish, cancel
from dashboard.plan.records import PlanSearch, Promise, Result
from dashboard.reads import Read
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
    """Collapsed, since few visitors use it. Missing fields are named beside it."""
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


NEWEST = "newest that has a result"
_COLOUR = {"waiting": look.IDLE, "running": look.CAUTION, "done": look.GOOD, "failed": look.BAD}


def searches(read: Read[list[PlanSearch]], session: PlanSession, planner: Planner, now_s: float) -> None:
    """The list, one result, and the form for another search."""
    st.subheader("Searches", anchor=False)
    if read.value is None:
        st.html(look.empty(NO_PLANNER))
        return
    for one in read.value:
        if not one.ended:
            _under_way(one, session, read.stale, now_s)
    ended = [one for one in read.value if one.ended]
    if ended:
        heads = ["When", "Search", "State", "Took", "Method", "Goodput", "By"]
        st.html(look.page(look.table(heads, [_ended(one, now_s) for one in ended]), stale=read.stale))
    elif not read.value:
        st.html(look.empty("Nobody has searched for a plan yet."))
    _one(ended, session, planner)
    search_form(session, read.stale)


def _under_way(one: PlanSearch, session: PlanSession, stale: bool, now_s: float) -> None:
    facts = [f"{one.plan_id}", f"by {one.who}" if one.who else "", f"submitted {units.ago(one.submitted_s, now_s)}"]
    if one.progress is not None:
        best = one.progress.best_goodput
        elapsed = one.progress.elapsed_s
        facts += [one.progress.what, f"{units.duration(elapsed)} so far" if elapsed is not None else ""]
        facts.append(f"best goodput {rate(best)}" if best is not None else "")
    said = f"{_state(one)} {look.text(' · '.join(filter(None, facts)))}"
    with st.container(horizontal=True, vertical_alignment="center", key=f"search-{one.plan_id}"):
        st.html(look.page(said, stale=stale), width="content")
        st.button(
            "Cancel",
            key=f"cancel-{one.plan_id}",
            disabled=stale or session.busy(one.plan_id),
            on_click=session.want,
            args=(cancel(one),),
        )


def _ended(one: PlanSearch, now_s: float) -> list[str]:
    took = one.ended_s - one.submitted_s if one.ended_s is not None else None
    state = _state(one) + (f" {look.soft(one.error)}" if one.error else "")
    found = (one.result.method, rate(one.result.promise.goodput)) if one.result else (units.NONE, units.NONE)
    cells = (units.duration(took), *found, one.who or units.NONE)
    told = [look.text(cell) for cell in cells]
    return [look.soft(units.ago(one.submitted_s, now_s)), look.strong(one.plan_id), state, *told]


def _one(ended: Sequence[PlanSearch], session: PlanSession, planner: Planner) -> None:
    known = [one.plan_id for one in ended if one.result is not None]
    if not known:
        return
    chosen = st.selectbox("Result", [NEWEST, *known], key="chosen_search", label_visibility="collapsed")
    read = _full(known[0] if chosen == NEWEST else chosen, session, planner)
    if read.value is None or read.value.result is None:
        st.html(look.empty(read.error or "This search has no result."))
        return
    result = read.value.result
    with st.container(border=True, key="search-result"):
        st.html(look.page(look.tiles(*_tiles(result.promise)), look.below(_groups(result))))
        st.html(look.page(_routes(result), look.below(_compared(result))))
        st.download_button(
            "Cluster file",
            result.cluster_file,
            file_name=f"plan-{read.value.plan_id}.yaml",
            mime="application/yaml",
            icon=":material/download:",
            on_click="ignore",
            disabled=not result.cluster_file,
            key="cluster_file",
        )


def _full(plan_id: str, session: PlanSession, planner: Planner) -> Read[PlanSearch]:
    known = session.search
    if known is not None and known.plan_id == plan_id:
        return Read(known)
    read = planner.search(plan_id)
    if read.value is not None:
        session.search = read.value
    return read


def _tiles(promise: Promise) -> list[str]:
    price = units.NONE if promise.usd_per_hour is None else f"{promise.usd_per_hour:.2f} USD/h"
    tokens = promise.usd_per_million_tokens
    per = "" if tokens is None else f"{tokens:.3g} USD for a million tokens"
    at = f"at {rate(promise.rate)}"
    return [
        look.tile("Goodput", rate(promise.goodput), "the most that keeps the SLO"),
        look.tile("SLO attainment", units.share(promise.attainment), at),
        look.tile("TTFT, mean", units.duration(promise.ttft_mean_s), at),
        look.tile("TPOT, mean", units.duration(promise.tpot_mean_s), at),
        look.tile("Price", price, per),
    ]


def _groups(result: Result) -> str:
    rows = [
        [
            look.strong(one.name),
            look.badge(one.role, {"prefill": look.PREFILL, "decode": look.DECODE}.get(one.role, look.IDLE)),
            look.text(one.accelerators),
            look.text(one.layout),
            look.text(units.NONE if one.price_usd_hour is None else f"{one.price_usd_hour:.2f}"),
        ]
        for one in result.groups
    ]
    return look.table(["Group", "Role", "Accelerators", "Layout", "USD/h"], rows)


def _routes(result: Result) -> str:
    rows = [
        [
            look.text(one.prefill or "the same"),
            look.text(one.decode),
            look.bar("", one.share, units.share(one.share), look.IDLE),
        ]
        for one in result.routes
    ]
    policies = f"<div>{look.soft('Policies')} {look.strong(result.policies)}</div>" if result.policies else ""
    return policies + (look.table(["Prompts computed by", "Decoded by", "Share"], rows) if rows else "")


def _compared(result: Result) -> str:
    told = "".join(f"<span>{look.soft(one.method)} {look.strong(rate(one.goodput))}</span>" for one in result.compared)
    return f'<div class="pp-facts">{look.text("Goodput of other methods:")}{told}</div>' if told else ""


def _state(one: PlanSearch) -> str:
    return look.badge(one.state, _COLOUR.get(one.state, look.IDLE))
