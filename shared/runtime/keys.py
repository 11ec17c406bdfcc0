"""API keys as they are kept: hashed, in one YAML file that the gateway and the dashboard read."""

import hashlib
import math
import secrets
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import InvalidRequest
from shared.files.yaml_file import read_document
from shared.secrecy import shown_key

PREFIX = "pp-"
LOOPBACK = ("127.0.0.1", "::1", "localhost")  # hosts that may be listened on without keys
LOOK, OPERATE = "look", "operate"
ROLES = ("", LOOK, OPERATE)  # of people at the dashboard; without one a key opens the API only


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as it is kept: `digest` is SHA-256 of the secret. `requests_per_s` 0 means no limit.

    slo: the class of requests that name none. classes: those that it may name; empty for all. weight: of its share of a
    full cluster. role: what its holder may do at the dashboard, one of `ROLES`. cache_salt: prefixes are shared only
    with keys of the same salt, so that no other key can measure by TTFT what its holder has sent; empty: with all keys.
    """

    name: str
    digest: str
    requests_per_s: float = 0.0
    burst: int = 0
    slo: str = "default"
    classes: tuple[str, ...] = ()
    weight: float = 1.0
    role: str = ""
    cache_salt: str = field(default="", repr=False)

    def may_use(self, slo: str) -> bool:
        """Whether its requests may be of that class."""
        return not self.classes or slo == self.slo or slo in self.classes


def digest_of(secret: str) -> str:
    """The form in which a key is kept. Keys are random and long, so one plain hash is enough."""
    return hashlib.sha256(secret.encode()).hexdigest()


def create_key(name: str, requests_per_s: float = 0.0, burst: int = 0, role: str = "") -> tuple[str, ApiKey]:
    """A new secret, shown once, and what is kept of it."""
    secret = PREFIX + secrets.token_urlsafe(32)
    return secret, ApiKey(name, digest_of(secret), requests_per_s, burst, role=role)


def load_keys(file: Path) -> tuple[ApiKey, ...]:
    """Keys of a YAML file: a list of mappings with ApiKey's fields. Raises InvalidRequest naming what is wrong."""
    try:
        entries = read_document(file).content or []
    except InvalidRequest as error:
        raise InvalidRequest(f"keys file {error.message}") from error
    keys = tuple(_key_of(file, number, entry) for number, entry in enumerate(_entries_of(file, entries), start=1))
    for key in keys:
        if len(key.digest) != 64 or key.requests_per_s < 0:
            raise InvalidRequest(f"keys file {file}: key {key.name!r} needs a SHA-256 digest and a rate of 0 or more")
        for name, value in (("requests_per_s", key.requests_per_s), ("burst", key.burst), ("weight", key.weight)):
            if not math.isfinite(value):
                raise InvalidRequest(f"keys file {file}: key {key.name!r}: {name} must be a finite number, not {value}")
        if not key.weight > 0:
            raise InvalidRequest(f"keys file {file}: key {key.name!r} needs a weight above 0, not {key.weight}")
        if key.role not in ROLES:
            known = f"{LOOK}, {OPERATE}, or none"
            raise InvalidRequest(f"keys file {file}: key {key.name!r} has the role {key.role!r}; known: {known}")
    return keys


def _entries_of(file: Path, entries: object) -> list[dict[str, Any]]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidRequest(
            f"keys file {file}: must be a list of mappings, each with the `name` and `digest` of a key"
        )
    return entries


def _key_of(file: Path, number: int, entry: dict[str, Any]) -> ApiKey:
    """One key. number: of the entry, from 1, for messages: these name keys of the mapping and no values."""
    known = [each.name for each in fields(ApiKey)]
    if unknown := [shown_key(str(key)) for key in entry if key not in known]:
        raise InvalidRequest(
            f"keys file {file}: entry {number}: unknown key {unknown[0]!r}; known: {', '.join(known)}; "
            "a secret has no place here: `polyphase keys add` writes its digest"
        )
    if missing := [key for key in ("name", "digest") if not isinstance(entry.get(key), str)]:
        raise InvalidRequest(f"keys file {file}: entry {number}: {missing[0]} must be given, as text")
    classes = entry.get("classes", ())
    if not isinstance(classes, list | tuple):
        raise InvalidRequest(f"keys file {file}: entry {number}: classes must be a list")
    try:
        return msgspec.convert({**entry, "classes": classes}, ApiKey)
    except msgspec.ValidationError as error:  # it names the types, and repeats no value
        raise InvalidRequest(f"keys file {file}: entry {number}: {error}") from error
