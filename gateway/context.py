"""What the HTTP side knows of a request and the pipeline needs: who asks, since when, and under which SLO class."""

import hashlib
from contextvars import ContextVar
from dataclasses import dataclass

from gateway.admission import Ticket
from gateway.connection import BodyWriter


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is.

    arrived_s: unix seconds at which all of its body was there. tier: OpenAI's `service_tier` that it is served as;
    empty where its body names none, or a header names its class. body: the short way to its connection, if any.
    cache_salt: of its API key; empty where its prefixes may be shared with other keys.
    body_bytes: the size of what was sent. request_id: what the client calls the request, as it was sent; may be empty.
    """

    ticket: Ticket
    slo: str
    arrived_s: float
    tier: str = ""
    body: BodyWriter | None = None
    cache_salt: str = ""
    body_bytes: int = 0
    request_id: str = ""

    def salted(self, cache_salt: str) -> str:
        """The salt of the prefix caches for a request that has named `cache_salt`, which may be empty."""
        if not self.cache_salt:
            return cache_salt
        return hashlib.sha256(f"{self.cache_salt}\0{cache_salt}".encode()).hexdigest()


# vLLM's handlers carry no headers down to the engine; a context variable follows the request's task.
caller: ContextVar[Caller] = ContextVar("caller")
