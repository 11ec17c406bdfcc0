"""The fast path: plain streams, passed by the edge directly to vLLM's handlers, and written by the gateway itself.

Plain is a chat or completion with one streamed answer as text and nothing beside it: no tools, parsers, log
probabilities, token ids, echo, or further answers. Such a stream needs little of what stands between the connection and
vLLM's handlers: no router, dependencies, middleware, or tasks that wait for a disconnect. A request that is unusual in
any way takes vLLM's own path with its body unchanged, so that vLLM words its errors. Relies on `gateway.plain_stream`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.entrypoints.serve.utils.api_utils import should_include_usage
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMClientError
from vllm.outputs import RequestOutput

from gateway.admission import current_request
from gateway.connection import EXTENSION, Body
from gateway.edge import Headers
from gateway.plain_stream import CHAT, COMPLETION, DONE, Chunks, Form, PlainStream, Usage
from gateway.request_hints import PARSED
from gateway.vllm_patches import bodies_pass, replace_stream_generator
from shared.errors import PolyphaseError
from shared.runtime.logs import get_log

log = get_log(__name__)
MAX_BYTES = 16 << 10  # of a body: parsing and tokenising it takes a millisecond, less than the wait for a thread
_JSON = (b"application/json", b"application/json; charset=utf-8")
_UNUSUAL_FIELDS = ("tools", "functions", "chat_template")  # a client's template may be slow, and needs a thread
_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]


@dataclass(frozen=True, slots=True)
class _Route:
    request_model: Any  # pydantic's
    create: Callable[[Any, Request], Awaitable[Any]]
    is_plain: Callable[[Any], bool]


class FastPath:
    """The fast path of one application. It has no routes where a part of the application wants to see all requests."""

    def __init__(self, app: FastAPI) -> None:
        state: Any = app.state
        chat, completion = state.openai_serving_chat, state.openai_serving_completion
        self._app = app
        self._headers: list[tuple[bytes, bytes]] = []
        self._routes: dict[str, _Route] = {}
        if _watches_requests(app):
            return
        if writes_plain_streams(chat):
            self._routes["/v1/chat/completions"] = _Route(
                ChatCompletionRequest, chat.create_chat_completion, plain_chat
            )
        if writes_plain_streams(completion):
            self._routes["/v1/completions"] = _Route(
                CompletionRequest, completion.create_completion, partial(plain_completion, prompts=1)
            )

    def app_for(self, scope: Scope, headers: Headers, body: bytes) -> ASGIApp | None:
        """What answers this request if it may take the fast path. headers: of `scope`; body: all of it."""
        route = self._routes.get(scope["path"])
        if route is None or len(body) > MAX_BYTES or b"origin" in headers or headers.get(b"content-type") not in _JSON:
            return None
        parsed = scope.get(PARSED)
        if parsed is None or not isinstance(scope.get("extensions", {}).get(EXTENSION), Body):
            return None
        try:
            value = parsed.value
            if not isinstance(value, dict) or value.get("stream") is not True or any(map(value.get, _UNUSUAL_FIELDS)):
                return None
            request = route.request_model.model_validate(parsed.take())  # which may change the value
        except Exception:  # vLLM's own path finds the error again, and reports it
            return None
        return partial(self._answer, route, request) if route.is_plain(request) else None

    async def _answer(self, route: _Route, request: Any, scope: Scope, receive: Receive, send: Send) -> None:
        """Returns when all is sent, or the client has left."""
        body: Body = scope["extensions"][EXTENSION]
        task = asyncio.current_task()
        assert task is not None
        body.on_disconnect(task.cancel)
        try:
            stream = await self._create(route, request, scope, receive)
            if stream is None:
                body.on_disconnect(None)
                await self._app(scope, receive, send)
                return
            self._headers = self._headers or await _stream_headers(self._app)
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            async with aclosing(stream):
                async for part in stream:
                    encoded = part.encode() if isinstance(part, str) else part  # vLLM's own generator yields strings
                    await send({"type": "http.response.body", "body": encoded, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:
            if not body.disconnected or task.uncancel():
                raise  # somebody else cancelled the task, too
        finally:
            body.on_disconnect(None)

    async def _create(self, route: _Route, request: Any, scope: Scope, receive: Receive) -> Any:
        """The stream of the answer; None where vLLM refuses the request, which its own path reports."""
        state = current_request.get()
        state.tokenise_inline = True
        try:
            answer = await route.create(request, Request({**scope, "app": self._app}, receive))
        except Exception:
            return None
        finally:
            state.tokenise_inline = False
        return answer if hasattr(answer, "__anext__") else None


def health_of(client: Any) -> ASGIApp:
    """Answers `/health`, which is requested every second, for an EngineClient."""

    async def health(_: Scope, __: Receive, send: Send) -> None:
        status = HTTPStatus.SERVICE_UNAVAILABLE if client.errored else HTTPStatus.OK
        await send({"type": "http.response.start", "status": int(status), "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    return health


async def _stream_headers(app: FastAPI) -> list[tuple[bytes, bytes]]:
    """The headers of a stream with those that the application's CORS middleware adds."""
    headers: list[tuple[bytes, bytes]] = []

    async def answer(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)})

    async def collect(message: Message) -> None:
        headers.extend(message["headers"])

    async def disconnected() -> Message:
        return {"type": "http.disconnect"}

    wrapped: ASGIApp = answer
    for middleware in app.user_middleware:
        cls: Any = middleware.cls
        if cls is CORSMiddleware:
            wrapped = cls(wrapped, *middleware.args, **middleware.kwargs)
    await wrapped({"type": "http", "method": "POST", "headers": []}, disconnected, collect)
    return headers


