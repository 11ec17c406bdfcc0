"""What a dataset builder has so far, in a file that outlives its process: one line an answer, each written whole."""

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from shared.errors import Conflict, InvalidRequest

FILE, SETTINGS = "answers.jsonl", "settings.json"


class Line(msgspec.Struct, frozen=True):
    """An answer to sample `sample` of a prompt, or why there is none (`refused`; the lengths are 0 then)."""

    prompt: str
    sample: int
    prompt_tokens: int = 0
    output_tokens: int = 0
    cut: bool = False
    refused: str = ""

    @property
    def key(self) -> tuple[str, int]:
        """What it answers."""
        return self.prompt, self.sample


class Journal:
    """A folder's journal. Raises Conflict when the folder was begun under other settings, naming what differs.

    A line that a kill has cut short is dropped: its answer is asked for again. One process writes at a time.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / FILE).open("a+b")
        try:
            self._lock()
            _agree(folder / SETTINGS, settings)
            self.lines = self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, line: Line) -> None:
        """Keep it: it is the system's when this returns, whatever becomes of the process."""
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()
        self.lines[line.key] = line

    def _lock(self) -> None:
        import fcntl

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise Conflict(f"{self.folder}: another process is building this dataset") from error

    def _read(self) -> dict[tuple[str, int], Line]:
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self._file.fileno(), len(whole))
        found = {}
        for number, text in enumerate(whole.splitlines(), start=1):
            try:
                line = msgspec.json.decode(text, type=Line)
            except msgspec.DecodeError as error:
                raise InvalidRequest(f"{self.folder / FILE}, line {number}: {error}") from error
            found[line.key] = line
        return found


def _agree(path: Path, settings: dict[str, Any]) -> None:
    if not path.exists():
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        fresh.replace(path)
        return
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidRequest(f"{path}: {error}") from error
    differ = [key for key in {**known, **settings} if known.get(key) != settings.get(key)]
    if differ:
        said = ", ".join(f"{key} was {known.get(key)!r} and is {settings.get(key)!r}" for key in differ)
        raise Conflict(f"{path.parent} was begun under other settings: {said}. Take another folder, or those.")
