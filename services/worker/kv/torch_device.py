"""A device that torch drives, with the streams, events and copies of `Device`: `torch.cuda`, which is ROCm's, too, and
`torch.xpu`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch


class TorchDevice:
    """The device of one rank's cache."""

    def __init__(self, cache: torch.Tensor) -> None:
        self._device = cache.device
        self._dtype = cache.dtype
        self._module = torch.get_device_module(cache.device)
        self._event = self._events()

    def enter(self) -> None:
        """See Device."""
        self._module.set_device(self._device)

    def stream(self) -> Any:
        """See Device."""
        return self._module.Stream(self._device)

    def event(self) -> Any:
        """See Device."""
        return self._event()

    def current(self) -> Any:
        """See Device."""
        return self._module.current_stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """See Device."""
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context

    def scratch(self, values: int) -> torch.Tensor:
        """See Device."""
        return torch.empty(values, dtype=self._dtype, device=self._device)

    def download(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """See Device. `to` is pinned, or the calling thread would wait."""
        to.copy_(source, non_blocking=True)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """See Device. torch keeps pinned memory of its own until the copy has been done."""
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
            made: Callable[[], Any] = self._module.Event
            return made
        return blocking
