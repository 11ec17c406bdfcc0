"""The edge: API keys and rates, limits on bodies and on waiting work, and how an answer ends, around vLLM's handlers.

The edge reads each body, makes the request's `RequestState`, and passes the request on to vLLM's application or to the
fast path. It is plain ASGI: a stream of tokens passes through it without a coroutine of its own.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import ExitStack
from http import HTTPStatus
from math import ceil

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.admission import Admissions, RequestState, current_request
from gateway.auth import OPERATE, ApiKey, KeyRates, KeyRing
from gateway.connection import EXTENSION
from gateway.metrics import GatewayMetrics
from gateway.request_hints import PARSED, RESPONSES, RequestHints, hints_of, parse, require_few_items
from gateway.sessions import session_key
from gateway.settings import USUAL_TIERS, GatewaySettings
from gateway.tracing import TRACE, TracedRequests
from shared.errors import Busy, EngineFailed, InvalidRequest, PolyphaseError, Unavailable
from shared.runtime.http import error_body
from shared.runtime.logs import get_log

log = get_log(__name__)
Header = tuple[bytes, bytes]
Headers = dict[bytes, bytes]
Rejection = Callable[[str, Exception], tuple[int, bytes]]  # by path: a status and a body
FastPathOf = Callable[[Scope, Headers, bytes], ASGIApp | None]

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/version"})
SLO_HEADER = b"x-polyphase-slo"
SESSION_HEADER = b"x-session-id"
PRECISION_HEADER = b"x-polyphase-mixed-precision"
TIERED_PATHS = frozenset(  # routes whose bodies may name a `service_tier`
    {"/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", RESPONSES, "/invocations"}
)
_REQUEST_ID = b"x-request-id"
_BODY_HEADERS = (b"content-type", b"content-length", b"transfer-encoding")
_RETRIABLE_STATUSES = (429, 503)  # they are sent with Retry-After
_RETRY_S = 2.0
_LONG_BYTES = 64 << 10  # the parsing of a longer body delays the streams of the process noticeably


class BodyTooLarge(PolyphaseError):
    code = "body_too_large"
    http_status = 413


class BodyTooSlow(PolyphaseError):
    code = "body_too_slow"
    http_status = 408


class ClassNotAllowed(PolyphaseError):
    code = "slo_class_not_allowed"
    http_status = 403


class OperatorsOnly(PolyphaseError):
    code = "operators_only"
    http_status = 403


class ClientGone(Exception):
    """The client disconnected before its body was complete."""


class Edge:
    """The middleware. An unreachable cluster is no reason to refuse a request: jobs wait for it within their patience.

    `gateway.app` sets the public attributes before the first request.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: GatewaySettings,
        keys: KeyRing,
        metrics: GatewayMetrics,
        admission: Admissions,
        rates: KeyRates,
    ) -> None:
        self.app = app
        self.admission = admission
        self.traced: TracedRequests | None = None
        self.fast_path: FastPathOf | None = None  # may return an application that answers in place of `app`
        self.on_refused: Callable[[str, str], None] = lambda slo, code: None  # called for refusals for load
        self.open = dict.fromkeys(OPEN_PATHS, app)  # what answers the paths without keys and limits
        self.served: Collection[str] = ()  # paths that metrics may name
        self.operators_only: Collection[
            str
        ] = ()  # paths for keys with the role `operate`, and for a gateway without keys
        self.root_path = ""  # that clients may put before each path
        self.rejection: Rejection = _rejection  # answers a request that is refused after its stream was announced
        self._settings = settings
        self._keys = keys
        self._metrics = metrics
        self._rates = rates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self.open:
            await self.open.get(scope.get("path", ""), self.app)(scope, receive, send)
        elif self.traced is not None:
            await self.traced.serve(self._counted, scope, receive, send)
        else:
            await self._counted(scope, receive, send)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        began_mono, status = time.perf_counter(), HTTPStatus.INTERNAL_SERVER_ERROR.value  # if an exception leaves here
        try:
            status = await self._serve(scope, receive, send)
        finally:
            if status:
                self._metrics.http.answered(
                    scope, scope["path"] in self.served, status, time.perf_counter() - began_mono
                )

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> int:
        """The status of the answer; 0 where the client left before it."""
        slo, state, app = "", None, self.app
        path = scope["path"].removeprefix(self.root_path)
        with ExitStack() as stack:
            try:
                headers = dict(scope["headers"])
                key, slo = self._identify(headers)
                if path in self.operators_only:
                    _require_operator(key, path)
                if scope["method"] == "POST":
                    caller = key.name if key else ""
                    state = stack.enter_context(self.admission.for_class(slo).admit(caller, slo))
                    charge = stack.enter_context(self.admission.held_bytes.charged(caller))
                    body = await self._read(receive, headers, charge)
                    hints = self._hints(path, scope, body)
                    if len(body) > _LONG_BYTES:
                        await asyncio.sleep(0)
                    if hints.tier is not None and path in TIERED_PATHS and SLO_HEADER not in headers:
                        slo, state.tier = self._class_of_tier(hints.tier, key, slo)
                    state.move(slo, self.admission.for_class(slo))
                    state.claim(hints.jobs)
                    state.arrived_s = time.time()
                    state.cache_salt = key.cache_salt if key else ""
                    state.one_precision = _forbids_mixed_precision(headers)
                    state.body_bytes = len(body)
                    state.hold = charge
                    state.client_request_id = (
                        headers[_REQUEST_ID].decode("latin-1") if _REQUEST_ID in headers else hints.request_id
                    )
                    state.session = self._session(headers, hints, caller)
                    state.connection = scope.get("extensions", {}).get(EXTENSION)
                    state.trace = scope.get(TRACE)
                    current_request.set(state)
                    receive = _replay(body, receive)
                    if self.fast_path is not None:
                        app = self.fast_path(scope, headers, body) or app
                    del body  # or it would be held until the answer has ended
            except PolyphaseError as error:
                self._metrics.refused.labels(cause=error.code, slo=slo).inc()
                if error.http_status in _RETRIABLE_STATUSES:
                    self.on_refused(slo, error.code)
                await _answer(send, error)
                return error.http_status
            except ClientGone:
                return 0
            reply = _Reply(app, send, state, path, self.rejection)
            await reply.run(scope, receive)
            return reply.status

    def _identify(self, headers: Headers) -> tuple[ApiKey | None, str]:
        """The request's key, and its SLO class unless the body names another."""
        key = self._keys.identify(
            headers.get(b"authorization", b"").decode("latin-1"), headers.get(b"x-api-key", b"").decode("latin-1")
        )
        default = key.slo if key is not None else "default"
        slo = headers[SLO_HEADER].decode("latin-1") if SLO_HEADER in headers else default
        if slo not in self._settings.slo:
            raise InvalidRequest(f"unknown SLO class {slo!r}; known: {', '.join(sorted(self._settings.slo))}")
        _require_allowed(key, slo)
        if key is not None:
            self._rates.check(key)
        return key, slo

    async def _read(self, receive: Receive, headers: Headers, charge: Callable[[int], None]) -> bytes:
        """All of the body. Raises BodyTooSlow; and BodyTooLarge and Busy, by its declared length before it is read."""
        limit = self._settings.max_body_bytes
        length = headers.get(b"content-length", b"")
        charged = int(length) if length.isdigit() else 0
        if charged > limit:
            raise BodyTooLarge(f"the body has {charged} bytes; the limit is {limit}")
        charge(charged)
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
                    if size > charged:
                        charge(size - charged)
                        charged = size
        except TimeoutError:
            raise BodyTooSlow(f"the body did not arrive within {self._settings.body_timeout_s:g} s") from None
        return b"".join(pieces)

    def _hints(self, path: str, scope: Scope, body: bytes) -> RequestHints:
        """Parse the body into the scope. Raises InvalidRequest."""
        require_few_items(path, body, self._settings.max_items_per_body, self._settings.max_model_len)
        parsed = parse(body) if body else None
        if parsed is None:
            return RequestHints()
        scope[PARSED] = parsed
        return hints_of(path, parsed.value)

    def _session(self, headers: Headers, hints: RequestHints, caller: str) -> str:
        """The key of the request's session; empty without one. Raises InvalidRequest."""
        field, session_id = hints.session
        if SESSION_HEADER in headers:
            field, session_id = "X-Session-Id", headers[SESSION_HEADER].decode("latin-1")
        return session_key(caller, field, session_id) if session_id and self._settings.sessions else ""

    def _class_of_tier(self, tier: object, key: ApiKey | None, slo: str) -> tuple[str, str]:
        """The SLO class that a `service_tier` stands for, and the tier that the request is served as."""
        if tier in USUAL_TIERS:
            return slo, "default"
        known = self._settings.service_tiers
        if not isinstance(tier, str) or tier not in known:
            choices = ", ".join((*USUAL_TIERS, *sorted(known)))
            raise InvalidRequest(f"unknown service_tier {tier!r:.80}; known: {choices}")
        _require_allowed(key, known[tier])
        return known[tier], tier


