"""What an engine tells of its prefix cache. Its blocks have names of its own, each of all tokens up to its end."""

from collections.abc import Callable, Sequence

import msgspec

BlockName = bytes | int


class BlocksStored(msgspec.Struct, frozen=True):
    """Blocks of one prompt, in order, can be found from now on; the first follows `parent`, or begins the prompt.

    `token_ids` are those of the blocks alone. `salt` is told with the first block of a prompt.
    """

    blocks: Sequence[BlockName]
    parent: BlockName | None
    token_ids: Sequence[int]
    salt: str = ""


class BlocksRemoved(msgspec.Struct, frozen=True):
    """One copy of each of them is gone. A block that was stored twice is gone when it was removed twice."""

    blocks: Sequence[BlockName]


class BlocksCleared(msgspec.Struct, frozen=True):
    """All are gone."""


CacheEvent = BlocksStored | BlocksRemoved | BlocksCleared
CacheSink = Callable[[Sequence[CacheEvent]], None]
