"""How good predictions were: accuracy, confusion, calibration. Pure."""

from collections.abc import Sequence

import msgspec

CALIBRATION_BINS = 10


class CalibrationBin(msgspec.Struct, frozen=True):
    """Predictions whose confidence lies in [lower, upper): how sure they were, and how often right."""

    lower: float
    upper: float
    count: int
    mean_confidence: float
    accuracy: float


class Scores(msgspec.Struct, frozen=True):
    """Scores over one split. All but the counts are shares in [0, 1].

    `majority` is the accuracy of always naming the commonest bucket; `calibration_error` is the expected
    calibration error over ten bins; `confusion[true][predicted]` counts examples.
    """

    examples: int
    accuracy: float
    within_one: float
    majority: float
    calibration_error: float
    confusion: list[list[int]]
    calibration: list[CalibrationBin]


def score(truth: Sequence[int], probabilities: Sequence[Sequence[float]], bucket_count: int) -> Scores:
    """Compare predicted distributions with the true buckets. Raises ValueError without any."""
    if not truth or len(truth) != len(probabilities):
        raise ValueError(f"{len(truth)} labels for {len(probabilities)} predictions")
    guesses = [max(range(len(row)), key=lambda index: (row[index], -index)) for row in probabilities]
    sure = [row[guess] for row, guess in zip(probabilities, guesses, strict=True)]
    confusion = [[0] * bucket_count for _ in range(bucket_count)]
    for label, guess in zip(truth, guesses, strict=True):
        confusion[label][guess] += 1
    gaps = [abs(label - guess) for label, guess in zip(truth, guesses, strict=True)]
    calibration = _calibrate(sure, [gap == 0 for gap in gaps])
    return Scores(
        examples=len(truth),
        accuracy=gaps.count(0) / len(gaps),
        within_one=sum(gap <= 1 for gap in gaps) / len(gaps),
        majority=max(sum(row) for row in confusion) / len(gaps),
        calibration_error=sum(bin_.count * abs(bin_.accuracy - bin_.mean_confidence) for bin_ in calibration)
        / len(gaps),
        confusion=confusion,
        calibration=calibration,
    )


def _calibrate(confidences: Sequence[float], hits: Sequence[bool]) -> list[CalibrationBin]:
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(CALIBRATION_BINS)]
    for confidence, hit in zip(confidences, hits, strict=True):
        bins[min(int(confidence * CALIBRATION_BINS), CALIBRATION_BINS - 1)].append((confidence, hit))
    return [
        CalibrationBin(
            lower=index / CALIBRATION_BINS,
            upper=(index + 1) / CALIBRATION_BINS,
            count=len(members),
            mean_confidence=sum(confidence for confidence, _ in members) / len(members),
            accuracy=sum(hit for _, hit in members) / len(members),
        )
        for index, members in enumerate(bins)
        if members
    ]
