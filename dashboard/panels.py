"""The parts of the page that only show: header, totals, SLO attainment, the audit."""

from collections.abc import Sequence
from typing import Any

import streamlit as st

from dashboard import look, units
from dashboard.dashboard_settings import DashboardSettings
from dashboard.data import Snapshot
from dashboard.reads import Read
from dashboard.records import AuditEntry, ClusterSummary, EventRow, LengthSource, PoliciesInForce, PolicyChoice
from shared.domain.instance import InstanceState, Role
from shared.policy.slo import SloReport

NO_MONITOR = "Nothing to show while the cluster monitor does not answer."


def header(snapshot: Snapshot, settings: DashboardSettings) -> None:
    """The name, the model and whether each service answers."""
    asked: list[tuple[str, str | None]] = [
        ("monitor", snapshot.monitor_error),
        ("scheduler", snapshot.scheduler_error),
        ("gateway", snapshot.gateway.error if snapshot.gateway else None),
        ("predictor", snapshot.predictor.error if snapshot.predictor else None),
    ]
    dots = "".join(
        look.dot(name, look.BAD if error else look.GOOD, error or "answers")
        for name, error in asked
        if error is not None
    )
    model = snapshot.cluster.value.model if snapshot.cluster.value else ""
    live = look.soft(f"refreshed every {settings.refresh_s:g} s")
    parts = f"<b>Polyphase</b>{look.soft(model)}<span class='pp-services'>{dots}{live}</span>"
    st.html(look.page(f'<div class="pp-head">{parts}</div>'))


def outages(snapshot: Snapshot, settings: DashboardSettings, now_s: float) -> None:
    """One notice for each service that does not answer as it should."""
    missing = [
        (
            "The cluster monitor",
            settings.monitor_url,
            snapshot.monitor_error,
            "Instances, SLO attainment, policies and actions wait until it answers. Serving goes on without it.",
            snapshot.monitor_known_s,
        ),
        (
            "The global scheduler",
            settings.scheduler_url,
            snapshot.scheduler_error,
            "Requests wait until it answers.",
            _known(snapshot.requests),
        ),
        (
            "The gateway",
            settings.gateway_url,
            snapshot.gateway.error if snapshot.gateway else "",
            "It takes no requests.",
            None,
        ),
        (
            "The predictor",
            settings.predictor_url,
            snapshot.predictor.error if snapshot.predictor else "",
            "Requests are served without a predicted output length.",
            None,
        ),
    ]
    for name, url, error, meaning, known_s in missing:
        if error:
            outage(name, url, error, meaning, known_s, now_s)


def outage(name: str, url: str, error: str, meaning: str, known_s: float | None, now_s: float) -> None:
    """One service does not answer as it should; `known_s`: of when what is still shown of it is, if anything is."""
    said = error.replace("`", "'")  # it ends no block of code
    known = "" if known_s is None else f" In grey: what it said {units.ago(known_s, now_s)}."
    st.error(
        f"**{name} at `{url}` does not answer as it should.** {meaning}{known}\n\n```text\n{said}\n```",
        icon=":material/cloud_off:",
    )


def totals(snapshot: Snapshot, slo_goal: float) -> None:
    """The cluster in five figures, and the policies in force."""
    cluster = snapshot.cluster
    facts = [*_policy_facts(snapshot.policies.value), *_length_facts(snapshot.predictor)]
    if cluster.value is not None:
        st.html(look.page(look.tiles(*_tiles(cluster.value, slo_goal)), stale=cluster.stale))
    if facts:
        line = "".join(f"<span>{look.soft(name)} {look.strong(value)}</span>" for name, value in facts)
        st.html(look.page(f'<div class="pp-facts">{line}</div>', stale=snapshot.policies.stale))


def slo(cluster: Read[ClusterSummary], slo_goal: float) -> None:
    """Attainment of each class over each window, with percentiles."""
    st.subheader("SLO attainment", anchor=False)
    if cluster.value is None:
        st.html(look.empty(NO_MONITOR))
        return
    if not any(report.requests for report in cluster.value.slo):
        st.html(look.empty("No request has ended within the windows."))
        return
    heads = ["Class", "Window", "Requests", "Targets", "Both met", "TTFT met", "TPOT met"]
    heads += ["TTFT p50 / p90 / p99", "TPOT p50 / p90 / p99"]
    rows = [_slo_row(report, slo_goal) for report in cluster.value.slo]
    st.html(look.page(look.table(heads, rows), stale=cluster.stale))


def audit(flips: Read[list[AuditEntry]], now_s: float) -> None:
    """Flips, drains and resumes, whoever did them."""
    st.subheader("Flips, drains and resumes", anchor=False)
    if flips.value is None:
        st.html(look.empty(NO_MONITOR))
        return
    if not flips.value:
        st.html(look.empty("Nobody has flipped, drained or resumed an instance yet."))
        return
    heads = ["When", "What", "Instance", "By", "Drain", "Flip", "Total", "Result"]
    rows = [_audit_row(entry, now_s) for entry in flips.value]
    st.html(look.page(look.table(heads, rows), stale=flips.stale))


def events(read: Read[list[EventRow]], now_s: float) -> None:
    """What happened to the instances, whoever looked."""
    st.subheader("Events", anchor=False)
    if read.value is None:
        st.html(look.empty(NO_MONITOR))
        return
    if not read.value:
        st.html(look.empty("Nothing has happened yet."))
        return
    rows = [_event_row(event, now_s) for event in read.value]
    st.html(look.page(look.table(["When", "What", "Instance", ""], rows), stale=read.stale))


