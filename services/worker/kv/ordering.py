"""In which order two threads touch a KV cache that lies on a device.

The engine's thread issues the model's work on its stream, the puller's thread issues imports on another one, and a
device runs the two as it likes. Events order them: an import's writes come after all that the model was given before
the import began, its end is told only when they are done, and what is exported has been copied before the engine goes
on. On a CPU every operation is done when its call returns, and the events of `torch.cpu` do nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class DeviceOrder:
    """The streams of one rank; make it on the engine's thread, whose device it keeps to."""

    def __init__(self, streams: Any) -> None:
        """`streams` is `torch.get_device_module(device)`: its Stream, Event, stream and current_stream are used."""
        self._streams = streams
        self._import = streams.Stream()

    def freed(self) -> Any:
        """Mark, on the engine's thread, all that the model has been given: blocks that are free now may be in use
        until then.
        """
        return self._mark(self._streams.current_stream())

    @contextmanager
    def writing(self, freed: Any) -> Iterator[None]:
        """What is issued inside runs on the import's stream, after `freed`."""
        with self._streams.stream(self._import):
            self._import.wait_event(freed)
            yield

    def written(self) -> None:
        """Return once everything that was issued for imports is done."""
        self._mark(self._import).synchronize()

    def copied(self) -> None:
        """Return once all that the calling thread has issued is done: copies are complete, their sources may change."""
        self._mark(self._streams.current_stream()).synchronize()

    def _mark(self, stream: Any) -> Any:
        event = self._streams.Event()
        event.record(stream)
        return event
