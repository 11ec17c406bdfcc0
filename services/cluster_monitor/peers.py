"""Who else is there: gateways and schedulers, as schedulers tell; and since when one has not been heard of."""

import asyncio
from collections.abc import Iterable, Mapping

FORGET_S = 900.0  # one that is silent for so long is missed no more


class Peers:
    """By name, when each was last heard of, by the loop's clock."""

    def __init__(self) -> None:
        self._clock = asyncio.get_running_loop().time
        self._schedulers: dict[str, float] = {}
        self._gateways: dict[str, float] = {}
        self._left: dict[str, float] = {}  # gateways that stopped in good order, and when: others may not know yet

    def hear(
        self, scheduler_id: str, gateways: Mapping[str, float], left: Iterable[str] = (), *, leaving: bool = False
    ) -> None:
        """A scheduler tells of itself, for how many seconds each gateway was silent there, and of those that left."""
        now = self._clock()
        if leaving:
            self._schedulers.pop(scheduler_id, None)
        else:
            self._schedulers[scheduler_id] = now
        for name in left:
            if self._gateways.pop(name, None) is not None:
                self._left[name] = now
        for name, silent_s in gateways.items():
            heard = now - silent_s
            if heard > self._left.get(name, float("-inf")):
                self._left.pop(name, None)
                self._gateways[name] = max(self._gateways.get(name, heard), heard)

    def schedulers(self) -> dict[str, float]:
        """Seconds of silence, by name."""
        self._schedulers = self._recent(self._schedulers)
        return self._silent(self._schedulers)

    def gateways(self) -> dict[str, float]:
        """Seconds of silence, by name."""
        self._gateways, self._left = self._recent(self._gateways), self._recent(self._left)
        return self._silent(self._gateways)

    def _recent(self, heard: Mapping[str, float]) -> dict[str, float]:
        since = self._clock() - FORGET_S
        return {name: at for name, at in heard.items() if at > since}

    def _silent(self, heard: Mapping[str, float]) -> dict[str, float]:
        now = self._clock()
        return {name: now - at for name, at in sorted(heard.items())}
