"""Parts for one instance, and its page: the card with action buttons, its history, its engine's steps against the step
cost, its reported details and its log.
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from statistics import median
from typing import Any, Literal

import streamlit as st

from dashboard import charts, layout, markup, units
from dashboard.actions import Action, Call, count_jobs, is_busy, request_action, show_results
from dashboard.answers import DETAILS, EVENTS, INSTANCE_HISTORY, INSTANCES, LOG, PREDICTIONS
from dashboard.api import Read
from dashboard.charts import POINTS, Line, Panel
from dashboard.console import Console
from dashboard.events_page import event_table
from dashboard.layout import NO_MONITOR
from shared.domain.estimated import ErrorFigures
from shared.domain.instance import InstanceState
from shared.domain.rates import StepForm
from shared.wire.api import Operation, OperationKind
from shared.wire.api.monitor import InstanceColumns, InstanceHistory, InstanceRow
from shared.wire.api.scheduler import InstanceErrors
from shared.wire.api.worker import MonitoredDetails, Step, Steps

InstanceOperation = Literal[OperationKind.FLIP, OperationKind.DRAIN, OperationKind.RESUME]
SLOW_S = 5.0  # refresh period of details, events and log, at least
AS_EXPECTED = (0.8, 1.25)  # measured over expected step time


def instance_action(
    kind: InstanceOperation, row: InstanceRow, rows: Sequence[InstanceRow], drain_timeout_s: float
) -> Action:
    """A flip, drain or resume of `row`, one of `rows`, with all data-parallel ranks of its instance."""
    instance_id, role, other = row.info.whole, row.role.value, row.role.other.value
    ranks = {each.instance_id: each for each in (row, *rows) if each.info.whole == instance_id}
    inflight = jobs_by_instance(ranks.values())[instance_id]
    of_ranks = f" It has {len(ranks)} data-parallel ranks, all of which do so." if len(ranks) > 1 else ""
    jobs, limit = count_jobs(inflight), f"at most {units.duration(drain_timeout_s)}"
    match kind:
        case OperationKind.FLIP:
            question = f"Flip {instance_id} from {role} to {other}?"
            drain = f"The instance first drains {jobs} ({limit})" if inflight else "The instance has no jobs to drain"
            consequences = f"{drain}. It then changes its role and accepts {other} work.{of_ranks}"
        case OperationKind.DRAIN:
            question = f"Drain {instance_id}?"
            work = f"finishes {jobs} (the drain takes {limit})" if inflight else "has no jobs to finish"
            until = f"It stays drained until it is resumed.{of_ranks}"
            consequences = f"The instance accepts no new {role} work and {work}. {until}"
        case OperationKind.RESUME:
            question = f"Resume {instance_id}?"
            consequences = f"The instance accepts new {role} work again.{of_ranks}"

    async def call(call: Call) -> Operation:
        monitor, force, who, operation_id = call.api.monitor, call.force, call.who, call.operation_id
        match kind:
            case OperationKind.DRAIN:
                drain = monitor.drain(
                    instance_id, force=force, timeout_s=drain_timeout_s, who=who, operation_id=operation_id
                )
                return await drain
            case OperationKind.RESUME:
                return await monitor.resume(instance_id, who=who, operation_id=operation_id)
            case OperationKind.FLIP:
                flip = monitor.flip(
                    instance_id, force=force, drain_timeout_s=drain_timeout_s, who=who, operation_id=operation_id
                )
                return await flip

    ready = {each.instance_id for each in rows if each.role is row.role and each.state is InstanceState.READY}
    warning = ""
    if row.instance_id in ready and ready <= ranks.keys() and kind is not OperationKind.RESUME:
        warning = (
            f"{instance_id} is the last ready {role} instance. Without it requests wait or fail. "
            f"The monitor refuses this {kind} unless it is forced."
        )
    return Action(
        name=f"{kind.capitalize()} of {instance_id}",
        question=question,
        consequences=consequences,
        call=call,
        success=operation_success,
        target=instance_id,
        force_warning=warning,
        operation=True,
        drains=kind is not OperationKind.RESUME,
    )


def jobs_by_instance(rows: Iterable[InstanceRow]) -> Counter[str]:
    """Jobs in flight of each instance, over all its data-parallel ranks."""
    jobs: Counter[str] = Counter()
    for row in rows:
        jobs[row.info.whole] += row.load.inflight
    return jobs


def operation_success(operation: Operation) -> str:
    drain = f"Drain {units.duration(operation.drain_s)}" if operation.drain_s is not None else "No drain"
    match operation.kind:
        case OperationKind.FLIP:
            flip = f"flip {units.duration(operation.flip_s)}" if operation.flip_s is not None else "flip time unknown"
            roles = f"is now {operation.to_role} (was {operation.from_role})"
            return f"{operation.instance_id} {roles}. {drain}, {flip}."
        case OperationKind.DRAIN:
            return f"{operation.instance_id} is drained and accepts no new work. {drain}."
        case OperationKind.RESUME:
            return f"{operation.instance_id} accepts {operation.to_role} work again."
        case OperationKind.MOVE:
            to = operation.to_instance or "another instance"
            shown = "its explanation shows whether its gateway has moved it"
            return f"{operation.instance_id} lets {operation.job_id} move to {to}; {shown}."


def errors_by_instance(console: Console) -> dict[str, InstanceErrors]:
    """How true the scheduler's estimates were lately; empty while it does not answer."""
    read = console.api.read_optional(PREDICTIONS)
    predictions = read.result().value if read is not None else None
    return {each.instance_id: each for each in predictions.instances} if predictions is not None else {}


