"""Copies between a model's KV cache and host memory: the order in which they run beside the model, the streams and
events of a device that torch drives, and the blocks of an engine's cache as the destination of an import.

Three threads meet here. The engine's thread issues the model's work and the gathers of exports; the puller's thread
issues imports; and a thread of `DeviceCopies` waits for exports to reach the host. A device runs its streams in any
order, so events order them, and the engine's thread waits for none:

- a gather comes after all that the model was given before, and the model goes on after it: blocks may be freed and
  used again while their KV is still on its way to the host, because it goes from scratch memory of the device;
- a copy to the host comes after its gather, and the next gather into the same scratch after the copy;
- what an import writes comes after all that the model was given before the import began, and the model goes on after
  it, in the step that first may read it.

Every rank has streams of its own on its own device, which is the current one of its threads. On a CPU an operation is
done when its call returns.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from services.worker.kv import KvError
from services.worker.kv.layout import KvLayout, StridedLayout
from services.worker.kv.staging import HeapMemory, Part, Piece, Staged
from shared.domain.kv import Codec

if TYPE_CHECKING:
    from services.worker.kv.device_codec import DeviceCodec

_log = logging.getLogger(__name__)

Done = Callable[[Staged | Exception], None]
Death = Callable[[str, BaseException], None]


class Copies:
    """The copies of one rank whose cache lies in host memory, and the base of those of a device: see `DeviceCopies`.

    The puller's thread calls `writing` and `written`, either thread `upload`, and the engine's thread everything else.
    """

    def __init__(self, memory: HeapMemory) -> None:
        self.memory = memory

    def enter(self) -> None:
        """To be called first on each thread of the endpoint: what it, or a transport on it, issues is for the
        cache's device.
        """

    def start(self, on_death: Death) -> None:
        """Before the first `stage`. `on_death(thread, error)` is called when a bug ends a thread."""

    def stage(self, pieces: Sequence[Piece], done: Done) -> None:
        """Copy pieces to the host. `done` gets the segments once they are there, in the order of these calls and on any
        thread, or why they are not. Raises what a piece or the host's memory raises, without calling `done`.
        """
        parts = self._taken(pieces)
        for part in parts:
            part.piece.issue(part, part.host)
        done([part.staged() for part in parts])

    def _taken(self, pieces: Sequence[Piece]) -> list[Part]:
        return [part for piece in pieces for part in self.memory.take(piece)]

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor where the cache is, for what is issued next on the same stream."""
        return tensor

    def freed(self) -> Any:
        """Mark all that the model has been given: blocks that are free now may be in use until then."""

    def writing(self, freed: Any) -> AbstractContextManager[None]:
        """What is issued inside is an import's, after `freed`."""
        return nullcontext()

    def written(self) -> None:
        """All that was issued for an import: the model may read it after the next `join`."""

    def join(self) -> None:
        """What the model is given from now on comes after everything `written`."""

    def close(self) -> None:
        """Return once no copy is under way."""


