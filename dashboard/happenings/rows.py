"""Events and operations as rows that lead to what they concern."""

from collections.abc import Sequence
from datetime import datetime
from zoneinfo import ZoneInfo

import pandas as pd
import streamlit as st

from dashboard import figures, frame, look, units
from dashboard.console import Console
from dashboard.reads import Read
from dashboard.records import AuditEntry, EventRow
from dashboard.tables import clickable, clicked

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
