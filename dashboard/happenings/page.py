"""The page Events: what happened, the audit of operations, and how one operation stands."""

import time

import streamlit as st

from dashboard import figures, frame, look, units
from dashboard.console import INSTANCE, OPERATION, Console, addressed
from dashboard.happenings.rows import audit_frame, event_table, follow
from dashboard.reads import Read
from dashboard.records import AuditEntry
from dashboard.tables import clickable, clicked

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
