"""One request that costs much, or goes wrong, beside others that must not notice."""

from typing import Any

from lab.chaos import rude
from lab.chaos.arena import Arena
from lab.chaos.client import Ask
from lab.chaos.scenario import Scenario

_ROUNDS = 20
_ANSWER_S = 10.0
_PICTURE = "data:image/png;base64,aGVsbG8="
_CHAT, _COMPLETE = "/v1/chat/completions", "/v1/completions"


async def _refused(arena: Arena, path: str, body: dict[str, Any], says: str) -> None:
    """Every gateway answers this body with a 400 that gives the reason, again and again."""
    for number in range(_ROUNDS):
        address = arena.gateways[number % len(arena.gateways)]
        reply = await rude.body_of(address, Ask("rude", path, {"model": "demo", **body}), _ANSWER_S)
        if reply is None or reply.status != 400 or says not in reply.error:
            raise AssertionError(
                f"{path} was answered by {reply and (reply.status, reply.error)}, not 400 with {says!r}"
            )


async def one_token_prompt_logprobs(arena: Arena) -> None:
    """Log probabilities of a prompt of one token, which has none; emulated engines refuse them."""
    body = {"prompt": "World", "max_tokens": 1}
    await _refused(arena, _COMPLETE, {**body, "prompt_logprobs": 1}, "no log probabilities")
    await _refused(arena, _COMPLETE, {**body, "echo": True, "logprobs": 1}, "no log probabilities")


async def many_prompt_logprobs(arena: Arena) -> None:
    """More log probabilities than a body may ask for."""
    body = {"prompt": [[400] * 1000] * 14, "max_tokens": 1, "prompt_logprobs": 20}
    await _refused(arena, _COMPLETE, body, "the limit is")


async def images(arena: Arena) -> None:
    """Pictures, on every API: the engines get tokens alone."""
    text, url = {"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": _PICTURE}}
    await _refused(arena, _CHAT, {"messages": [{"role": "user", "content": [text, url]}]}, "text alone")
    part = {"type": "input_image", "image_url": _PICTURE, "detail": "auto"}
    await _refused(arena, "/v1/responses", {"input": [{"role": "user", "content": [part]}]}, "text alone")
    source = {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}
    said = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    await _refused(arena, "/v1/messages", {"messages": said, "max_tokens": 5}, "text alone")


ONE_REQUEST = (
    Scenario("one-token-prompt-logprobs", "log probabilities of a prompt of one token", one_token_prompt_logprobs),
    Scenario("many-prompt-logprobs", "294,000 log probabilities of prompts in a body", many_prompt_logprobs),
    Scenario("images", "pictures on the three APIs that take them", images),
)
