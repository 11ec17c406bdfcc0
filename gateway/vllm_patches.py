"""Every change that the gateway makes to vLLM in its process, and the table of the routes that are not served.

All patches were checked against vLLM 0.32. `tests/gateway/test_vllm.py` compares the source of each patched or
replaced part of vLLM with the one that was checked, and fails when an upgrade changes it; other tests check the effect
of each patch. `gateway.app` applies the patches at the start, in the order in which they stand here; `gateway.core`
applies the ones of the front end.
"""

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache, partial, wraps
from importlib.util import find_spec
from threading import Lock
from typing import Any

import tokenizers.decoders
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from pydantic_core import SchemaValidator
from starlette.exceptions import HTTPException
from vllm import SamplingParams
from vllm.config import ModelConfig, VllmConfig
from vllm.entrypoints.anthropic.api_router import translate_error_response
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMValidationError
from vllm.multimodal import audio
from vllm.renderers.chat_utils import BaseMultiModalItemTracker
from vllm.utils.async_utils import make_async
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput
from vllm.v1.structured_output import backend_xgrammar

from gateway.admission import current_request
from gateway.request_hints import PARSED
from shared.errors import InvalidRequest, NotFound, PolyphaseError
from shared.policy.fair_share import CallerQueue, TokenCounters
from shared.runtime.http import error_body
from shared.runtime.logs import get_log

log = get_log(__name__)
Handler = Callable[..., Awaitable[Any]]

# Which of vLLM's routes are not served, and why; every other route that vLLM mounts is served. This table is the only
# list: a test compares it with what vLLM mounts with all its options on, and with docs/api.md.
_SPLIT = (
    "it is one half of a front end that is split over several servers, and a gateway is the whole of one: send token "
    "ids as `prompt` to /v1/completions with `return_token_ids`, or text to /tokenize"
)
_BY_ID = "any client that knows an id could end the request of another client: close the connection instead"
_STORED = "no gateway stores responses: keep the answer of the request itself"
_SCALES = "instances join and leave the cluster by themselves: use `polyphase drain` and `polyphase flip`"
_ADAPTERS = (
    "adapters are loaded while serving only with `lora: {allow_runtime_updating: true}` in the cluster file; otherwise "
    "write them under `lora`, and restart the suite"
)
_SAGEMAKER = "it is another name of /v1/load_lora_adapter and /v1/unload_lora_adapter: use these"
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
    "/adapters": _SAGEMAKER,
    "/adapters/{adapter_name}": _SAGEMAKER,
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

_UNSERVED_PATTERNS = {re.compile(re.sub(r"{\w+}", "[^/]+", path)): why for path, why in UNSERVED.items()}
_COUNTING_MIDDLEWARE = "PrometheusInstrumentatorMiddleware"
# Middleware that does not look at the parts of a body.
_PASSING_MIDDLEWARE = frozenset(
    {"AuthenticationMiddleware", "CORSMiddleware", "ScalingMiddleware", "XRequestIdMiddleware"}
)


def why_not(path: str) -> str:
    """Why a request for `path` is not served; empty where vLLM has no such route, or the route is served."""
    return next((why for pattern, why in _UNSERVED_PATTERNS.items() if pattern.fullmatch(path)), "")


# The application: its routes, and the answers to errors that no handler foresaw.


class MethodNotAllowed(InvalidRequest):
    """The path is served with other methods."""

    code = "method_not_allowed"
    http_status = 405


def trim(app: FastAPI) -> frozenset[str]:
    """Remove the unserved routes and give unforeseen errors OpenAI's shape; the paths that are served.

    Answers are counted at the edge (`metrics.HttpSeries`) in place of vLLM's middleware.
    """
    app.user_middleware = [each for each in app.user_middleware if _name(each) != _COUNTING_MIDDLEWARE]
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") not in UNSERVED]
    app.add_exception_handler(HTTPException, _answer_unrouted)
    for kind in (EngineGenerateError, Exception):
        app.add_exception_handler(kind, _answer_unforeseen)
    app.middleware_stack = None  # vLLM has built the stack already; the next build includes the handlers
    return frozenset(getattr(route, "path", "") for route in app.router.routes)


