"""KV of sessions that is kept in vLLM's prefix cache over the pause between two turns, such as a tool call.

When a request of a session ends, its whole blocks are pinned by their reference counts, for a time and within a budget
of the KV memory; the oldest sessions leave first. Pinned blocks that no request uses count as free: they are given back
at once when a request finds too few others, so that no request waits or is preempted for them. The engine's thread
makes all calls.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from services.worker.engines.vllm_patches import before_shortage


@dataclass(slots=True)
class _Kept:
    """The blocks of a session, from the beginning of its context on."""

    blocks: list[KVCacheBlock]
    until_mono: float


class KeptSessions:
    """The kept sessions of one scheduler. keep_s: for so long after the end of a request; share: of the KV blocks that
    may be pinned at most. With either at 0, nothing is kept.
    """

    def __init__(
        self, scheduler: Any, keep_s: float, share: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._scheduler = scheduler
        self._cache = scheduler.kv_cache_manager
        self._pool = self._cache.block_pool
        self._keep_s = keep_s
        self._clock = clock
        self.budget = int(share * (self._pool.num_gpu_blocks - 1)) if keep_s > 0 else 0
        # A state is no range of tokens: vLLM keeps it at some positions only.
        if not self._cache.enable_caching or self._cache.kv_cache_config.has_mamba_layers:
            self.budget = 0
        self._requests: dict[str, tuple[str, Request]] = {}  # sessions' requests in the engine
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # by session, the oldest first
        self._pins: dict[int, int] = {}  # by block, the sessions that keep it; each block is pinned once
        self._unused: int | None = None
        self.yielded = 0  # sessions whose blocks were given back to requests, since the start
        if self.budget:
            before_shortage(scheduler, self._yield)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def pinned(self) -> int:
        """Blocks that are kept."""
        return len(self._pins)

    @property
    def unused(self) -> int:
        """Of these, the blocks that no request uses: requests can have them."""
        if self._unused is None:
            self._unused = sum(self._pool.blocks[block_id].ref_cnt == 1 for block_id in self._pins)
        return self._unused

    def watch(self, request_id: str, session: str) -> None:
        """A request of a session was added to the scheduler."""
        request = self._scheduler.requests.get(request_id)
        if self.budget and session and request is not None:
            self._requests[request_id] = session, request

    def forget(self, request_id: str) -> None:
        """The request goes on in another engine."""
        self._requests.pop(request_id, None)

    def advance(self) -> None:
        """Between two steps: keep what has ended, and give back what was kept long enough."""
        self._unused = None
        if self._requests:
            ended = [request_id for request_id, (_, request) in self._requests.items() if request.is_finished()]
            for request_id in ended:
                self._keep(*self._requests.pop(request_id))
        now_mono = self._clock()
        while self._kept and next(iter(self._kept.values())).until_mono <= now_mono:
            self._drop_oldest()

    def _keep(self, session: str, request: Request) -> None:
        """The session's last request has ended: what the cache has of it replaces what was kept of the session."""
        found, *_ = self._cache.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens)
        blocks = _in_order(found)[: self.budget]
        former = self._kept.pop(session, None)
        if blocks:
            self._pin(blocks)  # before the former ones are released: they are mostly the same
            self._kept[session] = _Kept(blocks, self._clock() + self._keep_s)
        if former is not None:
            self._unpin(former.blocks)
        while self.pinned > self.budget:
            self._drop_oldest()

    def _yield(self) -> bool:
        """A request finds too few free blocks: give back a session's. False where nothing is left to give."""
        while self._kept:
            unused = self.unused
            self._drop_oldest()
            if self.unused < unused:
                self.yielded += 1
                return True
        return False

    def _drop_oldest(self) -> None:
        _, kept = self._kept.popitem(last=False)
        self._unpin(kept.blocks)

    def _pin(self, blocks: list[KVCacheBlock]) -> None:
        new = [block for block in blocks if block.block_id not in self._pins]
        self._pool.touch(new)
        for block in blocks:
            self._pins[block.block_id] = self._pins.get(block.block_id, 0) + 1
        self._unused = None

    def _unpin(self, blocks: list[KVCacheBlock]) -> None:
        freed = []
        for block in reversed(blocks):  # the end of a context is evicted before its beginning
            count = self._pins[block.block_id] - 1
            if count:
                self._pins[block.block_id] = count
            else:
                del self._pins[block.block_id]
                freed.append(block)
        self._pool.free_blocks(freed)
        self._unused = None


def _in_order(groups: tuple[list[KVCacheBlock], ...]) -> list[KVCacheBlock]:
    """The blocks of all KV cache groups by their place in the context, without vLLM's null block."""
    longest = max((len(group) for group in groups), default=0)
    placed = ((at * longest / max(1, len(group)), block) for group in groups for at, block in enumerate(group))
    return [block for _, block in sorted(placed, key=lambda one: one[0]) if not block.is_null]
