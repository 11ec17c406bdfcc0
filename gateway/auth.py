"""API keys: hashed at rest, compared in constant time, each with its own rate."""

from collections.abc import Collection
from pathlib import Path

from shared.errors import InvalidRequest, Unauthorized
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
