"""The Predictor page: the source of output length predictions and the reason for it, and how predictions compare
with actual lengths.
"""

from collections.abc import Sequence

import plotly.graph_objects as go
import streamlit as st

from dashboard import frame, look, units
from dashboard.console import Console
from dashboard.reads import Read
from dashboard.records import CLASSIFIER, CheckpointStatus, LengthSource, Reality

_HEIGHT_PX = 320
_SOURCES = {CLASSIFIER: "The classifier", "observed": "Observed lengths"}


def output_lengths(read: Read[LengthSource]) -> None:
    """In words, and as a cloud of points."""
    st.subheader("Output lengths", anchor=False)
    if read.value is None:
        st.html(look.empty("Nothing to show while the predictor does not answer."))
        return
    found, recent = read.value, read.value.reality.recent
    if found.fallen_back:
        st.warning(warning(found), icon=":material/warning:")
    if not recent:
        st.html(look.page(*_words(found), stale=read.stale))
        return
    left, right = st.columns([3, 2], gap="medium")
    with left:
        st.html(look.page(*_words(found), stale=read.stale))
    with right:
        st.caption(f"Tokens of the last {len(recent)} answers; on the line, the prediction was right")
        st.plotly_chart(scatter(recent), key="lengths-scatter", config={"displayModeBar": False})


def warning(found: LengthSource) -> str:
    """What stands above everything while the classifier is not to answer."""
    why = _plain(found.why[:1].upper() + found.why[1:])
    if not why and found.checkpoint.state == "broken":
        why = "Its checkpoint cannot be used."
    return f"**Predictions have fallen back on observed lengths.** {why or 'The predictor does not say why.'}"


def because(found: LengthSource) -> str:
    """Which source answers and why, in a sentence; what made the classifier unbelievable stands in the warning."""
    who, seen = _SOURCES.get(found.source, found.source), units.count(found.observed.observations)
    if found.source == CLASSIFIER:
        return f"{who} answers: its checkpoint is {found.checkpoint.state}. {found.why}".strip()
    reasons = {
        "missing": "there is no checkpoint of a classifier",
        "loading": "the classifier's checkpoint is being loaded",
        "broken": "the classifier's checkpoint cannot be used",
    }
    why = reasons.get(found.checkpoint.state, "the classifier is not believed")
    return f"{who} answer, of {seen} finished answers: {why}."


def scatter(recent: Sequence[tuple[float, float]]) -> go.Figure:
    """Predicted tokens to the right, true ones upwards, and the line on which they are equal."""
    expected, true = zip(*recent, strict=True)
    most = 1.05 * max(1.0, *expected, *true)
    figure = go.Figure(
        [
            go.Scatter(x=[0, most], y=[0, most], mode="lines", line=_LINE, hoverinfo="skip"),
            go.Scatter(x=expected, y=true, mode="markers", marker=_MARK, hovertemplate=_HOVER),
        ]
    )
    figure.update_layout(
        height=_HEIGHT_PX, margin={"l": 8, "r": 8, "t": 8, "b": 8}, showlegend=False, dragmode=False, font_size=12
    )
    figure.update_xaxes(title_text="predicted tokens", range=[0, most], fixedrange=True, zeroline=False)
    figure.update_yaxes(title_text="true tokens", range=[0, most], fixedrange=True, zeroline=False, automargin=True)
    return figure


def _words(found: LengthSource) -> list[str]:
    parts = [f"<p>{look.text(because(found))}</p>"]
    if found.checkpoint.state != "missing":
        parts.append(look.tiles(*_tiles(found)))
    if found.reality.answers:
        parts.append(look.below(look.narrow(look.table(["", "Right bucket"], _accuracies(found.reality)))))
    if found.checkpoint.error:
        parts.append(look.below(f'<div class="pp-why">{look.text(f"Checkpoint: {found.checkpoint.error}")}</div>'))
    return parts


def _tiles(found: LengthSource) -> list[str]:
    late = ", ".join(f"{units.count(count)} {cause}" for cause, count in found.fallbacks.items() if count)
    error = found.reality.mean_error_tokens
    far = units.NONE if error is None else f"{units.count(error)} tokens"
    return [
        _checkpoint(found.checkpoint),
        look.tile("Mean error", far, f"of {units.count(found.reality.answers)} answers that it predicted"),
        look.tile("Predictions that it missed", units.count(sum(found.fallbacks.values())), late or "all came in time"),
    ]


def _checkpoint(checkpoint: CheckpointStatus) -> str:
    broken = checkpoint.state == "broken"
    return look.tile("Checkpoint", checkpoint.state, checkpoint.path or "none is set", look.BAD if broken else "")


def _accuracies(reality: Reality) -> list[list[str]]:
    """The classifier beside those that know nothing of the prompt's text."""
    accuracy = reality.accuracy
    best = max((one for one in (accuracy.commonest, accuracy.prompt_length) if one is not None), default=None)
    mine, colour = units.share(accuracy.classifier), look.GOOD
    if accuracy.classifier is not None and best is not None and accuracy.classifier <= best:
        mine, colour = f"{mine}, no better than who does not read the prompt", look.BAD
    over = f"over {units.count(reality.answers)} answers"
    return [
        [f"{look.strong('Classifier')} {look.soft(over)}", look.bar("", accuracy.classifier, mine, colour)],
        *(
            [look.soft(name), look.bar("", share, units.share(share), look.IDLE)]
            for name, share in (
                ("Always the commonest bucket", accuracy.commonest),
                ("By the prompt's length alone", accuracy.prompt_length),
            )
        ),
    ]


def _plain(said: str) -> str:
    """A service's words where Markdown is read."""
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>$:#~" else letter for letter in said)


_LINE = {"color": look.IDLE, "width": 1.5, "dash": "dot"}
_MARK = {"color": look.DECODE, "size": 6, "opacity": 0.6}
_HOVER = "predicted %{x:.0f}, true %{y:.0f} tokens<extra></extra>"

NOT_THERE = (
    "No predictor is configured: POLYPHASE_DASHBOARD_PREDICTOR_URL is empty. With one, this page shows how its "
    "predictions of output lengths compare with what the answers became."
)


def predictor(console: Console) -> None:
    """One run of the page."""
    if not console.settings.predictor_url:
        frame.header(console, "Predictor", [], every_s=frame.NEVER_S)
        st.html(look.empty(NOT_THERE))
        return
    st.fragment(_live, run_every=max(5.0, console.settings.refresh_s))(console)


def _live(console: Console) -> None:
    asked = console.api.predictor()
    assert asked is not None
    read = asked.result()
    every_s = max(5.0, console.settings.refresh_s)
    frame.header(console, "Predictor", [frame.of_predictor(console, read)], every_s=every_s)
    output_lengths(read)
