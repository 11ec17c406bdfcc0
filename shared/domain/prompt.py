"""Prompts as they travel and wait: token ids as signed 32-bit integers, little-endian, four bytes each.

A list of 100,000 numbers takes milliseconds to write and to read at each hop; its bytes are passed on as they are.
Only an engine unpacks them.
"""

import sys
from array import array
from collections.abc import Iterable

TOKEN_BYTES = 4


def packed(token_ids: Iterable[int]) -> bytes:
    """Raises OverflowError for numbers beyond 32 bits, which no vocabulary has."""
    values = array("i", token_ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def unpacked(prompt: bytes) -> list[int]:
    """The token ids. Raises ValueError for bytes that are no whole number of them."""
    whole(prompt)
    values = array("i", prompt)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def whole(prompt: bytes) -> None:
    """Raises ValueError for bytes that are no whole number of tokens."""
    if len(prompt) % TOKEN_BYTES:
        raise ValueError(f"a prompt of {len(prompt)} bytes, where each token has {TOKEN_BYTES}")


def length(prompt: bytes) -> int:
    """In tokens."""
    return len(prompt) // TOKEN_BYTES


def beginning(prompt: bytes, tokens: int) -> bytes:
    """Its first tokens."""
    return prompt if tokens >= length(prompt) else prompt[: tokens * TOKEN_BYTES]
