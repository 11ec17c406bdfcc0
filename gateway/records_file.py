"""A file of lines that only its owner may read, bounded: the full one becomes NAME.1, and a new one is begun."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import InvalidRequest

_MODE = 0o600


class RecordsFile:
    """`path` and its predecessor, of half of `most_bytes` each. One process, and one thread of it, writes at a time."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self.path = path
        self.older = path.with_name(f"{path.name}.1")
        self.half_bytes = most_bytes // 2
        self._fd = -1
        self._size = 0

    def check(self) -> None:
        """Whether it can be written now. Raises InvalidRequest that says why not."""
        try:
            self._refuse_what_is_there()
            if not os.access(self.path.parent, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, f"files cannot be made in {self.path.parent}")
            with self.opened():
                pass
        except OSError as error:
            raise InvalidRequest(f"record_lengths: {self.path}: {error.strerror or error}") from error

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open it for some lines only, so that one that was moved away or deleted is begun anew. Raises OSError."""
        self._open()
        try:
            yield
        finally:
            self._close()

    def write(self, line: bytes) -> None:
        """Add one line, whole or not at all; it has no more than `half_bytes`. Raises OSError."""
        if self._size + len(line) > self.half_bytes:
            self._close()
            os.replace(self.path, self.older)
            self._open()
        try:
            if os.write(self._fd, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._fd, self._size)  # no reader understands half a line
            raise
        self._size += len(line)

    def _open(self) -> None:
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)
        try:
            found = os.fstat(self._fd)
            if found.st_mode & 0o777 != _MODE:
                os.fchmod(self._fd, _MODE)
            self._size = found.st_size
            if self._size and os.pread(self._fd, 1, self._size - 1) != b"\n":
                self._drop_half_a_line()
        except BaseException:
            self._close()
            raise

    def _drop_half_a_line(self) -> None:
        """What a kill has cut short."""
        self._size = os.pread(self._fd, self._size, 0).rfind(b"\n") + 1
        os.ftruncate(self._fd, self._size)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _refuse_what_is_there(self) -> None:
        for file in (self.path, self.older):
            if not file.exists():
                continue
            if not file.is_file():
                raise InvalidRequest(f"record_lengths: {file} is no regular file")
            if (size := file.stat().st_size) > self.half_bytes:
                raise InvalidRequest(
                    f"record_lengths: {file} has {size} bytes already, over half of record_bytes; move it away"
                )
