"""Which gateways are there, as their reports show; the monitor is told."""

from collections.abc import Callable

FORGET_S = 900.0  # one that is silent for so long is no more
TOLD_S = 30.0  # for so long it is told that one left


class Gateways:
    """By name, when each was last heard of. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard: dict[str, float] = {}
        self._gone: dict[str, float] = {}

    def heard(self, name: str) -> None:
        """It shows that it lives."""
        if name:
            self._heard[name] = self._clock()
            self._gone.pop(name, None)

    def left(self, name: str) -> None:
        """It stopped in good order: nobody misses it."""
        if name:
            self._heard.pop(name, None)
            self._gone[name] = self._clock()

    def gone(self) -> list[str]:
        """Those that left lately."""
        since = self._clock() - TOLD_S
        self._gone = {name: at for name, at in self._gone.items() if at > since}
        return list(self._gone)

    def silent_s(self) -> dict[str, float]:
        """Seconds since each was heard of."""
        now = self._clock()
        self._heard = {name: at for name, at in self._heard.items() if now - at < FORGET_S}
        return {name: now - at for name, at in self._heard.items()}
