"""One request's time as a waterfall, and why it went that way."""

from collections.abc import Sequence

import plotly.graph_objects as go

from dashboard import look, units
from shared.domain.kv import TransferOutcome, TransferReport
from shared.domain.route import Reason
from shared.timeline import Decision, RequestTimeline, Span, SpanRecord

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


def summary(timeline: RequestTimeline) -> str:
    """The figures of the request, in a line."""
    facts = (
        ("request", timeline.job_id),
        ("outcome", timeline.outcome or units.NONE),
        ("prompt", f"{timeline.prompt_tokens} tokens"),
        ("output", f"{timeline.output_tokens} tokens"),
        ("TTFT", units.duration(timeline.ttft_s)),
        ("TPOT", units.duration(timeline.tpot_s)),
        ("JCT", units.duration(timeline.jct_s)),
    )
    line = "".join(f"<span>{look.soft(name)} {look.strong(value)}</span>" for name, value in facts)
    return look.page(f'<div class="pp-facts">{line}</div>')


def explanation(timeline: RequestTimeline) -> str:
    """Each decision with its reasons, and how each transfer went."""
    transfers = (t for t in timeline.transfers if t.outcome is not TransferOutcome.LOCAL)
    decisions = (_decision(decision, timeline.arrived_s) for decision in timeline.decisions)
    return look.page(*decisions, *(_transfer(transfer) for transfer in transfers))


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


def _decision(decision: Decision, arrived_s: float) -> str:
    chosen = f" → {look.strong(decision.chosen)}" if decision.chosen else ""
    at = look.soft(f" at {_ms(decision.time_s, arrived_s):.1f} ms")
    return f'<div class="pp-why">{look.text(decision.kind)}{chosen}{at}{_reasons(decision.reasons)}</div>'


def _reasons(reasons: Sequence[Reason]) -> str:
    lines = (f"{look.text(reason.what)} <code>{_figures(reason)}</code>" for reason in reasons)
    return "".join(f"<div>{line}</div>" for line in lines)


def _figures(reason: Reason) -> str:
    return look.text(", ".join(f"{name} {_figure(value)}" for name, value in reason.figures.items()))


def _figure(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if value == round(value) else f"{value:.4g}"


def _transfer(transfer: TransferReport) -> str:
    taken_s = transfer.ended_s - transfer.started_s
    said = f"{transfer.tokens} tokens, {units.size(transfer.wire_bytes)}"
    if taken_s > 0:
        said += f" in {units.duration(taken_s)} ({units.size(transfer.wire_bytes / taken_s)}/s)"
    error = f"<div>{look.text(transfer.error)}</div>" if transfer.error else ""
    outcome = look.strong(transfer.outcome.value)
    return f'<div class="pp-why">transfer: {outcome} {look.soft(said)}{error}</div>'


def _ms(moment_s: float, arrived_s: float) -> float:
    return (moment_s - arrived_s) * 1000
