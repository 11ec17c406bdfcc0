"""The disk tier's part in each rank: a file of slots of one size, each with the rank's part of a block.

One thread reads and another one writes, so that a read waits for no write. In front of each block is a record of what
it should be: a digest of its key and of the engine's fingerprint, and a checksum of its bytes. A block whose record
does not fit is lost, and nothing is served from it. An error of the file itself ends its use.
"""

import fcntl
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import xxhash

_RECORD = struct.Struct("<16sQ")  # the digest, and the checksum: xxh3_64
_ALIGNED_BYTES = 4096  # records begin at multiples of it
_LOCK_S = 10.0  # within which the ranks of a former process, which has died, end
_CLOSE_S = 5.0  # for what is under way at the end


class DiskError(Exception):
    """The tier cannot be had; the text begins with the name of the setting."""


@dataclass(slots=True)
class DiskCopies:
    """What a step copies: `writes` from slots of host memory to slots of the file, and then `reads` from slots of the
    file to those of host memory. Each has the slot from which, the slot to which, and the block's key.
    """

    writes: list[tuple[int, int, bytes]] = field(default_factory=list)
    reads: list[tuple[int, int, bytes]] = field(default_factory=list)


@dataclass(slots=True)
class DiskReport:
    """What has ended since the last report: of one rank, or of several. Slots are those of the store in host memory."""

    written: int = 0  # blocks
    read: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)  # their blocks could not be read
    fault: str = ""  # why a file is not used any more

    def aggregate(self, other: "DiskReport") -> "DiskReport":
        """vLLM calls it with the reports of the other ranks."""
        return DiskReport(
            self.written + other.written, self.read + other.read, self.lost + other.lost, self.fault or other.fault
        )


@dataclass(frozen=True, slots=True)
class _Write:
    slot: int
    key: bytes
    data: bytes


@dataclass(frozen=True, slots=True)
class _Read:
    slot: int
    key: bytes
    host_slot: int
    into: memoryview


Work = TypeVar("Work", _Read, _Write)


