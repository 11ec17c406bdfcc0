"""API keys: hashed at rest, compared in constant time, each with its own rate."""

import hashlib
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import yaml

from shared.errors import InvalidRequest, Unauthorized

PREFIX = "pp-"
LOOPBACK = ("127.0.0.1", "::1", "localhost")  # hosts that may be listened on without keys


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as it is kept: `digest` is SHA-256 of the secret. `requests_per_s` 0 means no limit.

    slo: the class of requests that name none. classes: those that it may name; empty for all. weight: of its share of a
    full cluster.
    """

    name: str
    digest: str
    requests_per_s: float = 0.0
    burst: int = 0
    slo: str = "default"
    classes: tuple[str, ...] = ()
    weight: float = 1.0

    def may_use(self, slo: str) -> bool:
        """Whether its requests may be of that class."""
        return not self.classes or slo == self.slo or slo in self.classes


def digest_of(secret: str) -> str:
    """The form in which a key is kept. Keys are random and long, so one plain hash is enough."""
    return hashlib.sha256(secret.encode()).hexdigest()


def create_key(name: str, requests_per_s: float = 0.0, burst: int = 0) -> tuple[str, ApiKey]:
    """A new secret, shown once, and what is kept of it."""
    secret = PREFIX + secrets.token_urlsafe(32)
    return secret, ApiKey(name, digest_of(secret), requests_per_s, burst)


def load_keys(file: Path) -> tuple[ApiKey, ...]:
    """Keys of a YAML file: a list of mappings with ApiKey's fields. Raises InvalidRequest naming what is wrong."""
    try:
        entries = yaml.safe_load(file.read_text()) or []
        keys = tuple(ApiKey(**{**entry, "classes": tuple(entry.get("classes", ()))}) for entry in entries)
    except (OSError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise InvalidRequest(f"keys file {file}: {error}") from error
    for key in keys:
        if len(key.digest) != 64 or key.requests_per_s < 0:
            raise InvalidRequest(f"keys file {file}: key {key.name!r} needs a SHA-256 digest and a rate of 0 or more")
        if not key.weight > 0:
            raise InvalidRequest(f"keys file {file}: key {key.name!r} needs a weight above 0, not {key.weight}")
    return keys


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
