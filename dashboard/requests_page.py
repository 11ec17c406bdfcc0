"""The Requests page: a search over requests; `?request=ID` shows one with its explanation, waterfall and figures, and
moves it while it decodes. The Try it page reuses the view of one request.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import pandas as pd
import streamlit as st

from dashboard import layout, markup, units
from dashboard.actions import Action, Call, confirm_pending, is_busy, request_action, show_results
from dashboard.answers import INSTANCES, REQUEST, REQUEST_SEARCH, TIMELINE
from dashboard.api import Api, Read
from dashboard.console import REQUEST_ID, Console, address_parameter
from dashboard.instance_page import operation_success
from shared.domain.instance import InstanceState, Role
from shared.domain.job import Phase
from shared.explain import Sentence, explain
from shared.timeline import RequestTimeline, Span, SpanRecord
from shared.wire.api import Operation
from shared.wire.api.scheduler import RequestPage, RequestRow

ANY = "any"
ANYWHERE = "another instance"
ORDERS = {
    "slowest_ttft": "slowest TTFT",
    "slowest_tpot": "slowest TPOT",
    "longest_gap": "longest gap",
    "longest": "longest answer",
    "newest": "newest",
}
MISSED = {ANY: "", "missed": "true", "met": "false"}
WITHIN = {"15 min": 900.0, "1 h": 3600.0, "24 h": 86_400.0, "all": 0.0}  # seconds; 0: no limit
SINCE_STEP_S = 60.0  # start times are rounded, so that sessions share reads
SLOW_S = 5.0  # refresh period of the search, at least
TICKS = 5  # of the waterfall's times
# Text fields of the search: parameter of `GET /requests/search`, label.
TEXT_FIELDS = {"job": "Request id", "caller": "Key", "instance": "Instance", "slo": "Class", "outcome": "Outcome"}
_COLUMNS = {
    "request": st.column_config.TextColumn(width="medium"),
    **{f"{name} ms": st.column_config.NumberColumn(format="%.1f") for name in ("TTFT", "TPOT", "longest gap")},
}


def requests(console: Console) -> None:
    job_id = address_parameter(REQUEST_ID)
    if job_id:
        _request(console, job_id)
    else:
        address = {name: address_parameter(name) for name in (*TEXT_FIELDS, "missed", "order", "phase")}
        st.fragment(_search, run_every=max(SLOW_S, console.settings.refresh_s))(console, address)


def slowest_requests(api: Api, now_s: float) -> "Future[Read[RequestPage]]":
    """What the search shows before a user changes it."""
    defaults = _defaults(dict.fromkeys((*TEXT_FIELDS, "missed", "order", "phase"), ""))
    return api.read(REQUEST_SEARCH, **search_params(defaults, now_s, api.settings.requests_shown))


def _search(console: Console, address: Mapping[str, str]) -> None:
    now_s, limit = time.time(), console.settings.requests_shown
    defaults = _defaults(address)
    fields = {name: st.session_state.get(_key(name, address), value) for name, value in defaults.items()}
    filters = tuple(value for name, value in fields.items() if name != "offset")
    if st.session_state.get("search-filters") != filters:  # a changed search starts with its first page
        st.session_state["search-filters"] = filters
        st.session_state[_key("offset", address)] = fields["offset"] = 0
    read = console.api.read(REQUEST_SEARCH, **search_params(fields, now_s, limit)).result()
    layout.header(console, "Requests", [read], every_s=max(SLOW_S, console.settings.refresh_s))
    _form(defaults, address)
    if read.value is None:
        st.html(markup.empty("No data: the global scheduler does not answer."))
        return
    if not read.value.rows:
        st.html(markup.empty("No such request."))
        return
    with layout.stale_container("requests-box", read):
        ids = [row.job_id for row in read.value.rows]
        frame = request_frame(read.value.rows, now_s)
        layout.row_table(
            frame, ids, "requests", lambda job_id: console.open("requests", request=job_id), column_config=_COLUMNS
        )
    _paging(read.value, _key("offset", address), int(fields["offset"]), limit)


def search_params(fields: Mapping[str, Any], now_s: float, limit: int) -> dict[str, Any]:
    """The scheduler's parameters for the values of the form. A search by id ignores the time range."""
    texts = {name: str(fields.get(name, "")).strip() for name in TEXT_FIELDS}
    params: dict[str, Any] = {name: text for name, text in texts.items() if text}
    missed, phase = MISSED.get(str(fields.get("missed", ANY)), ""), str(fields.get("phase", ANY))
    within_s = WITHIN[str(fields.get("within") or "1 h")]
    if missed:
        params["missed"] = missed
    if phase not in ("", ANY):
        params["phase"] = phase
    if within_s and "job" not in params:
        params["since"] = (now_s - within_s) // SINCE_STEP_S * SINCE_STEP_S
    order, offset = fields.get("order") or "slowest_ttft", int(fields.get("offset", 0))
    return {**params, "order": order, "limit": limit, "offset": offset}


