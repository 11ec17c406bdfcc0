"""Requests that no instance of a cluster could ever serve: a mistake in the file or the trace, most of the time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.domain.instance import Role
from shared.sim.outcomes import Outcomes, Status
from shared.sim.spec import InstanceSpec
from shared.sim.workload import Workload


@dataclass(frozen=True, slots=True)
class Impossible:
    """How many of how many, and why. longest_tokens: the longest prompt and answer together that anyone can hold.

    too_long: those beyond every decode instance's `max_model_len` (`model_tokens`); the rest has no room in their KV.
    first: the row of the first one, with the tokens of its prompt and answer.
    """

    count: int
    requests: int
    too_long: int
    model_tokens: int
    longest_tokens: int
    first: tuple[int, int, int]

    def sentences(self) -> tuple[str, ...]:
        """Loud and clear."""
        row, prompt, output = self.first
        kv = self.count - self.too_long
        why = [f"longer than max_model_len, {self.model_tokens:,} tokens"] if self.too_long else []
        why += [f"longer than the KV memory of any instance, {self.longest_tokens:,} tokens"] if kv else []
        if self.too_long and kv:
            why = [f"{number:,} {text}" for number, text in zip((self.too_long, kv), why, strict=True)]
        return (
            f"{self.count:,} of {self.requests:,} requests ({_share(self.count, self.requests)}) can never be served: "
            f"{'; '.join(why)}.",
            f"The first is request {row:,}: {prompt:,} + {output:,} tokens. They miss the SLO, and are in no latency.",
        )


def certain(workload: Workload, instances: Sequence[InstanceSpec]) -> Impossible | None:
    """Those that are longer than the longest that any instance takes, known before anything runs; None: none is."""
    total = workload.prompt_tokens + workload.output_tokens
    return _told(total > _longest(instances), workload.prompt_tokens, workload.output_tokens, instances)


def found(outcomes: Outcomes, instances: Sequence[InstanceSpec]) -> Impossible | None:
    """Those that the simulation could not place anywhere; None where there were none."""
    there: NDArray[np.bool_] = outcomes.status == int(Status.IMPOSSIBLE)
    return _told(there, outcomes.prompt_tokens, outcomes.output_tokens, instances)


def _told(
    which: NDArray[np.bool_],
    prompt_tokens: NDArray[np.int64],
    output_tokens: NDArray[np.int64],
    instances: Sequence[InstanceSpec],
) -> Impossible | None:
    if not which.any():
        return None
    holders = [spec for spec in instances if spec.role is Role.DECODE] or instances  # of all of a request's KV
    model_tokens = max(spec.limits.max_model_len for spec in holders)
    total = prompt_tokens + output_tokens
    row = int(np.argmax(which))
    return Impossible(
        count=int(which.sum()),
        requests=len(which),
        too_long=int((which & (total > model_tokens)).sum()),
        model_tokens=model_tokens,
        longest_tokens=_longest(holders),
        first=(row, int(prompt_tokens[row]), int(output_tokens[row])),
    )


def _longest(instances: Sequence[InstanceSpec]) -> int:
    return max(min(spec.limits.max_model_len, spec.kv_tokens // spec.lanes) for spec in instances)


def _share(part: int, whole: int) -> str:
    share = 100 * part / whole
    return f"{share:.1f} %" if share >= 0.1 else "under 0.1 %"
