"""The HTTP shell of every service but the gateway: health, metrics, and our errors as JSON."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest

from shared.errors import InvalidRequest, PolyphaseError
from shared.runtime.header_limit import HeaderLimitProtocol

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]
SHUTDOWN_S = 5


def service_app(
    service: str, lifespan: Lifespan, registry: CollectorRegistry = REGISTRY, trouble: Callable[[], str] | None = None
) -> FastAPI:
    """A FastAPI app with `/health`, `/metrics` and the error table; the service adds its routers.

    `trouble` says what stands still in this process; empty: nothing.
    """
    app = FastAPI(title=f"Polyphase {service}", lifespan=lifespan)
    app.add_exception_handler(PolyphaseError, error_response)
    app.add_exception_handler(RequestValidationError, _validation_response)

    # Like every route of ours on the event loop: in FastAPI's thread pool they would read what the loop changes.
    @app.get("/health")
    async def health(response: Response) -> dict[str, str]:
        """Answers once the lifespan has started everything, and while the event loop turns: it is answered there.

        503 while something else that the process lives for stands still. Who is not well for long is started again.
        """
        cause = trouble() if trouble is not None else ""
        response.status_code = 503 if cause else 200
        return {"status": cause or "ok", "service": service}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app


def error_body(error: PolyphaseError) -> dict[str, Any]:
    """OpenAI's error shape."""
    kind = "server_error" if error.http_status >= 500 else "invalid_request_error"
    if error.http_status == 429:
        kind = "rate_limit_error"
    return {"error": {"message": error.message, "type": kind, "param": None, "code": error.code}}


def error_response(_: Request, error: Exception) -> JSONResponse:
    """The one way an error of ours becomes HTTP."""
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
    """Run until SIGTERM or SIGINT; clean-up belongs to the lifespan, since nothing after this is sure to run."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        loop="uvloop",
        http=HeaderLimitProtocol,
        ws="none",
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    uvicorn.Server(config).run()
