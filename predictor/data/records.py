"""Files of prompts, or of prompts with answers, record by record."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import InvalidRequest
from shared.files.text import GZIP, format_of, read_lines, read_records, shown

SUFFIXES = (".json", ".jsonl", ".parquet", ".txt")
_PARTS = ("instruction", "input")  # of a prompt, in Alpaca's form
_HUMANS = ("human", "user")  # who asks, in ShareGPT's form


@dataclass(frozen=True, slots=True)
class Record:
    """One record, and where it stands, for messages."""

    where: str
    content: Any


def records_in(paths: Sequence[Path]) -> Iterator[Record]:
    """Records of files, and of those files in folders that are of a known kind, in order.

    JSON: a list of objects, or an object a line; Parquet: a row; text: a prompt a line; each but Parquet also as gzip.
    Raises InvalidRequest that names the file, and the line where it has lines.
    """
    for file in _files(paths):
        yield from records_of(file)


def records_of(file: Path) -> Iterator[Record]:
    """Of one file, of the form that its name says; JSON if the name says nothing. Raises InvalidRequest."""
    match format_of(file):
        case ".parquet":
            found = _rows(file)
        case ".txt":
            found = (content for _, content in read_lines(file))
        case _:
            found = (content for _, content in read_records(file))
    for number, content in enumerate(found, start=1):
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
        raise ValueError(f"no prompt, instruction, messages or conversations among {', '.join(map(shown, content))}")
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
        inside = [file for file in sorted(path.iterdir()) if format_of(file) in SUFFIXES] if path.is_dir() else [path]
        if not inside:
            raise InvalidRequest(f"{path}: no file that ends in {', '.join(SUFFIXES)}, plain or with {GZIP}")
        files += inside
    return files


def _rows(file: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        yield from pyarrow.parquet.read_table(file).to_pylist()
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise InvalidRequest(
            f"{file}: not a Parquet file that can be read: {str(error).partition(chr(10))[0]}"
        ) from error
