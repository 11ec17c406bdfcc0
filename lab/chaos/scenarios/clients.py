"""Floods, slow readers, disconnect storms, and bodies that ask for thousands of answers."""

import asyncio
from random import Random
from typing import Any

from lab.chaos import rude
from lab.chaos.arena import Arena
from lab.chaos.client import Ask, Ending, Reply
from lab.chaos.load import fresh
from lab.chaos.scenario import Scenario

STORM, SLOW, FLOOD, DRIPS = 150, 24, 800, 200
_SLOW_S = 5.0
_BIG_S = 6.0  # who sends a huge body waits so long, and leaves
_HEAD_BYTES = 8 << 20


def _body(arena: Arena) -> dict[str, Any]:
    return dict(arena.asks[0].body)


async def disconnect_storm(arena: Arena) -> None:
    """Clients that leave at any moment: queued, in prefill, in transfer, in decode."""
    rng = Random(arena.rng.getrandbits(32))

    async def one(number: int) -> None:
        await asyncio.sleep(rng.uniform(0.0, 3.0))
        ask = fresh(arena.asks[number % len(arena.asks)])
        await rude.leave(arena.gateways[number % len(arena.gateways)], ask, rng.uniform(0.0, 0.8))

    await rude.crowd(STORM, one)


async def slow_readers(arena: Arena) -> None:
    """Streams that nobody reads."""
    ask = rude.wanting(_body(arena), max_tokens=200)
    await rude.crowd(SLOW, lambda n: rude.never_read(arena.gateways[n % len(arena.gateways)], fresh(ask), _SLOW_S))


async def flood(arena: Arena) -> None:
    """More requests at once than may queue: who is refused is told so, and when to come back."""
    replies: list[Reply | None] = []

    async def one(number: int) -> None:
        ask = fresh(rude.wanting(_body(arena), max_tokens=2))
        replies.append(await rude.body_of(arena.gateways[number % len(arena.gateways)], ask, 30.0))

    with arena.away():
        await rude.crowd(FLOOD, one)
    wrong = [r for r in replies if r is None or r.status not in (200, 429, 503) or r.ending is Ending.HUNG]
    if wrong:
        raise AssertionError(f"{len(wrong)} of {len(replies)} in the flood got no answer or a wrong one: {wrong[0]}")


async def thousand_prompts(arena: Arena) -> None:
    """One body with a thousand prompts."""
    await _big(arena, rude.wanting(_body(arena), prompt=["Hello"] * 1000, stream=False))


async def many_choices(arena: Arena) -> None:
    """One body that asks for five thousand choices."""
    await _big(arena, rude.wanting(_body(arena), n=5000, temperature=0.5, stream=False))


async def _big(arena: Arena, ask: Ask) -> None:
    body = {key: value for key, value in ask.body.items() if key != "stream_options"}
    reply = await rude.body_of(arena.gateways[0], Ask(ask.key, ask.path, body), _BIG_S)
    if reply is not None and reply.status >= 500:
        raise AssertionError(f"a body of {rude.size_of(ask)} bytes was answered by {reply.status}: {reply.error}")


async def costly_grammar(arena: Arena) -> None:
    """A body of a hundred bytes whose grammar takes very long to compile."""
    regex = "((((a{1,60}){1,60}){1,60})b){1,60}"
    ask = rude.wanting(_body(arena), structured_outputs={"regex": regex}, stream=False)
    await _big(arena, ask)


async def slow_heads(arena: Arena) -> None:
    """Connections whose request never ends."""
    await rude.crowd(DRIPS, lambda n: rude.drip(arena.gateways[n % len(arena.gateways)], _SLOW_S))


async def long_heads(arena: Arena) -> None:
    """Heads of many megabytes, to gateways and to the monitor: they are cut off early."""
    monitor = next(p for p in arena.ports if p.service == "monitor" and p.purpose == "http")
    for address in (*arena.gateways, (monitor.host, monitor.port)):
        taken = await asyncio.gather(*(rude.long_head(address, _HEAD_BYTES) for _ in range(4)))
        if max(taken) >= _HEAD_BYTES:
            raise AssertionError(f"{address[0]}:{address[1]} took {max(taken) >> 20} MiB of headers")


async def odd_bodies(arena: Arena) -> None:
    """Wishes that make no sense are the client's fault, never a 500."""
    plain = {key: value for key, value in _body(arena).items() if key not in ("stream", "stream_options")}
    odd: tuple[dict[str, Any], ...] = (
        {"vllm_xargs": {"kv_transfer_params": "x"}},
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"logit_bias": {"99999999": 5}},
        {"stop": [""] * 500},
        {"prompt": []},
        {"prompt": [[]]},
        {"priority": 10**30},
        {"cache_salt": ""},
        {"prompt_logprobs": 10**6},
        {"min_tokens": 10**9},
        {"stop_token_ids": [-1]},
    )
    wrong = []
    for wish in odd:
        reply = await rude.body_of(arena.gateways[0], Ask("odd", "/v1/completions", {**plain, **wish}), 5.0)
        if reply is None or reply.status >= 500 or reply.status == 0:
            wrong.append(f"{wish}: {reply.status if reply else 'no answer'} {reply.error[:80] if reply else ''}")
    if wrong:
        raise AssertionError(f"{len(wrong)} odd bodies: {'; '.join(wrong)}")


CLIENTS = (
    Scenario("disconnect-storm", f"{STORM} clients ask and leave at any moment", disconnect_storm),
    Scenario("slow-readers", f"{SLOW} streams of 200 tokens that nobody reads for 5 s", slow_readers),
    Scenario("flood", f"{FLOOD} requests at once", flood, errors=True),
    Scenario("thousand-prompts", "a body with 1,000 prompts, whose client leaves after 6 s", thousand_prompts),
    Scenario("many-choices", "a body with n = 5,000, whose client leaves after 6 s", many_choices),
    Scenario("costly-grammar", "a short regex that takes minutes to compile", costly_grammar),
    Scenario("slow-heads", f"{DRIPS} requests that come a byte a tenth of a second", slow_heads),
    Scenario("long-heads", "request heads of 8 MiB", long_heads),
    Scenario("odd-bodies", "well-formed bodies with senseless wishes", odd_bodies),
)
