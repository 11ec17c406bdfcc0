"""The Events page: the event log, the audit of operations, and the progress of one operation. Other pages reuse its
tables of events.
"""

import time
from collections.abc import Sequence
from datetime import datetime
from zoneinfo import ZoneInfo

import pandas as pd
import streamlit as st

from dashboard import figures, frame, look, units
from dashboard.console import INSTANCE, OPERATION, Console, addressed
from dashboard.frame import clickable, clicked
from dashboard.reads import Read
from dashboard.records import AuditEntry, EventRow

TROUBLE = (
    "death",
    "unresponsive",
    "operation_failed",
    "gateway_gone",
    "scheduler_gone",
    "request_refused",
    "plan_failed",
)
_SIGN = {"succeeded": "✓", "running": "…", "refused": "▲", "failed": "✕"}


def event_table(read: Read[list[EventRow]], console: Console, now_s: float, key: str, *, most_px: int = 560) -> None:
    """What happened, newest first; a click opens the request, operation or instance that it concerns."""
    opened = clicked(key)
    if opened is not None:
        follow(opened, console)
    if read.value is None:
        st.html(look.empty(frame.NO_MONITOR))
        return
    if not read.value:
        st.html(look.empty("Nothing of that kind has happened."))
        return
    with st.container(key=f"{key}-stale" if read.stale else f"{key}-box"):
        clickable(
            events_frame(read.value, now_s, figures.zone()),
            [target(event) for event in read.value],
            key,
            most_px=most_px,
            column_config={"text": st.column_config.TextColumn(width="large")},
        )


def target(event: EventRow) -> str:
    """What a click on it opens."""
    for kind, value in (("request", event.job_id), ("operation", event.operation_id), ("instance", event.instance_id)):
        if value:
            return f"{kind}:{value}"
    return ""


def follow(opened: str, console: Console) -> None:
    """Go there."""
    kind, _, name = opened.partition(":")
    match kind:
        case "request":
            console.open("requests", request=name)
        case "operation":
            console.open("events", operation=name)
        case "instance":
            console.open("instances", instance=name)


def events_frame(events: Sequence[EventRow], now_s: float, zone: str) -> pd.DataFrame:
    """One line an event."""
    return pd.DataFrame(
        [
            {
                "when": moment(event.time_s, now_s, zone),
                "what": kind_words(event.kind),
                "instance": event.instance_id,
                "text": event.text,
            }
            for event in events
        ]
    )


def audit_frame(entries: Sequence[AuditEntry], now_s: float, zone: str) -> pd.DataFrame:
    """One line an operation."""
    return pd.DataFrame(
        [
            {
                "when": moment(entry.started_s, now_s, zone),
                "what": f"flip {entry.from_role} → {entry.to_role}" if entry.kind == "flip" else entry.kind,
                "instance": entry.instance_id,
                "by": entry.who,
                "result": f"{_SIGN.get(entry.result, '?')} {entry.result}",
                "why": entry.why or entry.error,
                "drain": units.duration(entry.drain_s),
                "flip": units.duration(entry.flip_s),
                "total": units.duration(entry.total_s),
                "operation": entry.operation_id,
            }
            for entry in entries
        ]
    )


def kind_words(kind: str) -> str:
    """A kind of event for people, with a sign for trouble."""
    sign = "✕ " if kind in TROUBLE else "▲ " if kind.endswith(("_refused", "_fallback")) else ""
    return sign + kind.replace("_", " ")


def moment(time_s: float, now_s: float, zone: str) -> str:
    """The reader's own time of day, with the date where it is not today's, and how long ago."""
    then, now = (datetime.fromtimestamp(one, ZoneInfo(zone)) for one in (time_s, now_s))
    said = then.strftime("%H:%M:%S" if then.date() == now.date() else "%d %b %H:%M")
    return f"{said} ({units.ago(time_s, now_s)})"


KINDS = (
    "death",
    "unresponsive",
    "recovered",
    "registered",
    "restarted",
    "returned",
    "left",
    "forgotten",
    "registration_refused",
    "policy_flip",
    "operation_refused",
    "operation_failed",
    "policies_changed",
    "demand_shift",
    "verdict",
    "predictor_fallback",
    "predictor_recovered",
    "gateway_gone",
    "gateway_returned",
    "scheduler_gone",
    "scheduler_returned",
    "request_refused",
    "plan_proposed",
    "plan_accepted",
    "plan_refused",
    "plan_withdrawn",
    "plan_applied",
    "plan_failed",
)  # as the monitor names them
ANY = "any kind"
WITHIN = {"1 h": 3600.0, "24 h": 86_400.0, "7 d": 604_800.0, "ever": 0.0}
_ROUND_S = 60.0  # so that a read a period serves all
AUDIT = "audit"


