"""One request's time as a waterfall."""

import plotly.graph_objects as go

from dashboard import look, units
from shared.timeline import RequestTimeline, Span, SpanRecord

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
