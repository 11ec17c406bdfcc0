"""The question before each action, and the result after it."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import streamlit as st

from dashboard.data import Api
from dashboard.operations import Action, Intent, Operation, consequences, question
from dashboard.records import AuditEntry
from dashboard.session import Acting, Session

Submit = Callable[..., "Future[AuditEntry]"]


def ask(session: Session, api: Api, submit: Submit) -> None:
    """Put the waiting question on the screen. Auto-refreshes run beside it and leave it alone."""
    intent = session.intent
    if intent is None:
        return
    session.asking = True
    st.dialog(question(intent), on_dismiss=session.drop_intent)(_body)(session, api, submit, intent)


def results(session: Acting[Any, Any], now_s: float) -> None:
    """What became of confirmed actions."""
    for operation in session.operations:
        outcome = operation.outcome(now_s)
        with st.container(horizontal=True, vertical_alignment="center", key=f"result-{operation.key}"):
            match outcome.state:
                case "running":
                    st.info(outcome.text, icon=":material/hourglass_top:")
                    continue
                case "succeeded":
                    st.success(outcome.text, icon=":material/check_circle:")
                case "refused":
                    st.warning(outcome.text, icon=":material/block:")
                case "unknown":
                    st.warning(outcome.text, icon=":material/help:")
                case _:
                    st.error(outcome.text, icon=":material/error:")
            st.button(
                "Dismiss",
                key=f"dismiss-{operation.key}",
                type="tertiary",
                on_click=session.dismiss,
                args=(operation.key,),
            )


def _body(session: Session, api: Api, submit: Submit, intent: Intent) -> None:
    st.write(consequences(intent, api.settings.drain_timeout_s))
    force = False
    if intent.last_ready and intent.action is not Action.RESUME:
        st.warning(_last(intent), icon=":material/warning:")
        force = st.checkbox(f"{intent.action.capitalize()} it all the same (force)", key="force")
    with st.container(horizontal=True, horizontal_alignment="right"):
        answered = st.button("Cancel", key="cancel", on_click=session.drop_intent)
        wanted = intent.forced() if force else intent
        act = (session, api, submit, intent, wanted)
        answered |= st.button("Confirm", key="confirm", type="primary", on_click=_act, args=act)
    if answered:
        st.rerun()


def _act(session: Session, api: Api, submit: Submit, asked: Intent, wanted: Intent) -> None:
    if session.settle(asked):
        session.add(Operation(wanted, submit(api.operate, wanted)))


def _last(intent: Intent) -> str:
    said = f"{intent.instance_id} is the last ready {intent.role.value} instance: without it requests wait or fail."
    return f"{said} The monitor refuses to {intent.action} it unless forced."
