"""Patches of vLLM's request models: a list's validation stops at its first bad element; /tokenize bounds texts.

Without the first one pydantic collects the errors of every element against every member of a union: a body of 41 kB
with 4,096 bad items of `/v1/responses` took 13 s of the event loop, and takes 3 ms so. Without the second one vLLM
tokenises texts of any length, which occupies a thread for seconds. Checked against vLLM 0.32 and pydantic 2;
`tests/gateway/test_validation.py` fails where the models are built otherwise.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from pydantic import BaseModel
from pydantic_core import SchemaValidator
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest
from vllm.exceptions import VLLMValidationError

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
