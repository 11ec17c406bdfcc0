"""The question before each action, and the result after it."""

import uuid
from collections.abc import Mapping
from typing import Any

import streamlit as st

from dashboard.console import Console
from dashboard.operations import Action, Intent, Operation, Outcome, consequences, question
from dashboard.session import Acting, Session

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