def attainment_now(reports: Sequence[SloReport]) -> tuple[float | None, int, float]:
    """Attainment over all classes in the shortest window, its number of requests, its length in seconds."""
    window_s = min((report.window_s for report in reports), default=0.0)
    counted = [r for r in reports if r.window_s == window_s and r.requests and r.attainment is not None]
    requests = sum(report.requests for report in counted)
    if not requests:
        return None, 0, window_s
    return sum((r.attainment or 0.0) * r.requests for r in counted) / requests, requests, window_s


def _known(read: Read[Any]) -> float | None:
    return read.read_s if read.value is not None else None


def _attained(value: float | None, goal: float) -> tuple[str, str]:
    """Attainment in words, and the colour of what they mean."""
    if value is None or value >= goal:
        return units.share(value), look.GOOD
    return f"{units.share(value)}, below {units.share(goal)}", look.BAD


def _tiles(cluster: ClusterSummary, slo_goal: float) -> list[str]:
    met, requests, window_s = attainment_now(cluster.slo)
    total = {name: units.count(value) for name, value in cluster.totals.items()}
    running, waiting = total.get("running", "0"), total.get("waiting", "0")
    ended = "no request ended lately"
    if requests:
        ended = f"{units.count(requests)} requests, last {units.duration(window_s)}"
    low = met is not None and met < slo_goal
    goal = f"; the goal is {units.share(slo_goal)}" if low else ""
    return [
        *(_role_tile(cluster, role) for role in Role),
        look.tile("Jobs in flight", total.get("inflight", "0"), f"{running} running, {waiting} waiting"),
        look.tile(
            "Queued for prefill",
            f"{total.get('queued_prefill_tokens', '0')} tokens",
            f"of {total.get('queued_prefill', '0')} jobs",
        ),
        look.tile("SLO attainment now", units.share(met), ended + goal, look.BAD if low else ""),
    ]


def _role_tile(cluster: ClusterSummary, role: Role) -> str:
    states = cluster.instances.get(role.value, {})
    others = [s for s in InstanceState if s is not InstanceState.READY and states.get(s)]
    note = ", ".join(f"{states[state]} {state.value}" for state in others)
    value = f"{cluster.count(role, InstanceState.READY)} of {cluster.count(role)}"
    gone = states.get(InstanceState.DEAD, 0) + states.get(InstanceState.UNRESPONSIVE, 0)
    name = f"{role.value.capitalize()} instances ready"
    return look.tile(name, value, note or "none in another state", look.BAD if gone else "")


def _policy_facts(policies: PoliciesInForce | None) -> list[tuple[str, str]]:
    if policies is None:
        return []
    facts = [(kind.replace("_", " ").capitalize(), _policy(choice)) for kind, choice in policies.policies.items()]
    late = [f"{one.name}: {one.trouble}" if one.trouble else one.name for one in policies.followers if not one.follows]
    return [*facts, *([("Not followed by", ", ".join(late))] if late else [])]


def _policy(choice: PolicyChoice) -> str:
    parameters = ", ".join(f"{name} = {value}" for name, value in choice.parameters.items())
    name = f"{choice.name} ({parameters})" if parameters else choice.name
    return f"{name}, by {choice.changed.who}" if choice.changed else name


def _length_facts(lengths: Read[LengthSource] | None) -> list[tuple[str, str]]:
    if lengths is None or lengths.value is None:
        return []
    source, seen = lengths.value.source, lengths.value.observed.observations
    said = "classifier" if source == "classifier" else f"observed lengths ({units.count(seen)} answers seen)"
    if lengths.value.checkpoint.state == "broken":
        said += " – its checkpoint is broken"
    elif lengths.value.fallen_back:
        said += " – the classifier is not believed"
    return [("Output lengths from", said)]


def _slo_row(report: SloReport, goal: float) -> list[str]:
    shares = (report.attainment, report.ttft_attainment, report.tpot_attainment)
    met = [look.bar("", value, *_attained(value, goal)) for value in shares]
    percentiles = [
        " / ".join(look.text(units.duration(figures.get(p))) for p in ("p50", "p90", "p99"))
        for figures in (report.ttft_s, report.tpot_s)
    ]
    targets = f"{units.duration(report.ttft_target_s)} / {units.duration(report.tpot_target_s)}"
    about = (units.duration(report.window_s), units.count(report.requests), targets)
    return [look.strong(report.slo), *(look.text(value) for value in about), *met, *percentiles]


def _audit_row(entry: AuditEntry, now_s: float) -> list[str]:
    what = f"{entry.kind} {entry.from_role} → {entry.to_role}" if entry.kind == "flip" else entry.kind
    colour = {"succeeded": look.GOOD, "failed": look.BAD}.get(entry.result, look.CAUTION)
    result = look.badge(entry.result, colour) + (f" {look.soft(entry.error)}" if entry.error else "")
    times = (units.duration(value) for value in (entry.drain_s, entry.flip_s, entry.total_s))
    when = look.soft(units.ago(entry.started_s, now_s))
    return [when, look.text(what), look.strong(entry.instance_id), look.soft(entry.who), *times, result]


def _event_row(event: EventRow, now_s: float) -> list[str]:
    colour = look.BAD if event.kind in _TROUBLE else look.CAUTION if event.kind.endswith("_refused") else look.IDLE
    what = look.badge(event.kind.replace("_", " "), colour)
    return [look.soft(units.ago(event.time_s, now_s)), what, look.strong(event.instance_id), look.text(event.text)]


_TROUBLE = ("death", "unresponsive", "operation_failed")
