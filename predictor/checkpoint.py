"""A checkpoint's own metadata: what it predicts, what it was trained on, how good it was. No torch here."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

import msgspec

from predictor.baselines import Ceiling
from predictor.buckets import Buckets
from predictor.scores import Scores
from shared.errors import Unavailable

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
