"""What is known of lengths, in four degrees: nothing, how they are spread, what a classifier says, and the truth.

The four differ in the classifier's confusion alone: buckets and prior are the same, so that what one arm gains over
another is what its classifier knows of a single request.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lab.simulate.sim_file import load_prediction
from services.launcher.model_source import PROJECT
from shared.sim.prediction import Prediction
from shared.sim.workload import Lengths

NONE, MAJORITY, TRAINED, ORACLE = ARMS = ("none", "majority", "trained", "oracle")
SHIPPED = PROJECT / "models" / "demo-lengths" / "prediction.yaml"
PAPER = Prediction(width_tokens=200, buckets=10, accuracy=0.749)  # TetriInfer 5.2.3: OPT-125M, granularity 200
Arms = Mapping[str, Prediction | None]


@dataclass(frozen=True, slots=True)
class Trained:
    """How often a classifier is right, and where that figure comes from."""

    prediction: Prediction
    source: str


def trained(file: Path | None = None) -> Trained:
    """Of that evaluation, else of the one that ships with the demo's checkpoint, else TetriInfer's.

    Raises InvalidRequest for a file that is no evaluation.
    """
    found = file if file is not None else SHIPPED if SHIPPED.is_file() else None
    if found is None:
        return Trained(PAPER, "stand-in: TetriInfer's 74.9 % at 200 tokens, no checkpoint of ours")
    said = load_prediction(found)
    return Trained(
        Prediction(said.width_tokens, said.buckets, said.accuracy, said.confusion, said.prior), f"evaluation {found}"
    )


def arms(known: Prediction, output_tokens: Lengths) -> Arms:
    """All four, for answers of these lengths, whose spread every arm with a predictor knows."""
    width = width_for(known, output_tokens)
    fitted = replace(known, width_tokens=width)
    prior = prior_of(fitted, output_tokens)
    fitted = replace(fitted, prior=prior)
    commonest = int(np.argmax(prior))
    always = tuple(float(at == commonest) for at in range(fitted.buckets))
    return {
        NONE: None,
        MAJORITY: replace(fitted, confusion=(always,) * fitted.buckets),
        TRAINED: fitted,
        ORACLE: replace(fitted, confusion=None, accuracy=1.0),
    }


def width_for(known: Prediction, output_tokens: Lengths) -> int:
    """Its buckets, stretched as these answers are longer than those that it was evaluated on.

    A classifier of short answers would see all long ones in its last bucket; what carries over from one model to
    another is how well it tells the shorter from the longer. Without a prior nobody knows on what it was evaluated.
    """
    if known.prior is None:
        return known.width_tokens
    shares = np.asarray(known.prior) / sum(known.prior)
    mean = float(shares @ ((np.arange(known.buckets) + 0.5) * known.width_tokens))
    return max(1, round(known.width_tokens * float(output_tokens.mean()) / mean))


def prior_of(known: Prediction, output_tokens: Lengths) -> tuple[float, ...]:
    """How common each bucket is."""
    counts = np.bincount(known.buckets_of(output_tokens), minlength=known.buckets)
    return tuple((counts / counts.sum()).tolist())


def accuracy(known: Prediction) -> float:
    """The share of answers whose own bucket is said, by its prior."""
    said, rows = known.confusion, known.buckets
    prior = known.prior or (1.0 / rows,) * rows
    right = [row[at] for at, row in enumerate(said)] if said is not None else [known.accuracy] * rows
    return float(sum(share * hit for share, hit in zip(prior, right, strict=True)) / sum(prior))
