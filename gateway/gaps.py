"""Gaps between the tokens of answers, counted where each step passes: it costs one search in a short list."""

from bisect import bisect_left

# As vLLM counts them: vllm.v1.metrics.buckets. Seconds.
BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)


class Gaps:
    """How many gaps came to at most each bound, and, last, to more. Their sum is known otherwise: an answer's gaps add
    up to the time from its first token to its last.
    """

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)

    def add(self, gap_s: float) -> None:
        """One gap, of a step that brought tokens."""
        self.counts[bisect_left(BOUNDS, gap_s)] += 1

    def cumulative(self) -> list[tuple[str, float]]:
        """As Prometheus has it: bound, and how many came to at most that."""
        total, found = 0, []
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found
