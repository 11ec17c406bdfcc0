"""The lines of jobs that yield to heavier classes: one a class, fair between callers, and only its head asks."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from shared.policy.fair_share import FairLine, Ledger, Shares


class Lines:
    """A job that waits costs one entry and nothing a second. `shares`: what each caller has had, of any class."""

    def __init__(self, weights: Mapping[str, float] | None = None, ledger: Ledger | None = None) -> None:
        """ledger: of the processes that share this one's port."""
        self.shares = Shares(weights, ledger)
        self._lines: dict[str, FairLine[asyncio.Event]] = {}

    def waiting(self, slo: str) -> int:
        """How many jobs of that class wait, the one that asks included."""
        line = self._lines.get(slo)
        return len(line) if line is not None else 0

    @asynccontextmanager
    async def turn(self, slo: str, caller: str) -> AsyncIterator[None]:
        """The block is entered when it is this job's turn to ask, and its end is the next one's turn."""
        line = self._lines.get(slo)
        if line is None:
            line = self._lines[slo] = FairLine(self.shares)
        turn = asyncio.Event()
        line.push(turn, caller)
        _call(line)
        try:
            await turn.wait()
            yield
        finally:
            line.remove(turn, caller)
            _call(line)


def _call(line: FairLine[asyncio.Event]) -> None:
    if (head := line.head()) is not None:
        head.set()
