"""Floods, slow readers, disconnect storms, and bodies that ask for thousands of answers."""

import asyncio
import json
import socket
from contextlib import suppress
from random import Random
from typing import Any

from lab.chaos import hostile
from lab.chaos.arena import Arena
from lab.chaos.load import Address, Ask, Ending, Reply, fresh
from lab.chaos.scenario import Scenario

STORM, SLOW, FLOOD, SLOW_HEADS = 150, 24, 800, 200
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
        await hostile.leave(arena.gateways[number % len(arena.gateways)], ask, rng.uniform(0.0, 0.8))

    await hostile.crowd(STORM, one)


async def slow_readers(arena: Arena) -> None:
    """Streams that nobody reads."""
    ask = hostile.wanting(_body(arena), max_tokens=200)
    await hostile.crowd(
        SLOW, lambda n: hostile.never_read(arena.gateways[n % len(arena.gateways)], fresh(ask), _SLOW_S)
    )


async def flood(arena: Arena) -> None:
    """More requests at once than may queue: who is refused is told so, and when to come back."""
    replies: list[Reply | None] = []

    async def one(number: int) -> None:
        ask = fresh(hostile.wanting(_body(arena), max_tokens=2))
        replies.append(await hostile.body_of(arena.gateways[number % len(arena.gateways)], ask, 30.0))

    with arena.away():
        await hostile.crowd(FLOOD, one)
    wrong = [r for r in replies if r is None or r.status not in (200, 429, 503) or r.ending is Ending.HUNG]
    if wrong:
        raise AssertionError(f"{len(wrong)} of {len(replies)} in the flood got no answer or a wrong one: {wrong[0]}")


async def thousand_prompts(arena: Arena) -> None:
    """One body with a thousand prompts."""
    await _big(arena, hostile.wanting(_body(arena), prompt=["Hello"] * 1000, stream=False))


async def many_choices(arena: Arena) -> None:
    """One body that asks for five thousand choices."""
    await _big(arena, hostile.wanting(_body(arena), n=5000, temperature=0.5, stream=False))


async def _big(arena: Arena, ask: Ask) -> None:
    body = {key: value for key, value in ask.body.items() if key != "stream_options"}
    reply = await hostile.body_of(arena.gateways[0], Ask(ask.key, ask.path, body), _BIG_S)
    if reply is not None and reply.status >= 500:
        raise AssertionError(f"a body of {hostile.size_of(ask)} bytes was answered by {reply.status}: {reply.error}")


async def costly_grammar(arena: Arena) -> None:
    """A body of a hundred bytes whose grammar takes very long to compile."""
    regex = "((((a{1,60}){1,60}){1,60})b){1,60}"
    ask = hostile.wanting(_body(arena), structured_outputs={"regex": regex}, stream=False)
    await _big(arena, ask)


async def slow_heads(arena: Arena) -> None:
    """Connections whose request never ends."""
    await hostile.crowd(SLOW_HEADS, lambda n: hostile.drip(arena.gateways[n % len(arena.gateways)], _SLOW_S))


async def long_heads(arena: Arena) -> None:
    """Heads of many megabytes, to gateways and to the monitor: they are cut off early."""
    monitor = next(p for p in arena.ports if p.service == "monitor" and p.purpose == "http")
    for address in (*arena.gateways, (monitor.host, monitor.port)):
        taken = await asyncio.gather(*(hostile.long_head(address, _HEAD_BYTES) for _ in range(4)))
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
        reply = await hostile.body_of(arena.gateways[0], Ask("odd", "/v1/completions", {**plain, **wish}), 5.0)
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
    Scenario("slow-heads", f"{SLOW_HEADS} requests that come a byte a tenth of a second", slow_heads),
    Scenario("long-heads", "request heads of 8 MiB", long_heads),
    Scenario("odd-bodies", "well-formed bodies with senseless wishes", odd_bodies),
)

# MERGED bodies.py
# Bodies, answers and scrapes within every limit by themselves that together could harm others: each is charged.


