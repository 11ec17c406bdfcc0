"""What a checkpoint learns from: prompts as the service will see them, and how long their answers are."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from predictor.buckets import Buckets
from predictor.data.records import Record, prompt_of, records_in, records_of, string_of
from predictor.served import ServedTokenizer
from shared.errors import InvalidRequest
from shared.files.text import shown

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
