"""Split: the number of prompt tokens that the prefill instance computes; the decode instance computes the rest."""

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
    """The prefill instance computes tokens [0, tokens)."""

    tokens: int
    reasons: tuple[Reason, ...] = ()


class Split(Protocol):
    """Splits one job between one prefill and one decode instance: 0 <= tokens <= prompt_tokens.

    `needs_decode` says that the decode instance has to be chosen first; else `decode` is None. max_prefills: requests
    wait while every prefill instance has this many prompts to compute; 0: they do not.
    """

    name: ClassVar[str]
    needs_decode: ClassVar[bool]

    @property
    def max_prefills(self) -> int: ...

    def choose(self, job: JobView, prefill: InstanceView, decode: InstanceView | None, rng: Random) -> SplitChoice: ...


Freedom = tuple[float, float]  # the least and the largest share of the prompts that prefill instances may compute


@dataclass(frozen=True, slots=True)
class _PlainSplit:
    """Base of the splits that look at the prompt alone."""

    name: ClassVar[str]
    needs_decode: ClassVar[bool] = True
    max_prefills: ClassVar[int] = 0

    def choose(self, job: JobView, prefill: InstanceView, decode: InstanceView | None, rng: Random) -> SplitChoice:
        tokens = self._tokens(job.prompt_tokens, rng)
        reason = Reason(f"split:{self.name}", {"tokens": tokens, "prompt_tokens": job.prompt_tokens})
        return SplitChoice(tokens, (reason,))

    def _tokens(self, prompt: int, rng: Random) -> int:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class FullSplit(_PlainSplit):
    """All of the prompt: plain disaggregation."""

    name: ClassVar[str] = "full"
    needs_decode: ClassVar[bool] = False

    def _tokens(self, prompt: int, rng: Random) -> int:
        return prompt


@dataclass(frozen=True, slots=True)
class NoSplit(_PlainSplit):
    """None of the prompt: the decode instance computes the whole job."""

    name: ClassVar[str] = "none"

    def _tokens(self, prompt: int, rng: Random) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class FractionSplit(_PlainSplit):
    """The same share of every prompt, rounded up to a token."""

    name: ClassVar[str] = "fraction"
    fraction: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.fraction <= 1.0:
            raise InvalidRequest(f"fraction: fraction must lie in 0..1, not {self.fraction}")

    def _tokens(self, prompt: int, rng: Random) -> int:
        return min(prompt, ceil(self.fraction * prompt))


@dataclass(frozen=True, slots=True)
class RandomSplit(_PlainSplit):
    """A random number of tokens, uniform over 0..prompt_tokens; for tests and demonstrations."""

    name: ClassVar[str] = "random"

    def _tokens(self, prompt: int, rng: Random) -> int:
        return rng.randint(0, prompt)


def freedom(split: Split) -> Freedom:
    """The range of shares that a split policy may choose; one value where the share is fixed."""
    match split:
        case FullSplit():
            return 1.0, 1.0
        case NoSplit():
            return 0.0, 0.0
        case FractionSplit(fraction=fraction):
            return fraction, fraction
    return 0.0, 1.0
