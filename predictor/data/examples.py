"""Training examples: prompts as the service will see them and the lengths of their answers, read from Parquet,
JSON, JSONL or text files, with a deterministic split by hash.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from predictor.buckets import Buckets
from predictor.served import ServedTokenizer
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


# Of a hundred hash values, how many go to each split.
SPLITS = {"train": 80, "val": 10, "test": 10}
_MOST = 10**9  # tokens, of a prompt or an answer
ASIDE = ".jsonl.1"  # how a gateway's full file ends (`record_lengths`)


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt as the service will see it, its length in tokens, and the length of its answer in tokens.

    split: by the whole prompt, so that equal prompts never face each other. sample: of several answers to it.
    """

    text: str
    prompt_tokens: int
    output_tokens: int
    split: str
    sample: int = 0


def load_examples(paths: Sequence[Path], served: ServedTokenizer) -> list[Example]:
    """Read files and folders of them; duplicates go, the order is by the prompts' hashes.

    A record has a prompt (see `prompt_of`), and `response` or a counted `output_tokens`; or, as a gateway records them,
    what the service saw (`seen`), `prompt_tokens` and `output_tokens`. Raises InvalidRequest that names the file and
    the record.
    """
    found: dict[Example, None] = {}
    for record in _read(paths):
        try:
            found[_example(record.content, served)] = None
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(f"{record.where}: {error}") from error
    if not found:
        raise InvalidRequest(f"no records in {', '.join(map(str, paths))}")
    return sorted(found, key=lambda example: (hash_of(example.text), example.sample, example.output_tokens))


def split_examples(examples: Iterable[Example]) -> dict[str, list[Example]]:
    """Examples by split."""
    splits: dict[str, list[Example]] = {name: [] for name in SPLITS}
    for example in examples:
        splits[example.split].append(example)
    return splits


def split_of(text: str) -> str:
    """ "train", "val" or "test"; stable across runs and machines."""
    value = hash_of(text) % sum(SPLITS.values())
    for name, share in SPLITS.items():
        if value < share:
            return name
        value -= share
    raise AssertionError("shares cover every value")


def labels(examples: Iterable[Example], buckets: Buckets) -> list[int]:
    """The true bucket of each."""
    return [buckets.of(example.output_tokens) for example in examples]


def digest(examples: Iterable[Example]) -> str:
    """A SHA-256 over all examples in their order: what exactly a checkpoint was trained on."""
    total = hashlib.sha256()
    for example in examples:
        total.update(json.dumps([example.text, example.prompt_tokens, example.output_tokens]).encode() + b"\n")
    return total.hexdigest()


def _read(paths: Sequence[Path]) -> Iterator[Record]:
    """As `records_in`, and the full files that a gateway has put aside, named or in a named folder."""
    for path in paths:
        aside = path.name.endswith(ASIDE) and not path.is_dir()
        if not aside:
            yield from records_in([path])
        for file in [path] if aside else sorted(path.glob(f"*{ASIDE}")):
            yield from records_of(file)


def _example(record: Any, served: ServedTokenizer) -> Example:
    if isinstance(record, dict) and "seen" in record:
        return _recorded(record)
    prompt = prompt_of(record)
    if not isinstance(record, dict):
        raise TypeError("a prompt without an answer: `polyphase predictor dataset` asks a model for answers")
    if record.get("output_tokens") is None:
        output_tokens = served.output_tokens(string_of(record, "response"))
    else:
        output_tokens = _count(record, "output_tokens")
    text, prompt_tokens = served.seen_prompt(prompt)
    sample = _count(record, "sample") if "sample" in record else 0
    return Example(text, prompt_tokens, output_tokens, split_of(prompt), sample)


def _recorded(record: dict[str, Any]) -> Example:
    """A line of a gateway's, which has the text as the service saw it; who was cut counts as long as he got."""
    seen = string_of(record, "seen")
    return Example(seen, _count(record, "prompt_tokens"), _count(record, "output_tokens"), split_of(seen))


def _count(record: dict[str, Any], key: str) -> int:
    counted = record.get(key)
    if not isinstance(counted, int) or isinstance(counted, bool) or not 0 <= counted <= _MOST:
        raise ValueError(f"{key} must be a whole number from 0 to {_MOST:,}, got {shown(counted)}")
    return counted


def hash_of(text: str) -> int:
    """Alike on all machines: an order that has nothing to do with where a text stood."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
