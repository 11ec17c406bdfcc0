"""The order of device work, on a device that runs its streams in the worst order that events allow."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv.ordering import DeviceOrder


class Device:
    """What DeviceOrder uses of `torch.cuda`: streams whose work runs later, in any order that events allow."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = Random(seed)
        self._streams: list[Stream] = []
        self._current = self.Stream()

    def Stream(self) -> "Stream":
        self._streams.append(Stream(self))
        return self._streams[-1]

    def Event(self) -> "Event":
        return Event(self)

    def current_stream(self) -> "Stream":
        return self._current

    @contextmanager
    def stream(self, stream: "Stream") -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def issue(self, work: Callable[[], object]) -> None:
        self._current.queue.append((None, work))

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            ready = [each for each in self._streams if each.queue and (not each.queue[0][0] or each.queue[0][0].done)]
            assert ready, "the device waits for an event that nobody recorded"
            self._rng.choice(ready).queue.popleft()[1]()

    def finish(self) -> None:
        self.run(lambda: not any(each.queue for each in self._streams))


class Stream:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.queue: deque[tuple[Event | None, Callable[[], object]]] = deque()

    def wait_event(self, event: "Event") -> None:
        self.queue.append((event, lambda: None))


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.done = False

    def record(self, stream: Stream) -> None:
        stream.queue.append((None, lambda: setattr(self, "done", True)))

    def synchronize(self) -> None:
        self.device.run(lambda: self.done)


def imported(device: Device, cache: dict[str, int], *, ordered: bool) -> list[int]:
    """A block that the model still reads is freed and imported into; what the model reads before and after."""
    order, seen = DeviceOrder(device), list[int]()
    device.issue(lambda: seen.append(cache["block"]))
    freed = order.freed()
    if ordered:
        with order.writing(freed):
            device.issue(lambda: cache.update(block=2))
        order.written()
    else:
        with device.stream(device.Stream()):
            device.issue(lambda: cache.update(block=2))
    device.issue(lambda: seen.append(cache["block"]))
    device.finish()
    return seen


@given(st.integers(0, 10_000))
def test_imports_come_after_what_the_block_was_for_and_before_what_it_is_for(seed: int) -> None:
    assert imported(Device(seed), {"block": 1}, ordered=True) == [1, 2]


def test_without_the_order_both_races_happen() -> None:
    seen = {tuple(imported(Device(seed), {"block": 1}, ordered=False)) for seed in range(50)}
    assert {(1, 1), (2, 2)} <= seen


@given(st.integers(0, 10_000))
def test_what_is_exported_has_been_copied_before_the_engine_goes_on(seed: int) -> None:
    device, cache, host = Device(seed), {"block": 0}, list[int]()
    order = DeviceOrder(device)
    device.issue(lambda: cache.update(block=1))  # the forward
    device.issue(lambda: host.append(cache["block"]))
    order.copied()
    assert host == [1]


def test_two_imports_share_a_stream_and_the_end_of_one_waits_for_what_was_issued_before() -> None:
    device, written = Device(), list[str]()
    order = DeviceOrder(device)
    freed = order.freed()
    for name in "ab":
        with order.writing(freed):
            device.issue(lambda name=name: written.append(name))
    order.written()
    assert written == ["a", "b"]


def test_on_a_cpu_it_is_the_same_calls() -> None:
    order, cache = DeviceOrder(torch.get_device_module("cpu")), torch.zeros(4)
    with order.writing(order.freed()):
        cache[1] = 5.0
    order.written()
    order.copied()
    assert cache.tolist() == [0.0, 5.0, 0.0, 0.0]


def test_a_failed_write_leaves_the_stream_as_it_was() -> None:
    device = Device()
    order, before = DeviceOrder(device), device.current_stream()
    with pytest.raises(RuntimeError), order.writing(order.freed()):
        raise RuntimeError("no such slot")
    assert device.current_stream() is before
