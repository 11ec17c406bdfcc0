"""How much work may wait to be computed and to decode: counted in jobs and prompt tokens, a fair part for each caller.

A body is admitted before it is read and settles with each job that it becomes: `Admission.admit` at the headers,
`Ticket.claim` when its jobs can be counted, `Ticket.start` for each of them once its tokens are known.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from math import exp
from types import TracebackType
from typing import Protocol, Self

from gateway.settings import GatewaySettings
from gateway.table import Field, Kind, SharedTable
from shared.domain.job import WhenFull
from shared.errors import Busy, InvalidRequest, PolyphaseError

# MERGED counts.py
# How much waits in the gateway, and how fast it leaves: of this process alone, or of all that share its port.


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


RETRY_LEAST_S, RETRY_MOST_S = 1.0, 60.0


class Admission:
    """Bounds what was admitted and does not decode yet, by `counts`: of all gateway processes of the port.

    It counts first and looks then, so that of two processes that count at once neither overlooks the other.
    With several callers none of them may hold more than its share of the jobs and of the tokens, so that there is room
    for the others.
    Of one body only some jobs are in the cluster at once without decoding, so that others find short queues there.
    """

    def __init__(
        self, settings: GatewaySettings, counts: Counts, callers: Collection[str], *, delayed: bool = False
    ) -> None:
        """callers: all that there may be, now."""
        self._callers, self._share = callers, settings.caller_share
        self._max_jobs = settings.max_delayed_jobs if delayed else settings.max_queued_jobs
        self._max_tokens = settings.max_delayed_tokens if delayed else settings.max_queued_tokens
        self._max_jobs_a_body = settings.max_jobs_a_body
        self.counts = counts
        self.jobs_at_once = settings.jobs_at_once

    @property
    def _jobs_a_caller(self) -> int:
        return max(1, _share_of(self._max_jobs, self._share, self._callers))

    @property
    def _tokens_a_caller(self) -> int:
        return _share_of(self._max_tokens, self._share, self._callers)

    @property
    def jobs_a_body(self) -> int:
        """How many jobs one body may have."""
        return min(self._max_jobs_a_body, self._jobs_a_caller)

    def admit(self, caller: str) -> "Ticket":
        """Let a request in, for one job as yet. Raises Busy."""
        ticket = Ticket(self, caller)
        ticket.claim(1)
        return ticket

    def take_jobs(self, caller: str, jobs: int) -> None:
        """Raises Busy."""
        counts = self.counts
        counts.add_jobs(caller, jobs)
        waiting, held = counts.jobs - jobs, counts.of(caller) - jobs
        if (over := waiting + jobs - self._max_jobs) > 0:
            counts.add_jobs(caller, -jobs)
            said = f"{waiting} jobs wait to be computed or to decode; {jobs} more are too many"
            raise Busy(said, retry_after_s=self._retry_after_s(over))
        if (over := held + jobs - self._jobs_a_caller) > 0:
            counts.add_jobs(caller, -jobs)
            said = f"{held} jobs of {caller!r} wait to be computed or to decode; {jobs} more are over its share"
            raise Busy(said, retry_after_s=self._retry_after_s(over * waiting / max(1, held)))

    def take_tokens(self, caller: str, tokens: int) -> None:
        """Raises Busy. A job that nobody is before passes; the first one of a caller may be over its share."""
        counts = self.counts
        counts.add_tokens(caller, tokens)
        waiting, held = counts.tokens - tokens, counts.tokens_of(caller) - tokens
        if waiting and (over := waiting + tokens - self._max_tokens) > 0:
            counts.add_tokens(caller, -tokens)
            said = f"{waiting} prompt tokens wait; {tokens} more are over {self._max_tokens}"
            raise Busy(said, retry_after_s=self._retry_after_s(over * counts.jobs / waiting))
        if held and (over := held + tokens - self._tokens_a_caller) > 0:
            counts.add_tokens(caller, -tokens)
            said = f"{held} prompt tokens of {caller!r} wait; {tokens} more are over its share, {self._tokens_a_caller}"
            raise Busy(said, retry_after_s=self._retry_after_s(over * counts.jobs / held))

    def give_back(self, caller: str, jobs: int, tokens: int = 0) -> None:
        """These wait no longer."""
        if jobs:
            self.counts.add_jobs(caller, -jobs)
        if tokens:
            self.counts.add_tokens(caller, -tokens)

    def _retry_after_s(self, jobs: float) -> float:
        """Until so many have left at the present rate, from a second to a minute."""
        return retry_after_s(jobs, self.counts.left_per_s())


class HeldBytes:
    """Bounds the bytes of the bodies that this process holds, each until its answer has ended.

    With several callers none may hold more than its share, except for its first body.
    """

    def __init__(self, settings: GatewaySettings, callers: Collection[str]) -> None:
        """callers: all that there may be, now."""
        self._most = settings.max_held_bytes
        self._callers, self._share = callers, settings.caller_share
        self._by_caller: Counter[str] = Counter()
        self.total = 0

    @property
    def _most_a_caller(self) -> int:
        return _share_of(self._most, self._share, self._callers)

    @contextmanager
    def charged(self, caller: str) -> Iterator[Callable[[int], None]]:
        """What takes so many bytes more, and raises Busy; the block's end gives all of them back."""
        taken = 0

        def take(more: int) -> None:
            nonlocal taken
            held, others = self._by_caller[caller] - taken, self.total - taken
            if others and others + taken + more > self._most:
                raise Busy(f"bodies of {others} bytes are held; {taken + more} more are over {self._most}")
            if held and held + taken + more > self._most_a_caller:
                said = f"bodies of {held} bytes of {caller!r} are held; {taken + more} more are over its share"
                raise Busy(f"{said}, {self._most_a_caller}")
            taken += more
            self.total += more
            self._by_caller[caller] += more

        try:
            yield take
        finally:
            self.total -= taken
            self._by_caller[caller] -= taken
            if not self._by_caller[caller]:
                del self._by_caller[caller]


