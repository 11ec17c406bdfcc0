"""Detokenisers that begin with the end of a prompt.

The text of an answer's first tokens may depend on the prompt's last ones: where a space belongs, or the rest of a
character. vLLM has its detokeniser read all of the prompt, which takes 60 ms of the event loop for 120,000 tokens.
"""

from collections.abc import Sequence
from functools import cache

import tokenizers.decoders

END_TOKENS = 32  # a character has 4 bytes at most; the others are for special tokens, which have no text


@cache
def read_only_ends() -> None:
    """Have vLLM's detokenisers do so in this process: it looks this class up for each request, to be replaced."""
    whole = tokenizers.decoders.DecodeStream

    def of_end(ids: Sequence[int] | None = None, skip_special_tokens: bool = False) -> tokenizers.decoders.DecodeStream:
        return whole(ids=None if ids is None else list(ids[-END_TOKENS:]), skip_special_tokens=skip_special_tokens)

    tokenizers.decoders.DecodeStream = of_end  # type: ignore[assignment,misc]
