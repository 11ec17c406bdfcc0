"""One instance: its card with actions, its history, its recent steps against the step cost, its reported details
and its log.
"""

import json
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import msgspec
import plotly.graph_objects as go
import streamlit as st
from plotly.subplots import make_subplots

from dashboard import figures, frame, look, units
from dashboard.console import Console
from dashboard.events_page import event_table
from dashboard.frame import results
from dashboard.operations import Action, Session, intend
from dashboard.reads import Read
from dashboard.records import POINTS, RANGES, InstanceColumns, InstanceHistory, InstanceRow
from shared import palette
from shared.domain.instance import InstanceState, Role


def card(row: InstanceRow, rows: Sequence[InstanceRow], console: Console, session: Session, stale: bool) -> None:
    """What it does at the moment, a link to its page, and its buttons."""
    with st.container(border=True, key=f"card-{row.instance_id}"):
        st.html(look.page(head(row), engine(row), load(row), kv(row), stale=stale))
        with st.container(horizontal=True, vertical_alignment="center"):
            console.link("instances", "Open", icon=":material/chevron_right:", instance=row.instance_id)
            buttons(row, rows, console, session, stale)


def head(row: InstanceRow) -> str:
    """Its name, role and state."""
    state = look.dot(row.operation or row.state.value, look.STATE_COLOUR[row.state], row.death)
    role = look.badge(row.role.value, look.ROLE_COLOUR[row.role])
    parts = f'{look.strong(row.instance_id)}{role}<span class="pp-state">{state}</span>'
    return f'<div class="pp-card-head">{parts}</div>'


def engine(row: InstanceRow) -> str:
    """What runs there, on what."""
    info = row.info
    if row.emulated:
        name = look.badge("EMULATED", look.CAUTION, loud=True)
    else:
        name = look.text(f"{info.compatibility.engine} {info.compatibility.engine_version}")
    degrees = (("TP", info.tensor_parallel), ("PP", info.pipeline_parallel))
    parallel = "".join(f", {name} {degree}" for name, degree in degrees if degree > 1)
    return f"<div>{name} {look.soft(f'{info.accelerator}, {info.dtype}{parallel}')}</div>"


def load(row: InstanceRow) -> str:
    """Its jobs."""
    now = row.load
    return look.grid(
        [
            ("running", units.count(now.running)),
            ("waiting", units.count(now.waiting)),
            ("queued tokens", units.count(now.queued_prefill_tokens)),
            ("in flight", units.count(now.inflight)),
            ("decoding", units.count(now.decoding)),
            ("staged", units.size(now.staged_bytes)),
        ]
    )


def kv(row: InstanceRow) -> str:
    """Its KV memory, or why there is none."""
    if row.state is InstanceState.DEAD:
        return look.soft(row.death or "its connection is gone")
    return look.bar("KV", row.kv_usage, units.share(row.kv_usage), look.ROLE_COLOUR[row.role])


def buttons(row: InstanceRow, rows: Sequence[InstanceRow], console: Console, session: Session, stale: bool) -> None:
    """Drain, resume and flip; none for those who may only look."""
    if not console.account.may_operate:
        return
    draining = row.state is InstanceState.DRAINING
    for action, fits in ((Action.DRAIN, not draining), (Action.RESUME, draining), (Action.FLIP, True)):
        label = f"Flip to {row.role.other.value}" if action is Action.FLIP else action.capitalize()
        st.button(
            label,
            key=f"{action}-{row.instance_id}",
            disabled=stale or not (row.operable and fits),
            on_click=session.want,
            args=(intend(action, row, rows),),
        )


COLUMNS = 3


