"""The HTTP application of all services but the gateway: health, metrics, the cluster token, and errors as JSON."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgspec
import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from shared.errors import InvalidRequest, PolyphaseError, TokenMissing
from shared.runtime.connections import BoundedProtocol, ConnectionLimits, Connections, bounded
from shared.runtime.keys import OPEN, READING, fault_of
from shared.runtime.logs import get_log
from shared.runtime.metrics import describe_process
from shared.runtime.server import Server, settle
from shared.runtime.stray import nothing_stray
from shared.runtime.wire_version import HTTP_HEADER, OURS

log = get_log(__name__)
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]
SHUTDOWN_S = 5
READY = "/ready"
METRICS_SHARE, METRICS_KEPT_S = 0.01, 1.0
_ASKED = ("/health", READY)


def service_app(
    service: str,
    lifespan: Lifespan,
    registry: CollectorRegistry | None = None,
    trouble: Callable[[], str] | None = None,
    unready: Callable[[], str] | None = None,
    *,
    token: str,
    standing: Callable[[], Mapping[str, str]] = dict,
) -> FastAPI:
    """A FastAPI app with `/health`, `/ready`, `/metrics` and the error table; the service adds its routers.

    registry: of the process's metrics; None: only those of all processes. trouble: what is stuck in this process;
    unready: why it should get no work; empty: nothing. standing: further fields of `/health` and `/ready`. token: the
    cluster's secret (`ServiceSettings.token`); it is required for all calls but reads, whatever their route.
    """
    app = FastAPI(title=f"Polyphase {service}", lifespan=lifespan, dependencies=[Depends(nothing_stray)])
    app.add_exception_handler(PolyphaseError, error_response)
    app.add_exception_handler(RequestValidationError, _validation_response)

    app.add_middleware(Guard, token=token)
    app.add_middleware(Health, service=service, trouble=trouble, unready=unready, standing=standing)
    series = CollectorRegistry() if registry is None else registry
    describe_process(series)
    exposition = Exposition(series)

    # As all our routes, on the event loop: in FastAPI's thread pool it would read data that the loop changes.
    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(exposition.text(), media_type=CONTENT_TYPE_LATEST)

    return app


class Guard:
    """Refuses calls that may change something and have no or a wrong cluster token (without a token all of them), and
    calls of an incompatible wire version. People's tools need not state a version.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token
        if token == OPEN:
            log.warning("the cluster token is `open`: all callers that reach this service may change everything")
        elif not token:
            log.warning("no cluster token is set: HTTP calls that change something are refused")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("method") in READING:
            await self._app(scope, receive, send)
            return
        what = f"{scope.get('method', scope['type'])} {scope['path']}"
        headers = Headers(scope=scope)
        fault = fault_of(what, self._token, headers.getlist("authorization"))
        if fault is None and (version := headers.get(HTTP_HEADER)) is not None:
            fault = OURS.check_http(version, "the caller")
        if fault is None:
            await self._app(scope, receive, send)
            return
        response = error_response(Request(scope), fault)
        if isinstance(fault, TokenMissing):
            response.headers["WWW-Authenticate"] = "Bearer"
        await response(scope, receive, send)


class Exposition:
    """A registry as text. It is rendered on the event loop and may be requested without a key, so it is cached:
    rendering takes at most `METRICS_SHARE` of the loop's time, unless that would make the text older than
    `METRICS_KEPT_S`.
    """

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._clock = clock
        self._until_mono = float("-inf")
        self._text = b""

    def text(self) -> bytes:
        """The registry in Prometheus' text format."""
        began_mono = self._clock()
        if began_mono >= self._until_mono:
            self._text = generate_latest(self._registry)
            took_s = self._clock() - began_mono
            self._until_mono = began_mono + min(METRICS_KEPT_S, took_s / METRICS_SHARE)
        return self._text


def exposing(registry: CollectorRegistry, app: ASGIApp) -> ASGIApp:
    """An application that answers GET with a registry, on the event loop, and passes all else to `app`."""
    exposition = Exposition(registry)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "GET":
            await Response(exposition.text(), media_type=CONTENT_TYPE_LATEST)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return answer


class Health:
    """Answers GET `/health`, which is requested every two seconds from each process, and `/ready`, before routers and
    models.

    Answers come from the event loop, after the lifespan has started: 503 while another part of the process is stuck. A
    process that stays unhealthy is restarted; one that is healthy but not ready gets no work.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: str,
        trouble: Callable[[], str] | None,
        unready: Callable[[], str] | None = None,
        standing: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self._app = app
        self._service = service
        self._trouble = trouble
        self._unready = unready
        self._standing = standing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in _ASKED or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        cause = self._trouble() if self._trouble is not None else ""
        if not cause and scope["path"] == READY and self._unready is not None:
            cause = self._unready()
        await say_state(send, self._service, cause, self._standing())


async def say_state(send: Send, service: str, cause: str, standing: Mapping[str, str] | None = None) -> None:
    """The answer to `/health` and `/ready`: 200, or 503 and why."""
    body = msgspec.json.encode({"status": cause or "ok", "service": service, **(standing or {})})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 503 if cause else 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def json_response(answer: object) -> Response:
    """An answer as JSON: a struct of `shared.wire.api`, or a list or dict of them."""
    return Response(msgspec.json.encode(answer), media_type="application/json")


def error_body(error: PolyphaseError) -> dict[str, Any]:
    """OpenAI's error shape."""
    kind = "server_error" if error.http_status >= 500 else "invalid_request_error"
    if error.http_status == 429:
        kind = "rate_limit_error"
    return {"error": {"message": error.message, "type": kind, "param": None, "code": error.code}}


def error_response(_: Request, error: Exception) -> JSONResponse:
    """An error as an HTTP response; the only place for it."""
    known = error if isinstance(error, PolyphaseError) else PolyphaseError(str(error))
    headers = {}
    if known.http_status in (429, 503):
        headers["Retry-After"] = str(max(1, round(known.retry_after_s or 1)))
    return JSONResponse(error_body(known), status_code=known.http_status, headers=headers)


def _validation_response(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0] if error.errors() else {"loc": (), "msg": "invalid"}
    where = ".".join(str(part) for part in first["loc"])
    return error_response(request, InvalidRequest(f"{where}: {first['msg']}"))


def serve(app: FastAPI, host: str, port: int) -> None:
    """Run until SIGTERM or SIGINT. Clean-up belongs to the lifespan: code after this call may not run."""
    server = _server(app, host, port)
    server.on_started = settle
    server.run()


@asynccontextmanager
async def serving(app: FastAPI, host: str, port: int) -> AsyncIterator[None]:
    """Serve within the block, in a process whose signals another server gets. A server that cannot start ends it."""
    server, started = _server(app, host, port), asyncio.Event()
    server.on_started, server.gets_signals = started.set, False
    task = asyncio.create_task(server.serve(), name=app.title)
    try:
        await started.wait()
        yield
    finally:
        server.should_exit = True
        await task


def _server(app: FastAPI, host: str, port: int) -> Server:
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        loop="uvloop",
        http=bounded(BoundedProtocol, Connections(ConnectionLimits())),
        ws="none",
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    return Server(config)
