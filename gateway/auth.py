"""API keys and their request rates.

Keys are stored as hashes, in a file that is read again when it changes. The rate of a key is counted in the gateway's
table, so that it holds for all gateway processes of a port.
"""

import time
from collections.abc import Callable, Collection
from pathlib import Path

from gateway.table import Table
from shared.errors import Busy, InvalidRequest, Unauthorized
from shared.runtime.keys import LOOPBACK, OPERATE, ApiKey, create_key, digest_of, load_keys
from shared.runtime.logs import get_log

log = get_log(__name__)
REREAD_S = 1.0  # a key that was removed from the file is rejected after at most this time

__all__ = ["LOOPBACK", "OPERATE", "ApiKey", "KeyRing", "create_key", "digest_of", "load_keys"]


class KeyRing:
    """Finds the key that a request carries. A ring that was made without keys admits every request.

    `weights` maps the name of each key to its weight; it is one mapping that follows the file.
    """

    def __init__(
        self, keys: tuple[ApiKey, ...], file: Path | None = None, version: tuple[int, int, int] = (0, 0, 0)
    ) -> None:
        """file, version: where the keys are from, and the file's version before they were read, for `reread`."""
        self._file = file
        self._version = version
        self._classes: Collection[str] | None = None
        self.open = not keys  # for good: a file that is emptied later must not open the gateway
        self.weights: dict[str, float] = {}
        self._replace(keys)

    @classmethod
    def of_file(cls, file: Path | None) -> "KeyRing":
        """The keys of a file, or an open ring where there is none. Raises InvalidRequest for a bad file."""
        version = _version_of(file)
        return cls(load_keys(file) if file else (), file, version)

    def reread(self) -> None:
        """Read the file again if it has changed. A file that is missing or wrong leaves the keys as they were."""
        version = _version_of(self._file)
        if self.open or self._file is None or version == self._version:
            return
        self._version = version
        try:
            fresh = KeyRing(load_keys(self._file))
            if self._classes is not None:
                fresh.require_classes(self._classes)
        except InvalidRequest as error:
            log.error("the changed keys file is not used; the former keys stay valid", error=str(error))
            return
        self._replace(fresh.keys)
        log.info("keys file read again", file=str(self._file), keys=len(self._by_digest))

    def _replace(self, keys: tuple[ApiKey, ...]) -> None:
        self._by_digest = {key.digest: key for key in keys}
        self.weights.clear()
        self.weights.update((key.name, key.weight) for key in keys)

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        return tuple(self._by_digest.values())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(key.name for key in self.keys)

    def require_classes(self, known: Collection[str]) -> None:
        """Raises InvalidRequest for a key with an unknown SLO class; later, `reread` ignores a file with such a key."""
        self._classes = known
        for key in self._by_digest.values():
            for slo in (key.slo, *key.classes):
                if slo not in known:
                    raise InvalidRequest(f"key {key.name!r}: no SLO class {slo!r}; known: {', '.join(sorted(known))}")

    def identify(self, authorization: str, x_api_key: str = "") -> ApiKey | None:
        """The key of a request, None where none is needed. Raises Unauthorized. Anthropic clients use X-Api-Key.

        The time of the lookup of a digest reveals nothing useful: an attacker cannot choose the digest.
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


_LEVEL, _UPDATED = 2, 3  # words of a caller's row


class KeyRates:
    """Token buckets of API keys: `requests_per_s` refill a bucket, `burst` is its size."""

    def __init__(self, table: Table, clock: Callable[[], float] = time.monotonic) -> None:
        self._table = table
        self._clock = clock

    def check(self, key: ApiKey) -> None:
        """Count one request of the key. Raises Busy with the time until the next one is allowed; also where another
        process was stopped while it held the table's lock.
        """
        rate = key.requests_per_s
        if not rate:
            return
        burst = float(key.burst or max(1.0, rate))
        floats, row = self._table.floats, self._table.row(key.name)
        with self._table.locked():
            now = self._clock()
            level, updated_s = floats[row + _LEVEL], floats[row + _UPDATED]
            # 0.0: the first request of the key
            level = min(burst, level + max(0.0, now - updated_s) * rate) if updated_s else burst
            floats[row + _UPDATED] = max(updated_s, now)
            allowed = level >= 1.0
            floats[row + _LEVEL] = level - 1.0 if allowed else level
        if not allowed:
            retry_after_s = (1.0 - level) / rate
            raise Busy(f"key {key.name!r} is over its limit of {rate:g} requests/s", retry_after_s=retry_after_s)
