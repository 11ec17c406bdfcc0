"""What stands before vLLM's handlers: keys, rates, the size of a body, and how much work may wait.

Plain ASGI: a stream of tokens passes through without a coroutine of its own.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from gateway.admission import Admission, Ticket
from gateway.auth import ApiKey, KeyRing
from gateway.body import jobs_asked
from gateway.context import Caller, caller
from gateway.metrics import GatewayMetrics
from gateway.settings import GatewaySettings
from shared.errors import Busy, InvalidRequest, PolyphaseError, Unavailable
from shared.runtime.http import error_body

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = dict[bytes, bytes]

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/version"})
SLO_HEADER = b"x-polyphase-slo"
_COME_BACK = (429, 503)  # statuses that go with Retry-After
_RETRY_S = 2.0


class BodyTooLarge(PolyphaseError):
    """The body is over the limit."""

    code = "body_too_large"
    http_status = 413


class BodyTooSlow(PolyphaseError):
    """The body did not come in time."""

    code = "body_too_slow"
    http_status = 408


class ClientGone(Exception):
    """Nobody waits for an answer."""


@dataclass(slots=True)
class TokenBucket:
    """`rate` a second, `burst` at once."""

    rate: float
    burst: float
    level: float
    updated_s: float

    def take(self, now_s: float) -> float:
        """Take one; 0 if granted, else the seconds until there is one."""
        self.level = min(self.burst, self.level + (now_s - self.updated_s) * self.rate)
        self.updated_s = now_s
        if self.level >= 1.0:
            self.level -= 1.0
            return 0.0
        return (1.0 - self.level) / self.rate


class Edge:
    """The middleware. `healthy` is asked on each request that creates work."""

    def __init__(
        self,
        app: App,
        settings: GatewaySettings,
        keys: KeyRing,
        metrics: GatewayMetrics,
        admission: Admission,
        healthy: Callable[[], bool],
    ) -> None:
        self.app = app
        self._settings = settings
        self._keys = keys
        self._metrics = metrics
        self.admission = admission
        self._healthy = healthy
        self._buckets: dict[str, TokenBucket] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through or answer it here."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        with ExitStack() as stack:
            try:
                who, slo = self._identify(dict(scope["headers"]))
                if scope["method"] == "POST":
                    ticket = stack.enter_context(self.admission.admit(who))
                    receive = await self._admitted(ticket, slo, scope, receive)
            except PolyphaseError as error:
                self._metrics.refused.labels(cause=error.code).inc()
                await _answer(send, error)
            except ClientGone:
                return
            else:
                await self.app(scope, receive, _with_retry_after(send))

    def _identify(self, headers: Headers) -> tuple[str, str]:
        """The name of the caller and the SLO class."""
        key = self._keys.identify(
            headers.get(b"authorization", b"").decode("latin-1"), headers.get(b"x-api-key", b"").decode("latin-1")
        )
        slo = headers.get(SLO_HEADER, b"default").decode("latin-1")
        if slo not in self._settings.slo:
            raise InvalidRequest(f"unknown SLO class {slo!r}; known: {', '.join(sorted(self._settings.slo))}")
        if key is not None:
            self._take(key)
        return (key.name if key else ""), slo

    def _take(self, key: ApiKey) -> None:
        if not key.requests_per_s:
            return
        now = time.monotonic()
        burst = float(key.burst or max(1.0, key.requests_per_s))
        bucket = self._buckets.get(key.name)
        if bucket is None:
            bucket = self._buckets[key.name] = TokenBucket(key.requests_per_s, burst, burst, now)
        wait = bucket.take(now)
        if wait:
            raise Busy(f"key {key.name!r} is over its {key.requests_per_s:g} requests/s", retry_after_s=wait)

    async def _admitted(self, ticket: Ticket, slo: str, scope: Scope, receive: Receive) -> Receive:
        """Read a body and claim all that it asks for."""
        if not self._healthy():
            raise Unavailable("no global scheduler is reachable", retry_after_s=_RETRY_S)
        body = await self._read(receive, dict(scope["headers"]))
        ticket.claim(jobs_asked(body))
        caller.set(Caller(ticket, slo, time.time()))
        return _replay(body, receive)

    async def _read(self, receive: Receive, headers: Headers) -> bytes:
        """All of the body. Raises BodyTooLarge, where its length is declared before any of it; BodyTooSlow."""
        limit = self._settings.max_body_bytes
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > limit:
            raise BodyTooLarge(f"the body has {int(length)} bytes; the limit is {limit}")
        pieces: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                while more:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise ClientGone
                    pieces.append(message.get("body", b""))
                    more = message.get("more_body", False)
                    size += len(pieces[-1])
                    if size > limit:
                        raise BodyTooLarge(f"the body is over the limit of {limit} bytes")
        except TimeoutError:
            raise BodyTooSlow(f"the body did not come within {self._settings.body_timeout_s:g} s") from None
        return b"".join(pieces)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Gives the body, then what the connection gives."""
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return parts.pop() if parts else await receive()

    return replayed


def _with_retry_after(send: Send) -> Send:
    """vLLM's answers name no time to come back at."""

    def sending(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start" and message["status"] in _COME_BACK:
            headers = list(message.get("headers", ()))
            if all(name.lower() != b"retry-after" for name, _ in headers):
                message = {**message, "headers": [*headers, _retry_after(None)]}
        return send(message)

    return sending


def _retry_after(seconds: float | None) -> tuple[bytes, bytes]:
    return (b"retry-after", str(max(1, round(seconds or _RETRY_S))).encode())


async def _answer(send: Send, error: PolyphaseError) -> None:
    body = json.dumps(error_body(error)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.http_status in _COME_BACK:
        headers.append(_retry_after(error.retry_after_s))
    if error.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.http_status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
