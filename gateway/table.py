"""The counters of a gateway: work that waits, what callers were served, and the rates of API keys.

A gateway that is alone on its port counts in memory (`LocalTable`). Gateway processes that share a port count in a
mapped file (`SharedTable`), so that one limit holds for all of them. `Counts`, `ServedTokens` and `auth.KeyRates` read
and write either table.

Layout of the file, in words of eight bytes, native order: a head; SLOT_WORDS for each process, in which that process
alone writes; then one row for each caller: the digest of its name (two words), the level of its rate limit and the
time of that level (float seconds of the monotonic clock), and for each process the caller's waiting jobs and prompt
tokens, each by Kind, and the tokens that the process has served it (a float).

An aligned word is read and written at once, so counters need no lock: a process adds to its own counter before it reads
the sum of all, so of two processes that compete for the last place at most one gets it. The level of a rate limit is
changed under a lock of the file. A process that starts clears what a dead process of the same number had counted; the
kernel releases the locks of a dead process.
"""

import fcntl
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from hashlib import blake2b
from math import exp
from pathlib import Path
from threading import Lock

from gateway.settings import GatewaySettings
from shared.errors import Busy, InvalidRequest

MAGIC, VERSION = b"PPgwtab\n", 2
MAX_PROCESSES = 16
HEAD_WORDS, ROW_WORDS = 8, 4  # ROW_WORDS: of a row, before its counters
KINDS, KIND_WORDS = 2, 8
PART_WORDS = 2 * KINDS + 1  # of a row, for each process
SLOT_WORDS = KINDS * KIND_WORDS
LOCK_S = 0.05  # the lock is held for microseconds, and longer only by a process that is stopped meanwhile
FADE_S = 10.0  # time constant of the rate at which jobs leave the queue
_WORD = 8
_HEAD = struct.Struct("=8sQQQ")  # magic, version, processes, rows


class Kind(IntEnum):
    """What is counted separately: jobs of the SLO classes that yield to others, and all other jobs."""

    OTHERS = 0
    DELAYED = 1


class Field(IntEnum):
    """The words of a process for one Kind. The last three are floats, which `Counts` writes."""

    JOBS = 0
    TOKENS = 1
    LEFT = 2
    LEFT_AT_S = 3
    BEGAN_S = 4


class Table:
    """Where each counter stands among the words of a table: `integers` and `floats` are views of the same words."""

    integers: "list[int] | memoryview[int]"
    floats: "list[float] | memoryview[float]"

    def __init__(self, processes: int, process: int) -> None:
        self.processes, self.process = processes, process
        self.row_words = ROW_WORDS + PART_WORDS * processes
        self.first_row = HEAD_WORDS + SLOT_WORDS * processes
        self._rows: dict[str, int] = {}

    def first(self, process: int, kind: Kind, field: Field) -> int:
        return HEAD_WORDS + SLOT_WORDS * process + KIND_WORDS * kind + field

    def row(self, caller: str) -> int:
        """The caller's row, which is made at its first request. Raises InvalidRequest when the table is full."""
        row = self._rows.get(caller)
        if row is None:
            row = self._rows[caller] = self._new_row(caller)
        return row

    def waiting(self, row: int, process: int, kind: Kind) -> int:
        """Where a row counts the jobs of a process; their prompt tokens are KINDS words further."""
        return row + ROW_WORDS + PART_WORDS * process + kind

    def served(self, row: int, process: int) -> int:
        """Where a row has the tokens that a process has served, a float."""
        return row + ROW_WORDS + PART_WORDS * process + 2 * KINDS

    def publish(self) -> None:
        """Make what this process has written visible to the other processes before it reads on."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude the other processes. Raises Busy where another process holds the lock for long."""
        yield

    def close(self) -> None:
        """Count nothing any more, and leave the number of the process to a successor."""

    def _new_row(self, caller: str) -> int:
        raise NotImplementedError


class LocalTable(Table):
    """The table of the only process of a port, in memory."""

    def __init__(self) -> None:
        super().__init__(processes=1, process=0)
        self._words: list[float] = [0] * self.first_row
        self.floats = self._words
        self.integers = self._words  # type: ignore[assignment]  # a word is read as what was written to it

    def _new_row(self, caller: str) -> int:
        row = len(self._words)
        self._words += [0] * self.row_words
        return row


