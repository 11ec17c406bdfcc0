"""What arrives: requests by their times and lengths, as arrays."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shared.domain.job import Slo
from shared.errors import InvalidRequest

Times = NDArray[np.float64]
Lengths = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Mix:
    """Of which class each request is and who sent it: positions in `classes` and `callers`, shape [n] each."""

    classes: tuple[Slo, ...]
    class_of: Lengths
    callers: tuple[str, ...]
    caller_of: Lengths

    def head(self, count: int) -> "Mix":
        """Of the first `count` requests."""
        return replace(self, class_of=self.class_of[:count], caller_of=self.caller_of[:count])


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival.

    arrival_s: seconds from the start, not decreasing, shape [n]. prompt_tokens, output_tokens: at least 1, shape [n].
    prefixes: for each request the ids of its prompt's blocks of `prefix_block_tokens` tokens, in order (equal ids at
    the start of two prompts are equal text), or None where the source says nothing of it. mix: None where all are of
    the run's one class.
    Raises InvalidRequest that names the first request at fault.
    """

    name: str
    arrival_s: Times
    prompt_tokens: Lengths
    output_tokens: Lengths
    prefixes: tuple[tuple[int, ...], ...] | None = None
    prefix_block_tokens: int = 512
    mix: Mix | None = None

    def __post_init__(self) -> None:
        count = len(self.arrival_s)
        if not len(self.prompt_tokens) == len(self.output_tokens) == count:
            raise InvalidRequest(f"{self.name}: arrivals and lengths differ in number")
        if count == 0:
            raise InvalidRequest(f"{self.name}: no requests")
        if self.mix is not None and not len(self.mix.class_of) == len(self.mix.caller_of) == count:
            raise InvalidRequest(f"{self.name}: a mix of {len(self.mix.class_of)} requests, not {count}")
        if self.prefixes is not None and len(self.prefixes) != count:
            raise InvalidRequest(f"{self.name}: prefixes of {len(self.prefixes)} requests, not {count}")
        for what, bad in (
            ("arrival_s is not a finite number >= 0", ~(np.isfinite(self.arrival_s) & (self.arrival_s >= 0))),
            ("arrives before its predecessor", np.concatenate(([False], np.diff(self.arrival_s) < 0))),
            ("prompt_tokens is less than 1", self.prompt_tokens < 1),
            ("output_tokens is less than 1", self.output_tokens < 1),
        ):
            if bad.any():
                raise InvalidRequest(f"{self.name}: request {int(np.argmax(bad))}: {what}")

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def rate(self) -> float:
        """Requests a second over the span of the arrivals; infinite when all come at once."""
        span = float(self.arrival_s[-1] - self.arrival_s[0])
        return (len(self) - 1) / span if span > 0 else float("inf")

    def head(self, count: int) -> "Workload":
        """The first `count` requests."""
        prefixes = self.prefixes[:count] if self.prefixes is not None else None
        return replace(
            self,
            arrival_s=self.arrival_s[:count],
            prompt_tokens=self.prompt_tokens[:count],
            output_tokens=self.output_tokens[:count],
            prefixes=prefixes,
            mix=self.mix.head(count) if self.mix is not None else None,
        )

    def with_arrivals(self, arrival_s: Times) -> "Workload":
        """The same requests at other times."""
        return replace(self, arrival_s=np.asarray(arrival_s, dtype=np.float64))

    def at_once(self) -> "Workload":
        """All at time 0: the way to measure the highest throughput."""
        return self.with_arrivals(np.zeros(len(self)))

    def at_rate(self, rate: float) -> "Workload":
        """The same pattern of arrivals, stretched to `rate` requests a second; evenly spaced if it has none."""
        if not rate > 0:
            raise InvalidRequest(f"{self.name}: rate must be positive, not {rate}")
        span = float(self.arrival_s[-1] - self.arrival_s[0])
        if span <= 0:
            return self.with_arrivals(np.arange(len(self)) / rate)
        shifted = self.arrival_s - self.arrival_s[0]
        return self.with_arrivals(shifted * ((len(self) - 1) / rate / span))
