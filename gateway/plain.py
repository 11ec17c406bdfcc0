"""Which streams are plain, and their generators in the place of vLLM's.

Plain is a chat or completion with one answer as text, and nothing beside it: no tools or parsers, log probabilities,
token ids, echo, several answers. All others take vLLM's own path.
"""

import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from http import HTTPStatus
from typing import Any

from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import UsageInfo
from vllm.entrypoints.serve.utils.api_utils import should_include_usage
from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMClientError
from vllm.outputs import RequestOutput

from gateway.chunks import DONE, Chunks, Usage
from gateway.context import caller
from gateway.stream import PlainStream, submitted
from shared.errors import PolyphaseError
from shared.runtime.logs import get_log

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