def _defaults(address: Mapping[str, str]) -> dict[str, Any]:
    """The values of the form before a user changes them: those of the address."""
    missed = next((name for name, value in MISSED.items() if value and value == address["missed"]), ANY)
    order = address["order"] if address["order"] in ORDERS else "slowest_ttft"
    phase = address["phase"] if address["phase"] in list(Phase) else ANY
    texts = {name: address[name] for name in TEXT_FIELDS}
    return {**texts, "missed": missed, "order": order, "phase": phase, "within": "1 h", "offset": 0}


def _key(name: str, address: Mapping[str, str]) -> str:
    """The key of a field's widget: another address has widgets of its own."""
    return f"search-{name}-{'-'.join(address.values())}"


def _form(defaults: Mapping[str, Any], address: Mapping[str, str]) -> None:
    columns = st.columns(len(TEXT_FIELDS), gap="small")
    for column, (name, label) in zip(columns, TEXT_FIELDS.items(), strict=True):
        column.text_input(label, value=defaults[name], key=_key(name, address), placeholder=ANY)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        orders, phases = list(ORDERS), [ANY, *(phase.value for phase in Phase)]
        order, phase = orders.index(defaults["order"]), phases.index(defaults["phase"])
        st.selectbox("Order", orders, order, ORDERS.__getitem__, key=_key("order", address), width=170)
        st.selectbox("Phase", phases, phase, key=_key("phase", address), width=170)
        layout.choice("SLO", list(MISSED), defaults["missed"], _key("missed", address), labelled=True)
        layout.choice("Within", list(WITHIN), "1 h", _key("within", address), labelled=True)


def _paging(page: RequestPage, key: str, offset: int, limit: int) -> None:
    with st.container(horizontal=True, vertical_alignment="center"):
        st.caption(f"{offset + 1} to {offset + len(page.rows)}. Click a row to open the request.", width="content")
        previous, following = max(0, offset - limit), offset + limit
        st.button("Previous", key="page-before", disabled=not offset, on_click=_set, args=(key, previous))
        st.button("Next", key="page-after", disabled=not page.more, on_click=_set, args=(key, following))


def _set(key: str, value: int) -> None:
    st.session_state[key] = value


def request_frame(rows: Sequence[RequestRow], now_s: float) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "request": row.job_id,
                "arrived": units.ago(row.arrived_s, now_s),
                "key": row.caller,
                "SLO": row.slo + {True: " ✓ met", False: " ✕ missed", None: ""}[row.slo_met],
                "TTFT ms": _milliseconds(row.ttft_s),
                "TPOT ms": _milliseconds(row.tpot_s),
                "longest gap ms": _milliseconds(row.longest_gap_s),
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


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def _request(console: Console, job_id: str) -> None:
    """The page of one request, which refreshes until the request has ended."""
    confirm_pending(console)
    read = console.api.read(TIMELINE, job_id).result()
    ended = read.value is not None and bool(read.value.ended_s)
    st.fragment(_live, run_every=None if ended else console.settings.refresh_s)(console, job_id, ended)


