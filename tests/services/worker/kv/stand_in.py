"""What a device module of torch (`torch.cuda`, `torch.xpu`) does with threads, streams and events, on a machine without
a device: it records each call, and on which device a thread would make a context. Copies are done at once.
"""

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from services.worker.kv.device import TorchDevice


@dataclass(frozen=True)
class Call:
    name: str
    thread: str
    device: int  # on which the call works: a new thread's is 0 until it sets another


@dataclass
class StandIn:
    """`kind`: whose signatures it has, "cuda" or "xpu"."""

    kind: str
    calls: list[Call] = field(default_factory=list)
    _local: threading.local = field(default_factory=threading.local)

    @property
    def contexts(self) -> set[int]:
        """Devices on which the process has a context, half a GiB each."""
        return {call.device for call in self.calls}

    @property
    def first(self) -> dict[str, Call]:
        """Each thread's first call."""
        found: dict[str, Call] = {}
        for call in self.calls:
            found.setdefault(call.thread, call)
        return found

    def current_device(self) -> int:
        device: int = getattr(self._local, "device", 0)
        return device

    def set_device(self, device: torch.device) -> None:
        self._local.device = device.index
        self.record("set_device", device.index)

    def record(self, name: str, device: int | None = None) -> None:
        at = self.current_device() if device is None else device
        self.calls.append(Call(name, threading.current_thread().name, at))

    def Stream(self, device: torch.device) -> "Stream":
        self.record("Stream", device.index)
        return Stream(self, device.index)

    def Event(self, **options: Any) -> "Event":
        """TypeError for what the real one does not take."""
        real = torch.cuda.Event if self.kind == "cuda" else torch.xpu.Event
        inspect.signature(real.__new__).bind(real, **options)
        return Event(self)

    def current_stream(self, device: torch.device) -> "Stream":
        return self._streams.setdefault(device.index, Stream(self, device.index))

    @contextmanager
    def stream(self, stream: "Stream") -> Iterator[None]:
        """As torch.cuda's: it leaves the thread on the device on which it was."""
        outside, before = self.current_device(), self._streams.get(stream.device)
        self._local.device, self._streams[stream.device] = stream.device, stream
        self.record("stream")
        try:
            yield
        finally:
            self._streams.pop(stream.device)
            if before is not None:
                self._streams[stream.device] = before
            self._local.device = outside
            self.record("stream left")

    def synchronize(self, device: torch.device) -> None:
        self.record("synchronize", device.index)

    @property
    def _streams(self) -> dict[int, "Stream"]:
        if not hasattr(self._local, "streams"):
            self._local.streams = {}
        streams: dict[int, Stream] = self._local.streams
        return streams


@dataclass
class Stream:
    module: StandIn
    device: int

    def wait_event(self, event: "Event") -> None:
        assert event.recorded
        self.module.record("wait_event", self.device)


@dataclass
class Event:
    module: StandIn
    recorded: bool = False

    def record(self, stream: Stream) -> None:
        self.recorded = True
        self.module.record("Event.record", stream.device)

    def synchronize(self) -> None:
        """A call of the runtime without a guard: it works on the thread's current device."""
        assert self.recorded
        self.module.record("Event.synchronize")


class OnHost(TorchDevice):
    """`TorchDevice` over a stand-in, which `torch.get_device_module` has to give; its memory is the host's."""

    def __init__(self, module: StandIn, index: int) -> None:
        self._stand_in = module
        super().__init__(SimpleNamespace(device=torch.device(module.kind, index), dtype=torch.float32))  # type: ignore[arg-type]

    def scratch(self, values: int) -> torch.Tensor:
        self._stand_in.record("scratch", self._device.index)
        return torch.full((values,), float("nan"))

    def download(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self._stand_in.record("download")
        to.copy_(source)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        self._stand_in.record("upload")
        return tensor.clone()
