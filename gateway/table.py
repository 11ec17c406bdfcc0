"""The table that the gateway processes of one port share, a mapped file: their counters, and the keys' rates.

Layout, in words of eight bytes, native order: a head; SLOT_WORDS for each process, in which it alone writes; then for
each caller of an API key a row of its digest (two words), the level of its rate's bucket and when that was (float
seconds of the monotonic clock), and for each process the jobs of it that wait and their prompt tokens,
each by Kind, and the tokens that it was served (a float).

An aligned word is read and written at once, so counters need no lock: a process adds to its own before it looks at the
sum of all, so of two that ask for the last place at once none or one gets it, never both. A bucket is changed under the
file's lock. What a process that died had counted, its successor clears; the kernel lets go of its locks.
"""

import fcntl
import mmap
import os
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from hashlib import blake2b
from pathlib import Path
from threading import Lock

from gateway.settings import GatewaySettings
from shared.errors import Busy, InvalidRequest

MAGIC, VERSION = b"PPgwtab\n", 2
MOST_PROCESSES = 16
HEAD_WORDS, ROW_WORDS = 8, 4  # of a row: before the counters
KINDS, KIND_WORDS = 2, 8
PART_WORDS = 2 * KINDS + 1  # of a row: for each process
SLOT_WORDS = KINDS * KIND_WORDS
LOCK_S = 0.05  # it is held for microseconds, and longer only by one that is not running just then
_WORD = 8
_HEAD = struct.Struct("=8sQQQ")  # magic, version, processes, rows


class Kind(IntEnum):
    """Of what is counted: jobs of the classes that yield, and all others."""

    OTHERS = 0
    DELAYED = 1


class Field(IntEnum):
    """Of a process's words of one Kind. The last three are floats: see `gateway.admission`."""

    JOBS = 0
    TOKENS = 1
    LEFT = 2
    LEFT_AT_S = 3
    BEGAN_S = 4


@contextmanager
def shared_table(settings: GatewaySettings) -> Iterator["SharedTable | None"]:
    """That of the settings, for the block's length; None where the process is the only one. Raises InvalidRequest."""
    if settings.shared_table is None:
        yield None
        return
    table = SharedTable(settings.shared_table, settings.process)
    try:
        if table.processes != settings.processes:
            said = f"it is for {table.processes} processes, not {settings.processes}"
            raise InvalidRequest(f"shared_table: {settings.shared_table}: {said}")
        yield table
    finally:
        table.close()


