"""The answers of an emulated engine, which follow from the positions of their tokens."""

import msgspec

from services.worker.engines.base import EngineRequest

_TOKENS = 997  # a prime, so that the tokens of two positions rarely agree
_FIRST = 300  # below it tokenizers keep their special tokens and single bytes


def token_at(position: int) -> int:
    """The token at a position of the sequence: the same on every instance, so that an answer goes on alike after a
    hand-over.
    """
    return _FIRST + position * 7919 % _TOKENS


def output_token(request: EngineRequest, position: int) -> int:
    """The token at a position after the prompt: a forced token of the request, or else `token_at`."""
    output_position = position - len(request.prompt_token_ids)
    if output_position < len(request.forced_tokens):
        return request.forced_tokens[output_position]
    return token_at(position)


def given_tokens(request: EngineRequest) -> list[int]:
    """What is not generated: the prompt, and where the request resumes, the answer so far."""
    if request.resumes:
        return [*request.prompt_token_ids, *request.forced_tokens]
    return request.prompt_token_ids


class _Sampling(msgspec.Struct):
    """The sampling parameters that matter here, by vLLM's names: when an answer ends, beside max_tokens, and log
    probabilities, which an engine without a model does not have.
    """

    stop_token_ids: list[int] = []
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None


_SAMPLING = msgspec.msgpack.Decoder(_Sampling)
_LOGPROBS = ("logprobs", "prompt_logprobs", "logprob_token_ids")


def refusal(request: EngineRequest, capacity_tokens: int) -> str:
    """Why an emulated engine with memory for so many tokens cannot compute this request; empty where it can."""
    if (given := len(given_tokens(request))) >= capacity_tokens:
        what = "a prompt with the answer so far" if request.resumes else "a prompt"
        return f"{what} of {given} tokens: with one output token, it must fit in {capacity_tokens} tokens of KV"
    if request.resumes and (answered := len(request.forced_tokens)) >= request.max_tokens:
        return f"an answer of at most {request.max_tokens} tokens cannot go on: it has {answered}"
    sampling = _sampling(request)
    requested = [f"{name} {value}" for name in _LOGPROBS if (value := getattr(sampling, name)) is not None]
    if not requested:
        return ""
    return f"{', '.join(requested)}: an emulated engine has no model and no log probabilities: leave them out"


def answer_tokens(request: EngineRequest) -> tuple[int, str]:
    """How many tokens are to be generated, and why the answer ends then. An emulated token follows from its position,
    so both are known before. A stop token ends an answer, as with a real engine, so that clients can allow more tokens
    than they get.
    """
    prompt, limit, stops = len(request.prompt_token_ids), request.max_tokens, set(_sampling(request).stop_token_ids)
    answered = len(given_tokens(request)) - prompt
    for at in range(len(request.forced_tokens), limit if stops else 0):
        if token_at(prompt + at) in stops:
            return at + 1 - answered, "stop"
    return limit - answered, "length"


def _sampling(request: EngineRequest) -> _Sampling:
    """Undecodable sampling parameters count as the defaults."""
    try:
        return _SAMPLING.decode(request.generation.sampling)
    except msgspec.MsgspecError:
        return _Sampling()
