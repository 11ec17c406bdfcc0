"""Prompts on the wire: token ids packed as signed 32-bit little-endian integers; and the hashes of their prefixes.

Encoding and decoding a list of 100,000 numbers takes milliseconds at each hop; packed bytes are passed on as they are,
and only an engine unpacks them. A prefix is known by hashes of its whole blocks. These blocks have one size,
independent of the engines' block sizes, so that the hashes of a prompt can be looked up at all instances.

The tokens of an image, a video or a sound are placeholders, the same for each. A prompt's media items say where they
lie and what they stand for.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import msgspec

TOKEN_BYTES = 4


def packed(token_ids: Iterable[int]) -> bytes:
    """Token ids as bytes. Raises OverflowError for numbers beyond 32 bits, which no vocabulary has."""
    values = array("i", token_ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def unpacked(prompt: bytes) -> list[int]:
    """The token ids. Raises ValueError as `whole` does."""
    whole(prompt)
    values = array("i", prompt)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def whole(prompt: bytes) -> None:
    """Check that bytes are a whole number of tokens. Raises ValueError."""
    if len(prompt) % TOKEN_BYTES:
        raise ValueError(f"a prompt of {len(prompt)} bytes, where each token has {TOKEN_BYTES}")


def length(prompt: bytes) -> int:
    return len(prompt) // TOKEN_BYTES


def beginning(prompt: bytes, tokens: int) -> bytes:
    """The first tokens of a prompt."""
    return prompt if tokens >= length(prompt) else prompt[: tokens * TOKEN_BYTES]


class MediaItem(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An image, a video or a sound in a prompt. digest: of its content and of how it is processed. modality: as vLLM
    names it. Its placeholders are the `tokens` tokens from `start` on.
    """

    modality: str
    digest: str
    start: int
    tokens: int

    @property
    def end(self) -> int:
        return self.start + self.tokens


def whole_items(tokens: int, items: Iterable[MediaItem]) -> int:
    """The number of tokens of a prompt's beginning that ends outside of items: `tokens`, or else the end of the item
    in which it would end.
    """
    return next((item.end for item in items if item.start < tokens < item.end), tokens)


MODALITIES = ("image", "audio", "video")


def modalities(items: Iterable[MediaItem]) -> tuple[str, ...]:
    """Of the items, each once."""
    return tuple(dict.fromkeys(item.modality for item in items))


BLOCK_TOKENS = 64
MAX_BLOCKS = 512  # of one prompt; longer ones are known by their first 32,768 tokens
_HASH_BYTES = 8


class PrefixDelta(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An instance's report of blocks that it holds from now on, and of blocks that it holds no longer.

    `sequence` counts from 0; the first report has `starts`, which voids all earlier ones. Removals apply first; in
    `added` a block comes after the one that it follows in its prompt. Added blocks lie on the accelerator, or again
    there, except for those in `hosted`: these lie in host memory from now on, or follow one that does, so that they are
    loaded before they are of use.
    """

    generation: int  # of the instance: after a restart it holds no blocks
    sequence: int
    added: list[int] = []
    removed: list[int] = []
    starts: bool = False
    hosted: list[int] = []


def block_hashes(
    token_ids: Iterable[int],
    salt: str = "",
    adapter: str = "",
    items: Sequence[MediaItem] = (),
    *,
    block_tokens: int = BLOCK_TOKENS,
    most: int = MAX_BLOCKS,
) -> tuple[int, ...]:
    """Hashes of the whole blocks of a prompt, at most `most`; each covers all tokens up to its end, the media items
    that begin before it, the salt, and the adapter that computes them.

    They have 64 bits and are the same in every process. Prompts with different salts or adapters have no common hashes,
    and prompts with different items none from the first of these on. Token ids beyond 32 bits, which no vocabulary has,
    give no hashes.
    """
    try:
        prompt = packed(token_ids)
    except OverflowError:
        return ()
    return hashes_of(prompt, salt, adapter, items, block_tokens=block_tokens, most=most)


def hashes_of(
    prompt: bytes,
    salt: str = "",
    adapter: str = "",
    items: Sequence[MediaItem] = (),
    *,
    block_tokens: int = BLOCK_TOKENS,
    most: int = MAX_BLOCKS,
) -> tuple[int, ...]:
    """As `block_hashes`, of a packed prompt."""
    width = block_tokens * TOKEN_BYTES
    found, last = [], root_hash(salt, adapter)
    for start in range(0, min(len(prompt) // width, most) * width, width):
        begun = begun_in(items, start // TOKEN_BYTES, block_tokens) if items else ()
        last = next_hash(last, prompt[start : start + width], begun)
        found.append(last)
    return tuple(found)


def begun_in(items: Iterable[MediaItem], first: int, tokens: int) -> tuple[tuple[int, str], ...]:
    """The items that begin in the `tokens` tokens from `first` on, each by its position there and its digest."""
    return tuple((item.start - first, item.digest) for item in items if first <= item.start < first + tokens)


def root_hash(salt: str, adapter: str = "") -> int:
    """The hash that precedes the first block of a prompt."""
    # The adapter is the key of the hash: no salt that a client chooses gives the hash of another adapter.
    key = blake2b(adapter.encode(errors="surrogatepass")).digest() if adapter else b""
    digest = blake2b(salt.encode(errors="surrogatepass"), digest_size=_HASH_BYTES, key=key)
    return int.from_bytes(digest.digest(), "little")


def next_hash(last: int, block: bytes, begun: Sequence[tuple[int, str]] = ()) -> int:
    """The hash of a block, given by its packed tokens, after the block of hash `last`. begun: the media items that
    begin in it, each by its position in the block and its digest.
    """
    # The parent goes into BLAKE2's salt: it changes the initial state and costs nothing.
    key = blake2b(msgspec.msgpack.encode(begun)).digest() if begun else b""
    digest = blake2b(block, digest_size=_HASH_BYTES, key=key, salt=last.to_bytes(_HASH_BYTES, "little")).digest()
    return int.from_bytes(digest, "little")