def _forbids_mixed_precision(headers: Headers) -> bool:
    """Whether one precision has to compute the request, whatever its class. Raises InvalidRequest."""
    said = headers.get(PRECISION_HEADER, b"true").strip().lower()
    if said not in (b"true", b"false"):
        raise InvalidRequest(
            f"X-Polyphase-Mixed-Precision must be true or false, not {said.decode('latin-1')!r:.80}: false if one "
            "precision is to compute the prompt and the answer"
        )
    return said == b"false"


def _require_allowed(key: ApiKey | None, slo: str) -> None:
    if key is not None and not key.may_use(slo):
        raise ClassNotAllowed(f"key {key.name!r} may not use the SLO class {slo!r}")


def _require_operator(key: ApiKey | None, path: str) -> None:
    if key is not None and key.role != OPERATE:
        raise OperatorsOnly(f"{path} is for operators: key {key.name!r} has not the role {OPERATE}")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Returns the body first, and then what the connection gives."""
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return parts.pop() if parts else await receive()

    return replayed


class _Reply:
    """The application's answer, with what vLLM leaves out of it: Retry-After, and how a stream ended.

    The start of a stream is held until its first event. The Responses API sends events before it submits a job; those
    are held until it has submitted one. If a job is refused before that, the answer is the one to a request without a
    stream: its status, and the reason. The Responses API aborts a stream where the other APIs send an error in it.
    """

    def __init__(self, app: ASGIApp, send: Send, state: RequestState | None, path: str, rejection: Rejection) -> None:
        self._app = app
        self._send = send
        self._state = state
        self._path = path
        self._rejection = rejection
        self._streams = False
        self._held: list[Message] = []  # the start of a stream, and its events before a job is submitted
        self._refused = False
        self.status = 0  # once the answer has begun

    async def run(self, scope: Scope, receive: Receive) -> None:
        try:
            await self._app(scope, receive, self._sending)
        except Exception as error:
            if self._held and await self._refuse():
                return
            if not self._streams:
                raise
            await self._release()
            state, reason = self._state, None
            if state is not None and (state.refusal is not None or state.rejection is not None):
                reason = state.refusal or InvalidRequest(str(state.rejection))
            if reason is None:
                reason = _cause_for_clients(error)
                log.error("a stream broke off", path=scope["path"], error=reason.message, exc_info=error)
            event = {"type": "error", "code": reason.code, "message": reason.message, "param": None}
            body = f"event: error\ndata: {json.dumps({**event, **error_body(reason)})}\n\n".encode()
            await self._send({"type": "http.response.body", "body": body})

    def _sending(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            self.status = message["status"]
            self._streams = any(name == b"content-type" and b"event-stream" in value for name, value in headers)
            if self._streams and self._state is not None:
                self._held.append(message)
                if self._path == RESPONSES:
                    self._state.on_submitted = self._release
                return _nothing()
            if self.status in _RETRIABLE_STATUSES and all(name != b"retry-after" for name, _ in headers):
                refusal = self._state.refusal if self._state is not None else None
                retry_after_s = refusal.retry_after_s if refusal is not None else None
                message = {**message, "headers": [*headers, _retry_after(retry_after_s)]}
        elif self._held or self._refused:
            return self._first_event(message)
        return self._send(message)

    async def _first_event(self, message: Message) -> None:
        """Send or hold the first events of a stream; drop those that follow a refusal."""
        state = self._state
        if self._refused or state is None:
            return
        if state.refusal is not None or state.rejection is not None:
            await self._refuse()
        elif state.on_submitted is not None and message.get("more_body"):
            self._held.append(message)
        else:
            await self._release()
            await self._send(message)

    async def _release(self) -> None:
        if self._state is not None:
            self._state.on_submitted = None
        held, self._held = self._held, []
        for message in held:
            await self._send(message)

    async def _refuse(self) -> bool:
        """Answer with the reason for which a job was refused, if one was, in place of what was held."""
        state = self._state
        if state is None or (state.refusal is None and state.rejection is None):
            return False
        headers = [header for header in self._held[0]["headers"] if header[0] not in _BODY_HEADERS]  # of middleware
        self._held, self._refused = [], True
        if state.refusal is not None:
            self.status = state.refusal.http_status
            await _answer(self._send, state.refusal, *headers)
        elif state.rejection is not None:
            self.status, body = self._rejection(self._path, state.rejection)
            await _answer_json(self._send, self.status, body, *headers)
        return True


def _rejection(_: str, error: Exception) -> tuple[int, bytes]:
    refused = InvalidRequest(str(error))
    return refused.http_status, json.dumps(error_body(refused)).encode()


def _cause_for_clients(error: BaseException | None) -> PolyphaseError:
    """Our own error among the causes, as the front end carries it; of any other error clients see no detail."""
    while error is not None:
        status, message = getattr(error, "http_status", None), getattr(error, "message", None)
        if status is not None and isinstance(message, str):
            return next((known for known in (Busy, Unavailable) if known.http_status == status), EngineFailed)(message)
        error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__
    return PolyphaseError("internal error")


async def _nothing() -> None:
    pass


def _retry_after(seconds: float | None) -> Header:
    return (b"retry-after", str(max(1, ceil(seconds or _RETRY_S))).encode())


async def _answer(send: Send, error: PolyphaseError, *more: Header) -> None:
    headers = [*more]
    if error.http_status in _RETRIABLE_STATUSES:
        headers.append(_retry_after(error.retry_after_s))
    if error.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await _answer_json(send, error.http_status, json.dumps(error_body(error)).encode(), *headers)


async def _answer_json(send: Send, status: int, body: bytes, *more: Header) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