def bodies_pass(app: FastAPI) -> bool:
    """Whether no middleware of the application wants to see the parts of a body."""
    return all(_name(each) in _PASSING_MIDDLEWARE for each in app.user_middleware)


def _name(middleware: Any) -> str:
    return getattr(middleware.cls, "__name__", "")


def _answer_unrouted(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        why = why_not(request.url.path)
        return _response(NotFound(f"{what} is not served: {why}" if why else f"there is no route {what}"))
    if error.status_code == 405:
        return _response(MethodNotAllowed(f"{what}: the method is not allowed"))
    answer = _response(InvalidRequest(str(error.detail)))
    answer.status_code = error.status_code
    return answer


def _answer_unforeseen(request: Request, error: Exception) -> JSONResponse:
    cause = error.__cause__ or error
    if isinstance(cause, VLLMClientError | GracefulHTTPError):  # of a stream that was announced
        answer = create_error_response(cause)
        return JSONResponse(answer.model_dump(), status_code=answer.error.code)
    log.error("a request crashed", path=request.url.path, exc_info=cause)  # the details are not for the client
    return _response(PolyphaseError(f"internal error: {type(cause).__name__}"))


def _response(error: PolyphaseError) -> JSONResponse:
    return JSONResponse(error_body(error), status_code=error.http_status)


def rejection(path: str, error: Exception) -> tuple[int, bytes]:
    """The status and body with which vLLM answers `error` to a request without a stream."""
    answer = create_error_response(error)
    if path == "/v1/messages":
        response = translate_error_response(answer)
    else:
        response = JSONResponse(answer.model_dump(), status_code=answer.error.code)
    return response.status_code, bytes(response.body)


# Request models. Without `stop_at_first_errors` pydantic collects the errors of every element of a list against every
# member of a union: a body of 41 kB with 4,096 bad items for /v1/responses took 13 s of the event loop, with it 3 ms.

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


def stop_at_first_errors() -> None:
    """Have the validation of a list stop at its first bad element. Routes that exist already keep their validators."""
    for model in REQUEST_MODELS:
        schema = model.__pydantic_core_schema__
        _fail_fast(schema)
        model.__pydantic_validator__ = SchemaValidator(schema, _use_prebuilt=False)  # the prebuilt one is the old one


def _fail_fast(schema: Any) -> None:
    """Change each list of a core schema, whose parts may refer to each other, in place."""
    seen: set[int] = set()
    pending: list[Any] = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, dict) and id(part) not in seen:
            seen.add(id(part))
            if part.get("type") in ("list", "tuple", "set", "frozenset"):
                part["fail_fast"] = True
            pending.extend(part.values())
        elif isinstance(part, list | tuple):
            pending.extend(part)


def bound_tokenize_texts(max_chars_per_token: int) -> None:
    """Have `/tokenize` refuse a text that cannot fit the model by its length, before it occupies a thread for seconds.

    max_chars_per_token: of the model's tokenizer. Texts of a few tokens more than the context are still counted.
    """
    for model in (TokenizeCompletionRequest, TokenizeChatRequest):
        params_of = getattr(model.build_tok_params, "__wrapped__", model.build_tok_params)
        model.build_tok_params = _bounded(params_of, max_chars_per_token)


def _bounded(params_of: Callable[..., Any], max_chars_per_token: int) -> Callable[..., Any]:
    @wraps(params_of)
    def bounded(request: Any, model_config: Any) -> Any:
        if isinstance(request, TokenizeCompletionRequest):
            field, chars = "prompt", len(request.prompt)
        else:
            contents = [message.get("content") for message in request.messages]
            field, chars = "messages", sum(len(content) for content in contents if isinstance(content, str))
        limit = model_config.max_model_len * max_chars_per_token
        if chars > limit:
            raise VLLMValidationError(
                f"the text has {chars} characters; the model's context of {model_config.max_model_len} tokens has "
                f"at most {limit}: send a shorter text",
                parameter=field,
            )
        return params_of(request, model_config)

    return bounded