def _watches_requests(app: FastAPI) -> bool:
    """Whether a part of the application is to see each request, or to add to each answer."""
    args = app.state.args
    names = {getattr(middleware.cls, "__name__", "") for middleware in app.user_middleware}
    counts = args.enable_server_load_tracking or args.sse_keep_alive_interval
    return bool(counts or not bodies_pass(app) or names & {"AuthenticationMiddleware", "XRequestIdMiddleware"})


def serve_plain_streams(state: Any, direct: bool) -> None:
    """Have vLLM's handlers stream plain answers with the gateway's generators.

    direct: no middleware wants to see the body, so that events may go directly to the connection.
    """
    chat, completion = state.openai_serving_chat, state.openai_serving_completion
    if writes_plain_streams(chat):
        replace_stream_generator(chat, "chat_completion_stream_generator", partial(_chats, chat, direct))
    if writes_plain_streams(completion):
        replace_stream_generator(completion, "completion_stream_generator", partial(_completions, completion, direct))


def writes_plain_streams(serving: Any) -> bool:
    """Whether no option of the server adds to the text of a stream, or logs it."""
    adds = (
        getattr(serving, "parser_cls", None) is not None
        or serving.enable_prompt_tokens_details
        or serving.enable_per_request_metrics
        or getattr(serving, "enable_log_outputs", False)
    )
    return not adds and serving.renderer.tokenizer is not None


def plain_chat(request: ChatCompletionRequest) -> bool:
    return not (request.logprobs or request.tools or request.return_prompt_text) and _plain(request)


def plain_completion(request: CompletionRequest, prompts: int) -> bool:
    return prompts == 1 and request.logprobs is None and _plain(request)


def _plain(request: ChatCompletionRequest | CompletionRequest) -> bool:
    return (
        request.n in (None, 1)
        and not request.echo
        and request.prompt_logprobs is None
        and not request.return_token_ids
        and not request.use_beam_search
        and request.stream_interval is None
    )


def _chats(serving: Any, direct: bool, vllm_generator: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
    def generator(
        request: ChatCompletionRequest,
        outputs: AsyncIterator[RequestOutput],
        request_id: str,
        model: str,
        conversation: Any,
        tokenizer: Any,
        metadata: RequestResponseMetadata,
        **more: Any,
    ) -> AsyncIterator[Any]:
        if not plain_chat(request):
            return vllm_generator(  # type: ignore[no-any-return]
                request, outputs, request_id, model, conversation, tokenizer, metadata, **more
            )
        stream = _stream(serving, request, CHAT, request_id, int(time.time()), model, direct)
        return _generate(serving, stream, outputs, request_id, metadata)

    return generator


def _completions(serving: Any, direct: bool, vllm_generator: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
    def generator(
        request: CompletionRequest,
        inputs: Any,
        outputs: AsyncIterator[tuple[int, RequestOutput]],
        request_id: str,
        created: int,
        model: str,
        *,
        num_prompts: int,
        request_metadata: RequestResponseMetadata,
        **more: Any,
    ) -> AsyncIterator[Any]:
        if not plain_completion(request, num_prompts):
            more |= {"num_prompts": num_prompts, "request_metadata": request_metadata}
            return vllm_generator(  # type: ignore[no-any-return]
                request, inputs, outputs, request_id, created, model, **more
            )
        stream = _stream(serving, request, COMPLETION, request_id, created, model, direct)
        return _generate(serving, stream, (output async for _, output in outputs), request_id, request_metadata)

    return generator


def _stream(
    serving: Any, request: Any, form: Form, request_id: str, created: int, model: str, direct: bool
) -> PlainStream:
    usage = Usage(*should_include_usage(request.stream_options, serving.enable_force_include_usage))
    make_chunks = partial(Chunks, form, request_id, created, model, usage, serving.system_fingerprint)
    role = serving.get_chat_request_role(request) if form is CHAT else ""
    return PlainStream(make_chunks, role, current_request.get().connection if direct else None)


async def _generate(
    serving: Any,
    stream: PlainStream,
    outputs: AsyncIterator[RequestOutput],
    request_id: str,
    metadata: RequestResponseMetadata,
) -> AsyncIterator[bytes]:
    """The parts of the body that pass through the application: the first, the last, and errors in vLLM's words."""
    state = current_request.get()
    state.stream = stream  # the first step of `outputs` submits the job
    cut = None
    try:
        async for output in outputs:
            if output.outputs:
                cut = output.outputs[0]
            elif not stream.direct and not stream.ended and (events := stream.new_events()):
                yield events
                stream.begin()
        if cut is not None:
            serving._raise_if_error(cut.finish_reason, request_id)
        prompt_tokens, tokens = stream.counted
        metadata.final_usage_info = UsageInfo(
            prompt_tokens=prompt_tokens, completion_tokens=tokens, total_tokens=prompt_tokens + tokens
        )
        yield stream.last(cut) + stream.totals() + DONE
    except GenerationError as error:
        yield _error_event(serving._convert_generation_error_to_streaming_response(error))
    except VLLMClientError as error:
        yield _error_event(serving.create_streaming_error_response(error))
    except Exception as error:
        if getattr(error, "http_status", None) is None:  # a bug: its details are not for the client
            log.error("a stream failed", request_id=request_id, exc_info=error)
            internal = PolyphaseError(f"internal error: {type(error).__name__}")
            error = GracefulHTTPError(internal.message, HTTPStatus(internal.http_status))
        else:
            log.warning("a stream failed", request_id=request_id, error=str(error))
        yield _error_event(serving.create_streaming_error_response(error))
    finally:
        state.stream = None


def _error_event(error: str) -> bytes:
    return f"data: {error}\n\n".encode() + DONE
