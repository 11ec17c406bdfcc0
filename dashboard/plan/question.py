"""The question before the planner is told to do something."""

import streamlit as st

from dashboard.console import Console
from dashboard.plan.plan_session import PlanSession
from dashboard.plan.planner import Planner
from dashboard.plan.wishes import Deed, Wish, consequences, question


def ask(session: PlanSession, planner: Planner, console: Console) -> None:
    """Put the waiting question on the screen. Auto-refreshes run beside it and leave it alone."""
    wish = session.intent
    if wish is None:
        return
    session.asking = True
    st.dialog(question(wish), on_dismiss=session.drop_intent)(_body)(session, planner, console, wish)


def _body(session: PlanSession, planner: Planner, console: Console, wish: Wish) -> None:
    st.write(consequences(wish))
    with st.container(horizontal=True, horizontal_alignment="right"):
        answered = st.button("Cancel", key="cancel", on_click=session.drop_intent)
        act = (session, planner, console, wish)
        answered |= st.button("Confirm", key="confirm", type="primary", on_click=_act, args=act)
    if answered:
        st.rerun()


def _act(session: PlanSession, planner: Planner, console: Console, wish: Wish) -> None:
    if session.settle(wish):
        session.add(Deed(wish, console.submit(planner.act, wish, console.account)))