def past(found: InstanceHistory, columns: InstanceColumns, zone: str) -> go.Figure:
    """Six panels."""
    height = 2 * figures.PANEL_PX + figures.GAP_PX
    drawn = make_subplots(rows=2, cols=COLUMNS, vertical_spacing=figures.GAP_PX / height, horizontal_spacing=0.045)
    x = figures.local(found.time_s, zone)
    panels = [
        ("KV in use", [(columns.kv_used, "", look.BAD, "solid")]),
        (
            "Jobs",
            [(columns.running, "running", look.DECODE, "solid"), (columns.waiting, "waiting", look.CAUTION, "solid")],
        ),
        ("Prompt tokens that wait", [(columns.queued_prefill_tokens, "tokens", look.PREFILL, "solid")]),
        ("Jobs in flight", [(columns.inflight, "jobs", "#8a63c9", "solid")]),
        ("KV that waits to be fetched", [(columns.staged_bytes, "bytes", look.TRANSFER, "solid")]),
    ]
    titles = []
    for place, (title, lines) in enumerate(panels):
        for values, said, colour, dash in lines:
            drawn.add_trace(figures.line(x, values, said, colour, dash), row=place // 3 + 1, col=place % 3 + 1)
        titles.append(figures.keyed(title, [(said, colour, dash) for _, said, colour, dash in lines if said]))
    drawn.add_trace(_role_and_state(found, columns, zone), row=2, col=3)
    titles.append("<b>Role</b>  " + _role_key())
    figures.arrange(drawn, 2)
    drawn.update_xaxes(range=figures.local([found.from_s, found.to_s], zone))
    drawn.update_yaxes(range=[0, 1.04], tickformat=".0%", row=1, col=1)
    drawn.update_yaxes(showticklabels=False, row=2, col=3)
    figures.name_panels(drawn, titles)
    return drawn


def _role_and_state(found: InstanceHistory, columns: InstanceColumns, zone: str) -> go.Heatmap:
    number = {Role.PREFILL.value: 0.0, Role.DECODE.value: 1.0}
    states = columns.state or [None] * len(columns.role)
    values = [
        None if role is None else -1.0 if state == InstanceState.DEAD.value else number.get(role, -1.0)
        for role, state in zip(columns.role, states, strict=True)
    ]
    said = [f"{role or 'unknown'}, {state or 'unknown'}" for role, state in zip(columns.role, states, strict=True)]
    return go.Heatmap(
        x=figures.local(found.time_s, zone),
        y=[""],
        z=[values],
        text=[said],
        colorscale=palette.ROLES,
        zmin=-1.0,
        zmax=1.0,
        showscale=False,
        hovertemplate="%{text}<extra></extra>",
    )


def _role_key() -> str:
    keys = (("■ prefill", look.PREFILL), ("■ decode", look.DECODE), ("■ gone", look.IDLE))
    return " ".join(f'<span style="color:{colour}">{said}</span>' for said, colour in keys)


NEAR = (0.8, 1.25)  # times of what was expected: as it should be
_HEIGHT_PX = 250


class Step(msgspec.Struct, frozen=True):
    """One step. expected_s: by the cost model or the calibration; learned_s: by what the instance learned since."""

    seconds: float
    prefill_tokens: int = 0
    decodes: int = 0
    expected_s: float | None = None
    learned_s: float | None = None

    @property
    def kind(self) -> str:
        """What was in it."""
        if not self.decodes:
            return "prefill"
        return "both" if self.prefill_tokens else "decode"


def steps(told: Mapping[str, Any]) -> None:
    """A table by kind, and each step as a point; nothing where the instance tells of none."""
    newest = msgspec.convert(told.get("newest", []), list[Step])
    if not newest:
        return
    st.subheader("Steps beside the cost model", anchor=False)
    left, right = st.columns([3, 2], gap="medium")
    with left:
        heads = ["Steps", "Newest", "Tokens", "Decodes", "Measured, p50", "The model expects", "Learned"]
        rows = [_row(kind, [one for one in newest if one.kind == kind]) for kind in ("prefill", "both", "decode")]
        st.html(look.page(look.table(heads, [row for row in rows if row])))
        st.caption(f"Of the newest {len(newest)} of {units.count(told.get('total'))} steps since it started.")
    with right:
        st.plotly_chart(scatter(newest), key="steps-scatter", config=figures.SMALL)


def scatter(newest: Sequence[Step]) -> go.Figure:
    """Expected times to the right, measured ones upwards, in ms, and the line on which they are equal."""
    colour = {"prefill": look.PREFILL, "both": look.TRANSFER, "decode": look.DECODE}
    known = [one for one in newest if one.expected_s is not None]
    most = 1050.0 * max((max(one.seconds, one.expected_s or 0.0) for one in known), default=0.001)
    figure = go.Figure(
        go.Scatter(
            x=[0, most],
            y=[0, most],
            mode="lines",
            line={"color": look.IDLE, "dash": "dot", "width": 1.5},
            hoverinfo="skip",
        )
    )
    for kind, tint in colour.items():
        some = [one for one in known if one.kind == kind]
        figure.add_trace(
            go.Scatter(
                x=[1000 * (one.expected_s or 0.0) for one in some],
                y=[1000 * one.seconds for one in some],
                name=kind,
                mode="markers",
                marker={"color": tint, "size": 6, "opacity": 0.6},
                hovertemplate=f"{kind}: expected %{{x:.1f}}, measured %{{y:.1f}} ms<extra></extra>",
            )
        )
    figure.update_layout(
        height=_HEIGHT_PX,
        margin={"l": 4, "r": 8, "t": 24, "b": 8},
        dragmode=False,
        font_size=11,
        legend={"orientation": "h", "y": 1.14},
    )
    figure.data[0].showlegend = False
    figure.update_xaxes(title_text="expected, ms", range=[0, most], fixedrange=True, zeroline=False)
    figure.update_yaxes(title_text="measured, ms", range=[0, most], fixedrange=True, zeroline=False, automargin=True)
    return figure


def _row(kind: str, some: Sequence[Step]) -> list[str]:
    if not some:
        return []
    measured = median(one.seconds for one in some)
    return [
        look.strong(kind),
        look.text(len(some)),
        look.text(units.count(median(one.prefill_tokens for one in some))),
        look.text(units.count(median(one.decodes for one in some))),
        look.strong(units.duration(measured)),
        _beside(measured, [one.expected_s for one in some]),
        _beside(measured, [one.learned_s for one in some]),
    ]


def _beside(measured_s: float, expected: Sequence[float | None]) -> str:
    known = [one for one in expected if one is not None]
    if not known:
        return units.NONE
    middle = median(known)
    if middle <= 0.0:
        return look.text(units.duration(middle))
    ratio = measured_s / middle
    near = NEAR[0] <= ratio <= NEAR[1]
    mark = look.badge(f"took {ratio:.2f} ×", look.GOOD if near else look.CAUTION)
    return f"{look.text(units.duration(middle))} {mark}"


ROWS = 24  # of a table
_KNOWN = ("known", "instance_id", "started_s", "steps")  # told elsewhere on the page


def details(read: Read[dict[str, Any]], now_s: float) -> None:
    """All of it."""
    if read.value is None:
        st.html(look.empty(f"It tells nothing: {read.error}"))
        return
    told = {name: value for name, value in read.value.items() if name not in _KNOWN}
    plain = {name: value for name, value in told.items() if not isinstance(value, dict | list)}
    parts = [f"<div>{frame.aged(read, now_s)}</div>" if read.stale else "", _facts(plain)]
    for name, value in told.items():
        if isinstance(value, dict | list) and value:
            parts.append(look.below(f"<div>{look.strong(words(name))}</div>", section(value)))
    st.html(look.page(*parts, stale=read.stale))


def section(value: Any) -> str:
    """A dictionary or list as HTML."""
    if isinstance(value, Mapping):
        flat = {name: one for name, one in value.items() if isinstance(one, Mapping) and not _deep(one)}
        table = _table([{"": name, **one} for name, one in flat.items()]) if flat else ""
        plain = _facts({name: one for name, one in value.items() if not isinstance(one, dict | list)})
        below = (
            look.below(look.soft(words(name)), section(one))
            for name, one in value.items()
            if one and (_deep(one) or isinstance(one, list))
        )
        return plain + table + "".join(below)
    rows = [one for one in value if isinstance(one, Mapping)]
    if rows:
        return _table(rows)
    return f"<div>{look.text(', '.join(map(str, value[:ROWS])))}</div>"


def _deep(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(one, dict | list) for one in value.values())


def figure(name: str, value: Any) -> str:
    """A value in the unit that its name tells."""
    if value is None:
        return units.NONE
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name.endswith(("bytes_per_s", "bandwidth")):
        return f"{units.size(value)}/s"
    if name.endswith("_per_s"):
        return f"{value:.3g}/s"
    if name.endswith("_s"):
        return units.span(value) if value >= 120 else units.duration(value)
    if name.endswith("_ms"):
        return units.duration(value / 1000)
    if name.endswith("bytes"):
        return units.size(value)
    if name.endswith(("share", "ratio", "rate")) and 0 <= value <= 1:
        return units.share(value)
    return units.count(value) if float(value).is_integer() else f"{value:.4g}"


def words(name: str) -> str:
    """A field's name for people, without its unit."""
    for unit in ("_bytes_per_s", "_per_s", "_bytes", "_ms", "_s"):
        name = name.removesuffix(unit)
    said = name.replace("_", " ")
    return said[:1].upper() + said[1:]


def _facts(pairs: Mapping[str, Any]) -> str:
    return look.facts([(words(name), figure(name, value)) for name, value in pairs.items()]) if pairs else ""


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    names = list(
        dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, dict | list))
    )
    heads = [words(name) if name else "" for name in names]
    made = [[look.text(figure(name, row.get(name))) for name in names] for row in rows[:ROWS]]
    more = look.soft(f"and {len(rows) - ROWS} more") if len(rows) > ROWS else ""
    return look.narrow(look.table(heads, made)) + more


