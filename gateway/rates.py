"""The rate of each API key, in this process alone or in all that share its port."""

import time
from dataclasses import dataclass
from typing import Protocol

from gateway.auth import ApiKey
from gateway.table import SharedTable
from shared.errors import Busy

_LEVEL, _UPDATED = 2, 3  # words of a row


class Rates(Protocol):
    """Buckets of keys."""

    def take(self, key: ApiKey) -> None:
        """One request of the key. Raises Busy that says when there is room for one."""
        ...


@dataclass(slots=True)
class TokenBucket:
    """`rate` a second, `burst` at once."""

    rate: float
    burst: float
    level: float
    updated_s: float

    def take(self, now_s: float) -> float:
        """Take one; 0 if granted, else the seconds until there is one."""
        self.level = min(self.burst, self.level + max(0.0, now_s - self.updated_s) * self.rate)
        self.updated_s = max(self.updated_s, now_s)
        if self.level >= 1.0:
            self.level -= 1.0
            return 0.0
        return (1.0 - self.level) / self.rate


class OwnRates:
    """Of the only process."""

    def __init__(self) -> None:
        self._buckets: dict[str, TokenBucket] = {}

    def take(self, key: ApiKey) -> None:
        """One request of the key. Raises Busy."""
        if not key.requests_per_s:
            return
        now = time.monotonic()
        bucket = self._buckets.get(key.name)
        if bucket is None:
            bucket = self._buckets[key.name] = _full(key, now)
        _require(key, bucket.take(now))


class TableRates:
    """Of all processes of a table."""

    def __init__(self, table: SharedTable) -> None:
        self._table = table

    def take(self, key: ApiKey) -> None:
        """One request of the key. Raises Busy, also where a process stopped in the midst of this."""
        if not key.requests_per_s:
            return
        floats, row = self._table.floats, self._table.row(key.name)
        with self._table.locked():
            now = time.monotonic()
            bucket = _full(key, now)
            if floats[row + _UPDATED]:  # else it is the key's first request
                bucket.level, bucket.updated_s = floats[row + _LEVEL], floats[row + _UPDATED]
            wait_s = bucket.take(now)
            floats[row + _LEVEL], floats[row + _UPDATED] = bucket.level, bucket.updated_s
        _require(key, wait_s)


def _full(key: ApiKey, now: float) -> TokenBucket:
    burst = float(key.burst or max(1.0, key.requests_per_s))
    return TokenBucket(key.requests_per_s, burst, burst, now)


def _require(key: ApiKey, wait_s: float) -> None:
    if wait_s:
        raise Busy(f"key {key.name!r} is over its {key.requests_per_s:g} requests/s", retry_after_s=wait_s)
