"""Blocks in a rank's file and back, and what is served of a file that is not what it was: nothing."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.worker.kv import disk_store
from services.worker.kv.disk_store import (
    DiskError,
    DiskReport,
    DiskStore,
    check_folder,
    rank_file,
    remove_others,
    step_bytes,
)

SIZE, SLOTS = 5000, 4


class Store:
    """A store, and the buffers into which it reads, by their host slots."""

    def __init__(self, path: Path, fingerprint: str = "model") -> None:
        self.ended = threading.Semaphore(0)
        self.store = DiskStore(path, SLOTS, SIZE, fingerprint, ended=self.ended.release)
        self.total = DiskReport()

    def read(self, *wanted: tuple[int, bytes]) -> list[bytes | None]:
        """The blocks of these slots and keys; None: lost."""
        into = [bytearray(SIZE) for _ in wanted]
        for number, (slot, key) in enumerate(wanted):
            self.store.read(slot, key, number, memoryview(into[number]))
        for _ in wanted:
            assert self.ended.acquire(timeout=20)
        report = self.store.report()
        assert report is not None
        assert self.store.reading == 0
        self.total = self.total.aggregate(report)
        assert sorted(report.read + report.lost) == list(range(len(wanted)))
        return [bytes(data) if number in report.read else None for number, data in enumerate(into)]

    def written(self, blocks: int) -> None:
        """So many have been written since the start."""
        until_mono = time.monotonic() + 20
        while self.total.written < blocks:
            assert time.monotonic() < until_mono, self.total
            time.sleep(0.001)
            if (report := self.store.report()) is not None:
                self.total = self.total.aggregate(report)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return rank_file(tmp_path, 0)


@pytest.fixture
def opened(path: Path) -> Iterator[Store]:
    store = Store(path)
    yield store
    store.store.close()


def block(number: int) -> bytes:
    return bytes((number + at) % 251 for at in range(SIZE))


def filled(opened: Store) -> Store:
    for slot in range(SLOTS):
        opened.store.write(slot, b"key%d" % slot, block(slot))
    opened.written(SLOTS)
    return opened


def test_blocks_come_back(opened: Store, path: Path) -> None:
    assert path.stat().st_blocks * 512 >= path.stat().st_size == SLOTS * step_bytes(SIZE)
    filled(opened)
    wanted = [(slot, b"key%d" % slot) for slot in (2, 0, 3)]
    assert opened.read(*wanted) == [block(2), block(0), block(3)]
    opened.store.write(2, b"another", block(9))
    assert opened.read((2, b"another"), (2, b"key2")) == [block(9), None]
    opened.written(SLOTS + 1)
    assert opened.read((2, b"another"), (2, b"key2")) == [block(9), None]


def test_a_block_is_read_before_it_is_written(opened: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is at its first write while the others are given to it."""
    gate, real = threading.Event(), os.pwritev

    def slow(*arguments: Any) -> int:
        assert gate.wait(20)
        return real(*arguments)

    monkeypatch.setattr(os, "pwritev", slow)
    for number in range(3):
        opened.store.write(1, b"key%d" % number, block(number))
    into = bytearray(SIZE)
    opened.store.read(1, b"key2", 0, memoryview(into))
    gate.set()
    assert opened.ended.acquire(timeout=20)
    opened.written(3)
    assert bytes(into) == block(2)
    assert opened.total.read == [0]
    assert opened.read((1, b"key2")) == [block(2)]


def test_what_is_damaged_is_lost_and_the_rest_is_not(opened: Store, path: Path) -> None:
    filled(opened)
    with path.open("r+b") as file:
        file.seek(step_bytes(SIZE) + 100)
        file.write(b"?")
        file.seek(2 * step_bytes(SIZE))
        file.write(bytes(8))
        file.truncate(3 * step_bytes(SIZE) + 1000)
    wanted = [(slot, b"key%d" % slot) for slot in range(SLOTS)]
    assert opened.read(*wanted) == [block(0), None, None, None]
    opened.store.write(1, b"key1", block(1))
    assert opened.read((1, b"key1"), (0, b"key1")) == [block(1), None]
    assert opened.total.fault == ""


def disk_full(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("name", "fault", "says"),
    [
        ("pwritev", disk_full, "No space left on device"),
        ("pwritev", lambda *_: 10, "a write ended early"),
        ("preadv", disk_full, "No space left on device"),
    ],
)
def test_an_error_ends_the_use_of_the_file(
    opened: Store, path: Path, name: str, fault: Callable[..., int], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(opened)
    monkeypatch.setattr(os, name, fault)
    opened.store.write(0, b"new", block(7))
    if name == "pwritev":
        opened.written(SLOTS + 1)
    assert opened.read((1, b"key1"), (2, b"key2")) == [None, None]
    monkeypatch.undo()
    opened.store.write(0, b"newer", block(8))
    opened.written(SLOTS + 2)
    assert opened.read((0, b"newer"), (3, b"key3")) == [None, None]
    assert opened.total.fault == f"{path}: {says}"


def test_a_file_that_was_removed_is_not_used(opened: Store, path: Path) -> None:
    filled(opened)
    path.unlink()
    assert opened.read((0, b"key0")) == [None]
    assert opened.total.fault == f"{path}: the file was removed"


def test_the_file_of_a_former_process_is_emptied(path: Path) -> None:
    former = filled(Store(path))
    old = path.read_bytes()
    former.store.close()
    assert not path.exists()
    path.write_bytes(old)  # as of a process that was killed
    store = Store(path)
    assert store.read((0, b"key0")) == [None]
    store.store.close()
    path.write_bytes(old)
    store = Store(path, "another model")
    path.write_bytes(old)
    assert store.read((0, b"key0")) == [None]
    store.store.close()


def test_a_file_has_one_owner(opened: Store, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "_LOCK_S", 0.1)
    filled(opened)
    with pytest.raises(DiskError, match=r"disk_kv_folder: .*rank-0 is in use by another process"):
        Store(path)
    with pytest.raises(DiskError, match="in use by another process"):
        remove_others(path.parent, 0)
    assert opened.read((0, b"key0")) == [block(0)]


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, full = tmp_path / "gone" / "e", tmp_path / "e"
    with pytest.raises(DiskError, match=r"disk_kv_folder: there is no folder .*gone: make it, or mount it"):
        check_folder(gone, 1, 1)
    with pytest.raises(DiskError, match=r"disk_kv_folder: /proc/e cannot be used: "):
        check_folder(Path("/proc/e"), 1, 1)
    with pytest.raises(DiskError, match=r"disk_kv_bytes: 2 x 1048576.00 GiB do not fit in .*/e, where .* GiB are free"):
        check_folder(full, 1 << 50, 2)
    check_folder(full, 1, 2)
    monkeypatch.setattr(os, "posix_fallocate", disk_full)
    with pytest.raises(DiskError, match=r"disk_kv_bytes: .*rank-0 cannot have 8192 bytes: No space left on device"):
        DiskStore(rank_file(full, 0), 1, SIZE, "model")
    assert rank_file(full, 0).stat().st_size == 0


def test_files_of_more_ranks_are_removed(tmp_path: Path) -> None:
    for rank in range(4):
        rank_file(tmp_path, rank).write_bytes(b"old")
    remove_others(tmp_path, 2)
    assert sorted(tmp_path.iterdir()) == [rank_file(tmp_path, 0), rank_file(tmp_path, 1)]
