"""API keys: hashed at rest, compared in constant time, each with its own rate."""

import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gateway.table import SharedTable
from shared.errors import Busy, InvalidRequest, Unauthorized
from shared.runtime.keys import LOOPBACK, ApiKey, create_key, digest_of, load_keys
from shared.runtime.logs import get_log

log = get_log(__name__)
REREAD_S = 1.0  # a key that was taken out of the file opens nothing after that time

__all__ = ["LOOPBACK", "ApiKey", "KeyRing", "create_key", "digest_of", "load_keys"]


class KeyRing:
    """Answers whose key a request carries. A ring that was made without keys lets everybody in.

    weights: of each caller, one mapping that follows the file.
    """

    def __init__(
        self, keys: tuple[ApiKey, ...], file: Path | None = None, version: tuple[int, int, int] = (0, 0, 0)
    ) -> None:
        """file: where the keys are from, for `reread`; version: what the file was before they were read."""
        self._file = file
        self._version = version
        self._classes: Collection[str] | None = None
        self.open = not keys  # for good: a file that is emptied must not let everybody in
        self.weights: dict[str, float] = {}
        self._replace(keys)

    @classmethod
    def of_file(cls, file: Path | None) -> "KeyRing":
        """The keys of a file, or an open ring where there is none. Raises InvalidRequest for a bad file."""
        version = _version_of(file)
        return cls(load_keys(file) if file else (), file, version)

    def reread(self) -> None:
        """Follow the file if it has changed. A file that is missing or wrong leaves the keys as they were."""
        version = _version_of(self._file)
        if self.open or self._file is None or version == self._version:
            return
        self._version = version
        try:
            fresh = KeyRing(load_keys(self._file))
            fresh.require_classes(self._classes if self._classes is not None else fresh._named_classes())
        except InvalidRequest as error:
            log.error("the changed keys file is not used; the former keys stay valid", error=str(error))
            return
        self._replace(fresh.keys)
        log.info("keys file read again", file=str(self._file), keys=len(self._by_digest))

    def _replace(self, keys: tuple[ApiKey, ...]) -> None:
        self._by_digest = {key.digest: key for key in keys}
        self.weights.clear()
        self.weights.update((key.name, key.weight) for key in keys)

    def _named_classes(self) -> set[str]:
        return {slo for key in self.keys for slo in (key.slo, *key.classes)}

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """All of them."""
        return tuple(self._by_digest.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Who may call, one a key."""
        return tuple(key.name for key in self.keys)

    def require_classes(self, known: Collection[str]) -> None:
        """Raises InvalidRequest for a key with a class that there is not, now; later `reread` refuses such a file."""
        self._classes = known
        for key in self._by_digest.values():
            for slo in (key.slo, *key.classes):
                if slo not in known:
                    raise InvalidRequest(f"key {key.name!r}: no SLO class {slo!r}; known: {', '.join(sorted(known))}")

    def identify(self, authorization: str, x_api_key: str = "") -> ApiKey | None:
        """The key of a request, None where none is needed. Raises Unauthorized. Anthropic clients use X-Api-Key.

        Looking the digest up leaks nothing useful by its timing: an attacker cannot steer SHA-256.
        """
        if self.open:
            return None
        scheme, _, token = authorization.partition(" ")
        secret = token.strip() if scheme.lower() == "bearer" else x_api_key
        if not secret:
            raise Unauthorized("this server needs an API key: Authorization: Bearer <key>")
        key = self._by_digest.get(digest_of(secret))
        if key is None:
            raise Unauthorized("wrong API key")
        return key


def _version_of(file: Path | None) -> tuple[int, int, int]:
    try:
        state = file.stat() if file is not None else None
    except OSError:
        state = None
    return (state.st_mtime_ns, state.st_ino, state.st_size) if state is not None else (0, 0, 0)


# MERGED rates.py
# The rate of each API key, in this process alone or in all that share its port.


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
