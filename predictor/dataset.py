"""Training data: prompts with the length of their answers, from JSON or JSONL, split by hash."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from predictor.buckets import Buckets
from predictor.served import ServedTokenizer
from shared.errors import InvalidRequest

# Of a hundred hash values, how many go to each split.
SPLITS = {"train": 80, "val": 10, "test": 10}


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt as the service will see it, its length in tokens, and the length of its answer in tokens."""

    text: str
    prompt_tokens: int
    output_tokens: int


def load_examples(paths: Sequence[Path], served: ServedTokenizer) -> list[Example]:
    """Read files and folders of `*.json` and `*.jsonl`; duplicates go, the order is by the prompts' hashes.

    A record has `prompt` or `instruction` (with an optional `input`), and `response` or a counted
    `output_tokens`. Raises InvalidRequest that names the file and the record.
    """
    found: dict[Example, None] = {}
    for file in _files(paths):
        for number, record in enumerate(_records(file), start=1):
            try:
                found[_example(record, served)] = None
            except (KeyError, TypeError, ValueError) as error:
                raise InvalidRequest(f"{file}, record {number}: {error}") from error
    if not found:
        raise InvalidRequest(f"no records in {', '.join(map(str, paths))}")
    return sorted(found, key=lambda example: (_hash(example.text), example.output_tokens))


def split_examples(examples: Iterable[Example]) -> dict[str, list[Example]]:
    """Examples by split. It depends on the prompt's text alone, so equal prompts never face each other."""
    splits: dict[str, list[Example]] = {name: [] for name in SPLITS}
    for example in examples:
        splits[split_of(example.text)].append(example)
    return splits


def split_of(text: str) -> str:
    """ "train", "val" or "test"; stable across runs and machines."""
    value = _hash(text) % sum(SPLITS.values())
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


def _files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        inside = (
            [file for file in sorted(path.iterdir()) if file.suffix in (".json", ".jsonl")] if path.is_dir() else []
        )
        files += inside or [path]
    return files


def _records(file: Path) -> list[Any]:
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".jsonl":
            return [json.loads(line) for line in text.splitlines() if line.strip()]
        records = json.loads(text)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{file}: {error}") from error
    if not isinstance(records, list):
        raise InvalidRequest(f"{file}: expected a list of records, got {type(records).__name__}")
    return records


def _example(record: Any, served: ServedTokenizer) -> Example:
    if not isinstance(record, dict):
        raise TypeError(f"expected an object, got {type(record).__name__}")
    if "prompt" in record:
        prompt = _string(record, "prompt")
    else:
        parts = [_string(record, "instruction"), _string(record, "input") if record.get("input") else ""]
        prompt = "\n\n".join(part for part in parts if part)
    counted = record.get("output_tokens")
    if counted is not None and (not isinstance(counted, int) or isinstance(counted, bool) or counted < 0):
        raise ValueError(f"output_tokens must be a whole number of at least 0, got {counted!r}")
    output_tokens = served.output_tokens(_string(record, "response")) if counted is None else counted
    text, prompt_tokens = served.seen_prompt(prompt)
    return Example(text, prompt_tokens, output_tokens)


def _string(record: dict[str, Any], key: str) -> str:
    if not isinstance(record.get(key), str):
        raise ValueError(f"{key} must be a string")
    return str(record[key])


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