class SharedTable(Table):
    """The table as process number `process` sees it, which is the only process of that number until it ends.

    Raises InvalidRequest that names the file where it is missing, is no table, or belongs to another cluster.
    """

    def __init__(self, path: Path, process: int) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise self._wrong(f"{error.strerror}; `polyphase up` makes it at its start") from error
        try:
            processes, self._max_rows = self._read_head()
            if not 0 <= process < processes:
                raise self._wrong(f"it is for {processes} processes, and this is number {process} from 0")
            super().__init__(processes, process)
            try:  # the byte of the number is locked until the process ends
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, process)
            except OSError:
                raise self._wrong(f"another process is number {process} already") from None
            self._map = mmap.mmap(self._file, _size(processes, self._max_rows))
        except BaseException:
            os.close(self._file)
            raise
        self.integers = memoryview(self._map).cast("q")
        self.floats = memoryview(self._map).cast("d")
        self._fence = Lock()
        self._clear()

    def close(self) -> None:
        self._clear()
        os.close(self._file)  # the words stay mapped: a request that is cancelled late may still count down

    def publish(self) -> None:
        with self._fence:  # an atomic operation, which orders the process's memory accesses
            pass

    @contextmanager
    def locked(self) -> Iterator[None]:
        deadline_mono = 0.0
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                now = time.monotonic()
                deadline_mono = deadline_mono or now + LOCK_S
                if now > deadline_mono:
                    raise Busy("another gateway process does not respond; try again", retry_after_s=1.0) from None
                os.sched_yield()
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _new_row(self, caller: str) -> int:
        """Rows are found by the digest of the name, from where it points onwards, and are kept for good: processes
        that read the file of keys at different times agree on them.
        """
        digest = blake2b(caller.encode(), digest_size=16, person=b"caller").digest()
        high, low = (int.from_bytes(half, sys.byteorder, signed=True) for half in (digest[:8], digest[8:]))
        high = high or 1  # zero marks a free row
        with self.locked():
            for step in range(self._max_rows):
                at = self.first_row + (low + step) % self._max_rows * self.row_words
                found = self.integers[at]
                if not found:
                    self.integers[at + 1] = low
                    self.integers[at] = high
                    return at
                if found == high and self.integers[at + 1] == low:
                    return at
        raise self._wrong(f"all {self._max_rows} rows of callers are taken: restart the cluster to add more keys")

    def _read_head(self) -> tuple[int, int]:
        head = os.pread(self._file, _HEAD.size, 0)
        magic, version, processes, rows = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", 0, 0, 0)
        if magic != MAGIC or not 0 < processes <= MAX_PROCESSES:
            raise self._wrong("it is damaged, or no table of gateway processes: restart the cluster")
        if version != VERSION:
            raise self._wrong(f"it has version {version}, and this gateway writes {VERSION}: restart the cluster")
        if os.fstat(self._file).st_size != _size(processes, rows):
            raise self._wrong("it is damaged: its size is not the one that its head states; restart the cluster")
        return processes, rows

    def _clear(self) -> None:
        """Set this process's own counters to zero."""
        first = self.first(self.process, Kind.OTHERS, Field.JOBS)
        for at in (*range(first, first + SLOT_WORDS), *self._own_row_words()):
            self.integers[at] = 0

    def _own_row_words(self) -> Iterable[int]:
        for number in range(self._max_rows):
            row = self.first_row + number * self.row_words
            if self.integers[row]:
                own = self.waiting(row, self.process, Kind.OTHERS)
                yield from range(own, own + PART_WORDS)

    def _wrong(self, why: str) -> InvalidRequest:
        return InvalidRequest(f"shared_table: {self.path}: {why}")


@contextmanager
def shared_table(settings: GatewaySettings) -> Iterator[Table]:
    """The table that the settings name, for the length of the block. Raises InvalidRequest."""
    table = LocalTable() if settings.shared_table is None else SharedTable(settings.shared_table, settings.process)
    try:
        if settings.shared_table is not None and table.processes != settings.processes:
            difference = f"it is for {table.processes} processes, not {settings.processes}"
            raise InvalidRequest(f"shared_table: {settings.shared_table}: {difference}")
        yield table
    finally:
        table.close()


