"""The served model's tokenizer: from the ids that a caller sends, or a training prompt, to the same text.

A classifier must see at training what it will see in service: the ends of the chat-templated prompt, as the
served model's tokens, decoded without special tokens.
"""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from shared.domain.job import ends_of
from shared.errors import InvalidRequest

# Assumed for texts without a token count: OpenAI's rule of thumb for English text.
BYTES_PER_TOKEN = 4


class ServedTokenizer:
    """Token ids of the served model to text, and lengths in its tokens."""

    def __init__(self, tokenizer: Tokenizer, template: Any = None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    def seen_text(self, token_ids: list[int]) -> str:
        """The text of a prompt's ends, without special tokens and ids outside the vocabulary."""
        return str(self._tokenizer.decode(ends_of(token_ids), skip_special_tokens=True))

    def seen_prompt(self, prompt: str) -> tuple[str, int]:
        """What the service will see of this prompt as a chat message, and its length in tokens."""
        text = prompt if self._template is None else self._template(prompt)
        ids = self._tokenizer.encode(text, add_special_tokens=self._template is None).ids
        return self.seen_text(ids), len(ids)

    def output_tokens(self, response: str) -> int:
        """Tokens that the served model would produce for this answer, its end token included."""
        return len(self._tokenizer.encode(response, add_special_tokens=False).ids) + 1


def load_served(model: str, *, with_template: bool = False) -> ServedTokenizer:
    """Load it from a folder or by a Hugging Face name; only the latter, or a template, needs transformers.

    Raises InvalidRequest when there is no such tokenizer.
    """
    file = Path(model) / "tokenizer.json"
    try:
        if file.is_file() and not with_template:
            return ServedTokenizer(Tokenizer.from_file(str(file)))
        return _load_with_transformers(model)
    except Exception as error:  # tokenizers raises bare Exception
        raise InvalidRequest(f"served model {model!r}: no usable tokenizer: {error}") from error


def estimate_tokens(text: str) -> int:
    """A rough token count of a text that is not tokenised."""
    return -(-len(text.encode()) // BYTES_PER_TOKEN)


def _load_with_transformers(model: str) -> ServedTokenizer:
    from transformers import AutoTokenizer  # imports torch

    tokenizer: Any = AutoTokenizer.from_pretrained(model)

    def chat(prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    return ServedTokenizer(tokenizer.backend_tokenizer, chat if tokenizer.chat_template else None)