def use_parsed_bodies() -> None:
    """Have the framework (starlette 1.10) use the value of a body that the edge has parsed with the same parser."""
    Request.json = _json  # type: ignore[method-assign, assignment]


async def _json(self: Request) -> Any:
    if not hasattr(self, "_json"):
        body, parsed = await self.body(), self.scope.get(PARSED)
        self._json = json.loads(body) if parsed is None or parsed.taken else parsed.take()
    return self._json


# Handlers of requests.


def wrap_handlers(state: Any) -> None:
    """Have vLLM's handlers release the body of a request, and answer the service tier that it is served as.

    A streamed answer would otherwise hold the bytes and the parsed JSON, which the framework keeps with a request,
    until it has ended. The tier is named where the request had one; chunks of streams have no field for it.
    """
    for serving, method in (
        (state.openai_serving_chat, "create_chat_completion"),
        (state.openai_serving_chat_batch, "create_batch_chat_completion"),
        (state.openai_serving_completion, "create_completion"),
        (state.openai_serving_responses, "create_responses"),
        (state.anthropic_serving_messages, "create_messages"),
    ):
        setattr(serving, method, _wrapped(getattr(serving, method)))


def _wrapped(create: Handler) -> Handler:
    async def handle(request: Any, raw_request: Any = None) -> Any:
        for copy in ("_body", "_json"):
            if hasattr(raw_request, copy):
                setattr(raw_request, copy, None)
        tier = current_request.get().tier
        if tier and isinstance(request, ResponsesRequest):  # its answers and events repeat what the request says
            request.service_tier = tier
        answer = await create(request, raw_request)
        if tier and isinstance(answer, ChatCompletionResponse | CompletionResponse):
            answer.service_tier = tier
        return answer

    return handle


def name_stream_errors(messages: Any) -> None:
    """Have the Messages API send an error in a stream as such; vLLM's converter rejects it as no chunk of a chat."""
    convert: Callable[[AsyncIterator[str]], AsyncIterator[str]] = messages.message_stream_converter

    async def converted(chunks: AsyncIterator[str]) -> AsyncIterator[str]:
        errors: list[str] = []

        async def until_error() -> AsyncIterator[str]:
            async for chunk in chunks:
                if chunk.startswith('data: {"error"'):
                    errors.append(json.loads(chunk.removeprefix("data: "))["error"]["message"])
                    return
                yield chunk

        async for event in convert(until_error()):
            yield event
        for message in errors:
            error = {"type": "error", "error": {"type": "api_error", "message": message}}
            yield f"event: error\ndata: {json.dumps(error)}\n\n"

    messages.message_stream_converter = converted


def score_in_threads(scoring: Any, renderer: Any) -> None:
    """Have vLLM's generative scoring tokenise in the renderer's threads instead of on the event loop."""
    build: Callable[..., Coroutine[Any, Any, Any]] = scoring._build_prompts

    def built(*args: Any) -> Any:
        try:
            build(*args).send(None)  # it awaits nothing
        except StopIteration as end:
            return end.value
        raise RuntimeError("vLLM's generative scoring awaits something while it builds prompts")

    async def build_in_thread(*args: Any) -> Any:
        return await asyncio.wrap_future(renderer._executor.submit(built, *args))

    scoring._build_prompts = build_in_thread


