"""Which of the prompts that wait at an engine comes next."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

from shared.domain.job import JobView
from shared.domain.rates import StepRates
from shared.errors import InvalidRequest

WINDOW = 16  # TetriInfer 5.1: PrefillSchedBatch


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A job that waits at an engine.

    tokens: prompt tokens to compute here. before: those ahead of them, whose KV comes from elsewhere. arrived_s: when
    its client sent it; on one clock for all that wait. started: its client has tokens (a stream), so that it enters
    before all prompts that have none.
    """

    job: JobView
    tokens: int
    before: int = 0
    arrived_s: float = 0.0
    started: bool = False


class PrefillOrder(Protocol):
    """Orders what waits by a key that a job keeps while it waits; who came first breaks ties.

    `window`: at most so many jobs that came after a job are taken before it (`WaitingLine`), at least 1. `batches`: as
    many are ordered at a time instead, the oldest that wait, and all of them are taken before others are looked at.
    """

    name: ClassVar[str]

    @property
    def batches(self) -> bool:
        """See above."""
        ...

    @property
    def window(self) -> int:
        """See above."""
        ...

    def key(self, waiting: WaitingJob, rates: StepRates | None) -> float:
        """The least goes first. `rates`: of the instance, None where nothing was measured."""
        ...


@dataclass(frozen=True, slots=True)
class Fcfs:
    """First come, first served."""

    name: ClassVar[str] = "fcfs"
    batches: ClassVar[bool] = False

    @property
    def window(self) -> int:
        """Nobody overtakes."""
        return 1

    def key(self, waiting: WaitingJob, rates: StepRates | None) -> float:
        """See `PrefillOrder`."""
        return 0.0


@dataclass(frozen=True, slots=True)
class Sjf:
    """Least to compute first, `window` prompts (PrefillSchedBatch) at a time.

    overtake (ours): no batches, but at most `window` later prompts overtake one.
    Source: TetriInfer 3.3.1. The paper sorts by the length of the prompt, this by the tokens that are to be computed
    here, which is less where a prefix is cached.
    """

    name: ClassVar[str] = "sjf"
    window: int = WINDOW
    overtake: bool = False

    def __post_init__(self) -> None:
        _check(self.name, self.window)

    @property
    def batches(self) -> bool:
        """See `PrefillOrder`."""
        return not self.overtake

    def key(self, waiting: WaitingJob, rates: StepRates | None) -> float:
        """See `PrefillOrder`."""
        return float(waiting.tokens)


@dataclass(frozen=True, slots=True)
class Ljf:
    """Most to compute first; otherwise as `Sjf`. Source: TetriInfer 3.3.1."""

    name: ClassVar[str] = "ljf"
    window: int = WINDOW
    overtake: bool = False

    def __post_init__(self) -> None:
        _check(self.name, self.window)

    @property
    def batches(self) -> bool:
        """See `PrefillOrder`."""
        return not self.overtake

    def key(self, waiting: WaitingJob, rates: StepRates | None) -> float:
        """See `PrefillOrder`."""
        return -float(waiting.tokens)


@dataclass(frozen=True, slots=True)
class LeastSlack:
    """First the one whose prefill has to begin first: at arrival + TTFT target − predicted prefill time.

    The prediction is that of one step over all of its tokens, as the rates are when it comes; without rates the
    deadline alone decides.
    """

    name: ClassVar[str] = "least_slack"
    batches: ClassVar[bool] = False
    window: int = WINDOW

    def __post_init__(self) -> None:
        _check(self.name, self.window)

    def key(self, waiting: WaitingJob, rates: StepRates | None) -> float:
        """See `PrefillOrder`."""
        takes_s = rates.prefill_s(waiting.tokens, waiting.before) if rates is not None else 0.0
        return waiting.arrived_s + waiting.job.slo.ttft_s - takes_s


def _check(name: str, window: int) -> None:
    if window < 1:
        raise InvalidRequest(f"{name}: window must be at least 1, not {window}")
