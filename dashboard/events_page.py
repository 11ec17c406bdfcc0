"""The Events page: the cluster's event log, the audit of operations, and the state of one operation."""

import time
from collections.abc import Sequence
from concurrent.futures import Future

import pandas as pd
import streamlit as st

from dashboard import layout, markup, units
from dashboard.answers import EVENTS, OPERATION, OPERATIONS
from dashboard.api import Api, Read
from dashboard.console import INSTANCE_ID, OPERATION_ID, Console, address_parameter
from dashboard.layout import NO_MONITOR
from shared.wire.api import Event, EventKind, Operation, OperationKind, OperationResult

FAILURES = {
    EventKind.DEATH,
    EventKind.UNRESPONSIVE,
    EventKind.OPERATION_FAILED,
    EventKind.GATEWAY_GONE,
    EventKind.SCHEDULER_GONE,
    EventKind.REQUEST_REFUSED,
    EventKind.PLAN_FAILED,
}
ANY_KIND = "any kind"
WITHIN = {"1 h": 3600.0, "24 h": 86_400.0, "7 d": 604_800.0, "all": 0.0}  # seconds; 0: no limit
DEFAULT_WITHIN = "24 h"
SINCE_STEP_S = 60.0  # start times are rounded, so that sessions share reads
_SIGN = {OperationResult.SUCCEEDED: "✓", OperationResult.RUNNING: "…", OperationResult.REFUSED: "▲"}
_COLOUR = {
    OperationResult.SUCCEEDED: markup.GOOD,
    OperationResult.FAILED: markup.BAD,
    OperationResult.RUNNING: markup.PREFILL,
}


def events(console: Console) -> None:
    st.fragment(_live, run_every=console.settings.refresh_s)(console)


def _live(console: Console) -> None:
    now_s, instance_id = time.time(), address_parameter(INSTANCE_ID)
    kind = "" if _field("kind", ANY_KIND) == ANY_KIND else _field("kind", ANY_KIND)
    instance, within = _field("instance", instance_id).strip(), _field("within", DEFAULT_WITHIN)
    newest = newest_events(console.api, now_s, kind, instance, within)
    audit = console.api.read(OPERATIONS, limit=console.settings.flips_shown)
    read, operations = newest.result(), audit.result()
    layout.header(console, "Events", [read, operations])
    _chosen_operation(console, now_s)
    st.subheader("Events", anchor=False)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.selectbox("Kind", [ANY_KIND, *(each.value for each in EventKind)], key=_key("kind"), width=220)
        st.text_input("Instance", value=instance_id, key=_key("instance"), width=220)
        layout.choice("Within", list(WITHIN), DEFAULT_WITHIN, _key("within"), labelled=True)
    event_table(read, console, now_s, "events")
    st.subheader("Flips, drains, resumes and moves", anchor=False)
    _audit(operations, console, now_s)


def newest_events(
    api: Api, now_s: float, kind: str = "", instance: str = "", within: str = DEFAULT_WITHIN
) -> "Future[Read[list[Event]]]":
    """Events of that kind and instance; empty for any."""
    within_s = WITHIN[within]
    since_s = (now_s - within_s) // SINCE_STEP_S * SINCE_STEP_S if within_s else 0.0
    return api.read(EVENTS, limit=api.settings.events_shown, kind=kind, instance=instance, since=since_s)


def event_table(read: Read[list[Event]], console: Console, now_s: float, key: str, *, max_px: int = 560) -> None:
    """Events, newest first; a click opens the request, operation or instance of the event."""
    if read.value is None:
        st.html(markup.empty(NO_MONITOR))
    elif not read.value:
        st.html(markup.empty("No such event."))
    else:
        with layout.stale_container(f"{key}-box", read):
            layout.row_table(
                event_frame(read.value, now_s, layout.time_zone()),
                [link_of(event) for event in read.value],
                key,
                lambda link: _open(link, console),
                max_px=max_px,
                column_config={"text": st.column_config.TextColumn(width="large")},
            )


def link_of(event: Event) -> str:
    """What a click on the event opens: `request:ID`, `operation:ID`, `instance:ID`; empty for nothing."""
    links = (("request", event.job_id), ("operation", event.operation_id), ("instance", event.instance_id))
    return next((f"{kind}:{value}" for kind, value in links if value), "")


