"""KV in host memory after it left the blocks of vLLM's prefix cache: the part beside vLLM's scheduler. The part in each
rank is `host_store`.

A block that vLLM is about to use for something else is copied to a slot of the store first; and where a prompt's cached
beginning goes on in the store, vLLM gets blocks for it, which are filled before the forward pass that reads them.

The ranks carry out steps in the order in which they were scheduled. Within a step, blocks are saved before anything is
written, and loaded before the model runs, so that a slot can be given to another block at once.

Where there is a disk tier, it gets the blocks that leave a full store. A request that needs blocks from there is not
scheduled until they lie in the store again.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    KVCacheBlock,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
    resolve_block_hashes,
)
from vllm.v1.kv_cache_interface import is_full_attention_spec
from vllm.v1.request import Request

from services.worker.engines.base import DiskTierStats, HostTierStats
from services.worker.kv import holds_exact_kv
from services.worker.kv.disk_store import DiskReport
from services.worker.kv.disk_tier import DiskTier
from services.worker.kv.vllm.host_store import HostCopies
from shared.policy.host_index import Held, SlotIndex


@dataclass(frozen=True, slots=True)
class Stored:
    """A block of the store where vLLM's lookup expects one of its own. on_disk: it has to be read first."""

    held: Held
    on_disk: bool = False
    is_null: bool = False

    @property
    def block_id(self) -> int:
        """The slot, as blocks of a chunk name it: below 0."""
        return -1 - self.held.slot


Lookup = Callable[[Callable[[bytes], Stored | None], Request, int], tuple[Sequence[Sequence[Any]], int]]


@dataclass(slots=True)
class _Found:
    """A request's blocks of `tokens` behind the first `local` ones: `slots` of each group, by the block's number."""

    local: int
    tokens: int
    slots: list[dict[int, int]]
    held: list[Held]  # pinned, in the order of the prompt


@dataclass(frozen=True, slots=True)
class _Origin:
    """Of a block in vLLM's cache: which one it follows, and whether other requests may find it."""

    key: bytes
    parent: bytes | None
    exact: bool


