"""An evaluation as files: a page with both plots, and the confusion as `polyphase simulate` reads it."""

from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import yaml
from plotly.subplots import make_subplots

from predictor.buckets import Buckets
from predictor.evaluate import Evaluation, name_of

PAGE, PREDICTION = "evaluation.html", "prediction.yaml"


def write_files(folder: Path, found: Evaluation, buckets: Buckets) -> None:
    """`evaluation.html`: confusion and reliability; `prediction.yaml`: for a simulation's cluster file, or
    `polyphase simulate --prediction`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PREDICTION).write_text(yaml.safe_dump({"prediction": prediction_of(found, buckets)}), encoding="utf-8")
    _page(found, buckets).write_html(folder / PAGE, include_plotlyjs=True)


def prediction_of(found: Evaluation, buckets: Buckets) -> dict[str, Any]:
    """Shares of each true bucket; one that no example fell into is predicted as all others are together."""
    confusion = found.scores.confusion
    said = [sum(row[at] for row in confusion) for at in range(buckets.count)]
    rows = [row if any(row) else said for row in confusion]
    shares = [[count / sum(row) for count in row] for row in rows]
    whole = found.scores.examples
    prior = [sum(row) / whole for row in confusion]
    return {"width_tokens": buckets.width_tokens, "buckets": buckets.count, "confusion": shares, "prior": prior}


def _page(found: Evaluation, buckets: Buckets) -> Any:
    names = [name_of(buckets, at) for at in range(buckets.count)]
    page = make_subplots(cols=2, subplot_titles=("Confusion: examples by true and predicted tokens", "Reliability"))
    confusion = found.scores.confusion
    page.add_trace(
        go.Heatmap(
            z=confusion, x=names, y=names, text=confusion, texttemplate="%{text}", colorscale="Blues", showscale=False
        ),
        row=1,
        col=1,
    )
    bins = found.scores.calibration
    sure, right = [one.mean_confidence for one in bins], [one.accuracy for one in bins]
    counts = [f"{one.count} examples" for one in bins]
    page.add_trace(go.Scatter(x=[0, 1], y=[0, 1], mode="lines", name="perfect", line={"dash": "dot"}), row=1, col=2)
    page.add_trace(go.Scatter(x=sure, y=right, text=counts, mode="lines+markers", name="classifier"), row=1, col=2)
    page.update_xaxes(title_text="predicted", type="category", row=1, col=1)
    page.update_yaxes(title_text="true", type="category", autorange="reversed", row=1, col=1)
    page.update_xaxes(title_text="confidence", range=[0, 1], row=1, col=2)
    page.update_yaxes(title_text="share that was right", range=[0, 1], row=1, col=2)
    base = f"commonest bucket {found.majority.accuracy:.1%}, prompt length alone {found.prompt_length.accuracy:.1%}"
    page.update_layout(title=f"{found.scores.examples} examples: {found.scores.accuracy:.1%} right; {base}")
    return page
