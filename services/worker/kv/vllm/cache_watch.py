"""vLLM's prefix cache as others may know it: its KV events without its own publisher, and what requests find in it."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch

from services.worker.engines.cache_events import BlocksCleared, BlocksRemoved, BlocksStored, CacheEvent, CacheSink
from shared.runtime.logs import get_log

log = get_log(__name__)


class CacheWatch:
    """Watches the cache of one engine core; `sink` is called on the event loop, in the order of the events."""

    def __init__(self, sink: CacheSink | None) -> None:
        self._sink = sink
        self.prompt_tokens = 0  # of all requests whose first token is out
        self.hit_tokens = 0  # of those, found in this cache

    @property
    def config(self) -> KVEventsConfig | None:
        """Has vLLM tell of its blocks, and nobody listen: see `attach`."""
        return KVEventsConfig(enable_kv_cache_events=True, publisher="null") if self._sink is not None else None

    def attach(self, scheduler: Any, loop: asyncio.AbstractEventLoop) -> None:
        """Listen where the scheduler publishes, after each step; what is published elsewhere, too, stays so.

        A model whose layers cache in several groups is left out: a hit in one of them says little.
        """
        sink = self._sink
        if sink is None or len(scheduler.kv_cache_config.kv_cache_groups) > 1:
            return

        def tell(events: Sequence[CacheEvent]) -> None:
            loop.call_soon_threadsafe(sink, events)

        scheduler.kv_event_publisher = _Publisher(tell, scheduler.kv_event_publisher)

    def count(self, outputs: Iterable[Any]) -> None:
        """Outputs of one step."""
        for output in outputs:
            if (stats := output.prefill_stats) is not None:
                self.prompt_tokens += stats.num_prompt_tokens
                self.hit_tokens += stats.num_local_cached_tokens


class _Publisher:
    """In the place of vLLM's EventPublisher."""

    def __init__(self, sink: CacheSink, inner: Any) -> None:
        self._sink = sink
        self._inner = inner
        self._broken = False

    def publish(self, events: EventBatch) -> None:
        self._inner.publish(events)
        if self._broken:
            return
        try:
            found = [converted for event in events.events if (converted := _converted(event)) is not None]
        except Exception as error:  # another vLLM's events: placement does without, the engine goes on
            log.error("KV events are not understood; nobody is told of the prefix cache", exc_info=error)
            self._broken, found = True, [BlocksCleared()]
        if found:
            self._sink(found)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def get_publisher_config(self) -> Any:
        return self._inner.get_publisher_config()


def _converted(event: object) -> CacheEvent | None:
    """None for what has no meaning here: other tiers of memory, and what more than tokens and a salt tells apart."""
    if isinstance(event, AllBlocksCleared):
        return BlocksCleared()
    if isinstance(event, BlockRemoved):
        return BlocksRemoved(event.block_hashes)
    if not isinstance(event, BlockStored) or event.lora_name:
        return None
    salt = _salt(event.extra_keys, begins=event.parent_block_hash is None)
    if salt is None:
        return None
    return BlocksStored(event.block_hashes, event.parent_block_hash, event.token_ids, salt)


def _salt(extra_keys: Sequence[tuple[Any, ...] | None] | None, *, begins: bool) -> str | None:
    """The salt, which is told with a prompt's first block; None when the keys hold anything else."""
    keys = [key for block in extra_keys or () for key in block or ()]
    if not keys:
        return ""
    return keys[0] if begins and len(keys) == 1 and isinstance(keys[0], str) else None
