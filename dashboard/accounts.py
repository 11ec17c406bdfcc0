"""Who may use the dashboard: accounts from the gateway's keys file, and the tickets that keep a browser logged in
across tabs.
"""

import secrets
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from shared.errors import PolyphaseError, Unauthorized
from shared.runtime.keys import OPERATE, ApiKey, digest_of, load_keys

NOBODY_IN_PARTICULAR = "dashboard"  # stands in the audit where no login is asked for


class NotAllowed(PolyphaseError):
    """Who asks for it may only look."""

    code: ClassVar[str] = "not_allowed"
    http_status: ClassVar[int] = 403


@dataclass(frozen=True, slots=True)
class Account:
    """Who is there. `secret`: of their key, for what they ask of the gateway; empty without a login."""

    name: str
    role: str
    secret: str = field(default="", repr=False)

    @property
    def may_operate(self) -> bool:
        """Whether they may change something."""
        return self.role == OPERATE

    def require_operate(self) -> None:
        """Raises NotAllowed."""
        if not self.may_operate:
            raise NotAllowed(f"the key {self.name!r} may look and not operate; nothing was done")


ANYBODY = Account(NOBODY_IN_PARTICULAR, OPERATE)


class KeyFile:
    """The keys as the file has them now: one that is taken out of it opens nothing any more."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._read: tuple[tuple[int, int], dict[str, ApiKey]] | None = None

    def account(self, secret: str) -> Account:
        """Whose key it is. Raises Unauthorized for a wrong one or one without a role, InvalidRequest for the file."""
        key = self._keys().get(digest_of(secret))
        if key is None:
            raise Unauthorized("This key is not known here.")
        if not key.role:
            raise Unauthorized(f"The key {key.name!r} opens the API only: it has no role at the dashboard.")
        return Account(key.name, key.role, secret)

    def _keys(self) -> dict[str, ApiKey]:
        with self._lock:
            try:
                state = self._file.stat()
                version = (state.st_mtime_ns, state.st_ino)
            except OSError:
                version = (0, 0)  # reading says what is wrong
            if self._read is None or self._read[0] != version:
                self._read = version, {key.digest: key for key in load_keys(self._file)}
            return self._read[1]


HOURS = 12
KEPT = 1_000


class Tickets:
    """In memory only: tickets end with the process. Each is stored as its digest, with its holder's key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[str, tuple[str, float]] = OrderedDict()  # digest -> secret of the key, until when

    def issue(self, secret: str) -> str:
        """A new ticket for the holder of a key."""
        ticket = secrets.token_urlsafe(32)
        with self._lock:
            self._held[digest_of(ticket)] = secret, time.monotonic() + HOURS * 3600.0
            if len(self._held) > KEPT:
                self._held.popitem(last=False)
        return ticket

    def secret(self, ticket: str) -> str | None:
        """The key's secret; None for a ticket that is wrong, void or too old."""
        with self._lock:
            held = self._held.get(digest_of(ticket))
            return held[0] if held is not None and time.monotonic() < held[1] else None

    def void(self, ticket: str) -> None:
        """Good for nothing any more."""
        with self._lock:
            self._held.pop(digest_of(ticket), None)
