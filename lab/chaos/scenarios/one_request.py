"""One request or one API key that costs much, or goes wrong, beside others that must not notice."""

import asyncio
from typing import Any

from lab.chaos import rude
from lab.chaos.arena import Arena
from lab.chaos.client import Ask, Ending, Reply
from lab.chaos.clusters import CALLERS, QUEUED_TOKENS, secret_of
from lab.chaos.load import Address, fresh
from lab.chaos.scenario import Scenario

_ROUNDS = 20
_ANSWER_S = 10.0
_PICTURE = "data:image/png;base64,aGVsbG8="
_CHAT, _COMPLETE = "/v1/chat/completions", "/v1/completions"

GREEDY_TOKENS, GREEDY_MORE, GREEDY_ROUNDS = 1_900, 28, 3
_FIT = QUEUED_TOKENS // 2 // GREEDY_TOKENS
_SHARE_S = 2.0  # that the prompts of a key's share at both gateways take the prefill instances: others wait behind them


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


async def long_prompts_of_a_key(arena: Arena) -> None:
    """At each gateway one key sends as many long prompts as fit its share of what may wait, and many more, at once."""
    served = 0
    for _ in range(GREEDY_ROUNDS):
        for replies in await asyncio.gather(*(_greedy(address) for address in arena.gateways)):
            done = sum(reply.ending is Ending.DONE for reply in replies)
            refused = [reply for reply in replies if reply.ending is not Ending.DONE]
            for reply in refused:
                if reply.status != 429 or not reply.retry_after:
                    raise AssertionError(f"a prompt over the share was answered by {reply}")
            if done < _FIT or not refused:
                raise AssertionError(
                    f"{done} of {len(replies)} long prompts of a key were served; {_FIT} fit its share"
                )
            served += done
    sent = GREEDY_ROUNDS * len(arena.gateways) * (_FIT + GREEDY_MORE)
    arena.notes.append(f"{served} of {sent} prompts of the greedy key served, the others refused with 429")


async def _greedy(address: Address) -> list[Reply]:
    body = {"model": "demo", "prompt": [400] * GREEDY_TOKENS, "max_tokens": 2, "ignore_eos": True}
    ask = Ask("greedy", _COMPLETE, body, api_key=secret_of("greedy"))
    replies = await asyncio.gather(*(rude.body_of(address, fresh(ask), _ANSWER_S) for _ in range(_FIT + GREEDY_MORE)))
    if None in replies:
        raise AssertionError(f"a prompt of the greedy key was not answered within {_ANSWER_S:.0f} s")
    return [reply for reply in replies if reply is not None]


ONE_REQUEST = (
    Scenario("one-token-prompt-logprobs", "log probabilities of a prompt of one token", one_token_prompt_logprobs),
    Scenario("many-prompt-logprobs", "294,000 log probabilities of prompts in a body", many_prompt_logprobs),
    Scenario("images", "pictures on the three APIs that take them", images),
    Scenario(
        "key-long-prompts",
        "one API key sends long prompts, as many as fit its share and far more",
        long_prompts_of_a_key,
        CALLERS,
        away_s=_SHARE_S,
    ),
)
