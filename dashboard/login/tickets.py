"""Tickets: what a browser holds after a login, so that a link in a new tab asks for no key again."""

import secrets
import threading
import time
from collections import OrderedDict

from shared.runtime.keys import digest_of

HOURS = 12
KEPT = 1_000


class Tickets:
    """In memory only: with the process, all are void. A ticket is told by its digest, a key is kept for its holder."""

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
