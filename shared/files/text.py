"""Text that others wrote: UTF-8 with or without a byte order mark, plain or gzip, JSON in records.

A line ends at `\n`, `\r\n` or `\r` and nowhere else: `str.splitlines` also cuts at U+2028, U+2029, U+0085 and form
feeds, which JSON strings and prompts may hold. Errors name the file and the line, and repeat nothing of the text.
"""

import codecs
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from shared.errors import InvalidRequest

MAX_BYTES = 8 << 30  # of a file of records, unpacked
MAX_CONFIG_BYTES = 16 << 20  # of a configuration
MAX_MODEL_BYTES = 256 << 20  # of a model's own configuration, or of its index of weights
GZIP = ".gz"
_GZIP_MAGIC = b"\x1f\x8b"
_OTHER_UNICODE = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_CHUNK = 1 << 20
_BLANK = re.compile(r"[ \t\r\n]*")
_SHOWN = 60  # letters of a value that a message repeats


def open_text(path: Path, max_bytes: int = MAX_BYTES) -> TextIO:
    """The file's text from its start, unpacked. Opening and reading raise InvalidRequest.

    Refused are bytes that are not UTF-8, NUL characters, and what is longer than `max_bytes` unpacked.
    """
    try:
        raw = io.BufferedReader(_Checked(path, max_bytes), _CHUNK)
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read: {error.strerror or error}") from error
    return io.TextIOWrapper(raw, encoding="utf-8-sig")


def read_text(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> str:
    """The whole text of a file. Raises InvalidRequest as `open_text`."""
    with open_text(path, max_bytes) as file:
        return file.read()


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that hold something, without their ends, each with its number from 1. Raises InvalidRequest."""
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line.removesuffix("\n")


def read_records(path: Path) -> Iterator[tuple[int, Any]]:
    """Records of JSON, each with its line: a value a line, or the items of one list.

    Raises InvalidRequest that names file and line.
    """
    first = True
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            if first and line.lstrip().startswith("["):
                yield from _items(line + file.read(), path, number)
                return
            try:
                record = parse_json(line.removesuffix("\n"), path, number)
            except InvalidRequest as error:
                how = "; expected one record a line, or a list of records" if first else ""
                raise InvalidRequest(f"{error.message}{how}") from error
            first = False
            yield number, record


def read_json(path: Path) -> Any:
    """The one value in the JSON file of a model. Raises InvalidRequest that names file and line.

    Of a key that is there twice the last counts, as for the libraries that load the model.
    """
    return parse_json(read_text(path, MAX_MODEL_BYTES), path, decoder=_LENIENT)


def parse_json(text: str, where: object, line: int = 1, *, decoder: json.JSONDecoder | None = None) -> Any:
    """The value in a text that begins in that line of `where`. Raises InvalidRequest, also for a key given twice."""
    try:
        return (decoder or _DECODER).decode(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(_json_fault(where, line, error)) from error


def format_of(path: Path) -> str:
    """The suffix that says what is in a file, `.gz` left out: `.jsonl` of `a.jsonl.gz`."""
    return path.with_suffix("").suffix if path.suffix == GZIP else path.suffix


def shown(value: object) -> str:
    """A value as a message may repeat it: short, in printable characters."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested deeply; or an integer of more digits than Python prints
        return f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


class _Checked(io.RawIOBase):
    """The bytes of a file, unpacked if they are gzip, whatever the file is called; refuses what is not UTF-8 text."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        super().__init__()
        self._path, self._max_bytes = path, max_bytes
        self._file = path.open("rb")
        self._packed = self._file.peek(2)[:2] == _GZIP_MAGIC
        self._bytes: BinaryIO = cast(BinaryIO, gzip.GzipFile(fileobj=self._file)) if self._packed else self._file
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._read, self._line, self._after_return = 0, 1, False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        try:
            chunk = self._bytes.read(len(view))
        except (OSError, EOFError, zlib.error) as error:
            what = "it is not whole gzip" if self._packed else getattr(error, "strerror", None) or str(error)
            raise InvalidRequest(f"{self._path}: cannot be read: {what}") from error
        self._check(chunk)
        view[: len(chunk)] = chunk
        return len(chunk)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _check(self, chunk: bytes) -> None:
        if not self._read and chunk[:2] in _OTHER_UNICODE:
            raise InvalidRequest(f"{self._path}: not text in UTF-8 but in UTF-16: save it as UTF-8")
        self._read += len(chunk)
        if self._read > self._max_bytes:
            unpacked = ", unpacked" if self._packed else ""
            raise InvalidRequest(f"{self._path}: longer than {self._max_bytes:,} bytes{unpacked}: divide it")
        try:
            self._decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            self._refuse(error.object[: error.start], f"not text in UTF-8: {error.reason}")
        if (nul := chunk.find(0)) >= 0:
            self._refuse(chunk[:nul], "a NUL character: this is not text")
        self._count(chunk)

    def _refuse(self, before: bytes, why: str) -> None:
        self._count(before)
        raise InvalidRequest(f"{self._path}:{self._line}: {why}")

    def _count(self, chunk: bytes) -> None:
        self._line += chunk.count(b"\n") + chunk.count(b"\r") - chunk.count(b"\r\n")
        self._line -= self._after_return and chunk.startswith(b"\n")
        self._after_return = chunk.endswith(b"\r") if chunk else self._after_return


def _items(text: str, path: Path, line: int) -> Iterator[tuple[int, Any]]:
    """The items of a list that begins in that line, each with its own line."""

    def skip_blanks(at: int) -> int:
        found = _BLANK.match(text, at)
        return found.end() if found else at

    first_line, counted, at = line, 0, skip_blanks(text.index("[") + 1)
    while not text.startswith("]", at):
        line, counted = line + text.count("\n", counted, at), at
        try:
            item, at = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            counts_from_start = isinstance(error, json.JSONDecodeError)
            raise InvalidRequest(_json_fault(path, first_line if counts_from_start else line, error)) from error
        yield line, item
        at = skip_blanks(at)
        if text.startswith(",", at):
            at = skip_blanks(at + 1)
            if text.startswith("]", at):
                break  # a comma after the last item
        elif not text.startswith("]", at):
            break
    else:
        if skip_blanks(at + 1) == len(text):
            return
    parse_json(text, path, first_line)  # raises with the place of what is wrong between or after the items


def _json_fault(where: object, line: int, error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{where}:{line + error.lineno - 1}: not JSON: {error.msg} (column {error.colno})"
    why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    if isinstance(error, ValueError) and "integer string conversion" in why:  # Python's own bound
        why = "a number has too many digits"
    return f"{where}:{line}: not JSON: {why}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {shown(twice)} is there twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
_LENIENT = json.JSONDecoder()
