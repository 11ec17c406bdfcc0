"""The page Policies: those in force, who chose them, what else there is, who follows; and a form to change one."""

import time

import streamlit as st

from dashboard import figures, frame, look, units
from dashboard.confirm import asked_elsewhere, results
from dashboard.console import Console
from dashboard.happenings.rows import moment
from dashboard.policies.change import ChangeSession, ask, form
from dashboard.reads import Read
from dashboard.records import PoliciesInForce, PolicyChoice
from shared.domain.policies import ENGINE, ROUTING

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