_FIRST = ("timestamp", "level", "event", "service")


def plain(line: str) -> str:
    """Time of day, level, what happened, then the rest by name; a line that is no record of ours as it is."""
    try:
        record = json.loads(line)
    except ValueError:
        return line
    if not isinstance(record, dict) or "event" not in record:
        return line
    at = str(record.get("timestamp", ""))[11:23]
    rest = " ".join(f"{name}={value}" for name, value in record.items() if name not in _FIRST)
    return f"{at:12} {record.get('level', '')!s:8} {record['event']}{'  ' if rest else ''}{rest}"


SLOW_S = 5.0


def one(console: Console, session: Session, instance_id: str) -> None:
    """The parts of the page, each with a period of its own."""
    refresh_s = console.settings.refresh_s
    st.fragment(_now, run_every=refresh_s)(console, session, instance_id)
    with st.container(horizontal=True, vertical_alignment="bottom", key="range-line"):
        st.subheader("Over time", anchor=False, width="content")
        chosen = st.segmented_control(
            "Range", list(RANGES), default="15 min", required=True, key="range", label_visibility="collapsed"
        )
    minutes = RANGES[chosen or "15 min"]
    every_s = max(refresh_s, min(30.0, minutes * 60.0 / POINTS))
    st.fragment(_past, run_every=every_s)(console, minutes, instance_id)
    st.fragment(_slow, run_every=max(SLOW_S, refresh_s))(console, instance_id)


