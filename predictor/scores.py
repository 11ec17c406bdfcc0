"""How good predictions were: accuracy, error in tokens, confusion, calibration. Pure."""

from collections.abc import Sequence

import msgspec

from predictor.buckets import Buckets

CALIBRATION_BINS = 10


class CalibrationBin(msgspec.Struct, frozen=True):
    """Predictions whose confidence lies in [lower, upper): how sure they were, and how often right."""

    lower: float
    upper: float
    count: int
    mean_confidence: float
    accuracy: float


class Scores(msgspec.Struct, frozen=True):
    """Scores over one split. Shares are in [0, 1].

    mean_error_tokens: how far the expected length lay from the true one, on average. calibration_error: the expected
    calibration error over ten bins. confusion[true][predicted] counts examples.
    """

    examples: int
    accuracy: float
    within_one: float
    mean_error_tokens: float
    calibration_error: float
    confusion: list[list[int]]
    calibration: list[CalibrationBin]


def score(
    lengths: Sequence[int], probabilities: Sequence[Sequence[float]], buckets: Buckets, means: Sequence[float]
) -> Scores:
    """Compare predicted distributions with true lengths. means: see `bucket_means`. Raises ValueError without any."""
    if not lengths or len(lengths) != len(probabilities):
        raise ValueError(f"{len(lengths)} lengths for {len(probabilities)} predictions")
    truth = [buckets.of(tokens) for tokens in lengths]
    guesses = [likeliest(row) for row in probabilities]
    sure = [row[guess] for row, guess in zip(probabilities, guesses, strict=True)]
    confusion = [[0] * buckets.count for _ in range(buckets.count)]
    for label, guess in zip(truth, guesses, strict=True):
        confusion[label][guess] += 1
    gaps = [abs(label - guess) for label, guess in zip(truth, guesses, strict=True)]
    errors = [abs(expected(row, means) - tokens) for row, tokens in zip(probabilities, lengths, strict=True)]
    calibration = _calibrate(sure, [gap == 0 for gap in gaps])
    return Scores(
        examples=len(truth),
        accuracy=gaps.count(0) / len(gaps),
        within_one=sum(gap <= 1 for gap in gaps) / len(gaps),
        mean_error_tokens=sum(errors) / len(errors),
        calibration_error=sum(bin_.count * abs(bin_.accuracy - bin_.mean_confidence) for bin_ in calibration)
        / len(gaps),
        confusion=confusion,
        calibration=calibration,
    )


def likeliest(row: Sequence[float]) -> int:
    """The bucket with the highest probability, the shorter one of equals."""
    return max(range(len(row)), key=lambda index: (row[index], -index))


def expected(row: Sequence[float], means: Sequence[float]) -> float:
    """Tokens, by the buckets' probabilities."""
    return sum(share * mean for share, mean in zip(row, means, strict=True))


def bucket_means(lengths: Sequence[int], buckets: Buckets) -> list[float]:
    """Mean length in each bucket; its middle where there is none."""
    inside: list[list[int]] = [[] for _ in range(buckets.count)]
    for tokens in lengths:
        inside[buckets.of(tokens)].append(tokens)
    middles = [(at + 0.5) * buckets.width_tokens for at in range(buckets.count)]
    return [sum(some) / len(some) if some else middle for some, middle in zip(inside, middles, strict=True)]


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