class HostTier:
    """The engine's thread makes all calls; vLLM's block pool makes those of `cached`, `evicting` and `clear`."""

    def __init__(
        self, manager: Any, index: SlotIndex, slot_bytes: int, lookup: Lookup, disk: DiskTier | None = None
    ) -> None:
        """manager: vLLM's KVCacheManager. slot_bytes: on all ranks. lookup: of the blocks that vLLM or the store has
        of a request's first tokens, in each group, and of how many tokens these are.
        """
        self._manager = manager
        self._pool = manager.block_pool
        self._sizes: tuple[int, ...] = manager.coordinator.group_block_sizes
        # A block of a window is found without those before it.
        self._chained = [is_full_attention_spec(g.kv_cache_spec) for g in manager.kv_cache_config.kv_cache_groups]
        self._index = index
        self._lookup = lookup
        self._disk = disk
        if disk is not None:
            disk.stored, disk.removed, disk.left = self._added, self._removed, self._left
        self._origins: dict[int, _Origin] = {}  # by block id
        self._found: dict[str, _Found] = {}  # by request; of this step
        self._loaded: list[Held] = []  # pinned until the step is complete
        self._fresh: set[int] = set()  # blocks that this step computes or loads: their content is yet to come
        self._copies = HostCopies()
        self._slot_bytes = slot_bytes
        self._stored_blocks = self._loaded_blocks = self._evicted_blocks = self._served_tokens = 0

    def stats(self) -> HostTierStats:
        return HostTierStats(
            held_bytes=len(self._index) * self._slot_bytes,
            limit_bytes=self._index.slots * self._slot_bytes,
            stored_blocks=self._stored_blocks,
            loaded_blocks=self._loaded_blocks,
            evicted_blocks=self._evicted_blocks,
            served_tokens=self._served_tokens,
            block_tokens=1.0 / sum(1.0 / size for size in self._sizes),
            disk=self._disk.stats() if self._disk is not None else DiskTierStats(),
        )

    def cached(self, request: Request, blocks: Sequence[KVCacheBlock], start: int, end: int, group: int) -> None:
        """vLLM has put blocks [start, end) of a request into its cache."""
        exact = holds_exact_kv(request.cache_salt or "")
        hashes = resolve_block_hashes(request.block_hashes, self._pool.hash_block_size, self._sizes[group])
        for at in range(start, end):
            block = blocks[at]
            if (key := block.block_hash) is not None and not block.is_null:
                parent = make_block_hash_with_group_id(hashes[at - 1], group) if at and self._chained[group] else None
                self._origins[block.block_id] = _Origin(key, parent, exact)

    def evicting(self, blocks: Iterable[KVCacheBlock]) -> None:
        """vLLM is about to use these free blocks for something else."""
        for block in blocks:
            key = block.block_hash
            if key is not None and block.block_id not in self._fresh:
                self._save(key, block)
            self._fresh.add(block.block_id)

    def find(self, request: Request, local_tokens: int, *, read: bool = True) -> int | None:
        """How many tokens of a request follow the first `local_tokens` in the store. Keeps them until the step is
        complete, or another answer to the request's lookup is used. None: blocks of the request are being read. read:
        whether those may be that only the disk has.
        """
        self.forget(request.request_id)
        if not self._manager.prefix_cache_lookup_enabled(request):
            return 0
        disk, most_tokens = self._disk, request.num_tokens - 1
        if disk is not None and disk.waits(request.request_id):
            return None
        if disk is not None and read and self._read(disk, request.request_id, request, local_tokens, most_tokens):
            return None
        if not len(self._index):
            return 0
        groups, tokens = self._lookup(self._stored, request, most_tokens)
        if tokens <= local_tokens:
            return 0
        found = _Found(local_tokens, tokens - local_tokens, [{} for _ in groups], [])
        resident = []  # blocks that vLLM has behind a gap: they are copied by way of the store
        for group, blocks in enumerate(groups):
            for at in range(local_tokens // self._sizes[group], len(blocks)):
                block = blocks[at]
                key = block.held.key if isinstance(block, Stored) else block.block_hash
                if key is not None and self._stored(key) is not None:
                    self._keep(found, group, at, key)
                elif key is not None and not block.is_null:
                    resident.append((group, at, key, block))
        self._found[request.request_id] = found
        for group, at, key, block in resident:
            if block.block_id in self._fresh or not self._save(key, block):
                self.forget(request.request_id)
                return 0
            self._keep(found, group, at, key)
        return found.tokens

    def _read(self, disk: DiskTier, name: str, request: Request, local_tokens: int, most_tokens: int) -> bool:
        """Begin to read what only the disk has of a request, behind `local_tokens`. Returns whether what is called
        `name` waits for it.
        """
        if not disk.may_read(name):
            return False
        groups, tokens = self._lookup(self._anywhere, request, most_tokens)
        wanted, present = [], []
        for group, blocks in enumerate(groups if tokens > local_tokens else ()):
            size = self._sizes[group]
            for at in range(local_tokens // size, len(blocks)):
                if isinstance(block := blocks[at], Stored):
                    if block.on_disk:
                        wanted.append((at * size, block.held.key))
                    else:
                        present.append(block.held)
        return bool(wanted) and disk.read(name, [key for _, key in sorted(wanted)], present)

    def _keep(self, found: _Found, group: int, at: int, key: bytes) -> None:
        held = self._index.pin(key)
        found.slots[group][at] = held.slot
        found.held.append(held)

    def forget(self, request_id: str) -> None:
        """What was found for a request is not used."""
        found = self._found.pop(request_id, None)
        for held in found.held if found is not None else ():
            self._index.unpin(held)

    def load(self, request: Request, block_ids: Sequence[Sequence[int]], external_tokens: int) -> int:
        """vLLM has given a request blocks, of which those of so many tokens are neither cached nor computed. Returns of
        how many tokens, the first of these, the store fills them.
        """
        found = self._found.pop(request.request_id, None)
        if self._disk is not None:
            self._disk.forget(request.request_id)
        if found is None:
            return 0
        self._loaded += found.held
        if not external_tokens:  # vLLM wants none
            return 0
        for slots, ids in zip(found.slots, block_ids, strict=True):
            for at, slot in slots.items():
                if ids[at]:  # block 0 stands for what is outside of a window
                    self._copies.loads[ids[at]] = slot
                    self._loaded_blocks += 1
        for held in reversed(found.held):  # the last ones leave first
            self._index.use(held.key)
        self._served_tokens += found.tokens
        if (stats := request.prefill_stats) is not None and not request.num_preemptions:
            # To the accounts they are this engine's own.
            stats.set(stats.num_prompt_tokens, found.local + found.tokens, external_tokens - found.tokens)
        return found.tokens

    def take(self) -> HostCopies:
        """The copies of the step that is complete now."""
        for request_id in list(self._found):
            self.forget(request_id)
        for held in self._loaded:
            self._index.unpin(held)
        self._loaded.clear()
        self._fresh.clear()
        copies, self._copies = self._copies, HostCopies()
        if self._disk is not None:
            copies.disk = self._disk.take()
        return copies

    def disk_ended(self, report: DiskReport) -> None:
        """What the ranks have read from the disk, and written to it."""
        assert self._disk is not None, "ranks report where they were given something to read or write"
        self._disk.ended(report)

    def request_ended(self, request_id: str) -> None:
        self.forget(request_id)
        if self._disk is not None:
            self._disk.forget(request_id)

    def clear(self) -> None:
        """vLLM has emptied its cache, between two steps."""
        self._index.clear()
        self._origins.clear()
        if self._disk is not None:
            self._disk.clear()

    def prepares(self, transfer_id: str, request: Request, start: int) -> bool:
        """Whether blocks of a request, from token `start` on, are being read from the disk for an export. Has them
        read.
        """
        disk = self._disk
        if disk is None:
            return False
        name = _export_name(transfer_id)
        if disk.waits(name) or self._read(disk, name, request, start, request.num_tokens):
            return True
        disk.forget(name)
        return False

    def unprepare(self, transfer_id: str) -> None:
        if self._disk is not None:
            self._disk.forget(_export_name(transfer_id))

    def copy_now(self, copy: Callable[[HostCopies], list[DiskReport | None]]) -> None:
        """Have the ranks begin what is to be read and written, and report, between two steps. copy: in each of them."""
        assert self._disk is not None
        for report in copy(HostCopies(disk=self._disk.take())):
            if report is not None:
                self._disk.ended(report)

    def exported(self, request: Request) -> tuple[list[list[Any]], int]:
        """The blocks of a request that vLLM or the store has, in each group, and of how many tokens. Those of the store
        are pinned until `export_ended`.
        """
        groups, tokens = self._lookup(self._stored, request, request.num_tokens)
        for block in chain(*groups):
            if isinstance(block, Stored):
                self._index.pin(block.held.key)
        return [list(blocks) for blocks in groups], tokens

    def export_ended(self, blocks: Iterable[Any]) -> None:
        for block in blocks:
            if isinstance(block, Stored):
                self._index.unpin(block.held)

    def _stored(self, key: bytes) -> Stored | None:
        """The block, if the store has its content."""
        held = self._index.get(key)
        if held is None or (self._disk is not None and self._disk.is_reading(held)):
            return None
        return Stored(held)

    def _anywhere(self, key: bytes) -> Stored | None:
        """The block, also where it has to be read first, or is being read."""
        found = self._stored(key)
        if found is not None or self._disk is None:
            return found
        held = self._index.get(key) or self._disk.get(key)
        return Stored(held, on_disk=True) if held is not None else None

    def _save(self, key: bytes, block: KVCacheBlock) -> bool:
        """Whether the store has the block from this step on."""
        origin, group, tokens = self._origins.get(block.block_id), get_group_id(key), block.block_hash_num_tokens
        if origin is None or origin.key != key or not origin.exact or tokens is None or tokens % self._sizes[group]:
            return False
        if key in self._index:
            self._index.use(key)
            return self._stored(key) is not None
        put = self._index.put(key, origin.parent, tokens - self._sizes[group])
        if put is None:
            return False
        if put.dropped is not None:
            self._left(put.dropped)
        self._copies.saves[put.slot] = block.block_id
        self._stored_blocks += 1
        self._added(key)
        return True

    def _left(self, held: Held) -> None:
        """A block has made room for another one."""
        self._evicted_blocks += 1
        unsaved = self._copies.saves.pop(held.slot, None)  # this step would have saved it
        if self._disk is not None:
            self._disk.store(held, copied=unsaved is None)
        self._removed(held.key)

    def _added(self, key: bytes) -> None:
        """There is one more copy of a block, in host memory or on the disk."""
        group = get_group_id(key)
        size = self._sizes[group]
        self._event(BlockStored([_name(key)], None, [], size, None, MEDIUM_CPU, None, group_idx=group))

    def _removed(self, key: bytes) -> None:
        self._event(BlockRemoved([_name(key)], MEDIUM_CPU, get_group_id(key)))

    def _event(self, event: Any) -> None:
        """Before those of vLLM for the same block, so that one that moves is never gone."""
        if self._pool.enable_kv_cache_events:
            self._pool.kv_event_queue.append(event)


def _export_name(transfer_id: str) -> str:
    """As what an export waits: no request is called so."""
    return f"export {transfer_id}"


def _name(key: Any) -> Any:
    return maybe_convert_block_hash(get_block_hash(key))
