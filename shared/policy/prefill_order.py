"""Prefill order: which of the prompts queued at an engine comes next; and the share of steps that compute prompts."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

from shared.domain.job import JobView
from shared.domain.rates import StepRates
from shared.errors import InvalidRequest

WINDOW = 16  # TetriInfer 5.1: PrefillSchedBatch


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A job that is queued at an engine.

    tokens: prompt tokens to compute here. before: the tokens ahead of them, whose KV comes from another instance.
    arrived_s: when its client sent it; on one clock for the whole queue. started: its client has tokens (a stream), so
    that it comes before all prompts whose clients have none.
    """

    job: JobView
    tokens: int
    before: int = 0
    arrived_s: float = 0.0
    started: bool = False


class PrefillOrder(Protocol):
    """Orders queued jobs by a key that a job keeps while it waits, the least first; ties go to the job that came first.

    `window`, at least 1: the number of later jobs that may overtake a job (`WaitingLine`). `batches`: instead, the
    oldest `window` jobs are ordered, and all of them are taken before others are looked at. `rates` of a key: those of
    the instance, None where they are not measured.
    """

    name: ClassVar[str]

    @property
    def batches(self) -> bool: ...

    @property
    def window(self) -> int: ...

    def key(self, waiting: WaitingJob, rates: StepRates | None) -> float: ...


@dataclass(frozen=True, slots=True)
class Fcfs:
    """First come, first served."""

    name: ClassVar[str] = "fcfs"
    batches: ClassVar[bool] = False

    @property
    def window(self) -> int:
        """No job overtakes another."""
        return 1

    def key(self, waiting: WaitingJob, rates: StepRates | None) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Sjf:
    """The least tokens to compute first, `window` prompts (PrefillSchedBatch) at a time.

    overtake (ours): no batches, but at most `window` later prompts overtake one.
    Source: TetriInfer 3.3.1. The paper sorts by the length of the prompt, this policy by the tokens that are to be
    computed here: fewer where a prefix is cached.
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
class Ljf(Sjf):
    """The most tokens to compute first; otherwise as `Sjf`. Source: TetriInfer 3.3.1."""

    name: ClassVar[str] = "ljf"

    def key(self, waiting: WaitingJob, rates: StepRates | None) -> float:
        return -float(waiting.tokens)


@dataclass(frozen=True, slots=True)
class LeastSlack:
    """The job whose prefill has to begin first: at arrival + TTFT target − predicted prefill time.

    The prediction is that of one step over all its tokens, by the rates at its arrival; without rates the deadline
    alone decides.
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


FADE = 1.0 - 1.0 / 64.0  # a step counts by this factor less with each later step


class PrefillShare:
    """The share of an engine's last steps with decodes that computed prompts, too: a decaying mean."""

    __slots__ = ("_mixed", "_steps")

    def __init__(self) -> None:
        self._steps = self._mixed = 0.0

    def mixed(self) -> None:
        """Count a step of decodes and prompts."""
        self._steps = self._steps * FADE + 1.0
        self._mixed = self._mixed * FADE + 1.0

    def plain(self, steps: int = 1) -> None:
        """Count steps of decodes alone."""
        fade: float = FADE**steps
        self._steps = self._steps * fade + (1.0 - fade) / (1.0 - FADE)
        self._mixed *= fade

    def after(self, plain_steps: int = 0) -> float:
        """The share, 0..1, after so many more plain steps; 0 before the first step."""
        fade: float = FADE**plain_steps
        steps = self._steps * fade + (1.0 - fade) / (1.0 - FADE)
        return self._mixed * fade / steps if steps > 0.0 else 0.0
