"""The surface of the API: which of vLLM's routes are served, and how what none of its handlers foresaw is answered."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from vllm.entrypoints.anthropic.api_router import translate_error_response
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse
from vllm.entrypoints.openai.completion.protocol import CompletionResponse
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.v1.engine.exceptions import EngineGenerateError

from gateway.context import caller
from gateway.hints import PARSED
from gateway.served import UNSERVED, why_not
from shared.errors import InvalidRequest, NotFound, PolyphaseError
from shared.runtime.http import error_body
from shared.runtime.logs import get_log

log = get_log(__name__)

Handler = Callable[..., Awaitable[Any]]
_ERROR = 'data: {"error"'

# Middleware that leaves the parts of a body as they are.
_PASSING = frozenset({"AuthenticationMiddleware", "CORSMiddleware", "ScalingMiddleware", "XRequestIdMiddleware"})


class MethodNotAllowed(InvalidRequest):
    """The path is served, by other methods."""

    code = "method_not_allowed"
    http_status = 405


def trim(app: FastAPI) -> frozenset[str]:
    """Take away the routes that are not served, and give unforeseen errors OpenAI's shape; the paths that are served.

    Answers are counted at the edge: see `gateway.http_series`.
    """
    counting = "PrometheusInstrumentatorMiddleware"
    app.user_middleware = [each for each in app.user_middleware if getattr(each.cls, "__name__", "") != counting]
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") not in UNSERVED]
    app.add_exception_handler(HTTPException, _unrouted)
    for kind in (EngineGenerateError, Exception):
        app.add_exception_handler(kind, _unforeseen)
    app.middleware_stack = None  # vLLM has built it already; the next build takes the handlers in
    return frozenset(getattr(route, "path", "") for route in app.router.routes)


def use_parsed_bodies() -> None:
    """Have the framework use the value of a body that the edge has parsed (starlette 1.10).

    Its own parser would come to the same value, and take as long again.
    """
    Request.json = _json  # type: ignore[method-assign, assignment]


async def _json(self: Request) -> Any:
    if not hasattr(self, "_json"):
        body, parsed = await self.body(), self.scope.get(PARSED)
        self._json = json.loads(body) if parsed is None or parsed.taken else parsed.take()
    return self._json


def rejection(path: str, error: Exception) -> tuple[int, bytes]:
    """The status and body with which vLLM answers `error` where nothing is streamed."""
    said = create_error_response(error)
    if path == "/v1/messages":
        response = translate_error_response(said)
    else:
        response = JSONResponse(said.model_dump(), status_code=said.error.code)
    return response.status_code, bytes(response.body)


def score_in_threads(scoring: Any, renderer: Any) -> None:
    """Have vLLM's generative scoring tokenise in the renderer's threads: it does so on the event loop (0.32)."""
    build: Callable[..., Coroutine[Any, Any, Any]] = scoring._build_prompts

    def built(*given: Any) -> Any:
        try:
            build(*given).send(None)  # it awaits nothing
        except StopIteration as end:
            return end.value
        raise RuntimeError("vLLM's generative scoring awaits something while it builds prompts")

    async def build_in_thread(*given: Any) -> Any:
        return await asyncio.wrap_future(renderer._executor.submit(built, *given))

    scoring._build_prompts = build_in_thread


def bodies_pass(app: FastAPI) -> bool:
    """Whether nobody between us and the connection wants to see the parts of a body, as other middleware may."""
    return all(getattr(each.cls, "__name__", "") in _PASSING for each in app.user_middleware)


def name_errors(messages: Any) -> None:
    """Have the Messages API name an error in a stream; vLLM's converter complains that it is no chunk of a chat."""
    convert: Callable[[AsyncIterator[str]], AsyncIterator[str]] = messages.message_stream_converter

    async def converted(chunks: AsyncIterator[str]) -> AsyncIterator[str]:
        errors: list[str] = []

        async def sound() -> AsyncIterator[str]:
            async for chunk in chunks:
                if chunk.startswith(_ERROR):
                    errors.append(json.loads(chunk.removeprefix("data: "))["error"]["message"])
                    return
                yield chunk

        async for event in convert(sound()):
            yield event
        for message in errors:
            said = {"type": "error", "error": {"type": "api_error", "message": message}}
            yield f"event: error\ndata: {json.dumps(said)}\n\n"

    messages.message_stream_converter = converted


def release_bodies(state: Any) -> None:
    """Have vLLM's handlers of answers let go of the copies of a body that the framework keeps with a request.

    A streamed answer would hold the bytes and the parsed JSON until it has ended.
    """
    for serving, method in (
        (state.openai_serving_chat, "create_chat_completion"),
        (state.openai_serving_chat_batch, "create_batch_chat_completion"),
        (state.openai_serving_completion, "create_completion"),
        (state.openai_serving_responses, "create_responses"),
        (state.anthropic_serving_messages, "create_messages"),
    ):
        setattr(serving, method, _releasing(getattr(serving, method)))


def _releasing(create: Handler) -> Handler:
    async def released(request: Any, raw_request: Any = None) -> Any:
        for copy in ("_body", "_json"):
            if hasattr(raw_request, copy):
                setattr(raw_request, copy, None)
        return await create(request, raw_request)

    return released


def name_tiers(state: Any) -> None:
    """Have OpenAI's APIs answer the service tier that a request is served as, where it asked for one.

    Chunks of streamed chats and completions have no field for it.
    """
    for serving, method in (
        (state.openai_serving_chat, "create_chat_completion"),
        (state.openai_serving_chat_batch, "create_batch_chat_completion"),
        (state.openai_serving_completion, "create_completion"),
    ):
        setattr(serving, method, _telling_tier(getattr(serving, method)))
    state.openai_serving_responses.create_responses = _with_tier(state.openai_serving_responses.create_responses)


def _telling_tier(create: Handler) -> Handler:
    async def told(request: Any, raw_request: Any = None) -> Any:
        answer = await create(request, raw_request)
        if (tier := caller.get().tier) and isinstance(answer, ChatCompletionResponse | CompletionResponse):
            answer.service_tier = tier
        return answer

    return told


def _with_tier(create: Handler) -> Handler:
    """Its answers and events repeat what the request says."""

    async def told(request: Any, raw_request: Any = None) -> Any:
        request.service_tier = caller.get().tier or request.service_tier
        return await create(request, raw_request)

    return told


def _unrouted(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        why = why_not(request.url.path)
        return _response(NotFound(f"{what} is not served: {why}" if why else f"there is no {what} here"))
    if error.status_code == 405:
        return _response(MethodNotAllowed(f"{what}: the method is not allowed"))
    answer = _response(InvalidRequest(str(error.detail)))
    answer.status_code = error.status_code
    return answer


def _unforeseen(request: Request, error: Exception) -> JSONResponse:
    """A bug: what it says is for the log, and not for who asked."""
    cause = error.__cause__ or error
    if isinstance(cause, VLLMClientError | GracefulHTTPError):  # in a stream that was announced: the edge says it
        said = create_error_response(cause)
        return JSONResponse(said.model_dump(), status_code=said.error.code)
    log.error("a request crashed", path=request.url.path, exc_info=cause)
    return _response(PolyphaseError(f"internal error: {type(cause).__name__}"))


def _response(error: PolyphaseError) -> JSONResponse:
    return JSONResponse(error_body(error), status_code=error.http_status)
