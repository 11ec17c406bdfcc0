"""The Predictor page: which source predicts output lengths and why, and predicted against actual lengths."""

from collections.abc import Sequence

import streamlit as st

from dashboard import charts, layout, markup, units
from dashboard.answers import LENGTH_SOURCE
from dashboard.api import Read
from dashboard.console import Console
from shared.wire.api.predictor import CLASSIFIER, CheckpointStatus, LengthSource, Reality

SLOW_S = 5.0  # refresh period, at least
NOT_CONFIGURED = (
    "No predictor is configured: POLYPHASE_DASHBOARD_PREDICTOR_URL is empty. With a predictor, this page compares "
    "predicted output lengths with the actual ones."
)


def predictor(console: Console) -> None:
    if console.settings.predictor_url:
        every_s = max(SLOW_S, console.settings.refresh_s)
        st.fragment(_live, run_every=every_s)(console, every_s)
    else:
        layout.unavailable(console, "Predictor", NOT_CONFIGURED)


def _live(console: Console, every_s: float) -> None:
    read = console.api.read(LENGTH_SOURCE).result()
    layout.header(console, "Predictor", [read], every_s=every_s)
    st.subheader("Output lengths", anchor=False)
    if read.value is None:
        st.html(markup.empty("No data: the predictor does not answer."))
        return
    _lengths(read, read.value)


def _lengths(read: Read[LengthSource], source: LengthSource) -> None:
    recent = source.reality.recent
    if source.fallen_back:
        st.warning(fallback_warning(source), icon=":material/warning:")
    parts = markup.page(*length_parts(source), stale=read.stale)
    if not recent:
        st.html(parts)
        return
    left, right = st.columns([3, 2], gap="medium")
    left.html(parts)
    with right:
        st.caption(f"Tokens of the last {len(recent)} answers. A point on the line was predicted exactly.")
        st.html(scatter(recent))


def fallback_warning(source: LengthSource) -> str:
    """Why observed lengths are used although there is a checkpoint, as Markdown."""
    why = markup.markdown_text(source.why[:1].upper() + source.why[1:])
    if not why:
        broken = source.checkpoint.state == "broken"
        why = "The checkpoint is unusable." if broken else "The predictor gives no reason."
    return f"**The predictor uses observed lengths instead of the classifier.** {why}"


def source_sentence(source: LengthSource) -> str:
    """Which source is used, and why."""
    if source.source == CLASSIFIER:
        return f"The classifier predicts output lengths. {source.why}".strip()
    reasons = {
        "missing": "there is no checkpoint of a classifier",
        "loading": "the classifier's checkpoint is being loaded",
        "broken": "the classifier's checkpoint is unusable",
    }
    why = reasons.get(source.checkpoint.state, "the classifier is not accurate enough")
    answers = units.count(source.observed.observations)
    return f"Output lengths are predicted from {answers} observed answers: {why}."


def scatter(recent: Sequence[tuple[float, float]]) -> str:
    predicted, actual = zip(*recent, strict=True)
    axes = ("predicted tokens", "actual tokens")
    return charts.against_expected({"": (markup.DECODE, predicted, actual)}, axes, 280)


def length_parts(source: LengthSource) -> list[str]:
    parts = [f"<p>{markup.text(source_sentence(source))}</p>"]
    if source.checkpoint.state != "missing":
        parts.append(markup.tiles(*_tiles(source)))
    if source.reality.answers:
        table = markup.table(["", "Correct bucket"], _accuracy_rows(source.reality), narrow=True)
        parts.append(markup.below(table))
    if source.checkpoint.error:
        error = markup.text(f"Checkpoint: {source.checkpoint.error}")
        parts.append(markup.below(f'<div class="pp-why">{error}</div>'))
    return parts


def _tiles(source: LengthSource) -> list[str]:
    causes = ", ".join(f"{units.count(count)} {cause}" for cause, count in source.fallbacks.items() if count)
    error = source.reality.mean_error_tokens
    mean = units.NONE if error is None else f"{units.count(error)} tokens"
    fallbacks = units.count(sum(source.fallbacks.values()))
    return [
        _checkpoint_tile(source.checkpoint),
        markup.tile("Mean error", mean, f"of {units.count(source.reality.answers)} predicted answers"),
        markup.tile("Predictions without the classifier", fallbacks, causes or "all predictions were in time"),
    ]


def _checkpoint_tile(checkpoint: CheckpointStatus) -> str:
    colour = markup.BAD if checkpoint.state == "broken" else ""
    return markup.tile("Checkpoint", checkpoint.state, checkpoint.path or "none is configured", colour)


def _accuracy_rows(reality: Reality) -> list[list[str]]:
    """The classifier beside the baselines that do not read the prompt's text."""
    accuracy = reality.accuracy
    best = max((each for each in (accuracy.commonest, accuracy.prompt_length) if each is not None), default=None)
    share, colour = units.share(accuracy.classifier), markup.GOOD
    if accuracy.classifier is not None and best is not None and accuracy.classifier <= best:
        share, colour = f"{share}, no better than a baseline", markup.BAD
    answers = markup.soft(f"of {units.count(reality.answers)} answers")
    baselines = (
        ("Baseline: commonest bucket", accuracy.commonest),
        ("Baseline: prompt length alone", accuracy.prompt_length),
    )
    return [
        [f"{markup.strong('Classifier')} {answers}", markup.bar("", accuracy.classifier, share, colour)],
        *([markup.soft(name), markup.bar("", value, units.share(value), markup.IDLE)] for name, value in baselines),
    ]
