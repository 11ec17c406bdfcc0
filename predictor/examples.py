"""Training examples: prompts as the service will see them, and the lengths of their answers.

A classifier must see the same text at training as in service: the ends of the chat-templated prompt as the served
model's tokens, decoded without special tokens. The split into train, val and test follows from a hash of the prompt.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from predictor.buckets import Buckets
from shared.domain.job import ends_of
from shared.errors import InvalidRequest
from shared.files.text import GZIP, format_of, read_lines, read_records, shown

BYTES_PER_TOKEN = 4  # of a text that is not tokenised: OpenAI's rule of thumb for English
SUFFIXES = (".json", ".jsonl", ".parquet", ".txt")
ROTATED = ".jsonl.1"  # the ending of a gateway's full file (`record_lengths`)
SPLITS = {"train": 80, "val": 10, "test": 10}  # of a hundred hash values
MAX_TOKENS = 10**9  # of a prompt or an answer
_ALPACA_PARTS = ("instruction", "input")
_USER_ROLES = ("human", "user")  # in conversations of ShareGPT and of OpenAI


class ServedTokenizer:
    """The served model's tokenizer: token ids to text, and lengths in tokens. template: a prompt to a chat's text."""

    def __init__(self, tokenizer: Tokenizer, template: Any = None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    def seen_text(self, token_ids: list[int]) -> str:
        """The ends of a prompt as text, without special tokens and ids outside the vocabulary."""
        return str(self._tokenizer.decode(ends_of(token_ids), skip_special_tokens=True))

    def seen_prompt(self, prompt: str) -> tuple[str, int]:
        """What the service will see of this prompt as a chat message, and its length in tokens."""
        text = prompt if self._template is None else self._template(prompt)
        ids = self._tokenizer.encode(text, add_special_tokens=self._template is None).ids
        return self.seen_text(ids), len(ids)

    def output_tokens(self, response: str) -> int:
        """Tokens that the served model would produce for this answer, with its end token."""
        return len(self._tokenizer.encode(response, add_special_tokens=False).ids) + 1


def load_served(model: str, *, with_template: bool = False, trust_remote_code: bool = False) -> ServedTokenizer:
    """From a folder or by a Hugging Face name; the latter and templates need transformers.

    Raises InvalidRequest when there is no such tokenizer.
    """
    file = Path(model) / "tokenizer.json"
    try:
        if file.is_file() and not with_template:
            return ServedTokenizer(Tokenizer.from_file(str(file)))
        return _load_with_transformers(model, trust_remote_code)
    except Exception as error:  # tokenizers raises bare Exception
        raise InvalidRequest(f"served model {model!r}: no usable tokenizer: {error}") from error


def _load_with_transformers(model: str, trust_remote_code: bool) -> ServedTokenizer:
    from transformers import AutoTokenizer  # imports torch

    tokenizer: Any = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)

    def chat(prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    return ServedTokenizer(tokenizer.backend_tokenizer, chat if tokenizer.chat_template else None)


def estimate_tokens(text: str) -> int:
    return -(-len(text.encode()) // BYTES_PER_TOKEN)


@dataclass(frozen=True, slots=True)
class Record:
    """A record of a file; `where` is for messages."""

    where: str
    content: Any


def records_in(paths: Sequence[Path]) -> Iterator[Record]:
    """The records of files, and of the files with known endings in folders, in order.

    JSON: a list of objects, or an object a line; Parquet: a row; text: a prompt a line; all but Parquet also as gzip.
    Raises InvalidRequest that names the file, and the line where it has lines.
    """
    for path in paths:
        files = [file for file in sorted(path.iterdir()) if format_of(file) in SUFFIXES] if path.is_dir() else [path]
        if not files:
            raise InvalidRequest(f"{path}: no file that ends in {', '.join(SUFFIXES)}, plain or with {GZIP}")
        for file in files:
            yield from records_of(file)


def records_of(file: Path) -> Iterator[Record]:
    """The records of one file in the format of its ending; JSON for another ending. Raises InvalidRequest."""
    match format_of(file):
        case ".parquet":
            contents = _rows(file)
        case ".txt":
            contents = (content for _, content in read_lines(file))
        case _:
            contents = (content for _, content in read_records(file))
    for number, content in enumerate(contents, start=1):
        yield Record(f"{file}, record {number}", content)


def _rows(file: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        yield from pyarrow.parquet.read_table(file).to_pylist()
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidRequest(f"{file}: not a Parquet file that can be read: {reason}") from error


def prompt_of(content: Any) -> str:
    """The prompt of a record: a text, `prompt`, `instruction` with an optional `input`, or the first user message of
    `conversations` (ShareGPT) or `messages` (OpenAI). Raises ValueError or TypeError that says what is wrong.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, dict):
        raise TypeError(f"expected an object, got {type(content).__name__}")
    for key in ("conversations", "messages"):
        if key in content:
            return _first_user_message(key, content[key])
    if "prompt" in content:
        return _string(content, "prompt")
    if "instruction" not in content:
        raise ValueError(f"no prompt, instruction, messages or conversations among {', '.join(map(shown, content))}")
    return "\n\n".join(_string(content, key) for key in _ALPACA_PARTS if content.get(key))


