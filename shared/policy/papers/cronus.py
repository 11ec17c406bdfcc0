"""Cronus (partially disaggregated prefill): the part of a prompt that the prefill instance computes."""

from bisect import bisect_left
from dataclasses import dataclass
from random import Random
from typing import ClassVar, NamedTuple

from shared.domain.instance import InstanceView
from shared.domain.job import JobView
from shared.domain.route import Reason
from shared.errors import InvalidRequest
from shared.policy.index import queued_prefill_s
from shared.policy.papers.costs import ChunkedCost, PartialPrefillCost
from shared.policy.split import SplitChoice

CANDIDATES = 512  # evenly spaced splits that Cronus searches


class Balance(NamedTuple):
    """The cost model of the balance between the two instances of a pair. Seconds and tokens.

    n_p: prompt tokens of one chunked iteration. context: total context of the decodes beside it. ahead_prefill_s,
    ahead_chunked_s: queued work of both instances.
    """

    prompt: int
    prefill: PartialPrefillCost
    chunked: ChunkedCost
    n_p: int
    context: int
    ahead_prefill_s: float = 0.0
    ahead_chunked_s: float = 0.0

    def prefill_s(self, split: int) -> float:
        """T_prefill: until the prefill instance has computed its part."""
        return self.ahead_prefill_s + (self.prefill.time_s(split) if split else 0.0)

    def chunked_s(self, split: int) -> float:
        """T_chunked: until the decode instance has computed the rest. Source: Cronus eqs 1 and 3."""
        rest = self.prompt - split
        if rest <= 0:
            return self.ahead_chunked_s
        iterations = -(-rest // self.n_p)
        middle = split + (iterations - 1) * self.n_p / 2  # mean of the first and the last prefill context
        return self.ahead_chunked_s + iterations * self.chunked.time_s(middle, self.context)

    def gap_s(self, split: int) -> float:
        """The time by which the prefill instance takes longer."""
        return self.prefill_s(split) - self.chunked_s(split)

    @property
    def rises(self) -> bool:
        """Whether the gap is certain to rise with the split.

        One more token costs k_p on the prefill instance (the first one b_p, too), and k_ctxp in each iteration that
        remains on the decode instance; where it saves an iteration, that one takes no longer than before.
        """
        k_p, b_p = self.prefill.k_p, self.prefill.b_p
        k_ctxp, fixed = self.chunked.k_ctxp, self.chunked.k_ctxd * self.context + self.chunked.b_c
        most = -(-self.prompt // self.n_p)
        return k_ctxp >= 0 and fixed >= 0 and k_p + min(0.0, b_p) > most * k_ctxp


@dataclass(frozen=True, slots=True)
class CronusSplit:
    """The part of the prompt for which both instances take equally long, of 512 evenly spaced ones.

    budget: tokens of an iteration of the decode instance (0: its chunk size). max_prefills: a request waits in its
    gateway while every prefill instance has this many prompts to compute (`place`), so that each split rests on fresh
    loads; 0: it does not wait. The prefill instance computes the whole prompt without measured rates, without free KV
    blocks for the prompt, and without room beside the decodes.
    Source: Cronus 4.2 and algorithm 1. Ours, where the print is garbled: the guard on n_p, the context of the first and
    the last iteration.
    Ours, and off by default (see `BalancedSplit`): include_zero: L_p = 0, the whole prompt on the decode instance, is a
    candidate, too. queue_aware: the queues of both instances count, instead of waiting until they are empty.
    """

    name: ClassVar[str] = "cronus"
    needs_decode: ClassVar[bool] = True
    include_zero: bool = False
    budget: int = 0
    queue_aware: bool = False
    max_prefills: int = 2

    def __post_init__(self) -> None:
        if self.budget < 0:
            raise InvalidRequest(f"{self.name}: budget must not be negative")
        if self.max_prefills < 0:
            raise InvalidRequest(f"{self.name}: max_prefills must be at least 0, got {self.max_prefills}")

    def choose(self, job: JobView, prefill: InstanceView, decode: InstanceView | None, rng: Random) -> SplitChoice:
        if decode is None:
            return self._full(job, "no decode instance to share with")
        balance = self._balance(job, prefill, decode)
        if isinstance(balance, str):
            return self._full(job, balance)
        tokens = best_split(balance, 0 if self.include_zero else 1)
        figures: dict[str, float | str] = {
            "tokens": tokens,
            "prompt_tokens": job.prompt_tokens,
            "prefill_s": round(balance.prefill_s(tokens), 6),
            "chunked_s": round(balance.chunked_s(tokens), 6),
            "ahead_prefill_s": round(balance.ahead_prefill_s, 6),
            "ahead_chunked_s": round(balance.ahead_chunked_s, 6),
        }
        return SplitChoice(tokens, (Reason(f"split:{self.name}", figures),))

    def _full(self, job: JobView, why: str) -> SplitChoice:
        figures: dict[str, float | str] = {"tokens": job.prompt_tokens, "prompt_tokens": job.prompt_tokens, "why": why}
        return SplitChoice(job.prompt_tokens, (Reason(f"split:{self.name}, full", figures),))

    def _balance(self, job: JobView, prefill: InstanceView, decode: InstanceView) -> Balance | str:
        """The cost model of the pair, or why there is none."""
        load, info = decode.load, decode.info
        own, other = prefill.info.rates.step, info.rates.step
        if own is None or other is None:
            return f"no measured rates of {(prefill if own is None else decode).instance_id}"
        if load.free_blocks < -(-job.prompt_tokens // max(1, info.block_size)):
            return "no free blocks for the prompt"
        n_p = (self.budget or info.chunk_size) - load.decoding
        if n_p <= 0:
            return "no room beside the decodes"
        partial = PartialPrefillCost.from_steps(own, prefill.info.chunk_size)
        chunked = ChunkedCost.from_steps(other, info.chunk_size)
        balance = Balance(job.prompt_tokens, partial, chunked, n_p, load.context_tokens)
        if not self.queue_aware:
            return balance
        waiting = -(-load.queued_prefill_tokens // n_p)
        ahead_s = waiting * max(0.0, chunked.time_s(0.0, load.context_tokens))
        return balance._replace(ahead_prefill_s=queued_prefill_s(prefill), ahead_chunked_s=ahead_s)


@dataclass(frozen=True, slots=True)
class BalancedSplit(CronusSplit):
    """A variant of `CronusSplit` of ours: requests do not wait, queues count, and the decode instance may compute the
    whole prompt.
    """

    name: ClassVar[str] = "balanced"
    include_zero: bool = True
    queue_aware: bool = True
    max_prefills: int = 0


def best_split(balance: Balance, least: int = 0) -> int:
    """The candidate ⌈j·L_in/512⌉, j in least..512, with the least |gap|; the larger one on ties.

    The search is binary where the gap rises with the split, which is the rule, and else linear.
    """
    if not balance.rises:
        splits = [_candidate(balance, j) for j in range(least, CANDIDATES + 1)]
        return min(splits, key=lambda split: (abs(balance.gap_s(split)), -split))
    # The first candidate for which the prefill instance takes at least as long.
    low = bisect_left(range(CANDIDATES), 0.0, least, key=lambda j: balance.gap_s(_candidate(balance, j)))
    after = _candidate(balance, low)
    if low == least:
        return after
    before = _candidate(balance, low - 1)
    return before if abs(balance.gap_s(before)) < abs(balance.gap_s(after)) else after


def _candidate(balance: Balance, j: int) -> int:
    return -(-j * balance.prompt // CANDIDATES)
