"""What stands around vLLM's handlers: keys, rates, the size of a body, how much work may wait, how an answer ends.

Plain ASGI: a stream of tokens passes through without a coroutine of its own.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from contextlib import ExitStack
from http import HTTPStatus
from math import ceil
from typing import Any

from gateway.admission import Admissions, Ticket
from gateway.auth import ApiKey, KeyRing, Rates
from gateway.connection import EXTENSION
from gateway.metrics import GatewayMetrics
from gateway.request_context import (
    PARSED,
    RESPONSES,
    Caller,
    RequestHints,
    after_body,
    caller,
    hints_of,
    parse,
    require_few_items,
)
from gateway.settings import USUAL_TIERS, GatewaySettings
from gateway.tracing import TracedRequests
from shared.errors import Busy, EngineFailed, InvalidRequest, PolyphaseError, Unavailable
from shared.runtime.http import error_body
from shared.runtime.logs import get_log

log = get_log(__name__)
Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Header = tuple[bytes, bytes]
Headers = dict[bytes, bytes]
Rejection = Callable[[str, Exception], tuple[int, bytes]]  # by path: a status and a body
Short = Callable[[Scope, Headers, bytes], App | None]

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/version"})
SLO_HEADER = b"x-polyphase-slo"
_REQUEST_ID = b"x-request-id"
_OF_BODY = (b"content-type", b"content-length", b"transfer-encoding")
TIERED = frozenset(  # paths of OpenAI's request models
    {"/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", RESPONSES, "/invocations"}
)
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


class ClassNotAllowed(PolyphaseError):
    """The key is not for this SLO class."""

    code = "slo_class_not_allowed"
    http_status = 403


class ClientGone(Exception):
    """Nobody waits for an answer."""


class Edge:
    """The middleware. A cluster that is away is no reason to refuse: jobs wait for it, within their patience."""

    def __init__(
        self,
        app: App,
        settings: GatewaySettings,
        keys: KeyRing,
        metrics: GatewayMetrics,
        admission: Admissions,
        rates: Rates,
    ) -> None:
        self.app = app
        self.traced: TracedRequests | None = None
        self.short: Short | None = None  # may name what answers a request in the place of `app`
        self.on_refused: Callable[[str, str], None] = lambda slo, code: None  # told of each for load, by class and code
        self.open = dict.fromkeys(OPEN_PATHS, app)  # what answers those of any client, without limits
        self.served: Collection[str] = ()  # paths that metrics may name
        self.root_path = ""  # that clients may put before each path
        self.rejection: Rejection = _rejection  # answers a request that is refused after its stream was announced
        self._settings = settings
        self._keys = keys
        self._metrics = metrics
        self.admission = admission
        self._rates = rates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through or answer it here."""
        if scope["type"] != "http" or scope["path"] in self.open:
            await self.open.get(scope.get("path", ""), self.app)(scope, receive, send)
        elif self.traced is not None:
            await self.traced.serve(self._counted, scope, receive, send)
        else:
            await self._counted(scope, receive, send)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_s, status = time.perf_counter(), HTTPStatus.INTERNAL_SERVER_ERROR.value  # of what is raised from here
        try:
            status = await self._serve(scope, receive, send)
        finally:
            if status:
                self._metrics.http.answered(scope, scope["path"] in self.served, status, time.perf_counter() - began_s)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> int:
        """The status of the answer; 0 where nobody waited for one."""
        slo, ticket, app = "", None, self.app
        path = scope["path"].removeprefix(self.root_path)
        with ExitStack() as stack:
            try:
                headers = dict(scope["headers"])
                key, slo = self._identify(headers)
                if scope["method"] == "POST":
                    who = key.name if key else ""
                    ticket = stack.enter_context(self.admission.of(slo).admit(who))
                    take = stack.enter_context(self.admission.held_bytes.charged(who))
                    body = await self._read(receive, headers, take)
                    hints, tier = self._hints(path, scope, body), ""
                    await after_body(body)
                    if hints.tier is not None and path in TIERED and SLO_HEADER not in headers:
                        slo, tier = self._of_tier(hints.tier, key, slo)
                    ticket.move(self.admission.of(slo))
                    ticket.claim(hints.jobs)
                    writer = scope.get("extensions", {}).get(EXTENSION)
                    salt = key.cache_salt if key else ""
                    name = headers[_REQUEST_ID].decode("latin-1") if _REQUEST_ID in headers else hints.request_id
                    caller.set(Caller(ticket, slo, time.time(), tier, writer, salt, len(body), name))
                    receive = _replay(body, receive)
                    if self.short is not None:
                        app = self.short(scope, headers, body) or app
                    del body  # or it would be held until the answer has ended
            except PolyphaseError as error:
                self._metrics.refused.labels(cause=error.code, slo=slo).inc()
                if error.http_status in _COME_BACK:
                    self.on_refused(slo, error.code)
                await _answer(send, error)
                return error.http_status
            except ClientGone:
                return 0
            reply = _Reply(app, send, ticket, path, self.rejection)
            await reply.run(scope, receive)
            return reply.status

    def _hints(self, path: str, scope: Scope, body: bytes) -> RequestHints:
        """What is to be known of a body, whose value goes on with the request. Raises InvalidRequest."""
        limits = self._settings
        require_few_items(path, body, limits.max_items_per_body, limits.max_model_len)
        parsed = parse(body) if body else None
        if parsed is None:
            return RequestHints()
        scope[PARSED] = parsed
        return hints_of(path, parsed.value)

    def _identify(self, headers: Headers) -> tuple[ApiKey | None, str]:
        """Whose it is, and its SLO class, unless the body names another."""
        key = self._keys.identify(
            headers.get(b"authorization", b"").decode("latin-1"), headers.get(b"x-api-key", b"").decode("latin-1")
        )
        usual = key.slo if key is not None else "default"
        slo = headers[SLO_HEADER].decode("latin-1") if SLO_HEADER in headers else usual
        if slo not in self._settings.slo:
            raise InvalidRequest(f"unknown SLO class {slo!r}; known: {', '.join(sorted(self._settings.slo))}")
        _require(key, slo)
        if key is not None:
            self._rates.take(key)
        return key, slo

    def _of_tier(self, tier: object, key: ApiKey | None, usual: str) -> tuple[str, str]:
        """The SLO class that a `service_tier` stands for, and the tier that it is served as."""
        if tier in USUAL_TIERS:
            return usual, "default"
        known = self._settings.service_tiers
        if not isinstance(tier, str) or tier not in known:
            choices = ", ".join((*USUAL_TIERS, *sorted(known)))
            raise InvalidRequest(f"unknown service_tier {tier!r:.80}; known: {choices}")
        _require(key, known[tier])
        return known[tier], tier

    async def _read(self, receive: Receive, headers: Headers, take: Callable[[int], None]) -> bytes:
        """All of the body. Raises BodyTooLarge and Busy, where its length is declared before any of it; BodyTooSlow."""
        limit = self._settings.max_body_bytes
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > limit:
            raise BodyTooLarge(f"the body has {int(length)} bytes; the limit is {limit}")
        pieces: list[bytes] = []
        size, more = 0, True
        taken = int(length) if length.isdigit() else 0
        take(taken)
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
                    if size > taken:
                        take(size - taken)
                        taken = size
        except TimeoutError:
            raise BodyTooSlow(f"the body did not come within {self._settings.body_timeout_s:g} s") from None
        return b"".join(pieces)