def events(console: Console) -> None:
    """One run of the page."""
    st.fragment(_live, run_every=console.settings.refresh_s)(console)


def _live(console: Console) -> None:
    api, now_s = console.api, time.time()
    filters = {
        name: st.session_state.get(f"events-{name}-{addressed(INSTANCE)}", default)
        for name, default in (("kind", ANY), ("instance", addressed(INSTANCE)), ("within", "24 h"))
    }
    within_s = WITHIN[filters["within"] or "24 h"]
    since_s = (now_s - within_s) // _ROUND_S * _ROUND_S if within_s else 0.0
    kind = "" if filters["kind"] == ANY else filters["kind"]
    happened, flips = api.events(kind=kind, instance=filters["instance"].strip(), since=since_s), api.flips()
    read, audit = happened.result(), flips.result()
    frame.header(console, "Events", [frame.of_monitor(console, read, audit)])
    _operation(console, now_s)
    st.subheader("What happened", anchor=False)
    _filters(addressed(INSTANCE))
    event_table(read, console, now_s, "events")
    st.subheader("Flips, drains and resumes", anchor=False)
    _audit(audit, console, now_s)


def _filters(instance_id: str) -> None:
    with st.container(horizontal=True, vertical_alignment="bottom"):
        st.selectbox("Kind", [ANY, *KINDS], key=f"events-kind-{instance_id}", width=220)
        st.text_input("Instance", value=instance_id, key=f"events-instance-{instance_id}", width=220)
        st.segmented_control("Within", list(WITHIN), default="24 h", required=True, key=f"events-within-{instance_id}")


def _operation(console: Console, now_s: float) -> None:
    wanted = str(st.session_state.get(_operation_key(), addressed(OPERATION))).strip()
    if not wanted:
        return
    read = console.api.operation(wanted).result()
    if read.value is None:
        st.html(look.empty(f"Operation {wanted}: {read.error}"))
        return
    st.html(look.page(standing(read.value, now_s), stale=read.stale))
    with st.container(horizontal=True):
        console.instance_links([read.value.instance_id])


def _operation_key() -> str:
    return f"operation-{addressed(OPERATION)}"


def standing(entry: AuditEntry, now_s: float) -> str:
    """How an operation stands, as HTML."""
    colour = {"succeeded": look.GOOD, "failed": look.BAD, "running": look.PREFILL}.get(entry.result, look.CAUTION)
    what = f"flip {entry.from_role} → {entry.to_role}" if entry.kind == "flip" else entry.kind
    head = f"{look.badge(entry.result, colour)} {look.strong(what)} of {look.strong(entry.instance_id)}"
    pairs = [
        ("operation", entry.operation_id),
        ("by", entry.who),
        ("begun", units.ago(entry.started_s, now_s)),
        ("drain", units.duration(entry.drain_s)),
        ("flip", units.duration(entry.flip_s)),
        ("total", units.duration(entry.total_s)),
    ]
    said = "".join(f"<div>{look.text(text)}</div>" for text in (entry.why, entry.error) if text)
    return f'<div class="pp-sentence" style="--c:{colour}"><div>{head}</div>{look.facts(pairs)}{said}</div>'


def _audit(read: Read[list[AuditEntry]], console: Console, now_s: float) -> None:
    asked = addressed(OPERATION)
    st.text_input("One of them by its operation id", value=asked, key=_operation_key(), width=340)
    opened = clicked(AUDIT)
    if opened is not None:
        follow(f"operation:{opened}", console)
    if read.value is None:
        st.html(look.empty(frame.NO_MONITOR))
    elif not read.value:
        st.html(look.empty("Nobody has flipped, drained or resumed an instance yet."))
    else:
        with st.container(key="audit-stale" if read.stale else "audit-box"):
            ids = [entry.operation_id for entry in read.value]
            clickable(audit_frame(read.value, now_s, figures.zone()), ids, AUDIT, most_px=420)
