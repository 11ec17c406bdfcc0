"""A change of one policy: the form, the question, and what became of it."""

import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import streamlit as st

from dashboard.console import Console
from dashboard.operations import Outcome, fate
from dashboard.records import PoliciesInForce
from dashboard.session import Acting
from dashboard.units import duration
from shared.domain.route import PolicySpec
from shared.errors import InvalidRequest
from shared.files.yaml_file import parse_yaml

FILE = "as the cluster file says"


@dataclass(frozen=True, slots=True)
class Change:
    """A policy that somebody wants for a kind; None: the cluster file's."""

    kind: str
    spec: PolicySpec | None
    before: str

    @property
    def words(self) -> str:
        """What it comes to."""
        if self.spec is None:
            return f"{self.kind}: {self.before} → what the cluster file says"
        given = ", ".join(f"{name} = {value}" for name, value in self.spec.parameters.items())
        return f"{self.kind}: {self.before} → {self.spec.name}" + (f" ({given})" if given else "")


@dataclass(frozen=True, slots=True)
class Changing:
    """A confirmed change, under way or ended."""

    change: Change
    future: "Future[None]"
    started_s: float = field(default_factory=time.time)
    key: str = field(default_factory=lambda: uuid.uuid4().hex[:8])
    reference: str = ""

    def progress(self, left: Mapping[str, int]) -> str:
        """Nothing: the list of followers tells."""
        return ""

    def outcome(self, now_s: float) -> Outcome:
        """What to tell of it at `now_s` (unix seconds)."""
        words = self.change.words
        if not self.future.done():
            return Outcome("running", f"Changing {words}: {duration(max(0.0, now_s - self.started_s))} so far.")
        state, said = fate(self.future.exception())
        texts = {
            "succeeded": f"Changed {words}. Who follows already is told below.",
            "unknown": f"Whether {words} was changed is unknown; the list below tells. {said}",
            "refused": f"{words} was refused: {said}",
            "failed": f"{words} failed: {said}",
        }
        return Outcome(state, texts[state])


class ChangeSession(Acting[Change, Changing]):
    """Of the page Policies."""

    def __init__(self) -> None:
        super().__init__("policies_")


def form(found: PoliciesInForce, session: ChangeSession, stale: bool) -> None:
    """Choose a kind, a policy and its parameters; the question comes after it."""
    st.subheader("Change one", anchor=False)
    kinds = list(found.choices) or list(found.policies)
    with st.container(border=True, key="policy-form"):
        left, middle, right = st.columns([1, 1.4, 2.4], gap="small", vertical_alignment="top")
        kind = left.selectbox("What", kinds, format_func=lambda one: one.replace("_", " "), key="policy_kind")
        names = [*found.choices.get(kind, {}), FILE]
        now = found.policies[kind].name
        name = middle.selectbox(
            "Policy", names, index=names.index(now) if now in names else 0, key=f"policy_name-{kind}"
        )
        takes = found.choices.get(kind, {}).get(name, [])
        said = f"Takes: {', '.join(takes)}" if takes else "Takes no parameters"
        right.text_input("Parameters", key=f"policy_parameters-{kind}-{name}", disabled=not takes, help=_HELP)
        right.caption(said)
        st.button("Change …", key="policy_change", disabled=stale, on_click=_want, args=(session, found, kind, name))
        if trouble := st.session_state.get("policy_trouble"):
            st.warning(trouble, icon=":material/warning:")


_HELP = "name: value, name: value. What is left out has its usual value."


def parameters_of(text: str) -> dict[str, Any]:
    """`name: value, name: value` as a mapping. Raises InvalidRequest."""
    try:
        found = parse_yaml("{" + text + "}", "Parameters")
    except InvalidRequest as error:
        raise InvalidRequest(f"Parameters are written as name: value, name: value. {error.message}") from error
    bare = [name for name, value in found.items() if value is None]
    if bare:
        raise InvalidRequest(f"Parameters are written as name: value; {bare[0]!r} has no value.")
    return dict(found)


def ask(session: ChangeSession, console: Console) -> None:
    """Put the waiting question on the screen."""
    change = session.intent
    if change is None:
        return
    session.asking = True
    st.dialog("Change this policy?", on_dismiss=session.drop_intent)(_body)(session, console, change)


def _want(session: ChangeSession, found: PoliciesInForce, kind: str, name: str) -> None:
    st.session_state["policy_trouble"] = ""
    try:
        given = parameters_of(str(st.session_state.get(f"policy_parameters-{kind}-{name}", "")))
    except InvalidRequest as error:
        st.session_state["policy_trouble"] = error.message
        return
    session.want(Change(kind, None if name == FILE else PolicySpec(name, given), found.policies[kind].name))


def _body(session: ChangeSession, console: Console, change: Change) -> None:
    st.write(f"**{change.words}**")
    st.write(f"It holds for the whole cluster, from the next request on. The audit says: {console.account.name}.")
    with st.container(horizontal=True, horizontal_alignment="right"):
        answered = st.button("Cancel", key="cancel", on_click=session.drop_intent)
        args = (session, console, change)
        answered |= st.button("Confirm", key="confirm", type="primary", on_click=_act, args=args)
    if answered:
        st.rerun()


def _act(session: ChangeSession, console: Console, change: Change) -> None:
    if session.settle(change):
        wanted = {change.kind: change.spec}
        session.add(Changing(change, console.submit(console.api.set_policies, wanted, console.account)))