def card(
    row: InstanceRow, rows: Sequence[InstanceRow], errors: InstanceErrors | None, console: Console, stale: bool
) -> None:
    """The state of an instance, a link to its page, and its buttons."""
    with st.container(border=True, key=f"card-{row.instance_id}"):
        st.html(markup.page(_head(row), _engine(row), _load(row), _kv(row), _predicted(errors), stale=stale))
        with st.container(horizontal=True, vertical_alignment="center"):
            console.link("instances", "Open", icon=":material/chevron_right:", instance=row.instance_id)
            _buttons(row, rows, console, stale)


def instance(console: Console, instance_id: str) -> None:
    """The page of one instance; its parts refresh at their own periods."""
    refresh_s = console.settings.refresh_s
    st.fragment(_now, run_every=refresh_s)(console, instance_id)
    minutes = layout.range_heading("Over time", console.api)
    every_s = max(refresh_s, min(30.0, minutes * 60.0 / POINTS))
    st.fragment(_history, run_every=every_s)(console, minutes, instance_id)
    st.fragment(_reports, run_every=max(SLOW_S, refresh_s))(console, instance_id)


def _now(console: Console, instance_id: str) -> None:
    read, now_s = console.api.read(INSTANCES).result(), time.time()
    layout.header(console, "Instances", [read])
    console.link("instances", "All instances", icon=":material/arrow_back:")
    show_results(console, now_s, jobs_by_instance(read.value or ()))
    if read.value is None:
        st.html(markup.empty(NO_MONITOR))
        return
    row = next((row for row in read.value if row.instance_id == instance_id), None)
    if row is None:
        st.html(markup.empty(f"The monitor knows no instance {instance_id!r}."))
        return
    with st.container(key=f"instance-{instance_id}"):
        st.html(markup.page(_head(row), _engine(row), stale=read.stale))
        left, right = st.columns(2, gap="medium")
        errors = errors_by_instance(console).get(instance_id)
        left.html(markup.page(_load(row), _kv(row), _predicted(errors), stale=read.stale))
        right.html(markup.page(_properties(row, now_s), stale=read.stale))
        with st.container(horizontal=True, vertical_alignment="center"):
            _buttons(row, read.value, console, read.stale)
            console.link("requests", "Requests", icon=":material/search:", instance=instance_id)
            console.link("events", "Events", icon=":material/history:", instance=instance_id)


