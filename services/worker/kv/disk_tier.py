"""The disk tier beside vLLM's scheduler: which blocks lie in which slots of the ranks' files, and which requests wait
for blocks that are being read. The part in each rank is `disk_store`.

A block that leaves host memory is written to the disk, and stays there when it is read back: it is written once. The
ranks carry out what they get with each step in order: they copy blocks out of host memory before others get their
slots, and find a block that is not written yet among those that are to be written.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from services.worker.engines.base import DiskTierStats
from services.worker.kv.disk_store import DiskCopies, DiskReport
from shared.policy.host_index import Held, SlotIndex
from shared.runtime.logs import get_log

log = get_log(__name__)
_WAIT_S = 10.0  # in which some block is read while requests wait: a file that takes longer is not used any more


@dataclass(slots=True)
class _Reading:
    """A block on its way to its slot of host memory, where it is pinned, as it is on the disk."""

    held: Held
    source: Held
    ranks: int  # that are not done
    whole: bool = True


@dataclass(frozen=True, slots=True)
class _Wait:
    """A request waits for blocks that are read to these slots of host memory. `held`: pinned there until then."""

    slots: frozenset[int]
    held: list[Held]


class DiskTier:
    """The engine's thread makes all calls."""

    def __init__(
        self,
        index: SlotIndex,
        memory: SlotIndex,
        ranks: int,
        slot_bytes: int,
        queued_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """memory: of the store in host memory. slot_bytes: on all ranks. queued_blocks: how many may wait to be
        written.
        """
        self.stored: Callable[[bytes], None] = lambda _: None  # a block is held once more
        self.removed: Callable[[bytes], None] = lambda _: None  # and once less
        self.left: Callable[[Held], None] = lambda _: None  # it made room in host memory for one that is read
        self._index = index
        self._memory = memory
        self._ranks = ranks
        self._slot_bytes = slot_bytes
        self._queued_blocks = queued_blocks
        self._clock = clock
        self._queued = 0  # blocks of all ranks
        self._copies = DiskCopies()
        self._reading: dict[int, _Reading] = {}  # by slot of host memory
        self._waits: dict[str, _Wait | None] = {}  # by request; None: it has waited
        self._progress_mono = 0.0  # when the last read ended, or the first one began
        self._fault = ""
        self._written_blocks = self._read_blocks = self._evicted_blocks = 0
        self._dropped_blocks = self._lost_blocks = 0

    def __len__(self) -> int:
        return len(self._index)

    def stats(self) -> DiskTierStats:
        return DiskTierStats(
            held_bytes=len(self._index) * self._slot_bytes,
            limit_bytes=self._index.slots * self._slot_bytes,
            written_blocks=self._written_blocks,
            read_blocks=self._read_blocks,
            evicted_blocks=self._evicted_blocks,
            dropped_blocks=self._dropped_blocks,
            lost_blocks=self._lost_blocks,
            fault=self._fault,
        )

    def get(self, key: bytes) -> Held | None:
        return self._index.get(key)

    def is_reading(self, held: Held) -> bool:
        """Whether the content of this block of host memory is yet to come."""
        return held.slot in self._reading

    def store(self, held: Held, *, copied: bool) -> None:
        """A block leaves host memory in this step. copied: since an earlier step it is there."""
        if self._fault:
            return
        if held.key in self._index:
            self._index.use(held.key)
            return
        put = None
        if copied and self._queued + self._ranks <= self._queued_blocks * self._ranks:
            put = self._index.put(held.key, held.parent, held.depth_tokens)
        if put is None:
            self._dropped_blocks += 1
            return
        if put.dropped is not None:
            self._evicted_blocks += 1
            self.removed(put.dropped.key)
        self._queued += self._ranks
        self._copies.writes.append((held.slot, put.slot, held.key))
        self._written_blocks += 1
        self.stored(held.key)

    def may_read(self, request_id: str) -> bool:
        """Whether blocks may be read for a request: once, until it has blocks of vLLM's."""
        return len(self._index) > 0 and request_id not in self._waits

    def read(self, request_id: str, wanted: Sequence[bytes], present: Iterable[Held]) -> bool:
        """Begin to read blocks that a request needs, in the order of its prompt, as far as host memory has room for
        them beside those that are present there. Returns whether the request waits.
        """
        present = [self._memory.pin(held.key) for held in present]
        sources = [self._index.pin(key) for key in wanted if key in self._index]  # what leaves memory spares them
        slots = set()
        for key in wanted:
            held = self._memory.get(key)
            if held is None and (held := self._begin(self._index.pin(key))) is None:
                break
            present.append(self._memory.pin(key))
            slots.add(held.slot)
        for source in reversed(sources):
            self._index.use(source.key)
            self._index.unpin(source)
        if slots:
            self._waits[request_id] = _Wait(frozenset(slots), present)
        else:
            self._unpin(present)
        return bool(slots)

    def waits(self, request_id: str) -> bool:
        """Whether blocks of the request are still being read."""
        wait = self._waits.get(request_id)
        if wait is None:
            return False
        if not wait.slots.isdisjoint(self._reading):
            if self._clock() < self._progress_mono + _WAIT_S:
                return True
            self._switch_off(f"no block was read within {_WAIT_S:.0f} s")
        self._unpin(wait.held)
        self._waits[request_id] = None
        return False

    def forget(self, request_id: str) -> None:
        """A request has got vLLM's blocks, or has ended."""
        wait = self._waits.pop(request_id, None)
        if wait is not None:
            self._unpin(wait.held)

    def take(self) -> DiskCopies:
        """The copies of the step that is complete now."""
        copies, self._copies = self._copies, DiskCopies()
        return copies

    def ended(self, report: DiskReport) -> None:
        self._queued -= report.written
        if report.read or report.lost:
            self._progress_mono = self._clock()
        for slot in report.read:
            self._read_ended(slot, whole=True)
        for slot in report.lost:
            self._read_ended(slot, whole=False)
        if report.fault:
            self._switch_off(report.fault)

    def clear(self) -> None:
        """Forget all blocks."""
        self._index.clear()

    def _begin(self, source: Held) -> Held | None:
        """Begin to read a pinned block."""
        put = self._memory.put(source.key, source.parent, source.depth_tokens)
        if put is None:
            self._index.unpin(source)
            return None
        held = self._memory.pin(source.key)
        if put.dropped is not None:
            self.left(put.dropped)
        if not self._reading:
            self._progress_mono = self._clock()
        self._copies.reads.append((source.slot, put.slot, source.key))
        self._reading[put.slot] = _Reading(held, source, self._ranks)
        return held

    def _read_ended(self, slot: int, *, whole: bool) -> None:
        reading = self._reading[slot]
        reading.ranks -= 1
        reading.whole &= whole
        if reading.ranks:
            return
        del self._reading[slot]
        held, source = reading.held, reading.source
        self._memory.unpin(held)
        self._index.unpin(source)
        if reading.whole:
            self._read_blocks += 1
            if not held.cleared:
                self.stored(held.key)
            return
        self._lost_blocks += 1
        if not held.cleared:
            self._memory.drop(held.key)
        if not source.cleared:
            self._index.drop(source.key)
            self.removed(source.key)

    def _switch_off(self, fault: str) -> None:
        if self._fault:
            return
        log.error("the disk tier is switched off: requests go on without it", cause=fault)
        self._fault = fault
        for key in self._index:
            self.removed(key)
        self._index.clear()

    def _unpin(self, held: Iterable[Held]) -> None:
        for each in held:
            self._memory.unpin(each)