def _open(link: str, console: Console) -> None:
    kind, _, name = link.partition(":")
    match kind:
        case "request":
            console.open("requests", request=name)
        case "operation":
            console.open("events", operation=name)
        case "instance":
            console.open("instances", instance=name)


def event_frame(events: Sequence[Event], now_s: float, zone: str) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "time": units.moment(event.time_s, now_s, zone),
                "event": kind_label(event.kind),
                "instance": event.instance_id,
                "text": event.text,
            }
            for event in events
        ]
    )


def kind_label(kind: EventKind) -> str:
    """The kind in words, with a sign for failures and warnings."""
    sign = "✕ " if kind in FAILURES else "▲ " if kind.endswith(("_refused", "_fallback")) else ""
    return sign + kind.replace("_", " ")


def _chosen_operation(console: Console, now_s: float) -> None:
    """The state of the operation in the address or the field below."""
    wanted = str(st.session_state.get(_operation_key(), address_parameter(OPERATION_ID))).strip()
    if not wanted:
        return
    read = console.api.read(OPERATION, wanted).result()
    if read.value is None:
        st.html(markup.empty(f"Operation {wanted}: {read.error}"))
        return
    st.html(markup.page(_operation(read.value, now_s), stale=read.stale))
    with st.container(horizontal=True):
        if read.value.job_id:
            console.link("requests", read.value.job_id, icon=":material/search:", request=read.value.job_id)
        if read.value.instance_id:
            console.instance_links([read.value.instance_id])


def _operation(operation: Operation, now_s: float) -> str:
    colour = _COLOUR.get(operation.result, markup.CAUTION)
    what = f"{markup.strong(_what(operation))} of {markup.strong(operation.subject)}"
    pairs = [
        ("operation", operation.operation_id),
        ("by", operation.who),
        ("started", units.ago(operation.started_s, now_s)),
        ("drain", units.duration(operation.drain_s)),
        ("flip", units.duration(operation.flip_s)),
        ("total", units.duration(operation.total_s)),
    ]
    reasons = "".join(f"<div>{markup.text(text)}</div>" for text in (operation.why, operation.error) if text)
    head = f"<div>{markup.badge(operation.result, colour)} {what}</div>"
    return f'<div class="pp-sentence" style="--c:{colour}">{head}{markup.facts(pairs)}{reasons}</div>'


def _audit(read: Read[list[Operation]], console: Console, now_s: float) -> None:
    st.text_input("Look up an operation id", value=address_parameter(OPERATION_ID), key=_operation_key(), width=340)
    if read.value is None:
        st.html(markup.empty(NO_MONITOR))
    elif not read.value:
        st.html(markup.empty("No flips, drains, resumes or moves yet."))
    else:
        with layout.stale_container("audit-box", read):
            layout.row_table(
                operation_frame(read.value, now_s, layout.time_zone()),
                [operation.operation_id for operation in read.value],
                "audit",
                lambda operation_id: console.open("events", operation=operation_id),
                max_px=420,
            )


def operation_frame(operations: Sequence[Operation], now_s: float, zone: str) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "time": units.moment(each.started_s, now_s, zone),
                "action": _what(each),
                "instance": each.instance_id,
                "request": each.job_id,
                "by": each.who,
                "result": f"{_SIGN.get(each.result, '✕')} {each.result}",
                "reason": each.why or each.error,
                "drain": units.duration(each.drain_s),
                "flip": units.duration(each.flip_s),
                "total": units.duration(each.total_s),
                "operation": each.operation_id,
            }
            for each in operations
        ]
    )


def _what(operation: Operation) -> str:
    if operation.kind is OperationKind.FLIP:
        return f"flip {operation.from_role} → {operation.to_role}"
    if operation.kind is OperationKind.MOVE:
        return f"move to {operation.to_instance or 'another instance'}"
    return operation.kind.value


def _key(name: str) -> str:
    """The key of a filter's widget: another address has widgets of its own."""
    return f"events-{name}-{address_parameter(INSTANCE_ID)}"


def _field(name: str, default: str) -> str:
    value = st.session_state.get(_key(name), default)
    return default if value is None else str(value)


def _operation_key() -> str:
    return f"operation-{address_parameter(OPERATION_ID)}"
