"""The host tier's part in each rank: slots in host memory, each with the rank's part of a block, byte for byte. All
kinds of layers, also those of a draft, are therefore stored as they are.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from services.worker.kv.disk_store import DiskCopies
from services.worker.kv.layout import LayoutError

_SCRATCH_BYTES = 64 << 20  # of a device's memory, for blocks on their way
_SAMPLE_BLOCKS, _SAMPLES = 16, 3  # that are copied at the start, to measure how long a load takes
_HALF_BLOCKS = 1024  # after so many loaded blocks, a measurement counts half


@dataclass(slots=True)
class HostCopies:
    """What a step copies: `disk.writes`, then `saves` from blocks to slots, by slot, then `disk.reads` and `loads` from
    slots to blocks, by block.
    """

    saves: dict[int, int] = field(default_factory=dict)
    loads: dict[int, int] = field(default_factory=dict)
    disk: DiskCopies = field(default_factory=DiskCopies)


class LoadTimer:
    """How long loads take. On a device they are measured by its own clock, and counted at a later load."""

    def __init__(self, device: torch.device) -> None:
        self.block_s = 0.0  # seconds a block, over the last loads; any thread may read it
        self._device = device
        self._blocks = self._seconds = 0.0  # of the last loads
        self._under_way: deque[tuple[torch.Event, torch.Event, int]] = deque()

    def measure(self, blocks: int, load: Callable[[], None]) -> None:
        if self._device.type == "cpu":
            began = time.perf_counter()
            load()
            self._add(blocks, time.perf_counter() - began)
            return
        self.collect()
        began_at, ended_at = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        began_at.record()
        load()
        ended_at.record()
        self._under_way.append((began_at, ended_at, blocks))

    def collect(self) -> None:
        """Count the loads of a device that have ended."""
        while self._under_way and self._under_way[0][1].query():
            began_at, ended_at, blocks = self._under_way.popleft()
            self._add(blocks, began_at.elapsed_time(ended_at) / 1e3)

    def _add(self, blocks: int, seconds: float) -> None:
        kept = 0.5 ** (blocks / _HALF_BLOCKS)
        self._blocks, self._seconds = kept * self._blocks + blocks, kept * self._seconds + seconds
        self.block_s = self._seconds / self._blocks


class HostStore:
    """The slots of one rank. Copies are issued on the model's own stream, so that they need no events among each
    other.
    """

    def __init__(self, caches: Iterable[torch.Tensor], blocks: int) -> None:
        """caches: of all layers, in which vLLM counts so many blocks.

        Raises LayoutError where the blocks of a cache do not lie one behind the other.
        """
        self.zero = False  # fault injection: zeros are loaded
        self._blocks = blocks
        self._places, self._parts = _block_parts(caches, blocks)
        self.slot_bytes = sum(part.shape[1] * part.itemsize for part in self._parts)
        self.timer = LoadTimer(self._parts[0].device)
        self._slots = torch.empty(0, 0, dtype=self._parts[0].dtype)
        self._registered = 0
        self._copying: list[tuple[torch.Event, set[int]]] = []  # on a device, copies of slots that may be under way

    def allocate(self, slots: int) -> None:
        """On a device, with pinned memory: this takes a second for some GB."""
        width, dtype, device = self.slot_bytes // self._parts[0].itemsize, self._parts[0].dtype, self._parts[0].device
        self._slots = torch.empty(slots, width, dtype=dtype)
        if device.type != "cpu":
            from vllm.v1.kv_offload.cpu.host_register import host_register

            if host_register(self._slots.data_ptr(), self._slots.nbytes):
                self._registered = self._slots.data_ptr()
        sample = {at: at for at in range(min(_SAMPLE_BLOCKS, slots, self._blocks))}
        self.save(sample)
        for _ in range(_SAMPLES):  # blocks get what they have
            self.load(sample)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        self.timer.collect()

    def close(self) -> None:
        if self._registered:
            from vllm.v1.kv_offload.cpu.host_register import host_unregister

            host_unregister(self._registered)
            self._registered = 0

    def save(self, saves: dict[int, int]) -> None:
        """Copy blocks to slots, by slot."""
        for slots, blocks in self._batches(saves):
            there = torch.tensor(blocks, device=self._parts[0].device)
            rows = torch.cat([part.index_select(0, there) for part in self._parts], dim=1)
            for row, slot in enumerate(slots):
                self._slots[slot].copy_(rows[row], non_blocking=True)
        self._issued(saves)

    def load(self, loads: dict[int, int]) -> None:
        """Copy slots to blocks, by block."""
        self.timer.measure(len(loads), lambda: self._load(loads))

    def _load(self, loads: dict[int, int]) -> None:
        device = self._parts[0].device
        for blocks, slots in self._batches(loads):
            rows = torch.empty(len(slots), self._slots.shape[1], dtype=self._slots.dtype, device=device)
            for row, slot in enumerate(slots):
                rows[row].copy_(self._slots[slot], non_blocking=True)
            if self.zero:
                rows.zero_()
            there = torch.tensor(blocks, device=device)
            values = torch.split(rows, [part.shape[1] for part in self._parts], dim=1)
            for part, each in zip(self._parts, values, strict=True):
                part.index_copy_(0, there, each)
        self._issued(loads.values())

    def content(self, slot: int) -> memoryview:
        """The bytes of a slot, which other threads may read, or change, from now on."""
        self._settle({slot})
        return self._slots[slot].view(torch.uint8).numpy().data

    def _settle(self, slots: set[int]) -> None:
        """Wait until the copies of these slots that were issued are done."""
        for event, used in self._copying:
            if not used.isdisjoint(slots):
                event.synchronize()

    def _issued(self, slots: Iterable[int]) -> None:
        if self._parts[0].device.type != "cpu" and (used := set(slots)):
            event = torch.Event()
            event.record()
            self._copying = [(each, of) for each, of in self._copying if not each.query()]
            self._copying.append((event, used))

    def as_cache(self, cache: torch.Tensor, blocks: list[int], slots: list[int]) -> torch.Tensor:
        """A cache like that one of these blocks and then of these slots."""
        parts = cache.shape[0] // self._blocks
        inner, item = cache.stride()[1:], cache.element_size()
        width = item + item * sum((size - 1) * step for size, step in zip(cache.shape[1:], inner, strict=True))
        step = cache.stride(0) if parts > 1 else width // item
        rows = torch.zeros(len(blocks) + len(slots), parts * step * item, dtype=torch.uint8, device=cache.device)
        place = _place_of(cache, self._blocks)
        number = self._places.index(place)
        at = sum(part.shape[1] for part in self._parts[:number])
        part = self._parts[number]
        own = part.index_select(0, torch.tensor(blocks, dtype=torch.int64, device=cache.device))
        self._settle(set(slots))
        stored = self._slots[torch.tensor(slots, dtype=torch.int64), at : at + part.shape[1]].to(cache.device)
        values = torch.cat([own, stored]).view(torch.uint8)
        used = min(values.shape[1], rows.shape[1])  # another layer may have more in the same place
        rows[:, :used] = values[:, :used]
        shape = (len(rows) * parts, *cache.shape[1:])
        return rows.view(-1).view(cache.dtype).as_strided(shape, (step, *inner))

    def _batches(self, pairs: dict[int, int]) -> Iterable[tuple[list[int], list[int]]]:
        most = max(1, _SCRATCH_BYTES // self.slot_bytes)
        items = list(pairs.items())
        for at in range(0, len(items), most):
            batch = items[at : at + most]
            yield [to for to, _ in batch], [source for _, source in batch]


Place = tuple[int, int, int]


def _place_of(cache: torch.Tensor, blocks: int) -> Place:
    """Where block 0 of a cache lies, and how far behind it block 1."""
    item = cache.element_size()
    stride = cache.stride(0) * item * (cache.shape[0] // blocks)  # a kernel may divide a block
    return cache.untyped_storage().data_ptr(), int(cache.storage_offset()) * item, stride


def _block_parts(caches: Iterable[torch.Tensor], blocks: int) -> tuple[list[Place], list[torch.Tensor]]:
    """The caches as [block, value], in large values; layers that share memory once. Raises LayoutError."""
    widths: dict[Place, tuple[int, torch.Tensor]] = {}
    for cache in caches:
        item, shape = cache.element_size(), tuple(cache.shape)
        if shape[0] % blocks:
            raise LayoutError(f"a KV cache of shape {shape} does not begin with vLLM's {blocks} blocks")
        place = _place_of(cache, blocks)
        inner = zip((shape[0] // blocks, *shape[1:]), cache.stride(), strict=True)
        width = item + item * sum((size - 1) * step for size, step in inner)
        if width > place[2]:
            raise LayoutError(f"the blocks of a KV cache of shape {shape} and strides {cache.stride()} overlap")
        if width > widths.get(place, (0, cache))[0]:
            widths[place] = width, cache
    sizes = [size for (_, offset, stride), (width, _) in widths.items() for size in (offset, stride, width)]
    dtype = torch.int64 if not any(size % 8 for size in sizes) else torch.uint8
    parts = [
        torch.empty(0, dtype=dtype, device=cache.device).set_(
            cache.untyped_storage(),
            offset // dtype.itemsize,
            (blocks, width // dtype.itemsize),
            (stride // dtype.itemsize, 1),
        )
        for (_, offset, stride), (width, cache) in widths.items()
    ]
    return list(widths), parts
