"""Reading over HTTP: a read never raises, it brings a value, old or new, or a reason."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import msgspec

from shared.errors import PolyphaseError

T = TypeVar("T")
KEPT = 512  # reads that are remembered


@dataclass(frozen=True, slots=True)
class Read(Generic[T]):
    """What came of one read. With an error, the value is the last one that was read, at `read_s` (unix seconds)."""

    value: T | None
    error: str = ""
    read_s: float = 0.0

    @property
    def stale(self) -> bool:
        """Whether there is a value, but an old one."""
        return bool(self.error) and self.value is not None


class Reader:
    """Reads what services answer, and remembers what each read brought last. `timeout_s` is of one read."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._last: OrderedDict[str, Read[Any]] = OrderedDict()

    async def read(self, name: str, call: Callable[[], Awaitable[Any]], kind: Any) -> Read[Any]:
        """What was asked for; when that fails, what was read last under this name. Without a name nothing is kept."""
        try:
            async with asyncio.timeout(self._timeout_s):
                read = Read(msgspec.convert(await call(), kind), read_s=time.time())
        except TimeoutError:
            return self._known(name, f"no answer within {self._timeout_s:g} s")
        except PolyphaseError as error:
            return self._known(name, error.message)
        except ValueError as error:  # not JSON, or not of the kind: msgspec.ValidationError is one too
            return self._known(name, f"its answer was not understood: {error}")
        if name:
            self._last[name] = read
            self._last.move_to_end(name)
            if len(self._last) > KEPT:
                self._last.popitem(last=False)
        return read

    def _known(self, name: str, error: str) -> Read[Any]:
        return replace(self._last.get(name) or Read(None), error=error)
