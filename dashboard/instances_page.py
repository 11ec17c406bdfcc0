"""The Instances page: cards for a few instances, a table with the worst first for many; `?instance=ID` shows one."""

import time
from collections.abc import Iterable, Mapping, Sequence

import pandas as pd
import streamlit as st

from dashboard import layout, markup
from dashboard.actions import confirm_pending, show_results
from dashboard.answers import INSTANCES
from dashboard.console import INSTANCE_ID, Console, address_parameter
from dashboard.instance_page import card, errors_by_instance, instance, jobs_by_instance, off_by
from dashboard.layout import NO_MONITOR
from shared.domain.instance import InstanceState, Role
from shared.wire.api.monitor import InstanceRow
from shared.wire.api.scheduler import InstanceErrors

ANY = "all"
FULL_KV = 0.95  # share in use that counts as full while jobs wait
_SEVERITY = {
    InstanceState.DEAD: 4.0,
    InstanceState.UNRESPONSIVE: 3.0,
    InstanceState.DRAINING: 1.5,
    InstanceState.STARTING: 1.2,
    InstanceState.READY: 0.0,
}
_SIGN = {InstanceState.DEAD: "✕ ", InstanceState.UNRESPONSIVE: "✕ ", InstanceState.DRAINING: "▲ "}


def instances(console: Console) -> None:
    confirm_pending(console)
    chosen = address_parameter(INSTANCE_ID)
    if chosen:
        instance(console, chosen)
    else:
        st.fragment(_all, run_every=console.settings.refresh_s)(console)


def severity(row: InstanceRow) -> float:
    """The sort key of the table: states first, then full KV with waiting jobs, then the load."""
    usage = row.kv_usage or 0.0
    waiting = row.load.waiting / max(1, row.load.running + row.load.waiting)
    full = 1.0 if usage >= FULL_KV and row.load.waiting else 0.0
    return _SEVERITY[row.state] + full + 0.5 * waiting + 0.4 * usage


def worst_first(rows: Iterable[InstanceRow]) -> list[InstanceRow]:
    return sorted(rows, key=lambda row: (-severity(row), row.instance_id))


def _all(console: Console) -> None:
    read, now_s = console.api.read(INSTANCES).result(), time.time()
    layout.header(console, "Instances", [read])
    rows = read.value
    show_results(console, now_s, jobs_by_instance(rows or ()))
    if rows is None:
        st.html(markup.empty(NO_MONITOR))
        return
    if not rows:
        st.html(markup.empty("No instance has registered yet."))
        return
    shown = worst_first(_filtered(rows))
    if not shown:
        st.html(markup.empty("No instance has this role and state."))
    elif len(rows) <= console.settings.cards_shown:
        with st.container(key="cards"):
            errors = errors_by_instance(console)
            for row in shown:
                card(row, rows, errors.get(row.instance_id), console, read.stale)
    else:
        with layout.stale_container("instances-table", read):
            layout.row_table(
                instance_frame(shown, errors_by_instance(console)),
                [row.instance_id for row in shown],
                "instances",
                lambda instance_id: console.open("instances", instance=instance_id),
                column_config={
                    "state": st.column_config.TextColumn(width="medium"),
                    "KV used": st.column_config.ProgressColumn(format="percent", min_value=0.0, max_value=1.0),
                    "staged": st.column_config.NumberColumn(format="bytes"),
                },
            )
        st.caption("The worst first. Click a row to open the page of the instance, with its history and actions.")


def _filtered(rows: Sequence[InstanceRow]) -> list[InstanceRow]:
    with st.container(horizontal=True, vertical_alignment="center"):
        role = layout.choice("Role", [ANY, *(each.value for each in Role)], ANY, "role")
        state = layout.choice("State", [ANY, *(each.value for each in InstanceState)], ANY, "state")
        shown = [row for row in rows if role in (ANY, row.role.value) and state in (ANY, row.state.value)]
        st.caption(f"{len(shown)} of {len(rows)}", width="content")
    return shown


def instance_frame(rows: Sequence[InstanceRow], errors: Mapping[str, InstanceErrors] = {}) -> pd.DataFrame:
    none = InstanceErrors("")
    return pd.DataFrame(
        [
            {
                "instance": row.instance_id,
                "role": row.role.value,
                "state": _state(row),
                "engine": "EMULATED" if row.emulated else row.info.compatibility.engine,
                "accelerator": row.info.accelerator,
                "in flight": row.load.inflight,
                "running": row.load.running,
                "waiting": row.load.waiting,
                "queued tokens": row.load.queued_prefill_tokens,
                "KV used": row.kv_usage,
                "staged": row.load.staged_bytes,
                "TTFT off by": off_by(errors.get(row.instance_id, none).ttft),
                "TPOT off by": off_by(errors.get(row.instance_id, none).tpot),
            }
            for row in rows
        ]
    )


def _state(row: InstanceRow) -> str:
    return _SIGN.get(row.state, "") + (row.operation or row.state.value) + (f": {row.death}" if row.death else "")