def _head(row: InstanceRow) -> str:
    state = markup.dot(row.operation or row.state.value, markup.STATE[row.state], row.death)
    role = markup.badge(row.role.value, markup.ROLE[row.role])
    parts = f'{markup.strong(row.instance_id)}{role}<span class="pp-state">{state}</span>'
    return f'<div class="pp-card-head">{parts}</div>'


def _engine(row: InstanceRow) -> str:
    info = row.info
    if row.emulated:
        name = markup.badge("EMULATED", markup.CAUTION, outlined=True)
    else:
        name = markup.text(f"{info.compatibility.engine} {info.compatibility.engine_version}")
    degrees = (("TP", info.tensor_parallel), ("PP", info.pipeline_parallel))
    parallel = "".join(f", {name} {degree}" for name, degree in degrees if degree > 1)
    precision = f" ({info.precision} weights)" if info.precision else ""
    return f"<div>{name} {markup.soft(f'{info.accelerator}, {info.dtype}{precision}{parallel}')}</div>"


def _load(row: InstanceRow) -> str:
    load = row.load
    return markup.grid(
        [
            ("running", units.count(load.running)),
            ("waiting", units.count(load.waiting)),
            ("queued tokens", units.count(load.queued_prefill_tokens)),
            ("in flight", units.count(load.inflight)),
            ("decoding", units.count(load.decoding)),
            ("staged", units.size(load.staged_bytes)),
        ]
    )


def _kv(row: InstanceRow) -> str:
    """The KV memory in use, or why the instance is dead."""
    if row.state is InstanceState.DEAD:
        return markup.soft(row.death or "its connection is lost")
    return markup.bar("KV", row.kv_usage, units.share(row.kv_usage), markup.ROLE[row.role])


def _predicted(errors: InstanceErrors | None) -> str:
    """How far the last estimates were off, by the median."""
    if errors is None:
        return ""
    known = (("TTFT", errors.ttft), ("TPOT", errors.tpot))
    said = " · ".join(f"{name} {off_by(figures)}" for name, figures in known if figures is not None)
    return f"<div>{markup.soft(f'predictions off by: {said}')}</div>"


def off_by(figures: ErrorFigures | None) -> str:
    """The median and the 90th percentile of the absolute errors."""
    if figures is None:
        return units.NONE
    return f"{units.share(figures.median)} (p90 {units.share(figures.p90)})"


def _properties(row: InstanceRow, now_s: float) -> str:
    info = row.info
    started_s = info.generation / 1e9
    return markup.grid(
        [
            ("time in this state", units.span(now_s - row.state_since_s) if row.state_since_s else units.NONE),
            ("uptime", units.span(now_s - started_s) if started_s > 1e9 else units.NONE),
            ("KV blocks", f"{units.count(info.total_blocks)} of {info.block_size} tokens"),
            ("chunk size", f"{units.count(info.chunk_size)} tokens"),
            ("longest request", f"{units.count(info.max_model_len)} tokens"),
            ("HTTP", info.http),
        ]
    )


def _buttons(row: InstanceRow, rows: Sequence[InstanceRow], console: Console, stale: bool) -> None:
    """Drain, resume and flip; none for read-only accounts."""
    if not console.account.may_operate:
        return
    draining = row.state is InstanceState.DRAINING
    kinds: tuple[tuple[InstanceOperation, bool], ...] = (
        (OperationKind.DRAIN, not draining),
        (OperationKind.RESUME, draining),
        (OperationKind.FLIP, True),
    )
    for kind, allowed in kinds:
        st.button(
            f"Flip to {row.role.other.value}" if kind is OperationKind.FLIP else kind.capitalize(),
            key=f"{kind}-{row.instance_id}",
            disabled=stale or not (row.operable and allowed) or is_busy(row.info.whole),
            on_click=request_action,
            args=(instance_action(kind, row, rows, console.settings.drain_timeout_s),),
        )