class TorchDevice:
    """The device of one rank's cache, as torch drives it: `torch.cuda`, which is also ROCm's, and `torch.xpu`."""

    def __init__(self, cache: torch.Tensor) -> None:
        self._device = cache.device
        self._module = torch.get_device_module(cache.device)
        self._event = self._events()

    def enter(self) -> None:
        """Make this the calling thread's current device: a new thread has device 0, where its first call would make a
        context of half a GiB, whichever device the cache is on.
        """
        self._module.set_device(self._device)

    def stream(self) -> Any:
        return self._module.Stream(self._device)

    def event(self) -> Any:
        return self._event()

    def current(self) -> Any:
        return self._module.current_stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """The calling thread's stream is that one inside."""
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def scratch(self, size_bytes: int) -> torch.Tensor:
        """That many bytes of the device's memory."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def download(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Issue a copy to host memory on the current stream. `to` is pinned, or the calling thread would wait."""
        to.copy_(source, non_blocking=True)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Issue a copy to the device on the current stream. The source may change at once: torch keeps pinned memory of
        its own until the copy has been done.
        """
        return tensor.contiguous().pin_memory().to(self._device, non_blocking=True)

    def _events(self) -> Callable[[], Any]:
        """A thread that waits for an event sleeps where the device offers that: torch.cuda's would keep a core busy by
        default, and torch.xpu's have no such choice. One event is made at once, so that what a device lacks is known
        at the start and not with the first transfer.
        """
        blocking = partial(self._module.Event, blocking=True)
        try:
            blocking()
        except TypeError:
            self._module.Event()
            make: Callable[[], Any] = self._module.Event
            return make
        return blocking


@dataclass(slots=True)
class _Scratch:
    kv: torch.Tensor
    copied: Any = None  # the event after which it may be filled again


@dataclass(frozen=True, slots=True)
class _Staging:
    """Parts that are on the host after `copied`. They are kept until then, even if nothing else refers to them."""

    parts: list[Part]
    copied: Any
    done: Done


class DeviceCopies(Copies):
    """The cache lies on a device. Create it on the engine's thread, whose device it keeps to.

    Where more is exported than the scratch memory holds, the model's stream waits for the link to the host; the
    engine's thread does not.
    """

    def __init__(self, device: TorchDevice, memory: HeapMemory, segment_bytes: int, scratch: int) -> None:
        """`segment_bytes`: of the largest segment, of which so many have `scratch` memory."""
        super().__init__(memory)
        self._device = device
        self._gathers, self._exports, self._imports = device.stream(), device.stream(), device.stream()
        self._scratch = [_Scratch(device.scratch(segment_bytes)) for _ in range(scratch)]
        self._next = 0
        self._written: list[Any] = []
        self._lock = threading.Lock()
        self._stagings: queue.SimpleQueue[_Staging | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def enter(self) -> None:
        self._device.enter()

    def start(self, on_death: Death) -> None:
        self._thread = threading.Thread(target=self._run, args=(on_death,), name="kv-copies", daemon=True)
        self._thread.start()

    def stage(self, pieces: Sequence[Piece], done: Done) -> None:
        parts = self._taken(pieces)
        self._gathers.wait_event(self._mark(self._device.current()))
        try:
            for part in parts:
                self._issue(part)
        except BaseException:  # what was issued before still reads the cache, and writes host memory
            self._finish(parts, lambda _: None)
            raise
        self._finish(parts, done)

    def _issue(self, part: Part) -> None:
        slot = self._scratch[self._next]
        self._next = (self._next + 1) % len(self._scratch)
        there = slot.kv[: part.host.nbytes].view(part.host.dtype).view(part.host.shape)
        with self._device.on(self._gathers):
            if slot.copied is not None:
                self._gathers.wait_event(slot.copied)
            part.piece.issue(part, there)
        gathered = self._mark(self._gathers)
        with self._device.on(self._exports):
            self._exports.wait_event(gathered)
            self._device.download(part.host, there)
        slot.copied = self._mark(self._exports)

    def _finish(self, parts: list[Part], done: Done) -> None:
        self._device.current().wait_event(self._mark(self._gathers))
        self._stagings.put(_Staging(parts, self._mark(self._exports), done))

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._device.upload(tensor)

    def freed(self) -> Any:
        return self._mark(self._device.current())

    @contextmanager
    def writing(self, freed: Any) -> Iterator[None]:
        with self._device.on(self._imports):
            self._imports.wait_event(freed)
            yield

    def written(self) -> None:
        event = self._mark(self._imports)
        with self._lock:
            self._written.append(event)

    def join(self) -> None:
        with self._lock:
            written, self._written = self._written, []
        for event in written:
            self._device.current().wait_event(event)

    def close(self) -> None:
        self._stagings.put(None)
        if self._thread is not None:
            self._thread.join()

    def _mark(self, stream: Any) -> Any:
        event = self._device.event()
        event.record(stream)
        return event

    def _run(self, on_death: Death) -> None:
        try:
            self._device.enter()
            self._deliver()
        except Exception as error:
            _log.exception("the thread that waits for copies of KV ended")
            on_death("copies", error)

    def _deliver(self) -> None:
        while (staging := self._stagings.get()) is not None:
            try:
                staging.copied.synchronize()
                result: Staged | Exception = [part.staged() for part in staging.parts]
            except KvError as error:
                result = error
            except Exception as error:  # the device's: the transfer fails, and the engine will meet the error itself
                _log.exception("KV could not be copied to the host")
                result = error
            staging.done(result)
            del staging, result  # host memory is free once nothing refers to it


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of an engine's cache as the `Destination` of a component of an import, by the slots of its tokens."""

    caches: list[torch.Tensor]
    layout: KvLayout
    slots: list[torch.Tensor]  # of each layer, which has its blocks in one of the engine's groups
    token_start: int
    layer_start: int  # of this rank's, in the model
    head_start: int
    copies: Copies
    freed: Any  # after this event, the earlier use of the blocks is done
    zero: bool  # fault injection: proves that tests would notice wrong KV
    codec: "DeviceCodec | None"
    eight_bit: torch.dtype | None = None  # in which the caches hold KV, as uint8
    kv_scales: tuple[tuple[float, ...], ...] = ()  # of each layer, by side
    null_slots: int = 0  # slots below this are of the engine's null block, which stands for tokens outside of a window

    @property
    def dtype(self) -> torch.dtype:
        """float32 in the place of eight bits: what is converted is rounded once."""
        return self.caches[0].dtype if self.eight_bit is None else torch.float32

    def scales(self, layer: int) -> Sequence[float]:
        return self.kv_scales[layer - self.layer_start] if self.kv_scales else ()

    def write(self, layer: int, token_start: int, head_start: int, kv: torch.Tensor) -> None:
        if self.eight_bit is not None and isinstance(self.layout, StridedLayout):  # the CPU's kernel converts by itself
            top = torch.finfo(self.eight_bit).max  # as vLLM's kernels do; torch may make a larger value infinite
            kv = kv.clamp(-top, top).to(self.eight_bit).view(torch.uint8)
        first = token_start - self.token_start
        slots = self.slots[layer - self.layer_start][first : first + kv.shape[1]]
        if self.null_slots and not bool((kept := slots >= self.null_slots).all()):
            slots, kv = slots[kept], kv[:, kept]
            if not len(slots):
                return
        with self.copies.writing(self.freed):
            slots = self.copies.upload(slots)
            kv = self.copies.upload(kv * 0 if self.zero else kv)
            cache = self.caches[layer - self.layer_start]
            self.layout.scatter(cache, slots, head_start - self.head_start, kv)

    def take(
        self,
        layers: tuple[int, int],
        tokens: tuple[int, int],
        heads: tuple[int, int],
        payload: torch.Tensor,
        dtype: torch.dtype,
        codec: Codec,
    ) -> bool:
        """See Destination: kernels decode it into the blocks, all layers and tokens of it at once."""
        if self.codec is None or self.zero or (codec is Codec.RAW and dtype is not self.dtype):
            return False
        head, wanted = self.head_start, slice(tokens[0] - self.token_start, tokens[1] - self.token_start)
        slots = self.slots[0][wanted]  # a codec is for layers of one group
        if self.null_slots and bool((slots < self.null_slots).any()):
            return False  # the wanted part is written a layer at a time
        own = (layers[0] - self.layer_start, layers[1] - self.layer_start), (heads[0] - head, heads[1] - head)
        with self.copies.writing(self.freed):
            return self.codec.decode(*own, slots, payload, dtype, codec)

    def room(self, layers: tuple[int, int], tokens: tuple[int, int], heads: tuple[int, int]) -> list[memoryview]:
        """None: blocks hold KV in an order of their own."""
        return []

    def finish(self) -> None:
        self.copies.written()
