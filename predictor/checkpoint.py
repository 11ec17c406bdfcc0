"""A checkpoint's metadata and the measures of its quality: scores of predictions, the baselines that a classifier
has to beat, and the noise ceiling. Does not import torch.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

import msgspec

from predictor.buckets import Buckets, ObservedLengths
from predictor.examples import Example
from shared.errors import Unavailable

CALIBRATION_BINS = 10


class CalibrationBin(msgspec.Struct, frozen=True):
    """Predictions with a confidence in [lower, upper)."""

    lower: float
    upper: float
    count: int
    mean_confidence: float
    accuracy: float


class Scores(msgspec.Struct, frozen=True):
    """Scores over one split. Shares are in [0, 1].

    mean_error_tokens: mean distance of the expected from the actual length. calibration_error: the expected
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
    """Compare predicted distributions with actual lengths. means: see `bucket_means`. Raises ValueError without any."""
    if not lengths or len(lengths) != len(probabilities):
        raise ValueError(f"{len(lengths)} lengths for {len(probabilities)} predictions")
    truth = [buckets.of(tokens) for tokens in lengths]
    guesses = [likeliest(row) for row in probabilities]
    confidences = [row[guess] for row, guess in zip(probabilities, guesses, strict=True)]
    confusion = [[0] * buckets.count for _ in range(buckets.count)]
    for label, guess in zip(truth, guesses, strict=True):
        confusion[label][guess] += 1
    gaps = [abs(label - guess) for label, guess in zip(truth, guesses, strict=True)]
    errors = [abs(expected(row, means) - tokens) for row, tokens in zip(probabilities, lengths, strict=True)]
    calibration = _calibrate(confidences, [gap == 0 for gap in gaps])
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
    """The bucket with the highest probability, the shorter of equals."""
    return max(range(len(row)), key=lambda index: (row[index], -index))


def expected(row: Sequence[float], means: Sequence[float]) -> float:
    """The expected number of tokens."""
    return sum(share * mean for share, mean in zip(row, means, strict=True))


def bucket_means(lengths: Sequence[int], buckets: Buckets) -> list[float]:
    """The mean length in each bucket; the middle of an empty bucket."""
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


class Ceiling(msgspec.Struct, frozen=True):
    """Bounds of the highest possible accuracy when answers to the same prompt differ.

    upper: with knowledge of the evaluated answers themselves, optimistic for few samples. lower: with knowledge of all
    other answers to the same prompt. prompts: number of prompts with several answers.
    """

    prompts: int
    lower: float
    upper: float


def commonest(train: Iterable[Example], buckets: Buckets) -> list[float]:
    """The shares of the buckets: a prediction that ignores the prompt."""
    found = Counter(buckets.of(example.output_tokens) for example in train)
    return [found[bucket] / found.total() for bucket in range(buckets.count)]


def by_prompt_length(train: Sequence[Example], buckets: Buckets) -> ObservedLengths:
    """The service's fallback, which uses the prompt's length alone, after all answers of `train`."""
    observed = ObservedLengths(buckets, half_life=float(max(1, len(train))))
    for example in train:
        observed.observe(example.prompt_tokens, example.output_tokens)
    return observed


def ceiling(examples: Iterable[Example], buckets: Buckets) -> Ceiling | None:
    """None if no prompt has several answers."""
    answers: dict[tuple[str, int], list[int]] = defaultdict(list)
    for example in examples:
        answers[example.text, example.prompt_tokens].append(buckets.of(example.output_tokens))
    several = [found for found in answers.values() if len(found) > 1]
    if not several:
        return None
    upper = [Counter(found).most_common(1)[0][1] / len(found) for found in several]
    return Ceiling(len(several), sum(map(_left_out, several)) / len(several), sum(upper) / len(several))


def _left_out(found: Sequence[int]) -> float:
    """The share of answers in the commonest bucket of the others; equally common buckets are chosen by chance."""
    all_counts, right = Counter(found), 0.0
    for bucket in found:
        others = all_counts - Counter([bucket])
        most = max(others.values())
        leaders = [other for other, count in others.items() if count == most]
        right += (bucket in leaders) / len(leaders)
    return right / len(found)


META_FILE = "length_predictor.json"
TOKENIZER_FILE = "tokenizer.json"
FORMAT = 2  # format 1 read the end of a prompt alone


class BrokenCheckpoint(Unavailable):
    """The checkpoint exists, but is unusable; the message names the file and the reason."""


class CheckpointMeta(msgspec.Struct, frozen=True):
    """Contents of `length_predictor.json`, beside the weights and the tokenizer.

    `scores` are of the test split, `baselines` the accuracy there of the commonest bucket and of the prompt's length
    alone. `means`: mean length in tokens of each bucket's training examples. `temperature` divides the logits (fitted
    on the validation split, Guo et al. 2017), so that confidences mean what they say.
    """

    bucket_tokens: int
    bucket_count: int
    input_tokens: int
    base: str
    served_model: str
    data_digest: str
    examples: dict[str, int]
    scores: Scores
    seed: int
    trained_unix_s: float
    means: list[float]
    baselines: dict[str, float] = {}
    ceiling: Ceiling | None = None
    temperature: float = 1.0
    class_weights: bool = False
    format: int = FORMAT

    @property
    def buckets(self) -> Buckets:
        """The classes, in the order of the classifier's outputs."""
        return Buckets(self.bucket_tokens, self.bucket_count)


def read_meta(folder: Path) -> CheckpointMeta:
    """Raises BrokenCheckpoint."""
    path = folder / META_FILE
    try:
        meta = msgspec.json.decode(path.read_bytes(), type=CheckpointMeta)
        if meta.format != FORMAT:
            raise ValueError(f"format {meta.format}, this release reads {FORMAT}")
        if meta.input_tokens < 1 or not meta.temperature > 0:
            raise ValueError("input_tokens and temperature must be positive")
        if len(meta.means) != Buckets(meta.bucket_tokens, meta.bucket_count).count:
            raise ValueError(f"{len(meta.means)} means for {meta.bucket_count} buckets")
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise BrokenCheckpoint(f"{path}: {error}") from error
    return meta


def write_meta(folder: Path, meta: CheckpointMeta) -> None:
    (folder / META_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(meta), indent=2) + b"\n")


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """An empty folder that replaces `target` when the block succeeds, so that a reload reads a whole checkpoint."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = target.with_name(f".{target.name}.new"), target.with_name(f".{target.name}.old")
    for leftover in (fresh, old):
        rmtree(leftover, ignore_errors=True)
    fresh.mkdir()
    try:
        yield fresh
        if target.exists():
            target.rename(old)
        fresh.rename(target)
    finally:
        for leftover in (fresh, old):
            rmtree(leftover, ignore_errors=True)
