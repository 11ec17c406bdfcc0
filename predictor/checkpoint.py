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
from predictor.data.examples import Example
from shared.errors import Unavailable

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


class Ceiling(msgspec.Struct, frozen=True):
    """The most that can be right of answers that differ each time, out of several to each prompt.

    upper: of who knows the very answers, which flatters few samples. lower: of who knows all answers to a prompt but
    the one in question. The truth lies between. prompts: with several answers.
    """

    prompts: int
    lower: float
    upper: float


def commonest(train: Iterable[Example], buckets: Buckets) -> list[float]:
    """Shares of the buckets: the prediction that does not look at the prompt."""
    seen = Counter(buckets.of(example.output_tokens) for example in train)
    return [seen[bucket] / seen.total() for bucket in range(buckets.count)]


def by_prompt_length(train: Sequence[Example], buckets: Buckets) -> ObservedLengths:
    """Who looks at the prompt's length alone: what the service falls back to, having seen all of `train`."""
    observed = ObservedLengths(buckets, half_life=float(max(1, len(train))))
    for example in train:
        observed.observe(example.prompt_tokens, example.output_tokens)
    return observed


def ceiling(examples: Iterable[Example], buckets: Buckets) -> Ceiling | None:
    """None where no prompt has several answers."""
    answers: dict[tuple[str, int], list[int]] = defaultdict(list)
    for example in examples:
        answers[example.text, example.prompt_tokens].append(buckets.of(example.output_tokens))
    several = [found for found in answers.values() if len(found) > 1]
    if not several:
        return None
    upper = [Counter(found).most_common(1)[0][1] / len(found) for found in several]
    return Ceiling(len(several), sum(map(_left_out, several)) / len(several), sum(upper) / len(several))


def _left_out(found: Sequence[int]) -> float:
    """How often an answer is as most of the others are; of equally common ones by chance."""
    seen, right = Counter(found), 0.0
    for bucket in found:
        others = seen - Counter([bucket])
        most = max(others.values())
        leaders = [one for one, count in others.items() if count == most]
        right += (bucket in leaders) / len(leaders)
    return right / len(found)


META_FILE = "length_predictor.json"
TOKENIZER_FILE = "tokenizer.json"
FORMAT = 2  # 1 looked at the end of a prompt alone


class BrokenCheckpoint(Unavailable):
    """The checkpoint is there, but cannot be used; the message names the file and the reason."""


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
    """Read and check the metadata. Raises BrokenCheckpoint."""
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
    """Write the metadata file."""
    (folder / META_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(meta), indent=2) + b"\n")


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """An empty folder that replaces `target` when the block succeeds: no reload sees half a checkpoint."""
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
