"""Prompts as they travel and wait: token ids as signed 32-bit integers, little-endian, four bytes each.

A list of 100,000 numbers takes milliseconds to write and to read at each hop; its bytes are passed on as they are.
Only an engine unpacks them.
"""

import sys
from array import array
from collections.abc import Iterable
from hashlib import blake2b

import msgspec

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


# MERGED prefix.py
# A prompt's beginning as hashes of its whole blocks, and what an instance tells of those that it holds.
#
# Blocks are of a size of ours, whatever the engines': so that one prompt's hashes can be looked up at all of them.


BLOCK_TOKENS = 64
MAX_BLOCKS = 512  # of one prompt; what is longer is known by its first 32,768 tokens
_HASH_BYTES = 8


class PrefixDelta(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Blocks that an instance holds from now on, and those that it holds no longer.

    `sequence` counts from 0 in each account of an instance. The first of it has `starts`: all that was told before is
    void. Removals come first; in `added` a block comes after the one that it follows in its prompt.
    """

    generation: int  # of the instance: another one has been restarted and holds nothing of it
    sequence: int
    added: list[int] = []
    removed: list[int] = []
    starts: bool = False


def block_hashes(
    token_ids: Iterable[int], salt: str = "", *, block_tokens: int = BLOCK_TOKENS, most: int = MAX_BLOCKS
) -> tuple[int, ...]:
    """Hashes of the whole blocks of a prompt, `most` at most, each of all tokens up to its end and of the salt.

    64 bits, the same in every process. Prompts with different salts have none in common. Nothing for token ids that no
    vocabulary has (beyond 32 bits).
    """
    try:
        prompt = packed(token_ids)
    except OverflowError:
        return ()
    return hashes_of(prompt, salt, block_tokens=block_tokens, most=most)


def hashes_of(
    prompt: bytes, salt: str = "", *, block_tokens: int = BLOCK_TOKENS, most: int = MAX_BLOCKS
) -> tuple[int, ...]:
    """The same of a packed prompt."""
    width = block_tokens * TOKEN_BYTES
    found, last = [], root_hash(salt)
    for start in range(0, min(len(prompt) // width, most) * width, width):
        last = next_hash(last, prompt[start : start + width])
        found.append(last)
    return tuple(found)


def root_hash(salt: str) -> int:
    """What the first block of a prompt follows."""
    return int.from_bytes(blake2b(salt.encode(errors="surrogatepass"), digest_size=_HASH_BYTES).digest(), "little")


def next_hash(last: int, block: bytes) -> int:
    """The hash of a block, given by its packed tokens, after the block of hash `last`."""
    # The parent goes where BLAKE2 takes a salt: it changes the start of the function and costs nothing.
    digest = blake2b(block, digest_size=_HASH_BYTES, salt=last.to_bytes(_HASH_BYTES, "little")).digest()
    return int.from_bytes(digest, "little")
