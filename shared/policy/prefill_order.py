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
    def batches(self) -> bool: ...

    @property
    def window(self) -> int: ...

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
        return not self.overtake

    def key(self, waiting: WaitingJob, rates: StepRates | None) -> float:
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
        return not self.overtake

    def key(self, waiting: WaitingJob, rates: StepRates | None) -> float:
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
        takes_s = rates.prefill_s(waiting.tokens, waiting.before) if rates is not None else 0.0
        return waiting.arrived_s + waiting.job.slo.ttft_s - takes_s


def _check(name: str, window: int) -> None:
    if window < 1:
        raise InvalidRequest(f"{name}: window must be at least 1, not {window}")


# MERGED prefill_share.py
# How often decodes have a prompt beside them: a decaying share of an engine's steps.


FADE = 1.0 - 1.0 / 64.0  # a step counts so much less with each step after it


class PrefillShare:
    """Of the last steps with decodes in them, how many computed prompts, too."""

    __slots__ = ("_mixed", "_steps")

    def __init__(self) -> None:
        self._steps = self._mixed = 0.0

    def mixed(self) -> None:
        """A step of decodes and prompts has ended."""
        self._steps = self._steps * FADE + 1.0
        self._mixed = self._mixed * FADE + 1.0

    def plain(self, steps: int = 1) -> None:
        """So many steps of decodes alone have ended."""
        fade: float = FADE**steps
        self._steps = self._steps * fade + (1.0 - fade) / (1.0 - FADE)
        self._mixed *= fade

    def after(self, plain_steps: int = 0) -> float:
        """The share, 0..1, once so many more plain steps have ended; 0 before the first step."""
        fade: float = FADE**plain_steps
        steps = self._steps * fade + (1.0 - fade) / (1.0 - FADE)
        return self._mixed * fade / steps if steps > 0.0 else 0.0
