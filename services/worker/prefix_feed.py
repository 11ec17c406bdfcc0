"""The account of the prefix cache that each scheduler gets: all of it once, then changes, ten a second at most."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence

from services.worker.engines.base import BlockName, BlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from services.worker.kv.errors import is_lossy_salt
from shared.domain.prompt import BLOCK_TOKENS, MAX_BLOCKS, TOKEN_BYTES, PrefixDelta, next_hash, packed, root_hash
from shared.policy.prefix_index import ReachableBlocks
from shared.wire.messages import PrefixesRequest
from shared.wire.rpc_server import ServerCall

# MERGED held.py
# From the engine's blocks to ours: sizes may differ in any way.


class _End:
    """Where a block of the engine ends: our blocks up to there, and the tokens since the last of them.

    `rest` is theirs, packed; `parts` names the engine's blocks that it lies in.
    """

    __slots__ = ("depth", "last", "parts", "rest")

    def __init__(self, last: int, depth: int, rest: bytes = b"", parts: tuple[BlockName, ...] = ()) -> None:
        self.last = last
        self.depth = depth
        self.rest = rest
        self.parts = parts


class _Cover:
    """One of our blocks as it lies in blocks of the engine; `lacking` counts those of `parts` that are not held.

    The same block of ours may have several: what follows it in the engine's last block differs.
    """

    __slots__ = ("block", "lacking", "parent", "parts")

    def __init__(self, block: int, parent: int | None, parts: tuple[BlockName, ...]) -> None:
        self.block = block
        self.parent = parent
        self.parts = parts
        self.lacking = len(parts)


class _Node:
    """A block of the engine. `copies` held; `covers` that it has a part in; of them, those that end in it."""

    __slots__ = ("copies", "covers", "end", "ending")

    def __init__(self) -> None:
        self.copies = 0
        self.end: _End | None = None
        self.covers: dict[_Cover, None] = {}
        self.ending: tuple[_Cover, ...] = ()


class HeldPrefixes:
    """Our blocks of which the engine holds every token, by what it tells of its own.

    Left out: blocks far behind a prompt's start, those that follow an unknown one, and approximate KV, which nobody
    else may find.
    """

    def __init__(self, block_tokens: int = BLOCK_TOKENS, most: int = MAX_BLOCKS) -> None:
        self._width = block_tokens * TOKEN_BYTES
        self._most = most
        self._nodes: dict[BlockName, _Node] = {}
        self._whole: Counter[int] = Counter()  # covers that lack nothing, by our block
        self.reachable = ReachableBlocks()

    def __len__(self) -> int:
        """Engine blocks that are known."""
        return len(self._nodes)

    def apply(self, event: CacheEvent) -> None:
        """Take in what the engine tells, in its order."""
        if isinstance(event, BlocksStored):
            self._stored(event)
        elif isinstance(event, BlocksRemoved):
            for name in event.blocks:
                self._removed(name)
        elif isinstance(event, BlocksCleared):
            self._nodes.clear()
            self._whole.clear()
            self.reachable.clear()

    def _stored(self, event: BlocksStored) -> None:
        size, odd = divmod(len(event.token_ids), max(1, len(event.blocks)))
        end = self._end_of(event)
        if end is None or odd or not size:
            return
        data, width = packed(event.token_ids), size * TOKEN_BYTES
        for at, name in enumerate(event.blocks):
            if end.depth >= self._most:
                return
            node = self._nodes.get(name)
            if node is None:
                node = self._nodes[name] = _Node()
            if node.end is None:
                self._place(name, node, end, data[at * width : (at + 1) * width])
            end = node.end or end
            node.copies += 1
            if node.copies == 1:
                for cover in node.covers:
                    self._lacks(cover, -1)

    def _end_of(self, event: BlocksStored) -> _End | None:
        if event.parent is None:
            return None if is_lossy_salt(event.salt) else _End(root_hash(event.salt), 0)
        node = self._nodes.get(event.parent)
        return node.end if node is not None and node.copies else None

    def _place(self, name: BlockName, node: _Node, before: _End, data: bytes) -> None:
        """Find our blocks that end in this one of the engine."""
        rest, parts, last, depth = before.rest + data, (*before.parts, name), before.last, before.depth
        ending = []
        while len(rest) >= self._width and depth < self._most:
            parent = last if depth else None
            last = next_hash(last, rest[: self._width])
            cover = _Cover(last, parent, parts)
            ending.append(cover)
            for part in parts:
                self._nodes.setdefault(part, _Node()).covers[cover] = None
            cover.lacking = sum(not self._nodes[part].copies for part in parts)
            rest, parts, depth = rest[self._width :], (name,), depth + 1
        node.ending = tuple(ending)
        node.end = _End(last, depth, rest, parts if rest else ())

    def _removed(self, name: BlockName) -> None:
        node = self._nodes.get(name)
        if node is None or not node.copies:
            return
        node.copies -= 1
        if node.copies:
            return
        for cover in node.covers:
            self._lacks(cover, 1)
        for cover in node.ending:
            for part in cover.parts:
                other = self._nodes[part]
                del other.covers[cover]
                self._tidy(part, other)
        node.ending, node.end = (), None
        self._tidy(name, node)

    def _tidy(self, name: BlockName, node: _Node) -> None:
        if not node.copies and not node.covers:
            self._nodes.pop(name, None)

    def _lacks(self, cover: _Cover, more: int) -> None:
        was_whole = not cover.lacking
        cover.lacking += more
        if not cover.lacking:
            self._whole[cover.block] += 1
            self.reachable.hold(cover.block, cover.parent)
        elif was_whole:
            self._whole[cover.block] -= 1
            if not self._whole[cover.block]:
                del self._whole[cover.block]
                self.reachable.drop(cover.block)


PERIOD_S = 0.1
MOST_BLOCKS = 8_192  # of one message: 74 KB


class _Account:
    """What one caller has been told."""

    def __init__(self, call: ServerCall, generation: int) -> None:
        self._call = call
        self._generation = generation
        self._sequence = 0

    def tell(self, added: list[int], removed: list[int]) -> None:
        """Send it, in as many messages as it takes; the first of all is sent even if there is nothing to say."""
        for part in _parts(removed):
            self._send([], part)
        for part in _parts(added):
            self._send(part, [])
        if not self._sequence:
            self._send([], [])

    def _send(self, added: list[int], removed: list[int]) -> None:
        self._call.send(PrefixDelta(self._generation, self._sequence, added, removed, starts=not self._sequence))
        self._sequence += 1


class PrefixFeed:
    """Serves `prefixes`. Nothing is sent while nothing changes, and nothing is due while nobody listens."""

    def __init__(self, generation: int) -> None:
        self.held = HeldPrefixes()
        self._generation = generation
        self._accounts: set[_Account] = set()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def take(self, events: Sequence[CacheEvent]) -> None:
        """What the engine tells."""
        for event in events:
            self.held.apply(event)
        if self._accounts and self._timer is None and self.held.reachable.changed:
            self._timer = self._loop.call_later(PERIOD_S, self._tell)

    async def prefixes(self, _: PrefixesRequest, call: ServerCall) -> None:
        """The method: lasts until the caller is gone, gives it up, or its time is over."""
        self._tell()  # what is pending belongs to the accounts so far: to this one it is part of the whole
        account = _Account(call, self._generation)
        account.tell(list(self.held.reachable.blocks), [])
        self._accounts.add(account)
        try:
            await self._loop.create_future()
        finally:
            self._accounts.discard(account)

    def _tell(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        added, removed = self.held.reachable.take_changes()
        if added or removed:
            for account in self._accounts:
                account.tell(added, removed)


def _parts(blocks: list[int]) -> Iterator[list[int]]:
    return (blocks[at : at + MOST_BLOCKS] for at in range(0, len(blocks), MOST_BLOCKS))
