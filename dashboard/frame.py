"""The parts that all pages share: the header with the state of the services, the clock, outage messages,
confirmation dialogs with their results, and tables with clickable rows.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import look, units
from dashboard.console import Console
from dashboard.login_gate import leave_button
from dashboard.operations import Acting, Action, Intent, Operation, Outcome, Session, consequences, question
from dashboard.reads import Read

NO_MONITOR = "Nothing to show while the cluster monitor does not answer."
LATE = 3  # refreshes that may be missing
NEVER_S = float("inf")  # what has ended needs no refresh


@dataclass(frozen=True, slots=True)
class Service:
    """One of those that a page reads. meaning: of its absence."""

    name: str
    url: str
    meaning: str
    reads: Sequence[Read[Any] | None]

    @property
    def error(self) -> str:
        """Why something of it is missing; empty when nothing is."""
        return next((read.error for read in self.reads if read is not None and read.error), "")

    @property
    def known_s(self) -> float | None:
        """From when the oldest thing is that is shown of it; None when nothing is."""
        return min((read.read_s for read in self.reads if read is not None and read.value is not None), default=None)


def of_monitor(console: Console, *reads: Read[Any]) -> Service:
    """The monitor, as far as these reads tell."""
    meaning = "Instances, the verdict, policies and actions wait until it answers. Serving goes on without it."
    return Service("cluster monitor", console.settings.monitor_url, meaning, reads)


def of_scheduler(console: Console, *reads: Read[Any]) -> Service:
    """The scheduler, as far as these reads tell."""
    return Service("global scheduler", console.settings.scheduler_url, "Requests wait until it answers.", reads)


def of_gateway(console: Console, read: Read[Any] | None) -> Service:
    """The gateway."""
    return Service("gateway", console.settings.gateway_url, "It takes no requests.", [read])


def of_predictor(console: Console, read: Read[Any] | None) -> Service:
    """The predictor."""
    meaning = "Requests are served without a predicted output length."
    return Service("predictor", console.settings.predictor_url, meaning, [read])


def header(console: Console, title: str, services: Sequence[Service], every_s: float = 0.0) -> None:
    """The line on top, and a notice for each service that does not answer as it should."""
    now_s = time.time()
    dots = "".join(_dot(service) for service in services if service.url)
    dots += clock(now_s, every_s or console.settings.refresh_s)
    parts = f"<b>Polyphase</b>{look.soft(title)}<span class='pp-services'>{dots}</span>"
    with st.container(horizontal=True, vertical_alignment="center", key="header"):
        st.html(look.page(f'<div class="pp-head">{parts}</div>'))
        leave_button(console.account)
    for service in services:
        if service.url and service.error:
            outage(service, now_s)


def clock(now_s: float, every_s: float) -> str:
    """When this was drawn, counted on by the browser itself; a band over everything once that is too long ago."""
    if every_s == NEVER_S:
        return look.soft("this will not change any more")
    late = f"--late:{LATE * every_s:g}s"
    said = "This page no longer refreshes. What it shows is old, by seconds: "
    return (
        f'<span class="pp-clock" data-at="{now_s:.2f}" style="{late}">'
        f'<span class="pp-age">refreshed </span>'
        f'<span class="pp-late" role="alert">✕ {look.text(said)}<span class="pp-age-figure"></span></span></span>'
    )


def outage(service: Service, now_s: float) -> None:
    """One service does not answer as it should, and from when what is still shown of it is."""
    said = service.error.replace("`", "'")  # it ends no block of code
    known_s = service.known_s
    known = "" if known_s is None else f" In grey: what it said {units.ago(known_s, now_s)}."
    st.error(
        f"**The {service.name} at `{service.url}` does not answer as it should.** {service.meaning}{known}"
        f"\n\n```text\n{said}\n```",
        icon=":material/cloud_off:",
    )


def waited(future: "Future[Read[Any]] | None") -> Read[Any] | None:
    """What an optional service says."""
    return future.result() if future is not None else None


def aged(read: Read[Any], now_s: float) -> str:
    """How old what is shown is, where it is old."""
    return look.soft(f"as of {units.ago(read.read_s, now_s)}") if read.stale else ""


def _dot(service: Service) -> str:
    error = service.error
    said = f"{service.name} ✕" if error else service.name  # not by the colour alone
    return look.dot(said, look.BAD if error else look.GOOD, error or "answers")


NOTHING: Mapping[str, int] = {}


def ask(session: Session, console: Console) -> None:
    """Put the waiting question on the screen. Auto-refreshes run beside it and leave it alone."""
    intent = session.intent
    if intent is None:
        return
    session.asking = True
    st.dialog(question(intent), on_dismiss=session.drop_intent)(_body)(session, console, intent)


def asked_elsewhere(session: Acting[Any, Any]) -> None:
    """Begin a whole run when somebody wants something: the question stands outside of what refreshes itself."""
    if session.intent is not None and not session.asking:
        st.rerun()


def results(session: Acting[Any, Any], console: Console, now_s: float, left: Mapping[str, int] = NOTHING) -> None:
    """What became of confirmed actions, and of those under way how far they are. left: jobs of each instance."""
    asked_elsewhere(session)
    for operation in session.operations:
        outcome = operation.outcome(now_s)
        with st.container(horizontal=True, vertical_alignment="center", key=f"result-{operation.key}"):
            _show(outcome, operation.progress(left))
            if operation.reference:
                console.link("events", f"operation {operation.reference[:8]}", operation=operation.reference)
            if outcome.state != "running":
                st.button(
                    "Dismiss",
                    key=f"dismiss-{operation.key}",
                    type="tertiary",
                    on_click=session.dismiss,
                    args=(operation.key,),
                )


def _show(outcome: Outcome, progress: str) -> None:
    match outcome.state:
        case "running":
            st.info(outcome.text + progress, icon=":material/hourglass_top:")
        case "succeeded":
            st.success(outcome.text, icon=":material/check_circle:")
        case "refused":
            st.warning(outcome.text, icon=":material/block:")
        case "unknown":
            st.warning(outcome.text, icon=":material/help:")
        case _:
            st.error(outcome.text, icon=":material/error:")


def _body(session: Session, console: Console, intent: Intent) -> None:
    st.write(consequences(intent, console.settings.drain_timeout_s))
    force = False
    if intent.last_ready and intent.action is not Action.RESUME:
        st.warning(_last(intent), icon=":material/warning:")
        force = st.checkbox(f"{intent.action.capitalize()} it all the same (force)", key="force")
    with st.container(horizontal=True, horizontal_alignment="right"):
        answered = st.button("Cancel", key="cancel", on_click=session.drop_intent)
        wanted = intent.forced() if force else intent
        act = (session, console, intent, wanted)
        answered |= st.button("Confirm", key="confirm", type="primary", on_click=_act, args=act)
    if answered:
        st.rerun()


def _act(session: Session, console: Console, asked: Intent, wanted: Intent) -> None:
    if session.settle(asked):
        operation_id = uuid.uuid4().hex
        future = console.submit(console.api.operate, wanted, operation_id, console.account)
        session.add(Operation(wanted, future, key=operation_id))


def _last(intent: Intent) -> str:
    said = f"{intent.instance_id} is the last ready {intent.role.value} instance: without it requests wait or fail."
    return f"{said} The monitor refuses to {intent.action} it unless forced."


ROW_PX, HEAD_PX = 35, 38


def clicked(key: str) -> str | None:
    """The id of the row that was just clicked in that table, before the table is drawn again; a click counts once.

    Streamlit forgets the selection of a table that is gone only when a run of the page ends. A run that is cut off by
    the reader's next click (back to the list) would leave it, and the table would open the same row again. So a table
    whose click was followed is drawn as a new one.
    """
    selection = st.session_state.get(_widget(key), {}).get("selection", {})
    cells, shown = selection.get("cells") or [], st.session_state.get(f"{key}-shown", ())
    if not cells or not 0 <= cells[0][0] < len(shown):
        return None
    st.session_state[f"{key}-clicks"] = _clicks(key) + 1
    return str(shown[cells[0][0]])


def clickable(frame: pd.DataFrame, ids: Sequence[str], key: str, *, most_px: int = 560, **more: Any) -> None:
    """Draw it; `ids` are those of its rows."""
    st.session_state[f"{key}-shown"] = tuple(ids)
    height = min(most_px, HEAD_PX + ROW_PX * max(1, len(ids)))
    chosen: dict[str, Any] = {"on_select": "rerun", "selection_mode": "single-cell"}
    st.dataframe(frame, hide_index=True, key=_widget(key), height=height, placeholder=units.NONE, **chosen, **more)


def _widget(key: str) -> str:
    return f"{key}-{_clicks(key)}"


def _clicks(key: str) -> int:
    return int(st.session_state.get(f"{key}-clicks", 0))