def _live(console: Console, job_id: str, ended: bool) -> None:
    futures = console.api.read(REQUEST, job_id), console.api.read(TIMELINE, job_id)
    row, timeline = futures[0].result(), futures[1].result()
    if not ended and timeline.value is not None and timeline.value.ended_s:
        st.rerun()  # without further refreshes
    unknown = row.value is None and timeline.value is None
    reads: list[Read[Any]] = [read for read in (row, timeline) if read.value is not None or unknown]
    layout.header(console, "Requests", reads, every_s=layout.FINAL if ended else 0.0)
    console.link("requests", "All requests", icon=":material/arrow_back:")
    show_results(console, time.time())
    if not ended and row.value is not None and console.account.may_operate:
        _move(console, row)
    if timeline.value is None:
        st.html(markup.page(f"<h2>{markup.text(job_id)}</h2>", _status(row.value), _row_facts(row.value)))
        st.html(markup.empty(timeline.error))
        return
    show_request(timeline.value, row.value, console)


def _move(console: Console, read: Read[RequestRow]) -> None:
    """The button that moves the request while it decodes, and where to."""
    row, instances = read.value, console.api.read(INSTANCES).result()
    if row is None or row.phase is not Phase.DECODE:
        return
    ready = [
        each.instance_id
        for each in instances.value or ()
        if each.role is Role.DECODE and each.state is InstanceState.READY and each.instance_id != row.decode_instance
    ]
    with st.container(horizontal=True, vertical_alignment="bottom"):
        to = st.selectbox("Move to", [ANYWHERE, *ready], key=f"move-to-{row.job_id}", width=220)
        st.button(
            "Move",
            key=f"move-{row.job_id}",
            disabled=read.stale or instances.stale or not ready or is_busy(row.job_id),
            on_click=request_action,
            args=(move_action(row.job_id, "" if to == ANYWHERE else to),),
        )


def move_action(job_id: str, to: str) -> Action:
    """to: an instance; empty: placement chooses one."""

    async def call(call: Call) -> Operation:
        return await call.api.monitor.move(job_id, to=to, who=call.who, operation_id=call.operation_id)

    return Action(
        name=f"Move of {job_id}",
        question=f"Move {job_id} to {to or 'another decode instance'}?",
        consequences="Its gateway copies its KV while the answer goes on, and then switches over. Without room at the "
        "other instance the request stays where it is.",
        call=call,
        success=operation_success,
        target=job_id,
        operation=True,
    )


def show_request(timeline: RequestTimeline, row: RequestRow | None, console: Console) -> None:
    """Headline, figures, waterfall, explanation, and links to the request's instances."""
    explanation = explain(timeline)
    headline = f'<div class="pp-story">{markup.strong(explanation.headline)}</div>'
    st.html(markup.page(headline, _status(row), _timeline_facts(timeline)))
    st.html(waterfall(timeline))
    st.html(markup.page("".join(map(_sentence, explanation.steps))))
    places = dict.fromkeys(span.instance_id for span in timeline.spans if span.instance_id)
    if places:
        with st.container(horizontal=True, vertical_alignment="center"):
            st.html(markup.page(markup.soft("Instances:")), width="content")
            console.instance_links(places)


def _sentence(step: Sentence) -> str:
    colour = f' style="--c:{markup.STAGE[step.span]}"' if step.span is not None else ""
    at = "" if step.at_s is None else f"{'+' if step.at_s >= 0 else '−'}{units.duration(abs(step.at_s))}"
    figures = ", ".join(f"{name} {_figure(value)}" for name, value in step.figures.items())
    more = f"<details><summary>figures</summary><code>{markup.text(figures)}</code></details>" if figures else ""
    moment = f'<span class="pp-at">{markup.text(at)}</span>'
    return f'<div class="pp-sentence"{colour}>{moment}{markup.text(step.text)}{more}</div>'


