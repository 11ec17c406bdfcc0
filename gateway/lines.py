"""The lines of jobs that wait for their place: one a class, fair between callers, and only its head asks. Those that
step aside for others of their class (`shared.policy.overload.steps_aside`) have a line of their own.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from shared.policy.fair_share import FairLine, Ledger, Shares


class Lines:
    """A job that waits costs one entry and nothing a second. `shares`: what each caller has had, of any class."""

    def __init__(self, weights: Mapping[str, float] | None = None, ledger: Ledger | None = None) -> None:
        """ledger: of the processes that share this one's port."""
        self.shares = Shares(weights, ledger)
        self._lines: dict[tuple[str, bool], FairLine[asyncio.Event]] = {}  # by class, and whether they stepped aside

    def waiting(self, slo: str) -> int:
        """How many jobs of that class wait, those that ask included."""
        return sum(len(line) for (name, _), line in self._lines.items() if name == slo)

    def queued(self, slo: str) -> bool:
        """Whether a job of that class that comes now has others before it."""
        line = self._lines.get((slo, False))
        return line is not None and len(line) > 0

    @asynccontextmanager
    async def turn(self, slo: str, caller: str, *, aside: bool = False) -> AsyncIterator[None]:
        """The block is entered when it is this job's turn to ask, and its end is the next one's turn."""
        line = self._lines.get((slo, aside))
        if line is None:
            line = self._lines[slo, aside] = FairLine(self.shares)
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
