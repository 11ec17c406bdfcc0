"""A prompt's beginning as hashes of its whole blocks, and what an instance tells of those that it holds.

Blocks are of a size of ours, whatever the engines': so that one prompt's hashes can be looked up at all of them.
"""

from collections.abc import Iterable
from hashlib import blake2b

import msgspec

from shared.domain.prompt import TOKEN_BYTES, packed

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