ITEMS, INPUT_ITEMS, LEGAL_ITEMS, LEGAL_INPUT_ITEMS = 60_000, 110_000, 1_300, 1_000
TEXT_BYTES = 4 << 20
SCRAPES, SCRAPERS, PIPELINED = 40, 20, 400
_SECONDS = 15.0


def _told(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def _ask(address: Address, path: str, **body: Any) -> Reply:
    """The answer. Raises AssertionError where there is none, or it is the gateway's fault."""
    reply = await hostile.body_of(address, Ask("rude", path, {"model": "demo", **body}), _SECONDS)
    if reply is None or not 0 < reply.status < 500 or reply.ending not in (Ending.DONE, Ending.ERROR):
        raise AssertionError(f"a large body to {path} got {reply.status if reply else 'no answer'}")
    return reply


async def many_items(arena: Arena) -> None:
    """Bodies of tiny items: far too many are refused by their number, and as many as are allowed disturb no stream."""
    tool = {"type": "function", "function": {"name": "a"}}
    for address in arena.gateways:
        for path, body in (
            ("/v1/responses", {"input": _told("a") * INPUT_ITEMS}),
            ("/v1/responses", {"input": [{"a": 1}] * INPUT_ITEMS}),
            ("/v1/chat/completions", {"messages": _told("a") * ITEMS}),
            ("/v1/chat/completions", {"messages": _told("a"), "tools": [tool] * ITEMS}),
        ):
            reply = await _ask(address, path, **body)
            if reply.status not in (400, 413) or (reply.status == 400 and "max_items_per_body" not in reply.error):
                raise AssertionError(f"too many items: {reply.status} {reply.error}")
        await _ask(address, "/v1/responses", input=[{"a": 1}] * LEGAL_INPUT_ITEMS)
        await _ask(address, "/v1/responses", input=_told("a") * LEGAL_INPUT_ITEMS, max_output_tokens=1)
        await _ask(address, "/v1/chat/completions", messages=_told("a") * LEGAL_ITEMS, max_tokens=1)


async def huge_tokenize(arena: Arena) -> None:
    """Texts of four megabytes to be tokenised, none of which fits the model."""

    async def one(number: int) -> None:
        address = arena.gateways[number % len(arena.gateways)]
        reply = await _ask(address, "/tokenize", prompt="word " * (TEXT_BYTES // 5 - 100))
        if reply.status != 400:
            raise AssertionError(f"a text that cannot fit the model: {reply.status}")

    await hostile.crowd(6, one)


async def unread_answers(arena: Arena) -> None:
    """Clients that ask and ask on one connection and read nothing: they are hung up on."""

    async def one(number: int) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as raw:
            raw.setblocking(False)
            await loop.sock_connect(raw, arena.gateways[number % len(arena.gateways)])
            try:
                async with asyncio.timeout(_SECONDS):
                    await loop.sock_sendall(raw, b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * PIPELINED)
                    while True:
                        await asyncio.sleep(0.5)
                        with suppress(BlockingIOError):
                            raw.send(b"\r\n")
            except TimeoutError:
                raise AssertionError(f"after {_SECONDS:.0f} s an unread answer still has its connection") from None
            except ConnectionError:
                return

    await hostile.crowd(4, one)


async def hammered_metrics(arena: Arena) -> None:
    """Clients without a key that ask for /metrics all the time."""

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection(*arena.gateways[number % len(arena.gateways)])
        for _ in range(SCRAPES):
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            await reader.readexactly(int(head.partition("content-length:")[2].split("\r\n")[0]))
        writer.close()

    await hostile.crowd(SCRAPERS, one)


BODIES = (
    Scenario("many-items", f"bodies of {INPUT_ITEMS:,} and {ITEMS:,} tiny items, and of as many as pass", many_items),
    Scenario("huge-tokenize", "six texts of 4 MB to tokenise at once", huge_tokenize),
    Scenario("unread-answers", "clients that ask on one connection and read nothing", unread_answers),
    Scenario("hammered-metrics", f"{SCRAPERS} clients that ask for /metrics {SCRAPES} times each", hammered_metrics),
)

# MERGED connections.py
# Connections that say nothing or too little, a gateway that ends under load, and numbers that are none.


SILENT = 2000
ENDLESS_HEADS = 100
HEAD_S = 10.0  # the default of `head_timeout_s`
_PATIENCE_S = 15.0  # beyond HEAD_S


async def silent(arena: Arena) -> None:
    """Connections that send nothing: each is closed, and clients are served meanwhile."""
    await _all_closed(arena, SILENT, b"")


async def slow_heads_end(arena: Arena) -> None:
    """Heads that never end: each is given up, however its bytes come."""
    await _all_closed(arena, ENDLESS_HEADS, b"POST /v1/completions HTTP/1.1\r\nX-Slow: ")


async def _all_closed(arena: Arena, count: int, head: bytes) -> None:
    closed = 0

    async def one(number: int) -> None:
        nonlocal closed
        gone = await _until_closed(arena.gateways[number % len(arena.gateways)], head)
        closed += gone

    await hostile.crowd(count, one)
    if closed < count:
        raise AssertionError(f"{count - closed} of {count} connections were open after {HEAD_S + _PATIENCE_S:g} s")


async def _until_closed(address: Address, head: bytes) -> bool:
    with suppress(OSError):
        reader, writer = await asyncio.open_connection(*address)
        gone = asyncio.ensure_future(reader.read())
        try:
            async with asyncio.timeout(HEAD_S + _PATIENCE_S):
                writer.write(head)
                while not gone.done():
                    if head:
                        writer.write(b"a")
                    await asyncio.wait([gone], timeout=0.5)
        except TimeoutError:
            return False
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            writer.transport.abort()
    return True


async def drained_gateway(arena: Arena) -> None:
    """SIGTERM: what it has begun ends, and what comes meanwhile is refused with Retry-After."""
    (name, *_), address = arena.named("gateway"), arena.gateways[0]
    ask = fresh(hostile.wanting(dict(arena.asks[0].body), max_tokens=30))
    streams = [asyncio.ensure_future(hostile.body_of(address, ask, 30.0)) for _ in range(4)]
    await asyncio.sleep(0.2)
    old = arena.processes.stop(name)
    replies = await asyncio.gather(*streams)
    broken = [reply for reply in replies if reply is None or reply.status != 200 or not reply.finish_reason]
    await arena.processes.back(old)
    if broken:
        raise AssertionError(f"{len(broken)} of {len(streams)} streams did not end: {broken[0]}")


async def infinite_numbers(arena: Arena) -> None:
    """In bodies of clients and of operators: refused by a 4xx that names the field."""
    plain = {key: value for key, value in arena.asks[0].body.items() if key not in ("stream", "stream_options")}
    monitor = next(port for port in arena.ports if port.service == "monitor" and port.purpose == "http")
    placement = {"placement": {"name": "adaptive", "parameters": {"x": float("inf")}}}
    wrong = []
    for address, method, path, body in (
        *((arena.gateways[0], "POST", "/v1/completions", {**plain, "temperature": float(n)}) for n in ("inf", "nan")),
        (arena.gateways[0], "POST", "/v1/completions", {**plain, "repetition_penalty": float("nan")}),
        ((monitor.host, monitor.port), "PUT", "/policies", placement),
    ):
        status = await _status_of(address, method, path, json.dumps(body).encode())
        if not 400 <= status < 500:
            wrong.append(f"{method} {path}: {status}")
    if wrong:
        raise AssertionError("; ".join(wrong))


async def _status_of(address: Address, method: str, path: str, body: bytes) -> int:
    async with asyncio.timeout(10.0):
        reader, writer = await asyncio.open_connection(*address)
        try:
            head = f"{method} {path} HTTP/1.1\r\nhost: chaos\r\ncontent-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
            return int((await reader.readline()).split()[1])
        finally:
            writer.transport.abort()


CONNECTIONS = (
    Scenario("silent-connections", f"{SILENT} connections that send nothing", silent, bound_s=60.0),
    Scenario("endless-heads", f"{ENDLESS_HEADS} request heads that never end", slow_heads_end, bound_s=60.0),
    Scenario("gateway-drain", "SIGTERM to a gateway with streams", drained_gateway, errors=True, breaks=True),
    Scenario("infinite-numbers", "NaN and infinity in bodies", infinite_numbers),
)