def _now(console: Console, session: Session, instance_id: str) -> None:
    read, now_s = console.api.instances().result(), time.time()
    frame.header(console, "Instances", [frame.of_monitor(console, read)])
    console.link("instances", "All instances", icon=":material/arrow_back:")
    results(session, console, now_s, {row.instance_id: row.load.inflight for row in read.value or ()})
    if read.value is None:
        st.html(look.empty(frame.NO_MONITOR))
        return
    row = next((row for row in read.value if row.instance_id == instance_id), None)
    if row is None:
        st.html(look.empty(f"The monitor knows of no instance {instance_id!r}."))
        return
    with st.container(key=f"one-{instance_id}"):
        st.html(look.page(head(row), engine(row), stale=read.stale))
        left, right = st.columns(2, gap="medium")
        left.html(look.page(load(row), kv(row), stale=read.stale))
        right.html(look.page(_about(row, now_s), stale=read.stale))
        with st.container(horizontal=True, vertical_alignment="center"):
            buttons(row, read.value, console, session, read.stale)
            console.link("requests", "Its requests", icon=":material/search:", instance=instance_id)
            console.link("events", "Its events", icon=":material/history:", instance=instance_id)


def _about(row: InstanceRow, now_s: float) -> str:
    info = row.info
    started_s = info.generation / 1e9
    pairs = [
        ("in this state", units.span(now_s - row.state_since_s) if row.state_since_s else units.NONE),
        ("process", f"for {units.span(now_s - started_s)}" if started_s > 1e9 else units.NONE),
        ("KV blocks", f"{units.count(info.total_blocks)}, each {info.block_size} tokens"),
        ("chunk", f"{units.count(info.chunk_size)} tokens"),
        ("at most", f"{units.count(info.max_model_len)} tokens"),
        ("HTTP", info.http),
    ]
    return look.grid(pairs)


def _past(console: Console, minutes: int, instance_id: str) -> None:
    read = console.api.instance_history(minutes, POINTS, instance_id).result()
    columns = read.value.instances.get(instance_id) if read.value else None
    if read.value is None or columns is None:
        st.html(look.empty("Nothing is known of its past." if not read.error else frame.NO_MONITOR))
        return
    with st.container(key="past-stale" if read.stale else "past"):
        drawn = past(read.value, columns, figures.zone())
        st.plotly_chart(drawn, key=f"past-{minutes}", config=figures.SMALL)


def _slow(console: Console, instance_id: str) -> None:
    api, now_s = console.api, time.time()
    told, happened, log = api.details(instance_id), api.events(instance=instance_id), api.log(instance_id)
    itself = told.result()
    if itself.value is not None:
        steps(itself.value.get("steps", {}))
    st.subheader("What it tells of itself", anchor=False)
    details(itself, now_s)
    st.subheader("What happened to it", anchor=False)
    event_table(happened.result(), console, now_s, "its-events", most_px=260)
    st.subheader("Log", anchor=False)
    tail = log.result()
    if tail.value is None:
        st.html(look.empty(f"No log: {tail.error}"))
    else:
        said = [plain(line) for line in tail.value.lines[-console.settings.log_lines :]]
        st.code("\n".join(said) or "(empty)", language=None, height=300)
