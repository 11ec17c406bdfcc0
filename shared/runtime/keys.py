"""Secrets: API keys, kept hashed in a YAML file; the CurveZMQ key of a suite on one host; and the cluster token.

The key file of a suite has the secret half of a CurveZMQ pair and is readable only by its user; the public half follows
from it, and a process without it cannot connect to a control socket. The cluster token is one secret for all services
of a cluster. It is sent with HTTP calls that change something and with no others, compared in constant time, and is
not part of messages, log lines or addresses.
"""

import hashlib
import hmac
import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec
import zmq

from shared.errors import InvalidRequest, PolyphaseError, TokenMissing, TokenUnset, TokenWrong
from shared.files.text import read_text
from shared.files.yaml_file import read_document
from shared.secrecy import shown_key

PREFIX = "pp-"
LOOPBACK = ("127.0.0.1", "::1", "localhost")  # hosts that may be listened on without keys
LOOK, OPERATE = "look", "operate"
ROLES = ("", LOOK, OPERATE)  # of people at the dashboard; without one a key opens the API only


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key: `digest` is SHA-256 of the secret. `requests_per_s` 0 means no limit.

    slo: the class of requests that name none. classes: the classes that its requests may name; empty: all. weight: of
    its share of a full cluster. role: its holder's rights at the dashboard, one of `ROLES`; `operate` also allows to
    load LoRA adapters at the gateway. cache_salt: prefixes are shared only with keys of the same salt, so that other
    keys cannot measure by TTFT what its holder has sent; empty: they are shared with all keys without a salt.
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
    """The stored form of a key. Keys are random and long, so that one plain hash is enough."""
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


def new_key() -> str:
    """A new secret half (Z85)."""
    return zmq.curve_keypair()[1].decode()


def read_pair(file: Path) -> tuple[str, str]:
    """The pair (public, secret; Z85) of a key's file. Raises InvalidRequest that names the file."""
    try:
        secret = read_text(file).strip()
        return zmq.curve_public(secret.encode()).decode(), secret
    except (InvalidRequest, ValueError, zmq.ZMQError) as error:
        reason = (
            error.message
            if isinstance(error, InvalidRequest)
            else "not the secret half of a CurveZMQ pair (40 characters)"
        )
        raise InvalidRequest(
            f"the key file {file} cannot be used: {reason}; remove it and start the suite again: it makes a new one"
        ) from None


OPEN = "open"  # in the place of a secret: all callers that reach the port may change everything
READING = frozenset({"GET", "HEAD", "OPTIONS"})
_SHAPE = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")  # allowed after `Bearer`, and long enough
_GIVE = (
    "send it as `Authorization: Bearer …`. The polyphase command takes it from its --data-dir, POLYPHASE_CLUSTER_TOKEN "
    "or POLYPHASE_CLUSTER_TOKEN_FILE, a service from POLYPHASE_<SERVICE>_CLUSTER_TOKEN or ..._FILE"
)


def new_token() -> str:
    return secrets.token_urlsafe(32)


def checked(token: str, where: str) -> str:
    """The secret, if it has the right form. Raises InvalidRequest that names `where`, and not the secret."""
    if token != OPEN and not _SHAPE.fullmatch(token):
        raise InvalidRequest(
            f"{where}: a cluster token is 16 to 512 letters, digits and ._~+/=-, or the word {OPEN}; "
            "`polyphase keys token` makes one"
        )
    return token


def read_token(file: Path) -> str:
    """The secret that is the only content of a file. Raises InvalidRequest that names the file."""
    try:
        text = read_text(file)
    except InvalidRequest as error:
        raise InvalidRequest(f"the cluster token's file {error.message}") from None
    return checked(text.strip(), str(file))


def bearer(token: str) -> dict[str, str]:
    """The HTTP header with a secret; empty without one."""
    return {"Authorization": f"Bearer {token}"} if token not in ("", OPEN) else {}


def fault_of(what: str, token: str, sent: Sequence[str]) -> PolyphaseError | None:
    """Why a call is refused; None: it is allowed. what: the call. token: the service's secret. sent: the Authorization
    headers of the call.
    """
    if token == OPEN:
        return None
    if not token:
        return TokenUnset(
            f"{what}: this service has no cluster token, so that no call can change anything: set its "
            f"cluster_token or cluster_token_file, or `cluster_token: {OPEN}` to allow all callers"
        )
    shown = [value.strip() for scheme, _, value in (each.partition(" ") for each in sent) if scheme.lower() == "bearer"]
    if not any(shown):
        return TokenMissing(f"{what} needs the cluster's secret: {_GIVE}")
    # compare_digest raises an error for text beyond ASCII, which a header may have.
    if len(shown) == 1 and hmac.compare_digest(shown[0].encode(), token.encode()):
        return None
    return TokenWrong(f"{what}: the token that was sent is not this cluster's secret: {_GIVE}")
