"""A bound on the size of request bodies."""

from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.errors import InvalidRequest
from shared.runtime.http import error_response


class BodyLimit:
    """Answers 413 to a body of more than `max_bytes`, declared or not, without keeping it."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body up to the bound, then hand it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = bytearray()
        message: Message = {"more_body": True}
        while message.get("more_body", False):
            message = await receive()
            if message["type"] != "http.request":  # the client is gone
                return
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                await self._refuse(scope, receive, send)
                return
        parts = iter([{"type": "http.request", "body": bytes(body), "more_body": False}])

        async def replay() -> Any:
            return next(parts, None) or await receive()

        await self._app(scope, replay, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = error_response(Request(scope), InvalidRequest(f"body of more than {self._max_bytes} bytes"))
        response.status_code = 413
        await response(scope, receive, send)
