"""The short way of plain streams: from the edge straight to vLLM's handlers, and from them to the connection.

A request that will be a plain stream needs little of what stands between the two: no router, no dependencies, no
middleware, no tasks that wait for a disconnect. Whatever is unusual about one, its errors included, goes the usual way
with its body as it came, so that the answer is vLLM's.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.entrypoints.serve.utils.api_utils import should_include_usage
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMClientError
from vllm.outputs import RequestOutput

from gateway.connection import EXTENSION, Body
from gateway.edge import App, Headers, Message, Receive, Scope, Send
from gateway.plain_stream import DONE, Chunks, PlainStream, Usage, submitted
from gateway.request_context import PARSED, caller
from gateway.vllm_patches import bodies_pass
from shared.errors import PolyphaseError
from shared.runtime.logs import get_log

# MERGED plain.py
# Which streams are plain, and their generators in the place of vLLM's.
#
# Plain is a chat or completion with one answer as text, and nothing beside it: no tools or parsers, log probabilities,
# token ids, echo, several answers. All others take vLLM's own path.


log = get_log(__name__)
Make = Callable[..., Chunks]


def serve_plain_streams(state: Any, direct: bool) -> None:
    """Have vLLM's handlers of chats and completions stream plain answers by our generators.

    `direct`: no middleware wants to see the body, so that it may go straight to the connection.
    """
    chat, completion = state.openai_serving_chat, state.openai_serving_completion
    if writes_plain_streams(chat):
        chat.chat_completion_stream_generator = _chats(chat, direct)
    if writes_plain_streams(completion):
        completion.completion_stream_generator = _completions(completion, direct)


def writes_plain_streams(serving: Any) -> bool:
    """Whether nothing but the answer's text is told of a stream, or kept of it, by options of the server."""
    wants_more = (
        getattr(serving, "parser_cls", None) is not None
        or serving.enable_prompt_tokens_details
        or serving.enable_per_request_metrics
        or getattr(serving, "enable_log_outputs", False)
    )
    return not wants_more and serving.renderer.tokenizer is not None


def _plain_request(request: ChatCompletionRequest | CompletionRequest) -> bool:
    return (
        request.n in (None, 1)
        and not request.echo
        and request.prompt_logprobs is None
        and not request.return_token_ids
        and not request.use_beam_search
        and request.stream_interval is None
    )


def plain_chat(request: ChatCompletionRequest) -> bool:
    """Whether a chat wants nothing but text, in one answer."""
    return not (request.logprobs or request.tools or request.return_prompt_text) and _plain_request(request)


def plain_completion(request: CompletionRequest, prompts: int) -> bool:
    """Whether a completion of so many prompts does."""
    return prompts == 1 and request.logprobs is None and _plain_request(request)


def _chats(serving: Any, direct: bool) -> Callable[..., AsyncIterator[Any]]:
    theirs = serving.chat_completion_stream_generator

    def streamed(
        request: ChatCompletionRequest,
        outputs: AsyncIterator[RequestOutput],
        request_id: str,
        model: str,
        conversation: Any,
        tokenizer: Any,
        told: RequestResponseMetadata,
        **more: Any,
    ) -> AsyncIterator[Any]:
        if not plain_chat(request):
            return theirs(request, outputs, request_id, model, conversation, tokenizer, told, **more)  # type: ignore[no-any-return]
        stream = _stream(serving, request, Chunks.chat, request_id, int(time.time()), model, direct)
        return _generate(serving, stream, outputs, request_id, told)

    return streamed


def _completions(serving: Any, direct: bool) -> Callable[..., AsyncIterator[Any]]:
    theirs = serving.completion_stream_generator

    def streamed(
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
            return theirs(request, inputs, outputs, request_id, created, model, **more)  # type: ignore[no-any-return]
        stream = _stream(serving, request, Chunks.completion, request_id, created, model, direct)
        return _generate(serving, stream, _second(outputs), request_id, request_metadata)

    return streamed


def _stream(
    serving: Any, request: Any, make: Make, request_id: str, created: int, model: str, direct: bool
) -> PlainStream:
    usage = Usage(*should_include_usage(request.stream_options, serving.enable_force_include_usage))
    made = partial(make, request_id, created, model, usage, serving.system_fingerprint)
    role = serving.get_chat_request_role(request) if make == Chunks.chat else ""
    return PlainStream(made, role, caller.get().body if direct else None)


async def _second(outputs: AsyncIterator[tuple[int, RequestOutput]]) -> AsyncIterator[RequestOutput]:
    async for _, output in outputs:
        yield output


async def _generate(
    serving: Any,
    stream: PlainStream,
    outputs: AsyncIterator[RequestOutput],
    request_id: str,
    told: RequestResponseMetadata,
) -> AsyncIterator[bytes]:
    """The parts of the body that go through the application: the first and the last; errors as vLLM words them."""
    submitted.set(stream)  # for this task alone, which submits its request with the first step of `outputs`
    cut = None
    try:
        async for output in outputs:
            if output.outputs:
                cut = output.outputs[0]
            elif not stream.direct and not stream.ended and (news := stream.news()):
                yield news
                stream.begun()
        if cut is not None:
            serving._raise_if_error(cut.finish_reason, request_id)
        prompt_tokens, tokens = stream.counted
        told.final_usage_info = UsageInfo(
            prompt_tokens=prompt_tokens, completion_tokens=tokens, total_tokens=prompt_tokens + tokens
        )
        yield stream.last(cut) + stream.totals() + DONE
    except GenerationError as error:
        yield _error(serving._convert_generation_error_to_streaming_response(error))
    except VLLMClientError as error:  # of the request, and no trouble of ours
        yield _error(serving.create_streaming_error_response(error))
    except Exception as error:
        if getattr(error, "http_status", None) is None:  # a bug: what it says is for the log
            log.error("a stream failed", request_id=request_id, exc_info=error)
            internal = PolyphaseError(f"internal error: {type(error).__name__}")
            error = GracefulHTTPError(internal.message, HTTPStatus(internal.http_status))
        else:
            log.warning("a stream failed", request_id=request_id, error=str(error))
        yield _error(serving.create_streaming_error_response(error))
    finally:
        submitted.set(None)  # a request that follows on this connection may inherit the task's context


def _error(said: str) -> bytes:
    return f"data: {said}\n\n".encode() + DONE


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