def _history(console: Console, minutes: int, instance_id: str) -> None:
    params: dict[str, Any] = {"minutes": minutes, "points": POINTS, "instance": instance_id}
    read = console.api.read(INSTANCE_HISTORY, fresh_s=minutes * 60.0 / POINTS, **params).result()
    columns = read.value.instances.get(instance_id) if read.value else None
    if read.value is None or columns is None:
        st.html(markup.empty(NO_MONITOR if read.error else "No history of this instance yet."))
        return
    zone = layout.time_zone()
    state = f"instance {instance_id} {minutes} {read.value.to_s} {zone}"
    with layout.stale_container("past", read):
        st.html(charts.cached_chart(state, partial(history_charts, read.value, columns, zone)))


def history_charts(history: InstanceHistory, columns: InstanceColumns, zone: str) -> str:
    jobs = [Line(columns.running, "running", markup.DECODE), Line(columns.waiting, "waiting", markup.CAUTION)]
    panels = [
        Panel("KV in use", [Line(columns.kv_used, "", markup.BAD)], share=True),
        Panel("Jobs", jobs),
        Panel("Queued prompt tokens", [Line(columns.queued_prefill_tokens, "tokens", markup.PREFILL)]),
        Panel("Jobs in flight", [Line(columns.inflight, "jobs", charts.JOBS_COLOUR)]),
        Panel("Exported KV, not yet fetched", [Line(columns.staged_bytes, "bytes", markup.TRANSFER)]),
        Panel("Role", strip=columns),
    ]
    return charts.panel_grid(history.time_s, (history.from_s, history.to_s), panels, zone)


def _reports(console: Console, instance_id: str) -> None:
    api, now_s = console.api, time.time()
    details_read, log_read = api.read(DETAILS, instance_id), api.read(LOG, instance_id, lines=api.settings.log_lines)
    events = api.read(EVENTS, limit=api.settings.events_shown, instance=instance_id).result()
    details, log = details_read.result(), log_read.result()
    if details.value is not None:
        _steps(details.value.steps)
    st.subheader("Details", anchor=False)
    _details(details, now_s)
    st.subheader("Events", anchor=False)
    event_table(events, console, now_s, "its-events", max_px=260)
    st.subheader("Log", anchor=False)
    if log.value is None:
        st.html(markup.empty(f"No log: {log.error}"))
        return
    lines = [log_line(line) for line in log.value.lines[-console.settings.log_lines :]]
    st.html(markup.page(f'<div class="pp-log">{markup.text(chr(10).join(lines) or "(empty)")}</div>'))


def _steps(steps: Steps) -> None:
    """A table by kind of step, and each step as a point; nothing where the instance reports none."""
    newest = steps.newest
    if not newest:
        return
    st.subheader("Engine steps and step cost", anchor=False)
    colours = {"prefill": markup.PREFILL, "both": markup.TRANSFER, "decode": markup.DECODE}
    by_kind = {kind: [step for step in newest if step.kind == kind] for kind in colours}
    left, right = st.columns([3, 2], gap="medium")
    with left:
        heads = ["Steps", "Number", "Tokens", "Decodes", "Measured, p50", "Expected", "Learned"]
        st.html(markup.page(markup.table(heads, [_step_row(kind, some) for kind, some in by_kind.items() if some])))
        st.caption(f"The newest {len(newest)} of {units.count(steps.total)} steps since the start.")
    groups = {}
    for kind, some in by_kind.items():
        known = [step for step in some if step.expected_s is not None]
        expected, measured = (
            [1000 * (step.expected_s or 0.0) for step in known],
            [1000 * step.seconds for step in known],
        )
        groups[kind] = (colours[kind], expected, measured)
    right.html(charts.against_expected(groups, ("expected, ms", "measured, ms"), 220))


def _step_row(kind: str, steps: Sequence[Step]) -> list[str]:
    measured_s = median(step.seconds for step in steps)
    return [
        markup.strong(kind),
        markup.text(len(steps)),
        markup.text(units.count(median(step.prefill_tokens for step in steps))),
        markup.text(units.count(median(step.decodes for step in steps))),
        markup.strong(units.duration(measured_s)),
        _compared(measured_s, [step.expected_s for step in steps]),
        _compared(measured_s, [step.learned_s for step in steps]),
    ]


