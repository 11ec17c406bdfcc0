"""How much waits in the gateway, and how fast it leaves: of this process alone, or of all that share its port."""

import time
from collections import Counter
from math import exp
from typing import Protocol

from gateway.table import Field, Kind, SharedTable

FADE_S = 10.0  # over which it is measured how fast jobs leave


class Counts(Protocol):
    """Of one kind of jobs. A process adds to its own; what it reads is of all processes."""

    @property
    def own_jobs(self) -> int:
        """Of this process alone."""
        ...

    @property
    def jobs(self) -> int:
        """That wait."""
        ...

    @property
    def tokens(self) -> int:
        """Of their prompts."""
        ...

    def of(self, caller: str) -> int:
        """The jobs of one caller."""
        ...

    def tokens_of(self, caller: str) -> int:
        """The prompt tokens of one caller."""
        ...

    def add_jobs(self, caller: str, jobs: int) -> None:
        """So many more, or less."""
        ...

    def add_tokens(self, caller: str, tokens: int) -> None:
        """So many more, or less."""
        ...

    def left(self) -> None:
        """One job waits no longer: it began to decode, or ended."""
        ...

    def left_per_s(self) -> float:
        """How many did so a second of late."""
        ...


class OwnCounts:
    """Of the only process."""

    def __init__(self) -> None:
        self.own_jobs = 0
        self.tokens = 0
        self._by_caller: Counter[str] = Counter()
        self._tokens_by_caller: Counter[str] = Counter()
        self._drain = Drain(time.monotonic())

    @property
    def jobs(self) -> int:
        """That wait."""
        return self.own_jobs

    def of(self, caller: str) -> int:
        """The jobs of one caller."""
        return self._by_caller[caller]

    def tokens_of(self, caller: str) -> int:
        """The prompt tokens of one caller."""
        return self._tokens_by_caller[caller]

    def add_jobs(self, caller: str, jobs: int) -> None:
        """So many more, or less."""
        self.own_jobs += jobs
        self._by_caller[caller] += jobs
        if not self._by_caller[caller]:
            del self._by_caller[caller]

    def add_tokens(self, caller: str, tokens: int) -> None:
        """So many more, or less."""
        self.tokens += tokens
        self._tokens_by_caller[caller] += tokens
        if not self._tokens_by_caller[caller]:
            del self._tokens_by_caller[caller]

    def left(self) -> None:
        """One job waits no longer."""
        self._drain.left(time.monotonic())

    def left_per_s(self) -> float:
        """How many left a second of late."""
        return self._drain.rate(time.monotonic())


class TableCounts:
    """Of all processes of a table."""

    def __init__(self, table: SharedTable, kind: Kind) -> None:
        everyone = range(table.processes)
        self._kind = kind
        self._table = table
        self._words = table.integers
        self._jobs = tuple(table.first(each, kind, Field.JOBS) for each in everyone)
        self._tokens = tuple(table.first(each, kind, Field.TOKENS) for each in everyone)
        self._lefts = tuple(table.first(each, kind, Field.LEFT) for each in everyone)
        self._of: dict[str, tuple[int, ...]] = {}
        self._tokens_of: dict[str, tuple[int, ...]] = {}
        self._mine = table.process
        self._drain = Drain(time.monotonic())
        self._tell()

    @property
    def own_jobs(self) -> int:
        """Of this process alone."""
        return self._words[self._jobs[self._mine]]

    @property
    def jobs(self) -> int:
        """That wait."""
        return self._sum(self._jobs)

    @property
    def tokens(self) -> int:
        """Of their prompts."""
        return self._sum(self._tokens)

    def of(self, caller: str) -> int:
        """The jobs of one caller."""
        return self._sum(self._places(caller))

    def tokens_of(self, caller: str) -> int:
        """The prompt tokens of one caller."""
        return self._sum(self._token_places(caller))

    def add_jobs(self, caller: str, jobs: int) -> None:
        """So many more, or less."""
        self._words[self._jobs[self._mine]] += jobs
        self._words[self._places(caller)[self._mine]] += jobs
        self._table.settle()

    def add_tokens(self, caller: str, tokens: int) -> None:
        """So many more, or less."""
        self._words[self._tokens[self._mine]] += tokens
        self._words[self._token_places(caller)[self._mine]] += tokens
        self._table.settle()

    def left(self) -> None:
        """One job waits no longer."""
        self._drain.left(time.monotonic())
        self._tell()

    def left_per_s(self) -> float:
        """How many left a second of late, everywhere."""
        now = time.monotonic()
        return sum(Drain.told(*self._table.floats[at : at + 3]).rate(now) for at in self._lefts)

    def _tell(self) -> None:
        at = self._lefts[self._mine]
        for offset, value in enumerate(self._drain.state):
            self._table.floats[at + offset] = value

    def _places(self, caller: str) -> tuple[int, ...]:
        """Where the processes count the jobs of a caller: of a key that came later, from its first request on."""
        found = self._of.get(caller)
        if found is None:
            row, everyone = self._table.row(caller), range(self._table.processes)
            found = self._of[caller] = tuple(self._table.waiting(row, each, self._kind) for each in everyone)
        return found

    def _token_places(self, caller: str) -> tuple[int, ...]:
        found = self._tokens_of.get(caller)
        if found is None:
            row, everyone = self._table.row(caller), range(self._table.processes)
            found = self._tokens_of[caller] = tuple(
                self._table.waiting_tokens(row, each, self._kind) for each in everyone
            )
        return found

    def _sum(self, places: tuple[int, ...]) -> int:
        words = self._words
        return sum([words[at] for at in places])


class TableLedger:
    """What callers were served by all processes of a table."""

    def __init__(self, table: SharedTable) -> None:
        self._table = table
        self._others = [each for each in range(table.processes) if each != table.process]

    def note(self, caller: str, tokens: float) -> None:
        """It was served so much more here."""
        self._table.floats[self._table.served(self._table.row(caller), self._table.process)] += tokens

    def elsewhere(self, caller: str) -> float:
        """What the others have served it."""
        table, row = self._table, self._table.row(caller)
        return sum([table.floats[table.served(row, each)] for each in self._others])


class Drain:
    """How many jobs a second began to decode, or ended, of late. Times are of the monotonic clock, which all share."""

    def __init__(self, began_s: float) -> None:
        self._began_s = self._left_s = began_s
        self._count = 0.0

    @classmethod
    def told(cls, count: float, left_s: float, began_s: float) -> "Drain":
        """From its `state`."""
        drain = cls(began_s)
        drain._count, drain._left_s = count, left_s
        return drain

    @property
    def state(self) -> tuple[float, float, float]:
        """What `told` makes an equal one of."""
        return self._count, self._left_s, self._began_s

    def left(self, now: float) -> None:
        """One job waits no longer."""
        self._count = self._count * exp((self._left_s - now) / FADE_S) + 1.0
        self._left_s = now

    def rate(self, now: float) -> float:
        """Jobs a second."""
        seen_s = FADE_S * (1.0 - exp(-max(0.1, now - self._began_s) / FADE_S))
        return self._count * exp(min(0.0, self._left_s - now) / FADE_S) / seen_s
