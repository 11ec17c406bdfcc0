"""Whom to ask next of several servers that are alike: one that is there and has the fewest calls under way."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shared.errors import PolyphaseError

ASIDE_S = 1.0  # how long one that failed is left aside


@dataclass(slots=True, eq=False)
class Replica:
    """One of them, as its caller sees it."""

    address: str
    calls: int = 0  # under way
    latest: int = 0  # the number of the latest call to it
    aside_until_s: float = float("-inf")


class Replicas:
    """Times are `clock`'s, in seconds; `connected` says of an address whether anybody is there."""

    def __init__(self, addresses: Iterable[str], connected: Callable[[str], bool], clock: Callable[[], float]) -> None:
        self._all = [Replica(address) for address in addresses]
        self._connected = connected
        self._clock = clock
        self._calls = 0

    def __bool__(self) -> bool:
        return bool(self._all)

    def first(self) -> Replica:
        """The one to ask: one that is not there, or has just failed, only where no other is better."""
        now_s = self._clock()
        return min(
            self._all, key=lambda one: (not self._connected(one.address), now_s < one.aside_until_s, *_load(one))
        )

    def other(self, than: Replica) -> Replica | None:
        """Another one that is there and has not just failed, if any."""
        now_s = self._clock()
        there = (one for one in self._all if self._connected(one.address) and now_s >= one.aside_until_s)
        return min((one for one in there if one is not than), key=_load, default=None)

    @contextmanager
    def calling(self, replica: Replica) -> Iterator[None]:
        """A call to it, for the block's length; an error of ours says that it failed."""
        self._calls += 1
        replica.latest = self._calls
        replica.calls += 1
        try:
            yield
        except PolyphaseError:
            replica.aside_until_s = self._clock() + ASIDE_S
            raise
        finally:
            replica.calls -= 1


def _load(replica: Replica) -> tuple[int, int]:
    """Among those with as many calls, whoever was asked longest ago."""
    return replica.calls, replica.latest
