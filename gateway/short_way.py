"""The short way of plain streams: from the edge straight to vLLM's handlers, and from them to the connection.

A request that will be a plain stream needs little of what stands between the two: no router, no dependencies, no
middleware, no tasks that wait for a disconnect. Whatever is unusual about one, its errors included, goes the usual way
with its body as it came, so that the answer is vLLM's.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from gateway.connection import EXTENSION, Body
from gateway.edge import App, Headers, Message, Receive, Scope, Send
from gateway.hints import PARSED
from gateway.plain import plain_chat, plain_completion, writes_plain_streams
from gateway.surface import bodies_pass

MOST_BYTES = 16 << 10  # of a body: reading and tokenising that takes a millisecond, waiting for a thread takes longer
_JSON = (b"application/json", b"application/json; charset=utf-8")
_UNUSUAL = ("tools", "functions", "chat_template")  # the last may take its time, and is for a thread that is given up
_STREAMS = [(b"content-type", b"text/event-stream; charset=utf-8")]
_at_once: ContextVar[bool] = ContextVar("at_once", default=False)  # what vLLM has threads do is done here


@dataclass(frozen=True, slots=True)
class _Kind:
    model: Any  # pydantic's
    create: Callable[[Any, Request], Awaitable[Any]]
    plain: Callable[[Any], bool]


class ShortWay:
    """Of one application. It has no `kinds` where something in it wants to see all requests."""

    def __init__(self, app: FastAPI) -> None:
        state: Any = app.state
        chat, completion = state.openai_serving_chat, state.openai_serving_completion
        kinds = {
            "/v1/chat/completions": (chat, _Kind(ChatCompletionRequest, chat.create_chat_completion, plain_chat)),
            "/v1/completions": (
                completion,
                _Kind(CompletionRequest, completion.create_completion, lambda asked: plain_completion(asked, 1)),
            ),
        }
        if _watched(app):
            kinds = {}
        self._app = app
        self._headers: list[tuple[bytes, bytes]] = []
        self._kinds = {path: kind for path, (serving, kind) in kinds.items() if writes_plain_streams(serving)}
        if self._kinds:
            _read_at_once(chat.renderer)

    def of(self, scope: Scope, headers: Headers, body: bytes) -> App | None:
        """What answers this request, if it may go this way. `headers` of `scope`, `body` all of it."""
        kind = self._kinds.get(scope["path"])
        if kind is None or len(body) > MOST_BYTES or b"origin" in headers or headers.get(b"content-type") not in _JSON:
            return None
        parsed = scope.get(PARSED)
        if parsed is None or not isinstance(scope.get("extensions", {}).get(EXTENSION), Body):
            return None
        try:
            said = parsed.value
            if not isinstance(said, dict) or said.get("stream") is not True or any(map(said.get, _UNUSUAL)):
                return None
            asked = kind.model.model_validate(parsed.take())  # which may change it
        except Exception:  # what is wrong with it is found again, and said, on the usual way
            return None
        return partial(self._answer, kind, asked) if kind.plain(asked) else None

    async def _answer(self, kind: _Kind, asked: Any, scope: Scope, receive: Receive, send: Send) -> None:
        """Until all is sent, or its reader is gone."""
        body: Body = scope["extensions"][EXTENSION]
        task = asyncio.current_task()
        assert task is not None
        body.on_gone(task.cancel)
        try:
            stream = await self._stream(kind, asked, scope, receive)
            if stream is None:
                body.on_gone(None)
                await self._app(scope, receive, send)
                return
            self._headers = self._headers or await _headers(self._app)
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            async with aclosing(stream):
                async for part in stream:
                    body_part = part.encode() if isinstance(part, str) else part  # vLLM's own generator gives those
                    await send({"type": "http.response.body", "body": body_part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            if not body.gone or task.uncancel():
                raise  # not for that reason, or not for that alone
        finally:
            body.on_gone(None)

    async def _stream(self, kind: _Kind, asked: Any, scope: Scope, receive: Receive) -> Any:
        """The events of the answer; None where vLLM has something to say against the request."""
        token = _at_once.set(True)
        try:
            made = await kind.create(asked, Request({**scope, "app": self._app}, receive))
        except Exception:  # to be met again on the usual way
            return None
        finally:
            _at_once.reset(token)
        return made if hasattr(made, "__anext__") else None


def health_of(client: Any) -> App:
    """What answers `/health`, which is asked every second, for an EngineClient."""

    async def health(_: Scope, __: Receive, send: Send) -> None:
        status = HTTPStatus.SERVICE_UNAVAILABLE if client.errored else HTTPStatus.OK
        await send({"type": "http.response.start", "status": int(status), "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    return health


async def _headers(app: FastAPI) -> list[tuple[bytes, bytes]]:
    """Of a stream, as the application's middleware would have them."""
    told: list[tuple[bytes, bytes]] = []

    async def answer(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(_STREAMS)})

    async def take(message: Message) -> None:
        told.extend(message["headers"])

    async def nothing() -> Message:
        return {"type": "http.disconnect"}

    made: App = answer
    for each in app.user_middleware:
        kind: Any = each.cls
        if kind is CORSMiddleware:
            made = kind(made, *each.args, **each.kwargs)
    await made({"type": "http", "method": "POST", "headers": []}, nothing, take)
    return told


def _watched(app: FastAPI) -> bool:
    """Whether something in the application is to see every request, or to add to every answer."""
    args = app.state.args
    names = {getattr(each.cls, "__name__", "") for each in app.user_middleware}
    counts = args.enable_server_load_tracking or args.sse_keep_alive_interval
    return bool(counts or not bodies_pass(app) or names & {"AuthenticationMiddleware", "XRequestIdMiddleware"})


def _read_at_once(renderer: Any) -> None:
    """Have vLLM render and tokenise short prompts where it stands: what a thread is asked costs more than that."""
    executor = renderer._executor
    in_thread = executor.submit

    def submit(work: Callable[..., Any], /, *args: Any, **more: Any) -> Any:
        if not _at_once.get():
            return in_thread(work, *args, **more)
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **more))
        except Exception as error:  # its caller's
            done.set_exception(error)
        return done

    executor.submit = submit