def _require(key: ApiKey | None, slo: str) -> None:
    if key is not None and not key.may_use(slo):
        raise ClassNotAllowed(f"key {key.name!r} may not use the SLO class {slo!r}")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Gives the body, then what the connection gives."""
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return parts.pop() if parts else await receive()

    return replayed


class _Reply:
    """The application's answer, with what vLLM leaves out of it: when to come back, and how a stream ended.

    A stream begins with its first event. The Responses API sends events before it submits a job; those wait until it
    has. If a job is refused before that, the answer is what a request without a stream would get: its status, and the
    reason. The Responses API lets a stream break off where the others send an error in it.
    """

    def __init__(self, app: App, send: Send, ticket: Ticket | None, path: str, rejection: Rejection) -> None:
        self._app = app
        self._send = send
        self._ticket = ticket
        self._path = path
        self._rejection = rejection
        self._streams = False
        self._held: list[Message] = []  # the start of a stream, and what of it comes before a job is submitted
        self._refused = False
        self.status = 0  # once the answer has begun

    async def run(self, scope: Scope, receive: Receive) -> None:
        """Have the application answer."""
        try:
            await self._app(scope, receive, self._sending)
        except Exception as error:
            if self._held and await self._refuse():
                return
            if not self._streams:
                raise
            await self._release()
            said = self._refusal()
            if said is None:
                said = _cause_for_clients(error)
                log.error("a stream broke off", path=scope["path"], error=said.message, exc_info=error)
            event = {"type": "error", "code": said.code, "message": said.message, "param": None, **error_body(said)}
            body = f"event: error\ndata: {json.dumps(event)}\n\n".encode()
            await self._send({"type": "http.response.body", "body": body})

    def _refusal(self) -> PolyphaseError | None:
        """Why a job of the request was refused, if one was, for an event in a stream."""
        ticket = self._ticket
        if ticket is None or ticket.refusal is not None or ticket.rejection is None:
            return ticket.refusal if ticket is not None else None
        return InvalidRequest(str(ticket.rejection))

    def _sending(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            self.status = message["status"]
            self._streams = any(name == b"content-type" and b"event-stream" in value for name, value in headers)
            if self._streams and self._ticket is not None:
                self._held.append(message)
                if self._path == RESPONSES:
                    self._ticket.on_submitted = self._release
                return _nothing()
            if message["status"] in _COME_BACK and all(name != b"retry-after" for name, _ in headers):
                message = {**message, "headers": [*headers, _retry_after(self._retry_after_s())]}
        elif self._held or self._refused:
            return self._first(message)
        return self._send(message)

    def _retry_after_s(self) -> float | None:
        return self._ticket.refusal.retry_after_s if self._ticket and self._ticket.refusal else None

    async def _first(self, message: Message) -> None:
        """The first event of a stream; or what follows in place of one that was refused: nothing."""
        ticket = self._ticket
        if self._refused or ticket is None:
            return
        if ticket.refusal is not None or ticket.rejection is not None:
            await self._refuse()
        elif ticket.on_submitted is not None and message.get("more_body"):
            self._held.append(message)
        else:
            ticket.on_submitted = None
            held, self._held = self._held, []
            for each in (*held, message):
                await self._send(each)

    async def _release(self) -> None:
        """Send what was held."""
        if self._ticket is not None:
            self._ticket.on_submitted = None
        held, self._held = self._held, []
        for message in held:
            await self._send(message)

    async def _refuse(self) -> bool:
        """Answer with the reason for which a job was refused, if one was, in the place of what was held."""
        ticket = self._ticket
        if ticket is None or (ticket.refusal is None and ticket.rejection is None):
            return False
        kept = [each for each in self._held[0]["headers"] if each[0] not in _OF_BODY]  # of middleware
        self._held, self._refused = [], True
        if ticket.refusal is not None:
            self.status = ticket.refusal.http_status
            await _answer(self._send, ticket.refusal, *kept)
        elif ticket.rejection is not None:
            self.status, body = self._rejection(self._path, ticket.rejection)
            await _answer_json(self._send, self.status, body, *kept)
        return True


def _rejection(_: str, error: Exception) -> tuple[int, bytes]:
    refused = InvalidRequest(str(error))
    return refused.http_status, json.dumps(error_body(refused)).encode()


def _cause_for_clients(error: BaseException | None) -> PolyphaseError:
    """What one of ours said on the way, as the front end carries it; else only that it is a bug."""
    while error is not None:
        status, message = getattr(error, "http_status", None), getattr(error, "message", None)
        if status is not None and isinstance(message, str):
            return next((known for known in (Busy, Unavailable) if known.http_status == status), EngineFailed)(message)
        error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__
    return PolyphaseError("internal error")


async def _nothing() -> None:
    pass


def _retry_after(seconds: float | None) -> tuple[bytes, bytes]:
    return (b"retry-after", str(max(1, ceil(seconds or _RETRY_S))).encode())


async def _answer(send: Send, error: PolyphaseError, *more: Header) -> None:
    headers = [*more]
    if error.http_status in _COME_BACK:
        headers.append(_retry_after(error.retry_after_s))
    if error.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await _answer_json(send, error.http_status, json.dumps(error_body(error)).encode(), *headers)


async def _answer_json(send: Send, status: int, body: bytes, *more: Header) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
