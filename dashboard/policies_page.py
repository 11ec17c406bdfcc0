"""The Policies page: the policies in force, their alternatives and followers, and the form that changes one of
them.
"""

import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import streamlit as st

from dashboard import figures, frame, look, units
from dashboard.console import Console
from dashboard.events_page import moment
from dashboard.frame import asked_elsewhere, results
from dashboard.operations import Acting, Outcome, fate
from dashboard.reads import Read
from dashboard.records import PoliciesInForce, PolicyChoice
from dashboard.units import duration
from shared.domain.policies import ENGINE, ROUTING
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


_ABOUT = {
    "placement": "which instance computes a prompt",
    "split": "how much of it",
    "dispatch": "which instance decodes",
    "prefill_order": "whose prompt comes first",
    "decode_admission": "who gets KV memory",
    "step_budget": "prompt tokens in a step with decodes",
    "role_flip": "when an instance changes its role",
}


def policies(console: Console) -> None:
    """One run of the page."""
    session = ChangeSession()
    ask(session, console)
    st.fragment(_live, run_every=console.settings.refresh_s)(console, session)


def _live(console: Console, session: ChangeSession) -> None:
    asked_elsewhere(session)
    read, now_s = console.api.policies().result(), time.time()
    frame.header(console, "Policies", [frame.of_monitor(console, read)])
    results(session, console, now_s)
    found = read.value
    if found is None:
        st.html(look.empty(frame.NO_MONITOR))
        return
    if found.trouble:
        st.warning(found.trouble, icon=":material/warning:")
    zone = figures.zone()
    rows = [_row(kind, choice, now_s, zone) for kind, choice in found.policies.items()]
    heads = ["Decides", "In force", "By", "The cluster file says"]
    st.html(look.page(look.table(heads, rows), stale=read.stale))
    if console.account.may_operate:
        form(found, session, read.stale)
    else:
        st.caption("With a key of the role *operate* these can be changed here.")
    _followers(read)


def told(name: str, parameters: dict[str, object]) -> str:
    """A policy in a line."""
    given = ", ".join(f"{key} = {_short(value)}" for key, value in parameters.items())
    return f"{name} ({given})" if given else name


def _row(kind: str, choice: PolicyChoice, now_s: float, zone: str) -> list[str]:
    by = look.soft("the cluster file")
    if choice.changed is not None:
        by = f"{look.strong(choice.changed.who)} {look.soft(moment(choice.changed.since_s, now_s, zone))}"
    file = told(choice.file.name, choice.file.parameters) if choice.file is not None else units.NONE
    what = f"{look.strong(kind.replace('_', ' '))}<br>{look.soft(_ABOUT.get(kind, ''))}"
    return [what, look.strong(told(choice.name, choice.parameters)), by, look.soft(file)]


def _followers(read: Read[PoliciesInForce]) -> None:
    assert read.value is not None
    st.subheader("Who follows", anchor=False)
    late = [one for one in read.value.followers if not one.follows]
    total = len(read.value.followers)
    kinds = f"Schedulers go by {', '.join(ROUTING)}; instances by {', '.join(ENGINE)}."
    if not late:
        said = look.dot(f"All {total} follow revision {read.value.revision}.", look.GOOD) if total else "Nobody yet."
        st.html(look.page(said, f"<div>{look.soft(kinds)}</div>", stale=read.stale))
        return
    rows = [
        [look.strong(one.name), look.text(one.process), look.badge("✕ not yet", look.BAD), look.text(one.trouble)]
        for one in late[:50]
    ]
    said = f"{total - len(late)} of {total} follow revision {read.value.revision}. {kinds}"
    table = look.narrow(look.table(["Name", "Process", "Follows", "Why"], rows))
    st.html(look.page(f"<div>{look.soft(said)}</div>", table, stale=read.stale))


def _short(value: object) -> str:
    said = str(value)
    return said if len(said) <= 60 else f"{said[:57]}…"
