"""Files of prompts, or of prompts with answers, record by record."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import InvalidRequest

SUFFIXES = (".json", ".jsonl", ".parquet", ".txt")
_PARTS = ("instruction", "input")  # of a prompt, in Alpaca's form
_HUMANS = ("human", "user")  # who asks, in ShareGPT's form


@dataclass(frozen=True, slots=True)
class Record:
    """One record, and where it stands, for messages."""

    where: str
    content: Any


def read_records(paths: Sequence[Path]) -> Iterator[Record]:
    """Records of files, and of those files in folders that are of a known kind, in order.

    JSON: a list of objects; JSONL: an object a line; Parquet: a row; text: a prompt a line. Raises InvalidRequest that
    names the file.
    """
    for file in _files(paths):
        for number, content in enumerate(_contents(file), start=1):
            yield Record(f"{file}, record {number}", content)


def prompt_of(content: Any) -> str:
    """The prompt of a record: text, `prompt`, `instruction` with an optional `input`, or the first of a conversation.

    Raises ValueError or TypeError that says what is wrong.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, dict):
        raise TypeError(f"expected an object, got {type(content).__name__}")
    for key in ("conversations", "messages"):
        if key in content:
            return _first_asked(key, content[key])
    if "prompt" in content:
        return string_of(content, "prompt")
    if "instruction" not in content:
        raise ValueError(f"no prompt, instruction, messages or conversations among {', '.join(map(str, content))}")
    parts = [string_of(content, key) for key in _PARTS if content.get(key)]
    return "\n\n".join(parts)


def string_of(content: dict[str, Any], key: str) -> str:
    """The text under a key. Raises ValueError where there is none."""
    if not isinstance(content.get(key), str):
        raise ValueError(f"{key} must be a string")
    return str(content[key])


def _first_asked(key: str, turns: Any) -> str:
    """What a person said first: `from` and `value` in ShareGPT's form, `role` and `content` in OpenAI's."""
    if not isinstance(turns, list):
        raise TypeError(f"{key} must be a list, got {type(turns).__name__}")
    for turn in turns:
        if isinstance(turn, dict) and turn.get("from", turn.get("role")) in _HUMANS:
            return string_of(turn, "value" if "value" in turn else "content")
    raise ValueError(f"{key}: nobody asks anything")


def _files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        inside = [file for file in sorted(path.iterdir()) if file.suffix in SUFFIXES] if path.is_dir() else [path]
        if not inside:
            raise InvalidRequest(f"{path}: no file that ends in {', '.join(SUFFIXES)}")
        files += inside
    return files


def _contents(file: Path) -> list[Any]:
    try:
        if file.suffix == ".parquet":
            return _rows(file)
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".txt":
            return [line for line in text.splitlines() if line.strip()]
        if file.suffix == ".jsonl":
            return [_line(line, number) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        content = json.loads(text)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{file}: {error}") from error
    if not isinstance(content, list):
        raise InvalidRequest(f"{file}: expected a list of records, got {type(content).__name__}")
    return content


def _line(text: str, number: int) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from error


def _rows(file: Path) -> list[Any]:
    import pyarrow.parquet

    rows: list[Any] = pyarrow.parquet.read_table(file).to_pylist()
    return rows