def replace_stream_generator(
    serving: Any, method: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Have a handler write streams by `wrap(its own generator)`."""
    setattr(serving, method, wrap(getattr(serving, method)))


# The front end, in place of its engine core.


@contextmanager
def engine_core(core: Any) -> Iterator[None]:
    """Have an AsyncLLM that is made in the block use `core` as its engine core; vLLM has no argument for it."""
    make = EngineCoreClient.make_async_mp_client
    EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: core)
    try:
        yield
    finally:
        EngineCoreClient.make_async_mp_client = make


_validate_item = BaseMultiModalItemTracker._validate_add
_media_refusals: dict[int, Callable[[str], str]] = {}  # by the identity of a front end's model configuration


def refuse_media(model: ModelConfig, why: Callable[[str], str]) -> None:
    """Have vLLM's chat parser, which all APIs share, refuse items of some modalities before they are fetched.

    why: the reason by modality; empty for one that is served. model: the configuration of the front end.
    """
    _media_refusals[id(model)] = why
    BaseMultiModalItemTracker._validate_add = _validate_served


def _validate_served(tracker: BaseMultiModalItemTracker, modality: str) -> Any:
    if reason := _media_refusals[id(tracker.model_config)](modality):
        raise VLLMValidationError(f"{modality}: {reason}", parameter=modality)
    return _validate_item(tracker, modality)


def guard_media(renderer: Any) -> None:
    """Have vLLM's renderer refuse ids (`uuid`) that clients give to media items, and items whose processing needs a
    library that is missing.

    It would use the ids in place of hashes of the items' content: a client could then find the KV of another's image.
    """
    with_names, process = renderer._process_mm_uuids, renderer._process_multimodal

    def without_names(data: Any, items: Any, names: Mapping[str, Sequence[str | None]], request_id: str) -> Any:
        if any(name is not None for each in names.values() for name in each):
            raise VLLMValidationError("uuid: media items are known by their content: leave it out", parameter="uuid")
        return with_names(data, items, names, request_id)

    def processed(*args: Any, **more: Any) -> Any:
        try:
            return process(*args, **more)
        except ImportError as error:
            raise VLLMValidationError(f"the prompt's media items cannot be processed here: {error}") from error

    renderer._process_mm_uuids, renderer._process_multimodal = without_names, processed
    renderer._process_multimodal_async = make_async(processed, executor=renderer._mm_executor)


def resample_without_torchaudio() -> None:
    """Have vLLM change the sampling rate of sounds with SciPy where torchaudio, its default, is not installed."""
    if find_spec("torchaudio") is None:
        audio.resample_audio_torchaudio = audio.resample_audio_scipy


def send_all_media(config: VllmConfig) -> None:
    """Have vLLM's front end give the data of an item with each request, and not only its hash if an engine has had it.

    vLLM does so with several API servers; the data of recent items is then kept in this process.
    """
    config.parallel_config._api_process_count = 2


def process_each(processor: OutputProcessor, failed: Callable[[str, Exception], None]) -> None:
    """Have vLLM's output processor end only the request whose output raises an exception.

    vLLM processes the outputs of all requests in one loop of one task, `AsyncLLM`'s `output_handler`; an exception of
    one of them would end the task, and with it the front end. Should that task die nevertheless, the process ends.
    """
    process = processor.process_outputs

    def processed(outputs: list[Any], *timestamp_and_stats: Any, **more: Any) -> OutputProcessorOutput:
        ended: list[str] = []
        for output in outputs:
            try:
                ended += process([output], *timestamp_and_stats, **more).reqs_to_abort
            except Exception as error:
                failed(output.request_id, error)
        return OutputProcessorOutput(request_outputs=[], reqs_to_abort=ended)

    processor.process_outputs = processed
    processor.propagate_error = _end_process


def _end_process(error: BaseException) -> None:
    """At once: open streams break off, and the launcher restarts the gateway. Every answer would be an error."""
    log.critical("vLLM's output handler died; the process ends", exc_info=error)
    os._exit(os.EX_SOFTWARE)


validate_grammar = backend_xgrammar.validate_xgrammar_grammar  # vLLM's own, for processes that compile grammars


def defer_grammars(processor: Any = None) -> None:
    """Have vLLM not compile grammars on the event loop: `structured_outputs` compiles them in other processes.

    Handlers and parsers call the validation before a request is complete, the input processor (`processor`) after.
    """
    backend_xgrammar.validate_xgrammar_grammar = _check_features
    if processor is not None:
        processor.structured_outputs_config = None


def _check_features(params: SamplingParams) -> None:
    """The cheap part of vLLM's validation: parsers depend on what xgrammar is known not to support."""
    schema = params.structured_outputs.json if params.structured_outputs is not None else None
    if schema:
        document = json.loads(schema) if isinstance(schema, str) else schema
        if backend_xgrammar.has_xgrammar_unsupported_json_features(document):
            raise VLLMValidationError("the JSON schema has features that xgrammar does not support")


PROMPT_END_TOKENS = 32  # a character has at most 4 bytes; the other tokens are for special tokens, which have no text


@cache
def detokenise_from_prompt_ends() -> None:
    """Have vLLM's detokenisers read only the end of a prompt; they look this class up for each request.

    The text of an answer's first tokens depends on the prompt's last ones: where a space belongs, or the rest of a
    character. vLLM reads the whole prompt, which takes 60 ms of the event loop for 120,000 tokens.
    """
    stream = tokenizers.decoders.DecodeStream

    def from_end(
        ids: Sequence[int] | None = None, skip_special_tokens: bool = False
    ) -> tokenizers.decoders.DecodeStream:
        end = None if ids is None else list(ids[-PROMPT_END_TOKENS:])
        return stream(ids=end, skip_special_tokens=skip_special_tokens)

    tokenizers.decoders.DecodeStream = from_end  # type: ignore[assignment,misc]


# The threads in which vLLM renders chats and tokenises prompts. A text of some megabytes occupies a thread for seconds:
# one thread is reserved for short bodies, and the next caller is the one whose work has taken the least thread time.

LONG_BYTES = 64 << 10  # a longer body takes more than some tens of milliseconds to tokenise
SLOTS = 2
Submit = Callable[..., Future[Any]]


def share_threads(renderer: Any, slots: int, weights: Mapping[str, float] | None = None) -> None:
    """Have the `slots` threads of a renderer serve callers fairly, and tokenise plain streams' short prompts inline."""
    renderer._executor.submit = TokeniserSlots(renderer._executor.submit, slots, weights).submit


class _Work:
    """A call that waits for a thread or runs in one."""

    __slots__ = ("caller", "future", "long", "run")

    def __init__(self, caller: str, long: bool, run: Callable[[], Any]) -> None:
        self.caller = caller
        self.long = long
        self.run = run
        self.future: Future[Any] = Future()


class TokeniserSlots:
    """Replaces an executor's `submit`, in front of its threads. With one thread, long and short calls alternate."""

    def __init__(self, submit: Submit, slots: int, weights: Mapping[str, float] | None = None) -> None:
        self._submit = submit
        self._slots = slots
        self._max_long = max(1, slots - 1)
        self._shares = TokenCounters(weights)
        self._short: CallerQueue[_Work] = CallerQueue(self._shares)
        self._long: CallerQueue[_Work] = CallerQueue(self._shares)
        self._running = {True: 0, False: 0}  # by whether they are long
        self._last_long = False
        self._lock = Lock()

    def submit(self, call: Callable[..., Any], /, *args: Any, **more: Any) -> Future[Any]:
        """Have a thread run `call` when it is the caller's turn; at once where the request is to be tokenised inline,
        because a thread costs more than a short prompt.
        """
        request = current_request.get(None)
        if request is not None and request.tokenise_inline:
            done: Future[Any] = Future()
            try:
                done.set_result(call(*args, **more))
            except Exception as error:  # for the caller
                done.set_exception(error)
            return done
        caller, size = (request.caller, request.body_bytes) if request is not None else ("", 0)
        work = _Work(caller, size > LONG_BYTES, partial(call, *args, **more))
        with self._lock:
            self._shares.came(caller, time.monotonic())
            (self._long if work.long else self._short).push(work, caller)
            started = self._take()
        self._start(started)
        return work.future

    def _take(self) -> list[_Work]:
        """Take the calls whose turn it is out of the queues."""
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
        if long is None or self._running[True] >= self._max_long:
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
        began_mono = time.monotonic()
        try:
            result = work.run()
        except BaseException as error:  # for the caller
            self._ended(work, time.monotonic() - began_mono)
            work.future.set_exception(error)
        else:
            self._ended(work, time.monotonic() - began_mono)
            work.future.set_result(result)

    def _ended(self, work: _Work, took_s: float) -> None:
        with self._lock:
            self._running[work.long] -= 1
            self._shares.charge(work.caller, max(1, int(took_s * 1e6)), 0)
            self._shares.left(work.caller, time.monotonic())
            started = self._take()
        self._start(started)
