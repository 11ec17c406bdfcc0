"""Bodies and answers of the predictor's HTTP API. Tokens are of answers unless a field says otherwise."""

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType, structs

MAX_TOKENS = 2**31 - 2
CLASSIFIER = "classifier"  # source of predicted lengths
TokenCount = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
PositiveCount = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]


class Observation(Struct, frozen=True, forbid_unknown_fields=True):
    """A finished answer. model, classified: the classifier that computed a prediction and the bucket that it predicted;
    "" and -1 without one. expected_tokens: the prediction that the gateway received, from either source.
    """

    prompt_tokens: TokenCount
    output_tokens: TokenCount
    max_tokens: PositiveCount | None = None
    model: Annotated[str, Meta(max_length=64)] = ""
    classified: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] = -1
    expected_tokens: Annotated[float, Meta(ge=0)] | None = None

    @property
    def cut(self) -> bool:
        """Whether the answer may have ended at `max_tokens`."""
        return self.max_tokens is not None and self.output_tokens >= self.max_tokens


class Accepted(Struct, frozen=True):
    """accepted: observations of this call; observations: all so far."""

    accepted: int
    observations: int


class Predicted(Struct, frozen=True, kw_only=True):
    """A LengthPrediction. mean, quantiles (by share): absent where the length is not known at all."""

    bucket: int
    lower_tokens: int
    upper_tokens: int
    confidence: float
    source: str
    width_tokens: int
    shares: tuple[float, ...]
    most_tokens: int
    model: str
    classified: int
    latency_ms: float
    mean: float | UnsetType = UNSET
    quantiles: dict[str, float] | UnsetType = UNSET


class CheckpointStatus(Struct, frozen=True):
    """State of the predictor's checkpoint: missing, loading, loaded or broken. metadata, runs: see `predictor.model`
    and `predictor.loading`.
    """

    path: str | None
    state: str
    error: str | None
    metadata: dict[str, Any] | None = None
    runs: dict[str, Any] | None = None


class RollingAccuracy(Struct, frozen=True):
    """Shares of the last answers whose bucket was predicted correctly; None if unknown."""

    classifier: float | None = None
    commonest: float | None = None
    prompt_length: float | None = None

    def known(self) -> dict[str, float]:
        """The shares that are known, by name."""
        return {name: share for name, share in structs.asdict(self).items() if share is not None}


class Reality(Struct, frozen=True):
    """How the classifier's predictions turned out. model: empty without a classifier, as all fields are then.

    recent: predicted and actual tokens of an answer, newest last.
    """

    model: str = ""
    answers: int = 0
    accuracy: RollingAccuracy = RollingAccuracy()
    mean_error_tokens: float | None = None
    believed: bool | None = None
    recent: list[tuple[float, float]] = []


class LengthBand(Struct, frozen=True):
    """Observed lengths of prompts from that length up: the weight of each bucket."""

    from_prompt_tokens: int
    weights: list[float]


class ObservedStatus(Struct, frozen=True):
    """Lengths that were observed. accuracy: of the predictions made before each observation."""

    observations: int = 0
    accuracy: float | None = None
    bucket_tokens: int = 0
    bucket_count: int = 0
    bands: list[LengthBand] = []


class LengthSource(Struct, frozen=True):
    """The source of predictions: classifier or observed. use: the setting. why: the reason when the classifier is not
    used. fallbacks: predictions that observed lengths made in the classifier's place, by cause.
    """

    source: str
    use: str
    why: str
    checkpoint: CheckpointStatus
    reads_token_ids: bool = False
    pending: int = 0
    largest_batch: int = 0
    fallbacks: dict[str, int] = {}
    reality: Reality = Reality()
    observed: ObservedStatus = ObservedStatus()

    @property
    def fallen_back(self) -> bool:
        """Whether observed lengths are used although there is a checkpoint."""
        return self.source != CLASSIFIER and (bool(self.why) or self.checkpoint.state in ("loaded", "broken"))