def make_table(path: Path, processes: int, callers: int) -> None:
    """Begin a new one for so many processes and callers, in place of an older one. Raises InvalidRequest."""
    if not 0 < processes <= MOST_PROCESSES:
        raise InvalidRequest(f"shared_table: {processes} processes; at most {MOST_PROCESSES} share one")
    rows = 2 * callers + 64  # further keys may come while it is in use
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with open(os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(_HEAD.pack(MAGIC, VERSION, processes, rows))
            file.truncate(_size(processes, rows))
        fresh.replace(path)
    except OSError as error:
        raise InvalidRequest(f"shared_table: {path} cannot be made: {error.strerror}") from error


class SharedTable:
    """The table as process number `process` sees it, which is the only one of that number until it ends.

    `integers` and `floats` are its words; `first` and `row` say where. Raises InvalidRequest that names the file where
    it is missing, is no table, or is another's.
    """

    def __init__(self, path: Path, process: int) -> None:
        self.path = path
        self.process = process
        self._file = self._opened()
        try:
            self.processes, self._rows = self._read_head()
            if not 0 <= process < self.processes:
                raise self._wrong(f"it is for {self.processes} processes, and this is number {process} from 0")
            self._claim()
            self._map = mmap.mmap(self._file, _size(self.processes, self._rows))
        except BaseException:
            os.close(self._file)
            raise
        self._row_words = ROW_WORDS + PART_WORDS * self.processes
        self._first_row = HEAD_WORDS + SLOT_WORDS * self.processes
        self.integers = memoryview(self._map).cast("q")
        self.floats = memoryview(self._map).cast("d")
        self._fence = Lock()
        self._known_rows: dict[str, int] = {}
        self._clear()

    def close(self) -> None:
        """Count nothing any more, and leave the number to a successor."""
        self._clear()
        os.close(self._file)  # the words stay: a request that is cancelled late may still count down

    def first(self, process: int, kind: Kind, field: Field) -> int:
        """Where that word of a process is."""
        return HEAD_WORDS + SLOT_WORDS * process + KIND_WORDS * kind + field

    def row(self, caller: str) -> int:
        """Where the caller's row begins, which is made if there is none. Raises InvalidRequest when all are taken.

        Rows are found by the digest of the name, from where it points onwards, and are never given up: processes that
        read the file of keys at different times agree on them.
        """
        known = self._known_rows.get(caller)
        if known is None:
            known = self._known_rows[caller] = self._find_row(caller)
        return known

    def _find_row(self, caller: str) -> int:
        digest = blake2b(caller.encode(), digest_size=16, person=b"caller").digest()
        high, low = (int.from_bytes(half, sys.byteorder, signed=True) for half in (digest[:8], digest[8:]))
        high = high or 1  # zero: a row that nobody has
        with self.locked():
            for step in range(self._rows):
                at = self._first_row + (low + step) % self._rows * self._row_words
                found = self.integers[at]
                if not found:
                    self.integers[at + 1] = low
                    self.integers[at] = high
                    return at
                if found == high and self.integers[at + 1] == low:
                    return at
        raise self._wrong(f"all {self._rows} rows of callers are taken: start the suite anew for so many more keys")

    def waiting(self, row: int, process: int, kind: Kind) -> int:
        """Where a row counts the jobs of a process."""
        return row + ROW_WORDS + PART_WORDS * process + kind

    def waiting_tokens(self, row: int, process: int, kind: Kind) -> int:
        """Where a row counts the prompt tokens of those jobs."""
        return row + ROW_WORDS + PART_WORDS * process + KINDS + kind

    def served(self, row: int, process: int) -> int:
        """Where a row has the tokens that a process has served, a float."""
        return row + ROW_WORDS + PART_WORDS * process + 2 * KINDS

    def settle(self) -> None:
        """What this process has written is seen by the others before it reads on."""
        with self._fence:  # an atomic operation
            pass

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone in the table. Raises Busy where another holds it for long: it was stopped while it did."""
        give_up_s = 0.0
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                now = time.monotonic()
                give_up_s = give_up_s or now + LOCK_S
                if now > give_up_s:
                    raise Busy("another gateway process stands still; try again", retry_after_s=1.0) from None
                os.sched_yield()
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _opened(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise self._wrong(f"{error.strerror}; `polyphase up` makes it at its start") from error

    def _read_head(self) -> tuple[int, int]:
        head = os.pread(self._file, _HEAD.size, 0)
        magic, version, processes, rows = _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", 0, 0, 0)
        if magic != MAGIC or not 0 < processes <= MOST_PROCESSES:
            raise self._wrong("it is damaged, or no table of gateway processes: start the suite anew")
        if version != VERSION:
            raise self._wrong(f"it has version {version}, and this gateway writes {VERSION}: start the suite anew")
        if os.fstat(self._file).st_size != _size(processes, rows):
            raise self._wrong("it is damaged: its size is not what its head says; start the suite anew")
        return processes, rows

    def _claim(self) -> None:
        """Be the only process of this number, until it ends: the byte of that number is locked."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self.process)
        except OSError:
            raise self._wrong(f"another process is number {self.process} already") from None

    def _clear(self) -> None:
        """Nothing of what this number counts waits."""
        first = self.first(self.process, Kind.OTHERS, Field.JOBS)
        for at in (*range(first, first + SLOT_WORDS), *self._own_counts()):
            self.integers[at] = 0

    def _own_counts(self) -> Iterable[int]:
        for row in range(self._rows):
            at = self._first_row + row * self._row_words
            if self.integers[at]:
                own = self.waiting(at, self.process, Kind.OTHERS)
                yield from range(own, own + PART_WORDS)

    def _wrong(self, why: str) -> InvalidRequest:
        return InvalidRequest(f"shared_table: {self.path}: {why}")


def _size(processes: int, rows: int) -> int:
    return _WORD * (HEAD_WORDS + SLOT_WORDS * processes + rows * (ROW_WORDS + PART_WORDS * processes))
