"""The Requests page: a search over requests, and one request in full with its story, waterfall and figures. The
chat page reuses the view of one request.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from dashboard import figures, frame, look, units
from dashboard.console import REQUEST, Console, addressed
from dashboard.frame import clickable, clicked
from dashboard.reads import Read
from dashboard.records import Found, FoundRow
from shared.domain.job import Phase
from shared.explain import Sentence, explain
from shared.timeline import RequestTimeline, Span, SpanRecord
from shared.wire.messages import JobReport


@dataclass(frozen=True, slots=True)
class Story:
    """What happened in a sentence, and step by step as HTML."""

    headline: str
    steps: str


def story(timeline: RequestTimeline) -> Story:
    """Of one request."""
    told = explain(timeline)
    return Story(told.headline, "".join(map(_step, told.steps)))


def _step(step: Sentence) -> str:
    colour = f' style="--c:{look.SPAN_COLOUR[step.span]}"' if step.span is not None else ""
    at = "" if step.at_s is None else f"{'+' if step.at_s >= 0 else '−'}{units.duration(abs(step.at_s))}"
    figures = ", ".join(f"{name} {_figure(value)}" for name, value in step.figures.items())
    more = f"<details><summary>figures</summary><code>{look.text(figures)}</code></details>" if figures else ""
    moment = f'<span class="pp-at">{look.text(at)}</span>'
    return f'<div class="pp-sentence"{colour}>{moment}{look.text(step.text)}{more}</div>'


def _figure(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if value == round(value) else f"{value:.4g}"


_NAMES = {Span.DECODE_QUEUE: "decode queue"}
_ROW_PX, _FRAME_PX = 30, 96


def waterfall(timeline: RequestTimeline) -> go.Figure:
    """A bar for each span, in milliseconds since the arrival; a line where the first token left."""
    spans = sorted(timeline.spans, key=lambda span: (span.started_s, span.ended_s))
    figure = go.Figure()
    for place, span in enumerate(spans):
        figure.add_trace(_bar(place, span, timeline.arrived_s))
    if timeline.first_token_s:
        figure.add_vline(
            x=_ms(timeline.first_token_s, timeline.arrived_s),
            line_width=1.5,
            line_dash="dot",
            line_color=look.IDLE,
            annotation_text="first token",
            annotation_position="top",
            annotation_font_size=11,
        )
    moments_ms = [_ms(moment, timeline.arrived_s) for span in spans for moment in (span.started_s, span.ended_s)]
    first_ms, last_ms = min([0.0, *moments_ms]), max([1e-3, *moments_ms])
    figure.update_layout(
        height=_FRAME_PX + _ROW_PX * max(1, len(spans)),
        margin={"l": 8, "r": 8, "t": 26, "b": 8},
        showlegend=False,
        bargap=0.35,
        font_size=12,
    )
    figure.update_xaxes(
        title_text="ms since arrival", range=[first_ms, last_ms + 0.12 * (last_ms - first_ms)], zeroline=False
    )
    figure.update_yaxes(
        tickvals=list(range(len(spans))),
        ticktext=[label(span) for span in spans],
        range=[len(spans) - 0.5, -0.5],
        showgrid=False,
        automargin=True,
    )
    return figure


def label(span: SpanRecord) -> str:
    """What the span is called, where it was, and at which attempt if not the first."""
    parts = [_NAMES.get(span.span, span.span.value), span.instance_id]
    if span.attempt > 1:
        parts.append(f"attempt {span.attempt}")
    return look.text(" · ".join(part for part in parts if part))


def _bar(place: int, span: SpanRecord, arrived_s: float) -> go.Bar:
    length_s = max(0.0, span.ended_s - span.started_s)
    said = units.duration(length_s)
    return go.Bar(
        orientation="h",
        y=[place],
        base=[_ms(span.started_s, arrived_s)],
        x=[length_s * 1000],
        marker={"color": look.SPAN_COLOUR[span.span], "line": {"width": 0}, "cornerradius": 3},
        text=[said],
        textposition="auto",
        insidetextanchor="middle",
        cliponaxis=False,
        hovertemplate=f"{label(span)}<br>{said}<br>from %{{base:.1f}} ms<extra></extra>",
    )


def _ms(moment_s: float, arrived_s: float) -> float:
    return (moment_s - arrived_s) * 1000


def one(console: Console, job_id: str) -> None:
    """The page of one; it refreshes itself until the request has ended."""
    read = console.api.timeline(job_id).result()
    ended = read.value is not None and bool(read.value.ended_s)
    st.fragment(_live, run_every=None if ended else console.settings.refresh_s)(console, job_id, ended)


def _live(console: Console, job_id: str, ended: bool) -> None:
    api = console.api
    asked = api.request(job_id), api.timeline(job_id)
    row, timeline = asked[0].result(), asked[1].result()
    if not ended and timeline.value is not None and timeline.value.ended_s:
        st.rerun()  # it will not change any more: no refresh is needed
    unknown = row.value is None and timeline.value is None
    known = [one for one in (row, timeline) if one.value is not None or unknown]
    services = [frame.of_scheduler(console, *known)]
    frame.header(console, "Requests", services, every_s=0.0 if not ended else frame.NEVER_S)
    console.link("requests", "All requests", icon=":material/arrow_back:")
    if timeline.value is None:
        st.html(look.page(f"<h2>{look.text(job_id)}</h2>", _row(row), _row_figures(row)))
        st.html(look.empty(timeline.error))
        return
    draw(timeline.value, row, console, "waterfall")


def draw(timeline: RequestTimeline, row: Read[JobReport], console: Console, key: str) -> None:
    """Headline, figures, waterfall, sentences, and links to where it was."""
    told = story(timeline)
    st.html(look.page(f'<div class="pp-story">{look.strong(told.headline)}</div>', _row(row), summary(timeline)))
    st.plotly_chart(waterfall(timeline), key=key, config=figures.SMALL)
    st.html(look.page(told.steps))
    places = dict.fromkeys(span.instance_id for span in timeline.spans if span.instance_id)
    if places:
        with st.container(horizontal=True, vertical_alignment="center"):
            st.html(look.page(look.soft("It was on")), width="content")
            console.instance_links(places)


def summary(timeline: RequestTimeline) -> str:
    """The figures of the request, in a line."""
    return look.facts(
        [
            ("request", timeline.job_id),
            ("outcome", timeline.outcome or "under way"),
            ("prompt", f"{timeline.prompt_tokens} tokens"),
            ("output", f"{timeline.output_tokens} tokens"),
            ("TTFT", units.duration(timeline.ttft_s)),
            ("TPOT", units.duration(timeline.tpot_s)),
            ("longest gap", units.duration(timeline.longest_gap_s if timeline.gaps else None)),
            ("JCT", units.duration(timeline.jct_s)),
        ]
    )


def _row(read: Read[JobReport]) -> str:
    row = read.value
    if row is None:
        return ""
    met = {True: look.badge("✓ SLO met", look.GOOD), False: look.badge("✕ SLO missed", look.BAD), None: ""}
    split = f"split at {row.split} of {row.prompt_tokens} prompt tokens" if row.split else ""
    arrived = f"arrived {units.ago(row.arrived_s, time.time())}"
    words = " · ".join(filter(None, (f"class {row.slo}", f"phase {row.phase.value}", arrived, split)))
    return f"<div>{met[row.slo_met]} {look.soft(words)}</div>"


def _row_figures(read: Read[JobReport]) -> str:
    row = read.value
    if row is None:
        return ""
    return look.facts(
        [
            ("prefill", row.prefill_instance or units.NONE),
            ("decode", row.decode_instance or units.NONE),
            ("prompt", f"{row.prompt_tokens} tokens"),
            ("output", f"{row.output_tokens} tokens"),
        ]
    )


ANY = "any"
TABLE = "requests"
ORDERS = {
    "slowest_ttft": "slowest TTFT",
    "slowest_tpot": "slowest TPOT",
    "longest_gap": "longest gap",
    "longest": "longest",
    "newest": "newest",
}
MISSED = {ANY: "", "missed": "true", "met": "false"}
WITHIN = {"15 min": 900.0, "1 h": 3600.0, "24 h": 86_400.0, "ever": 0.0}
_ROUND_S = 60.0  # so that a read a period serves all
_TEXTS = {"job": "Request id", "caller": "Key", "instance": "Instance", "slo": "Class", "outcome": "Outcome"}


def requests(console: Console) -> None:
    """One run of the page."""
    job_id = addressed(REQUEST)
    if job_id:
        one(console, job_id)
    else:
        asked = {name: addressed(name) for name in (*_TEXTS, "missed", "order", "phase")}
        st.fragment(_search, run_every=max(5.0, console.settings.refresh_s))(console, asked)


def params_of(state: Mapping[str, Any], now_s: float, limit: int) -> dict[str, str | int | float]:
    """What to ask of the scheduler, out of what the form's fields hold."""
    params: dict[str, str | int | float] = {
        name: str(state.get(name, "")).strip() for name in _TEXTS if str(state.get(name, "")).strip()
    }
    missed = MISSED.get(str(state.get("missed", ANY)), "")
    phase = str(state.get("phase", ANY))
    within_s = WITHIN[str(state.get("within") or "1 h")]
    params |= {"missed": missed} if missed else {}
    params |= {"phase": phase} if phase not in ("", ANY) else {}
    params |= {"since": (now_s - within_s) // _ROUND_S * _ROUND_S} if within_s and "job" not in params else {}
    skipped = int(state.get("offset", 0))
    return {**params, "order": state.get("order") or "slowest_ttft", "limit": limit, "offset": skipped}


def _search(console: Console, asked: Mapping[str, str]) -> None:
    opened = clicked(TABLE)
    if opened is not None:
        console.open("requests", request=opened)
    now_s, limit = time.time(), console.settings.requests_shown
    state = {name: st.session_state.get(_key(name, asked), value) for name, value in _first(asked).items()}
    filters = tuple(value for name, value in state.items() if name != "offset")
    if st.session_state.get("search-filters") != filters:  # another search begins with its first rows
        st.session_state["search-filters"], st.session_state[_key("offset", asked)], state["offset"] = filters, 0, 0
    read = console.api.search(params_of(state, now_s, limit)).result()
    frame.header(console, "Requests", [frame.of_scheduler(console, read)], every_s=max(5.0, console.settings.refresh_s))
    _form(asked)
    found: Read[Found] = read
    if found.value is None:
        st.html(look.empty("Nothing to show while the global scheduler does not answer."))
        return
    if not found.value.rows:
        st.html(look.empty("No such request."))
        return
    with st.container(key="requests-stale" if read.stale else "requests-box"):
        clickable(
            table(found.value.rows, now_s), [row.job_id for row in found.value.rows], TABLE, column_config=_COLUMNS
        )
    _pages(found.value, _key("offset", asked), int(state["offset"]), limit)


def _first(asked: Mapping[str, str]) -> dict[str, Any]:
    """What the form's fields hold before anybody has touched them: what the address says."""
    missed = next((name for name, value in MISSED.items() if value and value == asked["missed"]), ANY)
    order = asked["order"] if asked["order"] in ORDERS else "slowest_ttft"
    phase = asked["phase"] if asked["phase"] in list(Phase) else ANY
    texts = {name: asked[name] for name in _TEXTS}
    return {**texts, "missed": missed, "order": order, "phase": phase, "within": "1 h", "offset": 0}


def _key(name: str, asked: Mapping[str, str]) -> str:
    """Of a field: another address has fields of its own."""
    return f"search-{name}-{'-'.join(asked.values())}"


def _form(asked: Mapping[str, str]) -> None:
    first = _first(asked)
    columns = st.columns(len(_TEXTS), gap="small")
    for column, (name, said) in zip(columns, _TEXTS.items(), strict=True):
        column.text_input(said, value=first[name], key=_key(name, asked), placeholder=ANY)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        orders, phases = list(ORDERS), [ANY, *(phase.value for phase in Phase)]
        st.selectbox(
            "First",
            orders,
            index=orders.index(first["order"]),
            format_func=lambda order: ORDERS[order],
            key=_key("order", asked),
            width=170,
        )
        st.selectbox("Phase", phases, index=phases.index(first["phase"]), key=_key("phase", asked), width=170)
        st.segmented_control("SLO", list(MISSED), default=first["missed"], required=True, key=_key("missed", asked))
        st.segmented_control("Within", list(WITHIN), default="1 h", required=True, key=_key("within", asked))


def _pages(found: Found, key: str, skipped: int, limit: int) -> None:
    with st.container(horizontal=True, vertical_alignment="center"):
        st.caption(f"{skipped + 1} to {skipped + len(found.rows)}. A click on one opens it.", width="content")
        st.button(
            "Before", key="page-before", disabled=not skipped, on_click=_turn, args=(key, max(0, skipped - limit))
        )
        st.button("After", key="page-after", disabled=not found.more, on_click=_turn, args=(key, skipped + limit))


def _turn(key: str, skipped: int) -> None:
    st.session_state[key] = skipped


def table(rows: Sequence[FoundRow], now_s: float) -> pd.DataFrame:
    """One line a request."""
    return pd.DataFrame(
        [
            {
                "request": row.job_id,
                "arrived": units.ago(row.arrived_s, now_s),
                "key": row.caller,
                "SLO": row.slo + {True: " ✓ met", False: " ✕ missed", None: ""}[row.slo_met],
                "TTFT ms": None if row.ttft_s is None else row.ttft_s * 1000,
                "TPOT ms": None if row.tpot_s is None else row.tpot_s * 1000,
                "longest gap ms": None if row.longest_gap_s is None else row.longest_gap_s * 1000,
                "phase": row.phase.value,
                "outcome": row.outcome,
                "prefill": row.prefill_instance or units.NONE,
                "decode": row.decode_instance or units.NONE,
                "prompt": row.prompt_tokens,
                "split": row.split,
                "output": row.output_tokens,
            }
            for row in rows
        ]
    )


_COLUMNS = {
    "request": st.column_config.TextColumn(width="medium"),
    "TTFT ms": st.column_config.NumberColumn(format="%.1f"),
    "TPOT ms": st.column_config.NumberColumn(format="%.1f"),
    "longest gap ms": st.column_config.NumberColumn(format="%.1f"),
}
