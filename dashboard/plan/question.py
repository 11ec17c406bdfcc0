"""The question before the planner is told to do something."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import streamlit as st

from dashboard.plan.plan_session import PlanSession
from dashboard.plan.planner import Planner
from dashboard.plan.wishes import Deed, Wish, consequences, question

Submit = Callable[..., "Future[Any]"]


def ask(session: PlanSession, planner: Planner, submit: Submit) -> None:
    """Put the waiting question on the screen. Auto-refreshes run beside it and leave it alone."""
    wish = session.intent
    if wish is None:
        return
    session.asking = True
    st.dialog(question(wish), on_dismiss=session.drop_intent)(_body)(session, planner, submit, wish)


def _body(session: PlanSession, planner: Planner, submit: Submit, wish: Wish) -> None:
    st.write(consequences(wish))
    with st.container(horizontal=True, horizontal_alignment="right"):
        answered = st.button("Cancel", key="cancel", on_click=session.drop_intent)
        act = (session, planner, submit, wish)
        answered |= st.button("Confirm", key="confirm", type="primary", on_click=_act, args=act)
    if answered:
        st.rerun()


def _act(session: PlanSession, planner: Planner, submit: Submit, wish: Wish) -> None:
    if session.settle(wish):
        session.add(Deed(wish, submit(planner.act, wish)))
