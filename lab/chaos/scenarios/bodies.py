"""Bodies, answers and scrapes within every limit by themselves that together could harm others: each is charged."""

import asyncio
import socket
from contextlib import suppress
from typing import Any

from lab.chaos import rude
from lab.chaos.arena import Arena
from lab.chaos.client import Ask, Ending, Reply
from lab.chaos.load import Address
from lab.chaos.scenario import Scenario

ITEMS, INPUT_ITEMS, LEGAL_ITEMS, LEGAL_INPUT_ITEMS = 60_000, 110_000, 1_300, 1_000
TEXT_BYTES = 4 << 20
SCRAPES, SCRAPERS, PIPELINED = 40, 20, 400
_SECONDS = 15.0


def _told(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def _ask(address: Address, path: str, **body: Any) -> Reply:
    """The answer. Raises AssertionError where there is none, or it is the gateway's fault."""
    reply = await rude.body_of(address, Ask("rude", path, {"model": "demo", **body}), _SECONDS)
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

    await rude.crowd(6, one)


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

    await rude.crowd(4, one)


async def hammered_metrics(arena: Arena) -> None:
    """Clients without a key that ask for /metrics all the time."""

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection(*arena.gateways[number % len(arena.gateways)])
        for _ in range(SCRAPES):
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            await reader.readexactly(int(head.partition("content-length:")[2].split("\r\n")[0]))
        writer.close()

    await rude.crowd(SCRAPERS, one)


BODIES = (
    Scenario("many-items", f"bodies of {INPUT_ITEMS:,} and {ITEMS:,} tiny items, and of as many as pass", many_items),
    Scenario("huge-tokenize", "six texts of 4 MB to tokenise at once", huge_tokenize),
    Scenario("unread-answers", "clients that ask on one connection and read nothing", unread_answers),
    Scenario("hammered-metrics", f"{SCRAPERS} clients that ask for /metrics {SCRAPES} times each", hammered_metrics),
)
