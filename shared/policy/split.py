"""Split: how many prompt tokens the prefill instance computes."""

from dataclasses import dataclass
from math import ceil
from random import Random
from typing import ClassVar, Protocol

import msgspec

from shared.domain.instance import InstanceView
from shared.domain.job import JobView
from shared.domain.route import Reason
from shared.errors import InvalidRequest


class SplitChoice(msgspec.Struct, frozen=True):
    """Tokens [0, tokens) are the prefill instance's; the decode instance computes the rest."""

    tokens: int
    reasons: tuple[Reason, ...] = ()


class Split(Protocol):
    """Decides the split of one job between one prefill and one decode instance.

    `needs_decode` says that the decode instance has to be chosen first; else `decode` is None.
    """

    name: ClassVar[str]
    needs_decode: ClassVar[bool]

    def choose(
        self, job: JobView, prefill: InstanceView, decode: InstanceView | None, now: float, rng: Random
    ) -> SplitChoice:
        """Decide: 0 <= tokens <= prompt_tokens."""
        ...


Freedom = tuple[float, float]  # the least and the most share of the prompts that prefill instances may compute


@dataclass(frozen=True, slots=True)
class FullSplit:
    """All of the prompt: plain disaggregation."""

    name: ClassVar[str] = "full"
    needs_decode: ClassVar[bool] = False

    def choose(
        self, job: JobView, prefill: InstanceView, decode: InstanceView | None, now: float, rng: Random
    ) -> SplitChoice:
        """See `Split`."""
        return _choice(self.name, job.prompt_tokens, job)


@dataclass(frozen=True, slots=True)
class NoSplit:
    """None of the prompt: the decode instance does it all."""

    name: ClassVar[str] = "none"
    needs_decode: ClassVar[bool] = True

    def choose(
        self, job: JobView, prefill: InstanceView, decode: InstanceView | None, now: float, rng: Random
    ) -> SplitChoice:
        """See `Split`."""
        return _choice(self.name, 0, job)


@dataclass(frozen=True, slots=True)
class FractionSplit:
    """The same share of every prompt, rounded up to a token."""

    name: ClassVar[str] = "fraction"
    needs_decode: ClassVar[bool] = True
    fraction: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.fraction <= 1.0:
            raise InvalidRequest(f"fraction: fraction must lie in 0..1, not {self.fraction}")

    def choose(
        self, job: JobView, prefill: InstanceView, decode: InstanceView | None, now: float, rng: Random
    ) -> SplitChoice:
        """See `Split`."""
        return _choice(self.name, min(job.prompt_tokens, ceil(self.fraction * job.prompt_tokens)), job)


@dataclass(frozen=True, slots=True)
class RandomSplit:
    """Any of 0..prompt_tokens, each as likely; for tests and demonstrations."""

    name: ClassVar[str] = "random"
    needs_decode: ClassVar[bool] = True

    def choose(
        self, job: JobView, prefill: InstanceView, decode: InstanceView | None, now: float, rng: Random
    ) -> SplitChoice:
        """See `Split`."""
        return _choice(self.name, rng.randint(0, job.prompt_tokens), job)


def _choice(name: str, tokens: int, job: JobView) -> SplitChoice:
    reason = Reason(f"split:{name}", {"tokens": tokens, "prompt_tokens": job.prompt_tokens})
    return SplitChoice(tokens, (reason,))


def freedom(split: Split) -> Freedom:
    """What a split leaves open: nothing, where it takes a fixed share."""
    match split:
        case FullSplit():
            return 1.0, 1.0
        case NoSplit():
            return 0.0, 0.0
        case FractionSplit(fraction=fraction):
            return fraction, fraction
    return 0.0, 1.0