def make_table(path: Path, processes: int, callers: int) -> None:
    """Write an empty table for these processes and callers in place of an older file. Raises InvalidRequest."""
    if not 0 < processes <= MAX_PROCESSES:
        raise InvalidRequest(f"shared_table: at most {MAX_PROCESSES} processes can share a table, got {processes}")
    rows = 2 * callers + 64  # keys may be added while the table is in use
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with open(os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(_HEAD.pack(MAGIC, VERSION, processes, rows))
            file.truncate(_size(processes, rows))
        fresh.replace(path)
    except OSError as error:
        raise InvalidRequest(f"shared_table: {path} cannot be made: {error.strerror}") from error


def _size(processes: int, rows: int) -> int:
    return _WORD * (HEAD_WORDS + SLOT_WORDS * processes + rows * (ROW_WORDS + PART_WORDS * processes))


class Counts:
    """The waiting jobs of one Kind and their prompt tokens. A process adds to its own counters and reads all."""

    def __init__(self, table: Table, kind: Kind, clock: Callable[[], float] = time.monotonic) -> None:
        everyone = range(table.processes)
        self._kind = kind
        self._table = table
        self._clock = clock
        self._words = table.integers
        self._jobs = tuple(table.first(each, kind, Field.JOBS) for each in everyone)
        self._tokens = tuple(table.first(each, kind, Field.TOKENS) for each in everyone)
        self._rates = tuple(table.first(each, kind, Field.LEFT) for each in everyone)
        self._callers: dict[str, tuple[int, ...]] = {}  # where the processes count the jobs of a caller
        self._mine = table.process
        at = self._rates[self._mine]
        table.floats[at], table.floats[at + 1], table.floats[at + 2] = 0.0, clock(), clock()

    @property
    def own_jobs(self) -> int:
        """The waiting jobs of this process alone."""
        return self._words[self._jobs[self._mine]]

    @property
    def jobs(self) -> int:
        return self._sum(self._jobs)

    @property
    def tokens(self) -> int:
        return self._sum(self._tokens)

    def jobs_of(self, caller: str) -> int:
        return self._sum(self._places(caller))

    def tokens_of(self, caller: str) -> int:
        words = self._words
        return sum([words[at + KINDS] for at in self._places(caller)])

    def add_jobs(self, caller: str, jobs: int) -> None:
        self._words[self._jobs[self._mine]] += jobs
        self._words[self._places(caller)[self._mine]] += jobs
        self._table.publish()

    def add_tokens(self, caller: str, tokens: int) -> None:
        self._words[self._tokens[self._mine]] += tokens
        self._words[self._places(caller)[self._mine] + KINDS] += tokens
        self._table.publish()

    def job_left(self) -> None:
        """Record that one job began to decode, or ended."""
        floats, at, now = self._table.floats, self._rates[self._mine], self._clock()
        floats[at] = floats[at] * exp((floats[at + 1] - now) / FADE_S) + 1.0
        floats[at + 1] = now

    def left_per_s(self) -> float:
        """How many jobs left per second of late, in all processes."""
        floats, now, total = self._table.floats, self._clock(), 0.0
        for at in self._rates:
            count, left_s, began_s = floats[at], floats[at + 1], floats[at + 2]
            seen_s = FADE_S * (1.0 - exp(-max(0.1, now - began_s) / FADE_S))
            total += count * exp(min(0.0, left_s - now) / FADE_S) / seen_s
        return total

    def _places(self, caller: str) -> tuple[int, ...]:
        found = self._callers.get(caller)
        if found is None:
            table, row = self._table, self._table.row(caller)
            found = tuple(table.waiting(row, each, self._kind) for each in range(table.processes))
            self._callers[caller] = found
        return found

    def _sum(self, places: tuple[int, ...]) -> int:
        words = self._words
        return sum([words[at] for at in places])


class ServedTokens:
    """What callers were served by all processes of a table: a `shared.policy.fair_share.Ledger`."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._others = [each for each in range(table.processes) if each != table.process]

    def note(self, caller: str, tokens: float) -> None:
        self._table.floats[self._table.served(self._table.row(caller), self._table.process)] += tokens

    def elsewhere(self, caller: str) -> float:
        """What the other processes have served the caller."""
        table, row = self._table, self._table.row(caller)
        return sum([table.floats[table.served(row, each)] for each in self._others])