def _first_user_message(key: str, messages: Any) -> str:
    if not isinstance(messages, list):
        raise TypeError(f"{key} must be a list, got {type(messages).__name__}")
    for message in messages:
        if isinstance(message, dict) and message.get("from", message.get("role")) in _USER_ROLES:
            return _string(message, "value" if "value" in message else "content")
    raise ValueError(f"{key}: no message of a user")


def _string(content: dict[str, object], key: str) -> str:
    if not isinstance(content.get(key), str):
        raise ValueError(f"{key} must be a string")
    return str(content[key])


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt as the service will see it, its length, and the length of its answer, in tokens.

    split: by the whole prompt, so that equal prompts are in one split. sample: number of the answer to this prompt.
    """

    text: str
    prompt_tokens: int
    output_tokens: int
    split: str
    sample: int = 0


def load_examples(paths: Sequence[Path], served: ServedTokenizer) -> list[Example]:
    """The examples of files and folders without duplicates, ordered by the hashes of their prompts.

    A record has a prompt (see `prompt_of`) and `response` or a counted `output_tokens`; or, as a gateway records
    it, the text that the service saw (`seen`), `prompt_tokens` and `output_tokens`. Raises InvalidRequest that names
    the file and the record.
    """
    found: dict[Example, None] = {}
    for record in _with_rotated(paths):
        try:
            found[_example(record.content, served)] = None
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(f"{record.where}: {error}") from error
    if not found:
        raise InvalidRequest(f"no records in {', '.join(map(str, paths))}")
    return sorted(found, key=lambda example: (hash_of(example.text), example.sample, example.output_tokens))


def _with_rotated(paths: Sequence[Path]) -> Iterator[Record]:
    """As `records_in`, with the full files of a gateway, by name or in a folder."""
    for path in paths:
        rotated = path.name.endswith(ROTATED) and not path.is_dir()
        if not rotated:
            yield from records_in([path])
        for file in [path] if rotated else sorted(path.glob(f"*{ROTATED}")):
            yield from records_of(file)


def _example(record: Any, served: ServedTokenizer) -> Example:
    if isinstance(record, dict) and "seen" in record:  # of a gateway; a cut answer counts with the length it reached
        seen = _string(record, "seen")
        return Example(seen, _count(record, "prompt_tokens"), _count(record, "output_tokens"), split_of(seen))
    prompt = prompt_of(record)
    if not isinstance(record, dict):
        raise TypeError("a prompt without an answer: `polyphase predictor dataset` collects answers of a model")
    if record.get("output_tokens") is None:
        output_tokens = served.output_tokens(_string(record, "response"))
    else:
        output_tokens = _count(record, "output_tokens")
    text, prompt_tokens = served.seen_prompt(prompt)
    sample = _count(record, "sample") if "sample" in record else 0
    return Example(text, prompt_tokens, output_tokens, split_of(prompt), sample)


def _count(record: dict[str, object], key: str) -> int:
    value = record.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_TOKENS:
        raise ValueError(f"{key} must be a whole number from 0 to {MAX_TOKENS:,}, got {shown(value)}")
    return value


def split_examples(examples: Iterable[Example]) -> dict[str, list[Example]]:
    splits: dict[str, list[Example]] = {name: [] for name in SPLITS}
    for example in examples:
        splits[example.split].append(example)
    return splits


def split_of(text: str) -> str:
    """ "train", "val" or "test"; equal on all machines."""
    value = hash_of(text) % sum(SPLITS.values())
    for name, share in SPLITS.items():
        if value < share:
            return name
        value -= share
    raise AssertionError("shares cover every value")


def labels(examples: Iterable[Example], buckets: Buckets) -> list[int]:
    """The actual buckets."""
    return [buckets.of(example.output_tokens) for example in examples]


def digest(examples: Iterable[Example]) -> str:
    """A SHA-256 over all examples in their order, which identifies the data of a checkpoint."""
    total = hashlib.sha256()
    for example in examples:
        total.update(json.dumps([example.text, example.prompt_tokens, example.output_tokens]).encode() + b"\n")
    return total.hexdigest()


def hash_of(text: str) -> int:
    """Equal on all machines; an order independent of the places of the texts."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
