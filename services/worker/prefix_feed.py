"""The content of the engine's prefix cache, reported to each scheduler in blocks of the cluster's own size.

A scheduler receives one snapshot, then changes, at most ten times a second; while there are few of them, as answers
make, twice a second. Engine blocks are converted to prefix blocks here; the two sizes may differ by any ratio.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence

from services.worker.engines.base import BlockName, BlocksCleared, BlocksKept, BlocksRemoved, BlocksStored, CacheEvent
from services.worker.kv import holds_exact_kv
from shared.domain.prompt import BLOCK_TOKENS, MAX_BLOCKS, TOKEN_BYTES, PrefixDelta, next_hash, packed, root_hash
from shared.policy.reachable_blocks import CacheChanges, TieredBlocks
from shared.runtime.tasks import Alarm
from shared.wire.messages import PrefixesRequest
from shared.wire.rpc_server import ServerCall

PERIOD_S = 0.1
FEW_S = 0.5  # between two messages while less than `MANY` blocks have changed: by fewer, a prompt saves little
MANY = 8
MAX_MESSAGE_BLOCKS = 8_192  # of one message: 74 KB


class PrefixFeed:
    """Serves `prefixes`. Nothing is sent while nothing changes, and no timer runs without a subscriber."""

    def __init__(self, generation: int, *, tiered: bool = False) -> None:
        """tiered: whether blocks may lie in host memory."""
        self.held = HeldPrefixes(tiered=tiered)
        self._generation = generation
        self._subscriptions: set[_Subscription] = set()
        self._loop = asyncio.get_running_loop()
        self._alarm = Alarm(self._publish)
        self._published_mono = -FEW_S

    def receive(self, events: Sequence[CacheEvent]) -> None:
        for event in events:
            self.held.apply(event)
        changed = self.held.reachable.changed if self._subscriptions else 0
        if changed:
            soon_mono = self._loop.time() + PERIOD_S
            self._alarm.by(soon_mono if changed >= MANY else max(soon_mono, self._published_mono + FEW_S))

    async def prefixes(self, _: PrefixesRequest, call: ServerCall) -> None:
        """The RPC method: lasts until the caller is gone or cancels, or its deadline has passed."""
        self._publish()  # pending changes go to the present subscribers; for the new one they are part of the snapshot
        subscription = _Subscription(call, self._generation)
        subscription.publish(self.held.reachable.snapshot())
        self._subscriptions.add(subscription)
        try:
            await self._loop.create_future()
        finally:
            self._subscriptions.discard(subscription)

    def _publish(self) -> None:
        self._alarm.cancel()
        changes = self.held.reachable.take_changes()
        if any(changes):
            self._published_mono = self._loop.time()
            for subscription in self._subscriptions:
                subscription.publish(changes)


class _Subscription:
    """What one subscriber has received."""

    def __init__(self, call: ServerCall, generation: int) -> None:
        self._call = call
        self._generation = generation
        self._sequence = 0

    def publish(self, changes: CacheChanges) -> None:
        """Send changes, in as many messages as needed; the first message is sent even if it is empty."""
        for part in _parts(changes.removed):
            self._send(removed=part)
        for part in _parts(changes.added):
            self._send(added=part)
        for part in _parts(changes.hosted):
            self._send(hosted=part)
        if not self._sequence:
            self._send()

    def _send(self, added: Sequence[int] = (), removed: Sequence[int] = (), hosted: Sequence[int] = ()) -> None:
        starts = not self._sequence
        self._call.send(PrefixDelta(self._generation, self._sequence, [*added], [*removed], starts, [*hosted]))
        self._sequence += 1


def _parts(blocks: list[int]) -> Iterator[list[int]]:
    return (blocks[at : at + MAX_MESSAGE_BLOCKS] for at in range(0, len(blocks), MAX_MESSAGE_BLOCKS))


class HeldPrefixes:
    """The prefix blocks of which the engine holds every token, from the events of its own blocks.

    Left out are blocks far behind a prompt's start, those that follow an unknown block, and approximate KV, which
    no other request may find.
    """

    def __init__(self, block_tokens: int = BLOCK_TOKENS, max_blocks: int = MAX_BLOCKS, *, tiered: bool = False) -> None:
        self._block_tokens = block_tokens
        self._width = block_tokens * TOKEN_BYTES
        self._max_blocks = max_blocks
        self._nodes: dict[BlockName, _Node] = {}
        self._whole: Counter[int] = Counter()  # by prefix block, its covers that lack nothing
        self._on_device: Counter[int] = Counter()  # by prefix block, its covers of which all lies on the accelerator
        self.reachable = TieredBlocks(tiered=tiered)

    def __len__(self) -> int:
        return len(self._nodes)

    def apply(self, event: CacheEvent) -> None:
        """Apply an event; events come in the engine's order."""
        if isinstance(event, BlocksStored):
            self._stored(event)
        elif isinstance(event, BlocksRemoved):
            for name in event.blocks:
                self._removed(name, host=event.host)
        elif isinstance(event, BlocksKept):
            for name in event.blocks:
                if (node := self._nodes.get(name)) is not None and node.copies:
                    self._add_copy(node, host=event.host)
        elif isinstance(event, BlocksCleared):
            self._nodes.clear()
            self._whole.clear()
            self._on_device.clear()
            self.reachable.clear()

    def _stored(self, event: BlocksStored) -> None:
        size, odd = divmod(len(event.token_ids), max(1, len(event.blocks)))
        end = self._end_of(event)
        if end is None or odd or not size:
            return
        data, width = packed(event.token_ids), size * TOKEN_BYTES
        for at, name in enumerate(event.blocks):
            if end.depth >= self._max_blocks:
                return
            node = self._nodes.get(name)
            if node is None:
                node = self._nodes[name] = _Node()
            if node.end is None:
                begun = [(token - at * size, digest) for token, digest in event.begun if token // size == at]
                self._place(name, node, end, data[at * width : (at + 1) * width], begun)
            end = node.end or end
            self._add_copy(node, host=False)

    def _add_copy(self, node: "_Node", *, host: bool) -> None:
        node.copies += 1
        if node.copies == 1:
            for cover in node.covers:
                self._lacks(cover, -1)
        if host:
            node.hosted += 1
        elif node.copies - node.hosted == 1 and self.reachable.tiered:
            for cover in node.covers:
                self._leaves(cover, -1)

    def _end_of(self, event: BlocksStored) -> "_End | None":
        if event.parent is None:
            return _End(root_hash(event.salt, event.adapter), 0) if holds_exact_kv(event.salt) else None
        node = self._nodes.get(event.parent)
        return node.end if node is not None and node.copies else None

    def _place(
        self, name: BlockName, node: "_Node", before: "_End", data: bytes, begun: Sequence[tuple[int, str]]
    ) -> None:
        """Find the prefix blocks that end in this engine block, in which these media items begin."""
        rest, parts, last, depth = before.rest + data, (*before.parts, name), before.last, before.depth
        ending, behind = [], len(before.rest) // TOKEN_BYTES
        items, block_tokens = [*before.begun, *((behind + at, digest) for at, digest in begun)], self._block_tokens
        while len(rest) >= self._width and depth < self._max_blocks:
            parent = last if depth else None
            last = next_hash(last, rest[: self._width], [item for item in items if item[0] < block_tokens])
            items = [(at - block_tokens, digest) for at, digest in items if at >= block_tokens]
            cover = _Cover(last, parent, parts)
            ending.append(cover)
            for part in parts:
                self._nodes.setdefault(part, _Node()).covers[cover] = None
            nodes = [self._nodes[part] for part in parts]
            cover.lacking = sum(not node.copies for node in nodes)
            cover.away = sum(node.copies == node.hosted for node in nodes)
            rest, parts, depth = rest[self._width :], (name,), depth + 1
        node.ending = tuple(ending)
        node.end = _End(last, depth, rest, parts if rest else (), items)

    def _removed(self, name: BlockName, *, host: bool) -> None:
        node = self._nodes.get(name)
        if node is None or not node.copies:
            return
        node.copies -= 1
        if host and node.hosted:
            node.hosted -= 1
        elif node.copies == node.hosted and self.reachable.tiered:
            for cover in node.covers:
                self._leaves(cover, 1)
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

    def _tidy(self, name: BlockName, node: "_Node") -> None:
        if not node.copies and not node.covers:
            self._nodes.pop(name, None)

    def _lacks(self, cover: "_Cover", more: int) -> None:
        was_whole = not cover.lacking
        cover.lacking += more
        if not cover.lacking:
            self._whole[cover.block] += 1
            self.reachable.every.hold(cover.block, cover.parent)
        elif was_whole:
            self._whole[cover.block] -= 1
            if not self._whole[cover.block]:
                del self._whole[cover.block]
                self.reachable.every.drop(cover.block)

    def _leaves(self, cover: "_Cover", more: int) -> None:
        """`more` of its parts are not on the accelerator any more, or fewer."""
        was_whole = not cover.away
        cover.away += more
        if not cover.away:
            self._on_device[cover.block] += 1
            self.reachable.device.hold(cover.block, cover.parent)
        elif was_whole:
            self._on_device[cover.block] -= 1
            if not self._on_device[cover.block]:
                del self._on_device[cover.block]
                self.reachable.device.drop(cover.block)


class _End:
    """The end of an engine block: the prefix blocks up to there, and the tokens since the last of them.

    `rest` holds these tokens, packed; `parts` names the engine blocks in which they lie, and `begun` the media items
    that begin in them, by position.
    """

    __slots__ = ("begun", "depth", "last", "parts", "rest")

    def __init__(
        self,
        last: int,
        depth: int,
        rest: bytes = b"",
        parts: tuple[BlockName, ...] = (),
        begun: Sequence[tuple[int, str]] = (),
    ) -> None:
        self.last = last
        self.depth = depth
        self.rest = rest
        self.parts = parts
        self.begun = begun


class _Cover:
    """A prefix block as it lies in blocks of the engine; `lacking` counts those of `parts` that are not held, `away`
    those that are not on the accelerator.

    A prefix block may have several covers: what follows it in the engine's last block differs.
    """

    __slots__ = ("away", "block", "lacking", "parent", "parts")

    def __init__(self, block: int, parent: int | None, parts: tuple[BlockName, ...]) -> None:
        self.block = block
        self.parent = parent
        self.parts = parts
        self.lacking = self.away = len(parts)


class _Node:
    """A block of the engine: `copies` that are held, of these the ones in host memory (`hosted`), the `covers` of which
    it is a part, and of these, those that end in it.
    """

    __slots__ = ("copies", "covers", "end", "ending", "hosted")

    def __init__(self) -> None:
        self.copies = self.hosted = 0
        self.end: _End | None = None
        self.covers: dict[_Cover, None] = {}
        self.ending: tuple[_Cover, ...] = ()
