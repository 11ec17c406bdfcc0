"""API keys: hashed at rest, compared in constant time, each with its own rate."""

from collections.abc import Collection

from shared.errors import InvalidRequest, Unauthorized
from shared.runtime.keys import LOOPBACK, ApiKey, create_key, digest_of, load_keys

__all__ = ["LOOPBACK", "ApiKey", "KeyRing", "create_key", "digest_of", "load_keys"]


class KeyRing:
    """Answers whose key a request carries. Without keys everybody is let in."""

    def __init__(self, keys: tuple[ApiKey, ...]) -> None:
        self._by_digest = {key.digest: key for key in keys}

    @property
    def open(self) -> bool:
        """Whether no key is needed."""
        return not self._by_digest

    @property
    def keys(self) -> tuple[ApiKey, ...]:
        """All of them."""
        return tuple(self._by_digest.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Who may call, one a key."""
        return tuple(key.name for key in self.keys)

    @property
    def weights(self) -> dict[str, float]:
        """Of each caller."""
        return {key.name: key.weight for key in self._by_digest.values()}

    def require_classes(self, known: Collection[str]) -> None:
        """Raises InvalidRequest for a key with a class that there is not."""
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