def _figure(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if value == round(value) else f"{value:.4g}"


def _beside(observed_s: float | None, predicted_s: float | None) -> str:
    """A time, beside what the first placement predicted of it."""
    predicted = f" (predicted {units.duration(predicted_s)})" if predicted_s is not None else ""
    return f"{units.duration(observed_s)}{predicted}"


def _timeline_facts(timeline: RequestTimeline) -> str:
    estimated = timeline.estimated
    return markup.facts(
        [
            ("request", timeline.job_id),
            ("outcome", timeline.outcome or "running"),
            ("prompt", f"{timeline.prompt_tokens} tokens"),
            ("output", f"{timeline.output_tokens} tokens"),
            ("TTFT", _beside(timeline.ttft_s, timeline.predicted_ttft_s)),
            ("TPOT", _beside(timeline.tpot_s, estimated.tpot_s if estimated is not None else None)),
            ("longest gap", units.duration(timeline.longest_gap_s if timeline.gaps else None)),
            ("JCT", units.duration(timeline.jct_s)),
        ]
    )


def _status(row: RequestRow | None) -> str:
    if row is None:
        return ""
    met = {True: markup.badge("✓ SLO met", markup.GOOD), False: markup.badge("✕ SLO missed", markup.BAD), None: ""}
    split = f"split at {row.split} of {row.prompt_tokens} prompt tokens" if row.split else ""
    arrived = f"arrived {units.ago(row.arrived_s, time.time())}"
    words = " · ".join(filter(None, (f"class {row.slo}", f"phase {row.phase.value}", arrived, split)))
    return f"<div>{met[row.slo_met]} {markup.soft(words)}</div>"


def _row_facts(row: RequestRow | None) -> str:
    if row is None:
        return ""
    return markup.facts(
        [
            ("prefill", row.prefill_instance or units.NONE),
            ("decode", row.decode_instance or units.NONE),
            ("prompt", f"{row.prompt_tokens} tokens"),
            ("output", f"{row.output_tokens} tokens"),
        ]
    )


def waterfall(timeline: RequestTimeline) -> str:
    """A bar for each span, over the time since the arrival; a line at the first token."""
    spans = sorted(timeline.spans, key=lambda span: (span.started_s, span.ended_s))
    ends_s = [moment - timeline.arrived_s for span in spans for moment in (span.started_s, span.ended_s)]
    first_s, last_s = min([0.0, *ends_s]), max([1e-6, *ends_s])

    def place(moment_s: float) -> float:
        return 100.0 * (moment_s - first_s) / (last_s - first_s)

    rows = []
    for span in spans:
        start_s, length_s = span.started_s - timeline.arrived_s, max(0.0, span.ended_s - span.started_s)
        label = units.duration(length_s)
        hint = f"{span_label(span)}: {label}, from +{units.duration(start_s)}"
        width = place(start_s + length_s) - place(start_s)
        style = f"--c:{markup.STAGE[span.span]};left:{place(start_s):.2f}%;width:{width:.2f}%"
        bar = f'<i style="{style}"></i><em style="left:{place(start_s + length_s):.2f}%">{markup.text(label)}</em>'
        rows.append(
            f'<span>{markup.text(span_label(span))}</span><div class="pp-track" title="{markup.text(hint)}">{bar}</div>'
        )
    moments_s = [first_s + (last_s - first_s) * tick / (TICKS - 1) for tick in range(TICKS)]
    ticks = "".join(f'<span style="left:{place(at):.1f}%">{units.duration(at)}</span>' for at in moments_s)
    line = ""
    if timeline.first_token_s:
        at = place(timeline.first_token_s - timeline.arrived_s)
        line = f'<b style="left:{at:.2f}%" title="first token"><u>first token</u></b>'
    axis = f'<span></span><div class="pp-times">{ticks}</div><div class="pp-marks">{line}</div>'
    return markup.page(f'<div class="pp-waterfall">{"".join(rows)}{axis}</div>')


def span_label(span: SpanRecord) -> str:
    """The span, its instance, and the attempt unless it is the first."""
    name = "decode queue" if span.span is Span.DECODE_QUEUE else span.span.value
    attempt = f"attempt {span.attempt}" if span.attempt > 1 else ""
    return " · ".join(filter(None, (name, span.instance_id, attempt)))
