"""The page Requests: a search over all of them, the worst first; or one request by its address."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import frame, look, units
from dashboard.console import REQUEST, Console, addressed
from dashboard.history import Found, FoundRow
from dashboard.jobs.one import one
from dashboard.reads import Read
from dashboard.tables import clickable, clicked
from shared.domain.job import Phase

ANY = "any"
TABLE = "requests"
ORDERS = {
    "slowest_ttft": "slowest TTFT",
    "slowest_tpot": "slowest TPOT",
    "longest_gap": "longest gap",
    "longest": "longest",
    "newest": "newest",
}
MISSED = {ANY: "", "missed": "true", "met": "false"}
WITHIN = {"15 min": 900.0, "1 h": 3600.0, "24 h": 86_400.0, "ever": 0.0}
_ROUND_S = 60.0  # so that a read a period serves all
_TEXTS = {"job": "Request id", "caller": "Key", "instance": "Instance", "slo": "Class", "outcome": "Outcome"}


def requests(console: Console) -> None:
    """One run of the page."""
    job_id = addressed(REQUEST)
    if job_id:
        one(console, job_id)
    else:
        asked = {name: addressed(name) for name in (*_TEXTS, "missed", "order", "phase")}
        st.fragment(_search, run_every=max(5.0, console.settings.refresh_s))(console, asked)


def params_of(state: Mapping[str, Any], now_s: float, limit: int) -> dict[str, str | int | float]:
    """What to ask of the scheduler, out of what the form's fields hold."""
    params: dict[str, str | int | float] = {
        name: str(state.get(name, "")).strip() for name in _TEXTS if str(state.get(name, "")).strip()
    }
    missed = MISSED.get(str(state.get("missed", ANY)), "")
    phase = str(state.get("phase", ANY))
    within_s = WITHIN[str(state.get("within") or "1 h")]
    params |= {"missed": missed} if missed else {}
    params |= {"phase": phase} if phase not in ("", ANY) else {}
    params |= {"since": (now_s - within_s) // _ROUND_S * _ROUND_S} if within_s and "job" not in params else {}
    skipped = int(state.get("offset", 0))
    return {**params, "order": state.get("order") or "slowest_ttft", "limit": limit, "offset": skipped}


def _search(console: Console, asked: Mapping[str, str]) -> None:
    opened = clicked(TABLE)
    if opened is not None:
        console.open("requests", request=opened)
    now_s, limit = time.time(), console.settings.requests_shown
    state = {name: st.session_state.get(_key(name, asked), value) for name, value in _first(asked).items()}
    filters = tuple(value for name, value in state.items() if name != "offset")
    if st.session_state.get("search-filters") != filters:  # another search begins with its first rows
        st.session_state["search-filters"], st.session_state[_key("offset", asked)], state["offset"] = filters, 0, 0
    read = console.api.search(params_of(state, now_s, limit)).result()
    frame.header(console, "Requests", [frame.of_scheduler(console, read)], every_s=max(5.0, console.settings.refresh_s))
    _form(asked)
    found: Read[Found] = read
    if found.value is None:
        st.html(look.empty("Nothing to show while the global scheduler does not answer."))
        return
    if not found.value.rows:
        st.html(look.empty("No such request."))
        return
    with st.container(key="requests-stale" if read.stale else "requests-box"):
        clickable(
            table(found.value.rows, now_s), [row.job_id for row in found.value.rows], TABLE, column_config=_COLUMNS
        )
    _pages(found.value, _key("offset", asked), int(state["offset"]), limit)


def _first(asked: Mapping[str, str]) -> dict[str, Any]:
    """What the form's fields hold before anybody has touched them: what the address says."""
    missed = next((name for name, value in MISSED.items() if value and value == asked["missed"]), ANY)
    order = asked["order"] if asked["order"] in ORDERS else "slowest_ttft"
    phase = asked["phase"] if asked["phase"] in list(Phase) else ANY
    texts = {name: asked[name] for name in _TEXTS}
    return {**texts, "missed": missed, "order": order, "phase": phase, "within": "1 h", "offset": 0}


def _key(name: str, asked: Mapping[str, str]) -> str:
    """Of a field: another address has fields of its own."""
    return f"search-{name}-{'-'.join(asked.values())}"


def _form(asked: Mapping[str, str]) -> None:
    first = _first(asked)
    columns = st.columns(len(_TEXTS), gap="small")
    for column, (name, said) in zip(columns, _TEXTS.items(), strict=True):
        column.text_input(said, value=first[name], key=_key(name, asked), placeholder=ANY)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        orders, phases = list(ORDERS), [ANY, *(phase.value for phase in Phase)]
        st.selectbox(
            "First",
            orders,
            index=orders.index(first["order"]),
            format_func=lambda order: ORDERS[order],
            key=_key("order", asked),
            width=170,
        )
        st.selectbox("Phase", phases, index=phases.index(first["phase"]), key=_key("phase", asked), width=170)
        st.segmented_control("SLO", list(MISSED), default=first["missed"], required=True, key=_key("missed", asked))
        st.segmented_control("Within", list(WITHIN), default="1 h", required=True, key=_key("within", asked))


def _pages(found: Found, key: str, skipped: int, limit: int) -> None:
    with st.container(horizontal=True, vertical_alignment="center"):
        st.caption(f"{skipped + 1} to {skipped + len(found.rows)}. A click on one opens it.", width="content")
        st.button(
            "Before", key="page-before", disabled=not skipped, on_click=_turn, args=(key, max(0, skipped - limit))
        )
        st.button("After", key="page-after", disabled=not found.more, on_click=_turn, args=(key, skipped + limit))


def _turn(key: str, skipped: int) -> None:
    st.session_state[key] = skipped


def table(rows: Sequence[FoundRow], now_s: float) -> pd.DataFrame:
    """One line a request."""
    return pd.DataFrame(
        [
            {
                "request": row.job_id,
                "arrived": units.ago(row.arrived_s, now_s),
                "key": row.caller,
                "SLO": row.slo + {True: " ✓ met", False: " ✕ missed", None: ""}[row.slo_met],
                "TTFT ms": None if row.ttft_s is None else row.ttft_s * 1000,
                "TPOT ms": None if row.tpot_s is None else row.tpot_s * 1000,
                "longest gap ms": None if row.longest_gap_s is None else row.longest_gap_s * 1000,
                "phase": row.phase.value,
                "outcome": row.outcome,
                "prefill": row.prefill_instance or units.NONE,
                "decode": row.decode_instance or units.NONE,
                "prompt": row.prompt_tokens,
                "split": row.split,
                "output": row.output_tokens,
            }
            for row in rows
        ]
    )


_COLUMNS = {
    "request": st.column_config.TextColumn(width="medium"),
    "TTFT ms": st.column_config.NumberColumn(format="%.1f"),
    "TPOT ms": st.column_config.NumberColumn(format="%.1f"),
    "longest gap ms": st.column_config.NumberColumn(format="%.1f"),
}