class DiskStore:
    """The engine's thread calls the public methods. `ended` is called on the thread that reads after each block that
    was read, or was lost.
    """

    def __init__(
        self, path: Path, slots: int, slot_bytes: int, fingerprint: str, ended: Callable[[], None] = lambda: None
    ) -> None:
        """Allocates the whole file. What is in it, of a former process, is dropped. Raises DiskError."""
        self.path = path
        self._fingerprint = blake2b(fingerprint.encode()).digest()
        self._step = step_bytes(slot_bytes)
        self._ended = ended
        self._file = _opened(path)
        try:
            _allocate(self._file, path, slots * self._step)
        except BaseException:
            os.close(self._file)
            raise
        self._reads: deque[_Read] = deque()
        self._writes: deque[_Write] = deque()
        self._latest: dict[int, _Write] = {}  # by slot, what is not written yet
        self._changed = threading.Condition()
        self._report = DiskReport()
        self._fault = ""
        self._closing = False
        self.reading = 0  # blocks whose end has not been reported
        self._threads = [
            threading.Thread(target=self._run_reads, name="kv-disk-reads", daemon=True),
            threading.Thread(target=self._run_writes, name="kv-disk-writes", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def write(self, slot: int, key: bytes, data: bytes | memoryview) -> None:
        """Queue a block, of which this takes a copy, for a slot."""
        write = _Write(slot, key, bytes(data))
        with self._changed:
            self._writes.append(write)
            self._latest[slot] = write
            self._changed.notify_all()

    def read(self, slot: int, key: bytes, host_slot: int, into: memoryview) -> None:
        """Queue the read of a slot, of which the last block given to `write` is that of this key.

        `into`: bytes that nothing else uses until `report` has `host_slot`.
        """
        self.reading += 1
        with self._changed:
            self._reads.append(_Read(slot, key, host_slot, into))
            self._changed.notify_all()

    def report(self) -> DiskReport | None:
        """What has ended since the last call, if anything has."""
        with self._changed:
            report, self._report = self._report, DiskReport()
        self.reading -= len(report.read) + len(report.lost)
        return report if report.written or report.read or report.lost or report.fault else None

    def close(self) -> None:
        """Drop all blocks, and the file."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(_CLOSE_S)
        self.path.unlink(missing_ok=True)
        if not any(thread.is_alive() for thread in self._threads):
            os.close(self._file)

    def _run_reads(self) -> None:
        while (read := self._next(self._reads)) is not None:
            fits = self._carry_out_read(read)
            with self._changed:
                (self._report.read if fits else self._report.lost).append(read.host_slot)
            self._ended()

    def _run_writes(self) -> None:
        while (write := self._next(self._writes)) is not None:
            self._carry_out_write(write)
            with self._changed:
                self._report.written += 1
                if self._latest.get(write.slot) is write:
                    del self._latest[write.slot]

    def _next(self, queue: deque[Work]) -> Work | None:
        with self._changed:
            while not (queue or self._closing):
                self._changed.wait()
            return None if self._closing else queue.popleft()

    def _carry_out_read(self, read: _Read) -> bool:
        """Whether the bytes are those of the block."""
        with self._changed:
            write = self._latest.get(read.slot)
        if write is not None:
            fits = write.key == read.key and not self._fault
            if fits:
                read.into[:] = write.data
            return fits
        if self._fault:
            return False
        record = bytearray(_RECORD.size)
        try:
            self._check_file()
            size = os.preadv(self._file, [record, read.into], read.slot * self._step)
        except OSError as error:
            self._fail(error)
            return False
        return size == len(record) + len(read.into) and record == self._record(read.key, read.into)

    def _carry_out_write(self, write: _Write) -> None:
        if self._fault:
            return
        record = self._record(write.key, write.data)
        try:
            self._check_file()
            size = os.pwritev(self._file, [record, write.data], write.slot * self._step)
        except OSError as error:
            self._fail(error)
            return
        if size < len(record) + len(write.data):
            self._fail(OSError("a write ended early"))  # as the disk became full: the next one would say so

    def _record(self, key: bytes, data: bytes | memoryview) -> bytes:
        digest = blake2b(key, digest_size=16, key=self._fingerprint).digest()
        return _RECORD.pack(digest, xxhash.xxh3_64_intdigest(data))

    def _check_file(self) -> None:
        """Raises OSError where it was removed: its space is not free, and no folder shows what takes it."""
        if not os.fstat(self._file).st_nlink:
            raise OSError("the file was removed")

    def _fail(self, error: OSError) -> None:
        with self._changed:
            self._fault = self._fault or f"{self.path}: {error.strerror or error}"
            self._report.fault = self._fault


def step_bytes(slot_bytes: int) -> int:
    """From one slot of a file to the next, for blocks of so many bytes."""
    return -(-(_RECORD.size + slot_bytes) // _ALIGNED_BYTES) * _ALIGNED_BYTES


def check_folder(folder: Path, disk_kv_bytes: int, ranks: int) -> None:
    """Make an instance's own folder within one that exists. Raises DiskError where it cannot be, or where the files of
    the ranks, of so many bytes each, would not fit beside what is there.
    """
    parent = folder.parent
    if not parent.is_dir():
        raise DiskError(f"disk_kv_folder: there is no folder {parent}: make it, or mount it")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        free = os.statvfs(folder)
    except OSError as error:
        raise DiskError(f"disk_kv_folder: {folder} cannot be used: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise DiskError(f"disk_kv_folder: {folder} cannot be written to")
    old_bytes = sum(_allocated(each) for each in folder.glob("rank-*"))  # of a former process: they are emptied
    free_bytes = free.f_bavail * free.f_frsize + old_bytes
    if disk_kv_bytes * ranks > free_bytes:
        raise DiskError(
            f"disk_kv_bytes: {ranks} x {disk_kv_bytes / 2**30:.2f} GiB do not fit in {folder}, where "
            f"{free_bytes / 2**30:.2f} GiB are free: lower it, or choose another disk_kv_folder"
        )


def remove_others(folder: Path, ranks: int) -> None:
    """Remove the files of a former process that had more ranks."""
    own = {rank_file(folder, rank) for rank in range(ranks)}
    for path in set(folder.glob("rank-*")) - own:
        os.close(_opened(path))  # it waits until nothing uses it any more
        path.unlink(missing_ok=True)


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"


def _allocated(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:  # it is gone
        return 0


def _opened(path: Path) -> int:
    """The file, which no other process has. Raises DiskError."""
    until_mono = time.monotonic() + _LOCK_S
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise DiskError(f"disk_kv_folder: {path} cannot be opened: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(file, 0o600)  # it has what users wrote
            if os.fstat(file).st_nlink:  # else its former owner has removed it meanwhile
                return file
            os.close(file)
        except BlockingIOError:
            os.close(file)
            if time.monotonic() > until_mono:
                raise DiskError(f"disk_kv_folder: {path} is in use by another process") from None
            time.sleep(0.05)
        except OSError as error:  # a file system without locks, or the file of another user
            os.close(file)
            raise DiskError(f"disk_kv_folder: {path} cannot be locked for this process: {error.strerror}") from error


def _allocate(file: int, path: Path, size: int) -> None:
    try:
        os.ftruncate(file, 0)
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        os.ftruncate(file, 0)
        raise DiskError(f"disk_kv_bytes: {path} cannot have {size} bytes: {error.strerror}") from error