def _compared(measured_s: float, expected: Sequence[float | None]) -> str:
    """The median of the expected times, and the measured time over it."""
    known = [value for value in expected if value is not None]
    if not known:
        return units.NONE
    middle_s = median(known)
    if middle_s <= 0.0:
        return markup.text(units.duration(middle_s))
    ratio = measured_s / middle_s
    colour = markup.GOOD if AS_EXPECTED[0] <= ratio <= AS_EXPECTED[1] else markup.CAUTION
    return f"{markup.text(units.duration(middle_s))} {markup.badge(f'measured {ratio:.2f} ×', colour)}"


def _details(read: Read[MonitoredDetails], now_s: float) -> None:
    if read.value is None:
        st.html(markup.empty(f"No details: {read.error}"))
        return
    age = f"<div>{layout.age(read, now_s)}</div>" if read.stale else ""
    st.html(markup.page(age, details_html(read.value), stale=read.stale))


def details_html(details: MonitoredDetails) -> str:
    """Versions, prefix cache, step cost, and the speeds of link and codecs, as far as they are known."""
    prefixes, link = details.prefixes, details.link
    facts: list[tuple[str, object]] = [
        ("uptime", units.span(details.uptime_s)),
        ("restarts", details.restarts),
        ("preemptions", units.count(details.preemptions)),
        ("prefix blocks", f"{units.count(prefixes.blocks)} of {prefixes.block_tokens} tokens"),
        ("cached prompt tokens", f"{units.count(prefixes.hit_tokens)} of {units.count(prefixes.asked_tokens)}"),
    ]
    if details.drafted_tokens:
        accepted = f"{units.count(details.accepted_tokens)} of {units.count(details.drafted_tokens)}"
        facts.append(("accepted drafted tokens", accepted))
    if (learned := details.rates.learned) is not None and learned.gain != 1.0:
        facts.append(("tokens of a decode step", f"{learned.gain:.2f}"))
    if link is not None:
        facts.append(("link", f"{units.size(link.bytes_s)}/s, latency {units.duration(link.latency_s)}"))
        speeds = {**link.slow, **{f"coded {name}": speed for name, speed in link.coded.items()}}
        facts += [(f"link, {name}", f"{units.size(speed)}/s") for name, speed in speeds.items()]
    for name, codec in details.codecs.items():
        speeds_text = f"encodes {units.size(codec.encode_bytes_s)}/s, decodes {units.size(codec.decode_bytes_s)}/s"
        facts.append((name, speeds_text))
    costs = (("at the start", details.rates.at_start), ("learned", details.rates.learned))
    rows = [_cost_row(f"{kind}, {source}", getattr(rates, kind)) for source, rates in costs if rates for kind in _KINDS]
    table = markup.below(markup.table(_COST_HEADS, rows, narrow=True)) if rows else ""
    return markup.facts(list(details.versions.items())) + markup.facts(facts) + table


_KINDS = ("prefill", "decode", "mixed")
_COST_HEADS = ("Step cost", "Fixed", "Prompt token", "per token before it", "Decode", "Context token", "Error", "Steps")


def _cost_row(name: str, form: StepForm) -> list[str]:
    times_s = (form.fixed_s, form.token_s, form.position_s, form.sequence_s, form.context_s)
    cells = [*map(units.duration, times_s), units.share(form.error), units.count(form.steps)]
    return [markup.strong(name), *map(markup.text, cells)]


def log_line(line: str) -> str:
    """A structured log record as time of day, level, event and fields; other lines unchanged."""
    try:
        record = json.loads(line)
    except ValueError:
        return line
    if not isinstance(record, dict) or "event" not in record:
        return line
    shown = ("timestamp", "level", "event", "service")
    fields = " ".join(f"{name}={value}" for name, value in record.items() if name not in shown)
    at = str(record.get("timestamp", ""))[11:23]
    return f"{at:12} {record.get('level', '')!s:8} {record['event']}{'  ' if fields else ''}{fields}"
