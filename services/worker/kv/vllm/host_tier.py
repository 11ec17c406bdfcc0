"""KV in host memory after it left the blocks of vLLM's prefix cache: the part beside vLLM's scheduler. The part in each
rank is `host_store`.

A block that vLLM is about to use for something else is copied to a slot of the store first; and where a prompt's cached
beginning goes on in the store, vLLM gets blocks for it, which are filled before the forward pass that reads them.

The ranks carry out steps in the order in which they were scheduled. Within a step, blocks are saved before anything is
written, and loaded before the model runs, so that a slot can be given to another block at once.
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

from services.worker.engines.base import HostTierStats
from services.worker.kv import holds_exact_kv
from services.worker.kv.vllm.host_store import HostCopies
from shared.policy.host_index import Held, SlotIndex


@dataclass(frozen=True, slots=True)
class Stored:
    """A block of the store where vLLM's lookup expects one of its own."""

    held: Held
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

    def __init__(self, manager: Any, index: SlotIndex, slot_bytes: int, lookup: Lookup) -> None:
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

    def find(self, request: Request, local_tokens: int) -> int:
        """How many tokens of a request follow the first `local_tokens` in the store. Keeps them until the step is
        complete, or another answer to the request's lookup is used.
        """
        self.forget(request.request_id)
        if not len(self._index) or not self._manager.prefix_cache_lookup_enabled(request):
            return 0
        groups, tokens = self._lookup(self._stored, request, request.num_tokens - 1)
        if tokens <= local_tokens:
            return 0
        found = _Found(local_tokens, tokens - local_tokens, [{} for _ in groups], [])
        resident = []  # blocks that vLLM has behind a gap: they are copied by way of the store
        for group, blocks in enumerate(groups):
            for at in range(local_tokens // self._sizes[group], len(blocks)):
                block = blocks[at]
                key = block.held.key if isinstance(block, Stored) else block.block_hash
                if key in self._index:
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
        return copies

    def clear(self) -> None:
        """vLLM has emptied its cache, between two steps."""
        self._index.clear()
        self._origins.clear()

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
        held = self._index.get(key)
        return Stored(held) if held is not None else None

    def _save(self, key: bytes, block: KVCacheBlock) -> bool:
        """Whether the store has the block from this step on."""
        origin, group, tokens = self._origins.get(block.block_id), get_group_id(key), block.block_hash_num_tokens
        if origin is None or origin.key != key or not origin.exact or tokens is None or tokens % self._sizes[group]:
            return False
        if key in self._index:
            self._index.use(key)
            return True
        put = self._index.put(key, origin.parent, tokens - self._sizes[group])
        if put is None:
            return False
        if put.dropped is not None:
            self._evicted_blocks += 1
            self._event(BlockRemoved([_name(put.dropped)], MEDIUM_CPU, get_group_id(put.dropped)))
        self._copies.saves[put.slot] = block.block_id
        self._stored_blocks += 1
        self._event(BlockStored([_name(key)], None, [], self._sizes[group], None, MEDIUM_CPU, None, group_idx=group))
        return True

    def _event(self, event: Any) -> None:
        """Before those of vLLM for the same block, so that one that moves is never gone."""
        if self._pool.enable_kv_cache_events:
            self._pool.kv_event_queue.append(event)


def _name(key: Any) -> Any:
    return maybe_convert_block_hash(get_block_hash(key))
