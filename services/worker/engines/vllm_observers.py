"""Observers of vLLM's engine core: the steps that it runs and how long they take, and the blocks that its prefix cache
stores and removes.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisher,
)
from vllm.v1.kv_cache_interface import is_full_attention_spec

from services.worker.engines.base import (
    BlocksCleared,
    BlocksKept,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    CacheSink,
    Chunks,
    StepLog,
)
from services.worker.engines.vllm_patches import observe_steps, replace_event_publisher
from shared.runtime.logs import get_log

log = get_log(__name__)


@dataclass(slots=True)
class _Batch:
    """A scheduled step, and when its turn of the loop began."""

    plan: Any
    began_mono: float
    cpu_s: float


class StepObserver:
    """`began` and `ended` stand around each turn of the engine's loop, on the engine's thread; they take some
    microseconds.

    With pipeline stages or asynchronous scheduling a step is done some turns after it was scheduled, while others
    are under way. It lasts until the end of the turn that has its tokens: from the beginning of the turn that
    scheduled it, or, where that was while all stages had work, from the end of the step that made room for it.
    Where the engine's thread itself computes, a step is done in the turn that schedules it, whenever its tokens are
    fetched.
    """

    def __init__(self, scheduler: Any, log: StepLog, *, own_cpu: bool, stages: int = 1) -> None:
        """own_cpu: the calling thread computes, rather than other processes or a device. stages: how many steps are
        computed at once; others wait.
        """
        self._log = log
        self._own_cpu = own_cpu
        self._under_way: deque[_Batch] = deque()  # without those that compute nothing
        self._done: list[_Batch] = []
        self._ends_mono: deque[float] = deque([0.0] * stages, maxlen=stages)  # of the last steps
        self._fetched = False
        self._began_mono = self._cpu_s = 0.0
        observe_steps(scheduler, self._scheduled, self._updated)

    def _scheduled(self, plan: Any) -> None:
        if plan.total_num_scheduled_tokens:
            self._under_way.append(batch := _Batch(plan, self._began_mono, self._cpu_s))
            if self._own_cpu:
                self._done.append(batch)

    def _updated(self, plan: Any) -> None:
        if self._under_way and self._under_way[0].plan is plan:  # they end in the order in which they began
            self._fetched = True
            batch = self._under_way.popleft()
            if not self._own_cpu:
                self._done.append(batch)

    @property
    def idle(self) -> bool:
        """Whether nothing was computed in the last turn."""
        return not self._under_way and not self._fetched

    def began(self) -> None:
        self._done.clear()
        self._fetched = False
        self._cpu_s = time.thread_time() if self._own_cpu else 0.0
        self._began_mono = time.perf_counter()

    def ended(self) -> None:
        """The turn has ended and its tokens are on their way; a turn in which nothing was computed leaves no record."""
        for batch in self._done:
            now = time.perf_counter()
            seconds = now - max(batch.began_mono, self._ends_mono[0])
            self._ends_mono.append(now)
            cpu_s = time.thread_time() - batch.cpu_s if self._own_cpu else 0.0
            self._log.add(seconds, cpu_s, *batch_of(batch.plan))


def batch_of(plan: Any) -> tuple[Chunks, int, int]:
    """Prefill chunks, number of decodes and their total context, of a vLLM SchedulerOutput.

    One token after some context, and the drafted tokens behind it, are a decode to the engine, whatever it is to the
    request: the last token of a prompt whose KV was imported costs the same.
    """
    cached, new, scheduled = plan.scheduled_cached_reqs, plan.scheduled_new_reqs, plan.num_scheduled_tokens
    if not new and plan.total_num_scheduled_tokens == len(scheduled) == len(cached.req_ids):
        return (), len(scheduled), sum(cached.num_computed_tokens)  # the usual step: nothing but decodes
    chunks, decodes, context, drafts = [], 0, 0, plan.scheduled_spec_decode_tokens
    known = [(request.req_id, request.num_computed_tokens) for request in new]
    for name, computed in (*zip(cached.req_ids, cached.num_computed_tokens, strict=True), *known):
        tokens = scheduled.get(name, 0) - len(drafts.get(name, ()))
        if tokens == 1 and computed:
            decodes += 1
            context += computed
        elif tokens:
            chunks.append((tokens, computed))
    return tuple(chunks), decodes, context


class CacheWatch:
    """Watches the prefix cache of one engine core; `sink` is called on the event loop, in the order of the events."""

    def __init__(self, sink: CacheSink | None) -> None:
        self._sink = sink
        self.prompt_tokens = 0  # of all requests whose first token is out
        self.hit_tokens = 0  # of those, found in this cache

    @property
    def config(self) -> KVEventsConfig | None:
        """vLLM makes events and does not publish them: see `attach`."""
        return KVEventsConfig(enable_kv_cache_events=True, publisher="null") if self._sink is not None else None

    def attach(self, scheduler: Any, loop: asyncio.AbstractEventLoop) -> None:
        """Receive the events that the scheduler publishes after each step, in addition to vLLM's own publisher.

        Of a model whose layers cache in several groups, the layers with full attention say what can be found: the
        others keep less of a prompt, the end of which they mostly have.
        """
        sink = self._sink
        if sink is None:
            return
        groups = scheduler.kv_cache_config.kv_cache_groups
        full = [index for index, group in enumerate(groups) if is_full_attention_spec(group.kv_cache_spec)]
        watched = full[0] if full else 0

        def publish(events: Sequence[CacheEvent]) -> None:
            loop.call_soon_threadsafe(sink, events)

        replace_event_publisher(scheduler, lambda inner: _Publisher(publish, watched, inner))

    def count(self, outputs: Iterable[Any]) -> None:
        for output in outputs:
            if (stats := output.prefill_stats) is not None:
                self.prompt_tokens += stats.num_prompt_tokens
                self.hit_tokens += stats.num_local_cached_tokens


class _Publisher(EventPublisher):  # type: ignore[misc]  # vLLM is untyped here
    def __init__(self, sink: CacheSink, group: int, inner: Any) -> None:
        self._sink = sink
        self._group = group
        self._inner = inner
        self._broken = False

    def publish(self, events: EventBatch) -> None:
        self._inner.publish(events)
        if self._broken:
            return
        try:
            found = [converted for event in events.events if (converted := _converted(event, self._group)) is not None]
        except (
            Exception
        ) as error:  # events of another version of vLLM: placement works without them, the engine goes on
            log.error("vLLM's KV events are not understood: the prefix cache is not reported", exc_info=error)
            self._broken, found = True, [BlocksCleared()]
        if found:
            self._sink(found)

    def shutdown(self) -> None:
        self._inner.shutdown()

    def get_publisher_config(self) -> Any:
        return self._inner.get_publisher_config()


def _converted(event: object, group: int) -> CacheEvent | None:
    """None for events that have no meaning here: of other groups of layers, and of blocks that more than tokens, media
    items, a salt and an adapter tell apart.
    """
    if isinstance(event, AllBlocksCleared):
        return BlocksCleared()
    if getattr(event, "group_idx", None) not in (None, group):
        return None
    if isinstance(event, BlockRemoved):
        return BlocksRemoved(event.block_hashes, host=event.medium == MEDIUM_CPU)
    if not isinstance(event, BlockStored):
        return None
    if event.medium == MEDIUM_CPU:
        return BlocksKept(event.block_hashes, host=True)
    adapter = event.lora_name or ""
    keys = _keys(event, adapter)
    if keys is None:
        return None
    salt, begun = keys
    return BlocksStored(event.block_hashes, event.parent_block_hash, event.token_ids, salt, adapter, begun)


def _keys(event: BlockStored, adapter: str) -> tuple[str, tuple[tuple[int, str], ...]] | None:
    """The salt, which comes with a prompt's first block, and the media items that begin in the blocks; None when the
    keys hold anything else.

    The name of an adapter is the first key of each block. An item is a key of all blocks in which it lies: its digest,
    and its position relative to the block, which is negative where it began in an earlier one.
    """
    salt, begun = "", []
    block_tokens = len(event.token_ids) // max(1, len(event.block_hashes))
    for number, block in enumerate(event.extra_keys or ()):
        keys = list(block or ())
        if adapter and keys[:1] != [adapter]:
            return None
        for key in keys[bool(adapter) :]:
            match key:
                case (str() as digest, int() as position):
                    if position >= 0:
                        begun.append((number * block_tokens + position, digest))
                case str() if not number and not salt and event.parent_block_hash is None:
                    salt = key
                case _:
                    return None
    return salt, tuple(begun)
