"""The newest engine steps of an instance, for calibration: written by the engine at each step, read over HTTP."""

import time

from shared.policy.prefill_order import PrefillShare
from shared.wire.messages import StepPage, StepRecord

KEPT = 8192  # steps: over a minute of a fast engine's, some 2 MB

Chunks = tuple[tuple[int, int], ...]
_Entry = tuple[int, float, float, float, Chunks, int, int]


class StepLog:
    """A ring of the last `kept` steps. One thread writes, others may read at any time; neither ever waits."""

    def __init__(self, kept: int = KEPT) -> None:
        self._ring: list[_Entry | None] = [None] * kept
        self._count = 0
        self._share = PrefillShare()

    @property
    def prefill_share(self) -> float:
        """Of the last steps with decodes, how many computed prompts, too."""
        return self._share.after()

    def add(self, seconds: float, cpu_s: float, prefill: Chunks, decode_count: int, decode_context_tokens: int) -> None:
        """Record a step that ends now. See StepRecord."""
        number = self._count
        self._ring[number % len(self._ring)] = (
            number,
            time.time(),
            seconds,
            cpu_s,
            prefill,
            decode_count,
            decode_context_tokens,
        )
        self._count = number + 1
        if decode_count:
            if prefill:
                self._share.mixed()
            else:
                self._share.plain()

    def page(self, instance_id: str, generation: int, since: int, limit: int) -> StepPage:
        """Up to `limit` steps from number `since` on; with a negative `since`, the newest ones."""
        count = self._count
        first = max(0, count - limit) if since < 0 else min(since, count)
        start = max(first, count - len(self._ring))
        stop = min(count, start + limit)
        kept = []
        for number in range(start, stop):
            entry = self._ring[number % len(self._ring)]
            if entry is not None and entry[0] == number:  # else the writer has come round meanwhile
                kept.append(StepRecord(*entry))
        return StepPage(instance_id, generation, tuple(kept), stop, stop - first - len(kept))
