"""A call that is due by some time, and perhaps by an earlier one."""

import asyncio
from collections.abc import Callable


class Alarm:
    """Calls back once, at the earliest of the times that it was set to since it did last."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._timer: asyncio.Handle | None = None  # uvloop's, for what is due already, does not say when
        self._when_mono = 0.0

    def by(self, when_mono: float) -> None:
        """Call back then, by the running loop's clock, unless it is to be earlier."""
        if self._timer is not None:
            if self._when_mono <= when_mono:
                return
            self._timer.cancel()
        self._when_mono = when_mono
        self._timer = asyncio.get_running_loop().call_at(when_mono, self._ring)

    def cancel(self) -> None:
        """Do not."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        self._callback()
