"""The surface of the API: which of vLLM's routes are served, and how what none of its handlers foresaw is answered."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import cache, partial, wraps
from threading import Lock
from typing import Any

import tokenizers.decoders
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from pydantic_core import SchemaValidator
from starlette.exceptions import HTTPException
from vllm.entrypoints.anthropic.api_router import translate_error_response
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineGenerateError

from gateway.request_context import PARSED, caller
from shared.errors import InvalidRequest, NotFound, PolyphaseError
from shared.policy.fair_share import FairLine, Shares
from shared.runtime.http import error_body
from shared.runtime.logs import get_log

# MERGED served.py
# Which of vLLM's routes are not served, and why. Every other route that vLLM mounts is served.
#
# This table is the only list. A test compares it with what vLLM mounts with all its options on, and with docs/api.md.


_SPLIT = (
    "it is one half of a front end that is split over several servers, and a gateway is the whole of one: send token "
    "ids as `prompt` to /v1/completions with `return_token_ids`, or text to /tokenize"
)
_BY_ID = "any client that knows an id could end the request of another client: close the connection instead"
_STORED = "no gateway stores responses: keep the answer of the request itself"
_SCALES = "instances join and leave the cluster by themselves: use `polyphase drain` and `polyphase flip`"
_ADAPTERS = "this cluster serves no LoRA adapters: name the model itself"
_ENGINE = "it is about an engine in the server's process, and a gateway has none: use `polyphase` for instances"
_WEIGHTS = "weights are loaded when an instance starts: restart it with the model that it should serve"

UNSERVED: dict[str, str] = {
    "/v1/chat/completions/render": _SPLIT,
    "/v1/completions/render": _SPLIT,
    "/v1/messages/render": _SPLIT,
    "/v1/responses/render": _SPLIT,
    "/v1/chat/completions/derender": _SPLIT,
    "/v1/completions/derender": _SPLIT,
    "/inference/v1/generate": _SPLIT,
    "/inference/v1/abort_requests": _BY_ID,
    "/abort_requests": _BY_ID,
    "/v1/responses/{response_id}": _STORED,
    "/v1/responses/{response_id}/cancel": _STORED,
    "/v1/systemone": (
        "it reads its text once for each question, and fetches images from addresses that clients name, and no limit "
        "of this gateway covers that: send completions with `logprobs` and `logprob_token_ids`"
    ),
    "/v1/load_lora_adapter": _ADAPTERS,
    "/v1/unload_lora_adapter": _ADAPTERS,
    "/adapters": _ADAPTERS,
    "/adapters/{adapter_name}": _ADAPTERS,
    "/scale_elastic_ep": _SCALES,
    "/is_scaling_elastic_ep": _SCALES,
    "/fault_tolerance/apply": _SCALES,
    "/fault_tolerance/status": _SCALES,
    "/kv_event_sources": "KV events come from instances, which publish them to the schedulers of the cluster alone",
    "/start_profile": _ENGINE,
    "/stop_profile": _ENGINE,
    "/reset_prefix_cache": _ENGINE,
    "/reset_mm_cache": _ENGINE,
    "/reset_encoder_cache": _ENGINE,
    "/collective_rpc": _ENGINE,
    "/server_info": _ENGINE,
    "/sleep": _ENGINE,
    "/release_kv_cache_memory": _ENGINE,
    "/wake_up": _ENGINE,
    "/is_sleeping": _ENGINE,
    "/pause": _ENGINE,
    "/resume": _ENGINE,
    "/is_paused": _ENGINE,
    "/get_world_size": _ENGINE,
    "/init_weight_transfer_engine": _WEIGHTS,
    "/shutdown_weight_transfer_engine": _WEIGHTS,
    "/start_weight_update": _WEIGHTS,
    "/start_draft_weight_update": _WEIGHTS,
    "/update_weights": _WEIGHTS,
    "/finish_weight_update": _WEIGHTS,
    "/update_weight_version": _WEIGHTS,
    "/weight_info": _WEIGHTS,
    "/weight_checker": _WEIGHTS,
}

_PATTERNS = {re.compile(re.sub(r"{\w+}", "[^/]+", path)): why for path, why in UNSERVED.items()}


def why_not(path: str) -> str:
    """Why a request for `path` is not served; empty where vLLM has no such route, or it is served."""
    return next((why for pattern, why in _PATTERNS.items() if pattern.fullmatch(path)), "")


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

    Answers are counted at the edge: see `gateway.metrics`.
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


# MERGED tokenising.py
# The threads in which vLLM renders chats and tokenises prompts, shared fairly between callers.
#
# A text of some megabytes occupies a thread for seconds. Therefore one thread is left to short bodies, and of those
# that wait for a thread the caller goes first whose work has taken the least thread time.


LONG_BYTES = 64 << 10  # of a body: what tokenises for more than some tens of milliseconds
SLOTS = 2
Submit = Callable[..., Future[Any]]


class _Work:
    """One call that waits for a thread or has one."""

    __slots__ = ("caller", "future", "long", "run")

    def __init__(self, who: str, long: bool, run: Callable[[], Any]) -> None:
        self.caller = who
        self.long = long
        self.run = run
        self.future: Future[Any] = Future()


class TokeniserSlots:
    """Takes the place of an executor's `submit`, in front of its threads. With one thread, long and short alternate."""

    def __init__(self, submit: Submit, slots: int, weights: Mapping[str, float] | None = None) -> None:
        self._submit = submit
        self._slots = slots
        self._most_long = max(1, slots - 1)
        self._shares = Shares(weights)
        self._short: FairLine[_Work] = FairLine(self._shares)
        self._long: FairLine[_Work] = FairLine(self._shares)
        self._running = {True: 0, False: 0}  # by whether they are long
        self._last_long = False
        self._lock = Lock()

    def submit(self, call: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        """Have `call` run in a thread once it is its turn."""
        who = caller.get(None)
        name, size = (who.ticket.caller, who.body_bytes) if who is not None else ("", 0)
        work = _Work(name, size > LONG_BYTES, partial(call, *args, **more))
        with self._lock:
            self._shares.came(name, time.monotonic())
            (self._long if work.long else self._short).push(work, name)
            started = self._take()
        self._start(started)
        return work.future

    def _take(self) -> list[_Work]:
        """Those whose turn it is."""
        taken: list[_Work] = []
        while sum(self._running.values()) < self._slots and (work := self._next()) is not None:
            (self._long if work.long else self._short).remove(work, work.caller)
            if work.future.set_running_or_notify_cancel():
                self._running[work.long] += 1
                self._last_long = work.long
                taken.append(work)
            else:
                self._shares.left(work.caller, time.monotonic())
        return taken

    def _next(self) -> _Work | None:
        short, long = self._short.head(), self._long.head()
        if long is None or self._running[True] >= self._most_long:
            return short
        if short is not None and self._slots == 1 and self._last_long:
            return short
        return long

    def _start(self, works: list[_Work]) -> None:
        for work in works:
            try:
                self._submit(self._run, work)
            except RuntimeError as error:  # the pool is shut down
                work.future.set_exception(error)
                self._ended(work, 0.0)

    def _run(self, work: _Work) -> None:
        """In a thread of the pool."""
        began_s = time.monotonic()
        try:
            result = work.run()
        except BaseException as error:  # its caller's
            self._ended(work, time.monotonic() - began_s)
            work.future.set_exception(error)
        else:
            self._ended(work, time.monotonic() - began_s)
            work.future.set_result(result)

    def _ended(self, work: _Work, took_s: float) -> None:
        with self._lock:
            self._running[work.long] -= 1
            self._shares.charge(work.caller, max(1, int(took_s * 1e6)), 0)
            self._shares.left(work.caller, time.monotonic())
            started = self._take()
        self._start(started)


def share_threads(renderer: Any, slots: int, weights: Mapping[str, float] | None = None) -> None:
    """Have a renderer of vLLM's (checked against 0.32) give its `slots` threads to callers fairly."""
    renderer._executor.submit = TokeniserSlots(renderer._executor.submit, slots, weights).submit


# MERGED detokenising.py
# Detokenisers that begin with the end of a prompt.
#
# The text of an answer's first tokens may depend on the prompt's last ones: where a space belongs, or the rest of a
# character. vLLM has its detokeniser read all of the prompt, which takes 60 ms of the event loop for 120,000 tokens.


END_TOKENS = 32  # a character has 4 bytes at most; the others are for special tokens, which have no text


@cache
def read_only_ends() -> None:
    """Have vLLM's detokenisers do so in this process: it looks this class up for each request, to be replaced."""
    whole = tokenizers.decoders.DecodeStream

    def of_end(ids: Sequence[int] | None = None, skip_special_tokens: bool = False) -> tokenizers.decoders.DecodeStream:
        return whole(ids=None if ids is None else list(ids[-END_TOKENS:]), skip_special_tokens=skip_special_tokens)

    tokenizers.decoders.DecodeStream = of_end  # type: ignore[assignment,misc]


# MERGED validation.py
# Patches of vLLM's request models: a list's validation stops at its first bad element; /tokenize bounds texts.
#
# Without the first one pydantic collects the errors of every element against every member of a union: a body of 41 kB
# with 4,096 bad items of `/v1/responses` took 13 s of the event loop, and takes 3 ms so. Without the second one vLLM
# tokenises texts of any length, which occupies a thread for seconds. Checked against vLLM 0.32 and pydantic 2;
# `tests/gateway/test_validation.py` fails where the models are built otherwise.


REQUEST_MODELS: tuple[type[BaseModel], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
    AnthropicMessagesRequest,
    AnthropicCountTokensRequest,
    TokenizeCompletionRequest,
    TokenizeChatRequest,
    DetokenizeRequest,
)
_LISTS = ("list", "tuple", "set", "frozenset")


def stop_at_first_errors() -> None:
    """Patch the models. Routes that are made before keep validators of their own."""
    for model in REQUEST_MODELS:
        schema = model.__pydantic_core_schema__
        _fail_fast(schema)
        model.__pydantic_validator__ = SchemaValidator(schema, _use_prebuilt=False)  # the prebuilt one is the old one


def bound_tokenize_texts(max_chars_per_token: int) -> None:
    """Have `/tokenize` refuse texts that cannot fit the model by their characters alone, before they are tokenised.

    max_chars_per_token: of the model's tokenizer. Texts of a few more tokens than the context are still counted.
    """
    for model in (TokenizeCompletionRequest, TokenizeChatRequest):
        params_of = getattr(model.build_tok_params, "__wrapped__", model.build_tok_params)
        model.build_tok_params = _bounded(params_of, max_chars_per_token)


def _bounded(params_of: Callable[..., Any], max_chars_per_token: int) -> Callable[..., Any]:
    @wraps(params_of)
    def bounded(request: Any, model_config: Any) -> Any:
        chars, most = _chars(request), model_config.max_model_len * max_chars_per_token
        if chars > most:
            raise VLLMValidationError(
                f"the text has {chars} characters; the model's context of {model_config.max_model_len} tokens has "
                f"{most} at most: send a shorter one",
                parameter="messages" if isinstance(request, TokenizeChatRequest) else "prompt",
            )
        return params_of(request, model_config)

    return bounded


def _chars(request: Any) -> int:
    if isinstance(request, TokenizeCompletionRequest):
        return len(request.prompt)
    contents = [message.get("content") for message in request.messages]
    return sum(len(content) for content in contents if isinstance(content, str))


def _fail_fast(schema: Any) -> None:
    """Change every list of a core schema, whose parts may refer to each other, in place."""
    seen: set[int] = set()
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if id(part) in seen:
                continue
            seen.add(id(part))
            if part.get("type") in _LISTS:
                part["fail_fast"] = True
            waiting.extend(part.values())
        elif isinstance(part, list | tuple):
            waiting.extend(part)
