"""A device that torch drives (`torch.cuda`, which is ROCm's, too) with the streams, events and copies of `Device`."""

from contextlib import AbstractContextManager
from typing import Any

import torch


class TorchDevice:
    """The device of one rank's cache."""

    def __init__(self, cache: torch.Tensor) -> None:
        self._device = cache.device
        self._dtype = cache.dtype
        self._module = torch.get_device_module(cache.device)

    def enter(self) -> None:
        """See Device."""
        self._module.set_device(self._device)

    def stream(self) -> Any:
        """See Device."""
        return self._module.Stream(self._device)

    def event(self) -> Any:
        """See Device. Who waits for it sleeps: by default it would keep a core busy."""
        return self._module.Event(blocking=True)

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
