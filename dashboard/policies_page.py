"""The Policies page: the policies in force, the processes that follow them, and the form that changes a policy for the
whole cluster.
"""

import time
from collections.abc import Mapping

import streamlit as st

from dashboard import layout, markup, units
from dashboard.actions import Action, Call, confirm_pending, request_action, show_results
from dashboard.answers import POLICIES
from dashboard.api import Read
from dashboard.console import Console
from shared.domain.policies import ENGINE, ROUTING
from shared.domain.route import PolicySpec
from shared.errors import InvalidRequest
from shared.files.yaml_file import parse_yaml
from shared.wire.api.monitor import PoliciesInForce, PolicyChoice

FROM_FILE = "as in the cluster file"
FOLLOWERS_SHOWN = 50
_DECISIONS = {
    "placement": "which instance computes a prompt",
    "split": "how much of the prompt it computes",
    "dispatch": "which instance decodes",
    "prefill_order": "which prompt is computed first",
    "decode_admission": "which request gets KV memory",
    "step_budget": "prompt tokens in a step with decodes",
    "role_flip": "when an instance changes its role",
}
_ERROR = "policy_form_error"


def policy_action(kind: str, spec: PolicySpec | None, before: str, who: str) -> Action:
    """Use `spec` for this kind of policy; None: the cluster file's."""
    after = _policy(spec.name, spec.parameters) if spec is not None else FROM_FILE

    async def call(call: Call) -> None:
        await call.api.monitor.set_policies({kind: spec}, who=call.who)

    return Action(
        name=f"Change of the {kind} policy",
        question="Change this policy?",
        consequences=(
            f"**{kind}: {before} → {after}**\n\n"
            f"The change applies to the whole cluster from the next request on. The audit records it under {who}."
        ),
        call=call,
        success=lambda _: f"The {kind} policy has been changed: {before} → {after}.",
    )


def policies(console: Console) -> None:
    confirm_pending(console)
    st.fragment(_live, run_every=console.settings.refresh_s)(console)


def _live(console: Console) -> None:
    read, now_s = console.api.read(POLICIES).result(), time.time()
    layout.header(console, "Policies", [read])
    show_results(console, now_s)
    found = read.value
    if found is None:
        st.html(markup.empty(layout.NO_MONITOR))
        return
    if found.trouble:
        st.warning(found.trouble, icon=":material/warning:")
    st.html(policy_table(read, found, now_s, layout.time_zone()))
    if console.account.may_operate:
        _form(found, console.account.name, read.stale)
    else:
        st.caption("Policies can be changed with a key of the role *operate*.")
    _followers(read, found)


def policy_table(read: Read[PoliciesInForce], found: PoliciesInForce, now_s: float, zone: str) -> str:
    rows = [_row(kind, choice, now_s, zone) for kind, choice in found.policies.items()]
    return markup.page(markup.table(["Policy", "In force", "Set by", "Cluster file"], rows), stale=read.stale)


def _row(kind: str, choice: PolicyChoice, now_s: float, zone: str) -> list[str]:
    by = markup.soft("the cluster file")
    if choice.changed is not None:
        changed = units.moment(choice.changed.since_s, now_s, zone)
        by = f"{markup.strong(choice.changed.who)} {markup.soft(changed)}"
    file = _policy(choice.file.name, choice.file.parameters) if choice.file is not None else units.NONE
    name = f"{markup.strong(kind.replace('_', ' '))}<br>{markup.soft(_DECISIONS.get(kind, ''))}"
    return [name, markup.strong(_policy(choice.name, choice.parameters)), by, markup.soft(file)]


def _form(found: PoliciesInForce, who: str, stale: bool) -> None:
    st.subheader("Change a policy", anchor=False)
    kinds = list(found.choices) or list(found.policies)
    with st.container(border=True, key="policy-form"):
        left, middle, right = st.columns([1, 1.4, 2.4], gap="small", vertical_alignment="top")
        kind = left.selectbox("Kind", kinds, format_func=lambda each: each.replace("_", " "), key="policy_kind")
        names = [*found.choices.get(kind, {}), FROM_FILE]
        now = found.policies[kind].name
        index = names.index(now) if now in names else 0
        name = middle.selectbox("Policy", names, index=index, key=f"policy_name-{kind}")
        parameters = found.choices.get(kind, {}).get(name, ())
        usage = "name: value, name: value. Parameters that are left out have their defaults."
        right.text_input("Parameters", key=_parameters_key(kind, name), disabled=not parameters, help=usage)
        right.caption(f"Parameters: {', '.join(parameters)}" if parameters else "No parameters")
        args = (kind, name, now, who)
        st.button("Change …", key="policy_change", disabled=stale, on_click=_request_change, args=args)
        if error := st.session_state.get(_ERROR):
            st.warning(error, icon=":material/warning:")


def _request_change(kind: str, name: str, before: str, who: str) -> None:
    st.session_state[_ERROR] = ""
    try:
        parameters = parse_parameters(str(st.session_state.get(_parameters_key(kind, name), "")))
    except InvalidRequest as error:
        st.session_state[_ERROR] = error.message
        return
    request_action(policy_action(kind, None if name == FROM_FILE else PolicySpec(name, parameters), before, who))


def _parameters_key(kind: str, name: str) -> str:
    return f"policy_parameters-{kind}-{name}"


def parse_parameters(text: str) -> dict[str, object]:
    """`name: value, name: value` as a dictionary. Raises InvalidRequest."""
    try:
        found = parse_yaml("{" + text + "}", "Parameters")
    except InvalidRequest as error:
        raise InvalidRequest(f"Write parameters as name: value, name: value. {error.message}") from error
    missing = next((name for name, value in found.items() if value is None), None)
    if missing is not None:
        raise InvalidRequest(f"Write parameters as name: value. {missing!r} has no value.")
    return dict(found)


def _policy(name: str, parameters: Mapping[str, object]) -> str:
    """A policy with its parameters in a line."""
    words = ", ".join(f"{key} = {_shortened(value)}" for key, value in parameters.items())
    return f"{name} ({words})" if words else name


def _followers(read: Read[PoliciesInForce], found: PoliciesInForce) -> None:
    """The processes that do not use the policies in force yet."""
    st.subheader("Processes", anchor=False)
    late, total = [each for each in found.followers if not each.follows], len(found.followers)
    kinds = f"Schedulers apply {', '.join(ROUTING)}; instances apply {', '.join(ENGINE)}."
    if not late:
        all_follow = markup.dot(f"All {total} processes use revision {found.revision}.", markup.GOOD)
        words = all_follow if total else "No process has connected yet."
        st.html(markup.page(words, f"<div>{markup.soft(kinds)}</div>", stale=read.stale))
        return
    rows = [
        [
            markup.strong(each.name),
            markup.text(each.process),
            markup.badge("✕ not yet", markup.BAD),
            markup.text(each.trouble),
        ]
        for each in late[:FOLLOWERS_SHOWN]
    ]
    words = f"{total - len(late)} of {total} processes use revision {found.revision}. {kinds}"
    table = markup.table(["Name", "Process", "Up to date", "Reason"], rows, narrow=True)
    st.html(markup.page(f"<div>{markup.soft(words)}</div>", table, stale=read.stale))


def _shortened(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
