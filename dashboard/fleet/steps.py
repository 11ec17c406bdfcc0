"""An instance's newest steps beside what its cost model and what it has learned expect of them."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import msgspec
import plotly.graph_objects as go
import streamlit as st

from dashboard import figures, look, units

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
