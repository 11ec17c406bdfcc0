"""A device that does nothing before it must, and then runs its streams in any order that events allow."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import torch


class LateDevice:
    """As `services.worker.kv.device.TorchDevice`. Work begins when somebody waits for an event, or with `finish`.

    deaf: streams wait for no event. `waited`: the threads that waited for the device. `entered`: names of those that
    made it their current one.
    """

    def __init__(self, seed: int = 0, *, deaf: bool = False) -> None:
        self.deaf = deaf
        self.waited: set[threading.Thread] = set()
        self.entered: list[str] = []
        self.broken: Exception | None = None  # what waiting for an event raises
        self.lock = threading.RLock()
        self._rng = Random(seed)
        self._streams: list[Stream] = []
        self._default = self.stream()
        self._current = threading.local()

    def enter(self) -> None:
        self.entered.append(threading.current_thread().name)

    def stream(self) -> "Stream":
        self._streams.append(Stream(self))
        return self._streams[-1]

    def event(self) -> "Event":
        return Event(self)

    def current(self) -> "Stream":
        found: Stream = getattr(self._current, "stream", self._default)
        return found

    @contextmanager
    def on(self, stream: "Stream") -> Iterator[None]:
        before, self._current.stream = self.current(), stream
        try:
            yield
        finally:
            self._current.stream = before

    def scratch(self, size_bytes: int) -> torch.Tensor:
        return torch.full((size_bytes // 4,), float("nan")).view(torch.uint8)

    def download(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.issue(lambda: to.copy_(source))

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        there, snapshot = torch.zeros_like(tensor), tensor.clone()
        self.issue(lambda: there.copy_(snapshot))
        return there

    def issue(self, work: Callable[[], object]) -> None:
        with self.lock:
            self.current().queue.append((None, work))

    def run(self, until: Callable[[], bool]) -> None:
        with self.lock:
            while not until():
                ready = [each for each in self._streams if each.queue and each.ready]
                assert ready, "the device waits for an event that nobody recorded"
                self._rng.choice(ready).queue.popleft()[1]()

    def finish(self) -> None:
        self.run(lambda: not any(each.queue for each in self._streams))


class Stream:
    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.queue: deque[tuple[Event | None, Callable[[], object]]] = deque()

    @property
    def ready(self) -> bool:
        event = self.queue[0][0]
        return event is None or event.done or self.device.deaf

    def wait_event(self, event: "Event") -> None:
        assert event.recorded, "a stream does not wait for an event that is not recorded yet"
        with self.device.lock:
            self.queue.append((event, lambda: None))


class Event:
    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.recorded = self.done = False

    def record(self, stream: Stream) -> None:
        with self.device.lock:
            self.recorded = True
            stream.queue.append((None, lambda: setattr(self, "done", True)))

    def synchronize(self) -> None:
        self.device.waited.add(threading.current_thread())
        if self.device.broken is not None:
            raise self.device.broken
        self.device.run(lambda: self.done)
