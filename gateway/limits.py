"""What stands before vLLM's handlers: keys, rates, the bound on queued work, the size of a body.

Plain ASGI: a stream of tokens passes through without a wrapper of its own.
"""

import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from gateway.auth import ApiKey, KeyRing
from gateway.context import Caller, caller
from gateway.metrics import GatewayMetrics
from gateway.settings import GatewaySettings
from shared.errors import Busy, InvalidRequest, PolyphaseError, Unavailable
from shared.runtime.http import error_body

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/version"})
SLO_HEADER = b"x-polyphase-slo"


class BodyTooLarge(PolyphaseError):
    """The body is over the limit."""

    code = "body_too_large"
    http_status = 413


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


class Limits:
    """The middleware. `queued` and `healthy` are asked on each request that creates work."""

    def __init__(
        self,
        app: App,
        settings: GatewaySettings,
        keys: KeyRing,
        metrics: GatewayMetrics,
        queued: Callable[[], int],
        healthy: Callable[[], bool],
    ) -> None:
        self._app = app
        self._settings = settings
        self._keys = keys
        self._metrics = metrics
        self._queued = queued
        self._healthy = healthy
        self._buckets: dict[str, TokenBucket] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through or answer it here."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        try:
            self._admit(scope, headers)
            bounded = self._bounded(headers)
        except PolyphaseError as error:
            self._metrics.refused.labels(cause=error.code).inc()
            await _answer(send, error)
            return
        if bounded:
            await self._app(scope, receive, send)
        else:
            body = _UndeclaredBody(receive, self._settings.max_body_bytes)
            await self._app(scope, body.receive, body.guard(send))

    def _bounded(self, headers: dict[bytes, bytes]) -> bool:
        """Whether the body's declared length bounds it: the HTTP parser reads no more than was declared."""
        if b"transfer-encoding" in headers:
            return False
        length = headers.get(b"content-length", b"0")
        limit = self._settings.max_body_bytes
        if length.isdigit() and int(length) > limit:
            raise BodyTooLarge(f"the body has {int(length)} bytes; the limit is {limit}")
        return length.isdigit()

    def _admit(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        key = self._keys.identify(
            headers.get(b"authorization", b"").decode("latin-1"), headers.get(b"x-api-key", b"").decode("latin-1")
        )
        slo = headers.get(SLO_HEADER, b"default").decode("latin-1")
        if slo not in self._settings.slo:
            raise InvalidRequest(f"unknown SLO class {slo!r}; known: {', '.join(sorted(self._settings.slo))}")
        if key is not None:
            self._take(key)
        caller.set(Caller(key.name if key else "", slo))
        if scope["method"] == "POST":
            if self._queued() >= self._settings.max_queued_jobs:
                raise Busy(f"{self._queued()} requests are waiting for their first token", retry_after_s=2)
            if not self._healthy():
                raise Unavailable("no global scheduler is reachable", retry_after_s=2)

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


class _UndeclaredBody:
    """Counts a body that comes in chunks of any number."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._size = 0
        self._answered = False

    async def receive(self) -> MutableMapping[str, Any]:
        """Pass on a piece of the body. Past the limit the application sees the client leave."""
        message = await self._receive()
        if message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            if self._size > self._limit:
                return {"type": "http.disconnect"}
        return message

    def guard(self, send: Send) -> Send:
        """Answer 413 in the application's place once the limit was passed."""

        async def guarded(message: MutableMapping[str, Any]) -> None:
            if self._size <= self._limit:
                await send(message)
            elif not self._answered:
                self._answered = True
                await _answer(send, BodyTooLarge(f"the body is over the limit of {self._limit} bytes"))

        return guarded


async def _answer(send: Send, error: PolyphaseError) -> None:
    body = json.dumps(error_body(error)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.http_status in (429, 503):
        headers.append((b"retry-after", str(max(1, round(error.retry_after_s or 1))).encode()))
    if error.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.http_status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