def _share_of(most: int, share: float, callers: Collection[str]) -> int:
    return int(most * share) if len(callers) > 1 else most


class Admissions:
    """One count for the classes that yield, and one for all others: whoever waits long leaves the others their room."""

    def __init__(self, settings: GatewaySettings, callers: Collection[str], table: SharedTable | None = None) -> None:
        """callers: all that there may be, now; none where everybody is let in. table: of the processes of the port."""

        def counted(kind: Kind) -> Counts:
            return OwnCounts() if table is None else TableCounts(table, kind)

        self._yields = {name for name, one in settings.slo.items() if one.when_full is WhenFull.DELAY}
        self._delayed = Admission(settings, counted(Kind.DELAYED), callers, delayed=True)
        self._others = Admission(settings, counted(Kind.OTHERS), callers)
        self.held_bytes = HeldBytes(settings, callers)

    def of(self, slo: str) -> Admission:
        """The one that counts jobs of that class."""
        return self._delayed if slo in self._yields else self._others

    @property
    def own_jobs(self) -> int:
        """That wait in this process, of all classes."""
        return self._delayed.counts.own_jobs + self._others.counts.own_jobs

    @property
    def jobs(self) -> int:
        """That wait in all processes, of all classes."""
        return self._delayed.counts.jobs + self._others.counts.jobs

    @property
    def tokens(self) -> int:
        """Of their prompts."""
        return self._delayed.counts.tokens + self._others.counts.tokens


def retry_after_s(jobs: float, left_per_s: float) -> float:
    """Until so many have left at that rate, from a second to a minute."""
    return min(RETRY_MOST_S, max(RETRY_LEAST_S, jobs / left_per_s if left_per_s > 0.0 else RETRY_MOST_S))


class Ticket:
    """What one request may start. A context manager: what was claimed and not started goes back at its end.

    refusal: why one of its jobs was refused for load, once that is so. rejection: what vLLM says against one of its
    jobs, once one is refused for what it wants. on_submitted: called once, when the first job is submitted.
    """

    def __init__(self, admission: Admission, caller: str) -> None:
        self.admission = admission
        self.caller = caller
        self.turns = asyncio.Semaphore(admission.jobs_at_once)
        self._claimed = 0
        self.refusal: PolyphaseError | None = None
        self.rejection: Exception | None = None
        self.on_submitted: Callable[[], Awaitable[None]] | None = None
        self.prompt_logprobs = 0  # of its prompts so far: tokens times candidates

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.admission.give_back(self.caller, self._claimed)
        self._claimed = 0

    def claim(self, jobs: int) -> None:
        """Hold a claim for so many jobs. Raises Busy; InvalidRequest when no body may have so many."""
        limit = self.admission.jobs_a_body
        if jobs > limit:
            raise InvalidRequest(
                f"the body asks for {jobs} answers (prompts, conversations or items, times n); the limit is {limit}"
            )
        if jobs > self._claimed:
            self.admission.take_jobs(self.caller, jobs - self._claimed)
            self._claimed = jobs

    def move(self, admission: Admission) -> None:
        """Hold the same claim there from now on. Raises Busy, and then nothing has moved."""
        if admission is not self.admission:
            admission.take_jobs(self.caller, self._claimed)
            self.admission.give_back(self.caller, self._claimed)
            self.admission = admission

    def start(self, prompt_tokens: int) -> "Seat":
        """Turn a claim into a job; a job beyond what was claimed is a claim of its own. Raises Busy."""
        self.claim(1)
        self.admission.take_tokens(self.caller, prompt_tokens)
        self._claimed -= 1
        return Seat(self, prompt_tokens)


class Seat:
    """A job's, until it decodes or ends."""

    def __init__(self, ticket: Ticket, tokens: int) -> None:
        self.ticket = ticket
        self._tokens = tokens
        self._waits = True
        self._has_turn = False

    async def turn(self, timeout_s: float) -> None:
        """Wait until few enough jobs of the body are in the cluster without decoding, at most so long."""
        turns = self.ticket.turns
        if not turns.locked():
            await turns.acquire()  # returns at once
            self._has_turn = True
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await turns.acquire()
                self._has_turn = True

    def leave(self) -> None:
        """The job waits no longer. May be said more than once."""
        if self._waits:
            self._waits = False
            self.ticket.admission.give_back(self.ticket.caller, 1, self._tokens)
            self.ticket.admission.counts.left()
        if self._has_turn:
            self._has_turn = False
            self.ticket.turns.release()
