"""Scenarios of clients.

Floods, slow readers, disconnect storms, bodies and answers that are within each limit and dear together, requests for
thousands of answers, and connections that send nothing or too little.
"""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

from benchmarks.chaos import hostile
from benchmarks.chaos.faults import bodies
from benchmarks.chaos.load import fresh, unstreamed
from benchmarks.chaos.scenario import scenario
from benchmarks.chaos.under_test import SuiteUnderTest
from tools.client import CHAT, COMPLETIONS, Address, Ending, Request, Response

STORM, SLOW, FLOOD, SLOW_HEADS = 150, 24, 800, 200
RESPONSES = "/v1/responses"
_SLOW_S = 5.0
_BIG_S = 6.0  # the client of a huge body leaves after this time
_HEAD_BYTES = 8 << 20

client = partial(scenario, "clients")
body = partial(scenario, "bodies")
connection = partial(scenario, "connections")


@client("disconnect-storm", f"{STORM} clients ask and leave at any moment")
async def _disconnect_storm(suite: SuiteUnderTest) -> None:
    rng = Random(suite.rng.getrandbits(32))
    await hostile.leaving_clients(suite.gateways, suite.requests, STORM, 3.0, rng)


@client("slow-readers", f"{SLOW} streams of 200 tokens that nobody reads for 5 s")
async def _slow_readers(suite: SuiteUnderTest) -> None:
    request = hostile.changed(suite.requests[0], max_tokens=200)
    await hostile.crowd(SLOW, lambda n: hostile.never_read(suite.gateway(n), fresh(request), _SLOW_S))


@client("flood", f"{FLOOD} requests at once", errors=True)
async def _flood(suite: SuiteUnderTest) -> None:
    """More requests at once than may queue: the gateway refuses some, with Retry-After."""
    answers: list[Response] = []

    async def send(number: int) -> None:
        request = fresh(hostile.changed(suite.requests[0], max_tokens=2))
        answers.append(await hostile.body_of(suite.gateway(number), request, 30.0))

    with suite.outage():
        await hostile.crowd(FLOOD, send)
    wrong = [answer for answer in answers if answer.status not in (200, 429, 503) or answer.ending is Ending.HUNG]
    if wrong:
        raise AssertionError(f"{len(wrong)} of {len(answers)} requests had no answer or a wrong one: {wrong[0]}")


def _plain_with(*changes: dict[str, Any]) -> Callable[[SuiteUnderTest], list[tuple[str, dict[str, Any]]]]:
    """A steady user's completion in one piece, with other fields."""
    return lambda suite: [(COMPLETIONS, {**unstreamed(suite.requests[0]), **change}) for change in changes]


def _expensive(name: str, does: str, **fields: Any) -> None:
    """The gateway must answer it without a 5xx, or not before its client leaves."""
    client(name, does)(bodies(_plain_with(fields), range(500), seconds=_BIG_S))


_expensive("thousand-prompts", "a body with 1,000 prompts, whose client leaves after 6 s", prompt=["Hello"] * 1000)
_expensive("many-choices", "a body with n = 5,000, whose client leaves after 6 s", n=5000, temperature=0.5)
_GRAMMAR = {"regex": "((((a{1,60}){1,60}){1,60})b){1,60}"}
_expensive("costly-grammar", "a short regex that takes minutes to compile", structured_outputs=_GRAMMAR)


@client("slow-heads", f"{SLOW_HEADS} requests that come a byte a tenth of a second")
async def _slow_heads(suite: SuiteUnderTest) -> None:
    await hostile.crowd(SLOW_HEADS, lambda n: hostile.drip(suite.gateway(n), _SLOW_S))


@client("long-heads", "request heads of 8 MiB")
async def _long_heads(suite: SuiteUnderTest) -> None:
    """Gateways and the monitor must close the connection before the whole head has come."""
    for address in (*suite.gateways, suite.ports_for("monitor", "http")[0].address):
        accepted = await asyncio.gather(*(hostile.long_head(address, _HEAD_BYTES) for _ in range(4)))
        if max(accepted) >= _HEAD_BYTES:
            raise AssertionError(f"{address[0]}:{address[1]} accepted {max(accepted) >> 20} MiB of headers")


# Senseless parameters are the client's fault: no 5xx.
_ODD: tuple[dict[str, Any], ...] = (
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
client("odd-bodies", "well-formed bodies with senseless wishes")(bodies(_plain_with(*_ODD), range(1, 500), seconds=5.0))

# Bodies, answers and scrapes that are within every limit, and whose sum could harm other clients: each is charged.

ITEMS, INPUT_ITEMS, LEGAL_ITEMS, LEGAL_INPUT_ITEMS = 60_000, 110_000, 1_300, 1_000
TEXT_BYTES = 4 << 20
SCRAPES, SCRAPERS, PIPELINED = 40, 20, 400
_SECONDS = 15.0
_MESSAGE, _NOTHING = [{"role": "user", "content": "a"}], [{"a": 1}]
_TOOL = {"type": "function", "function": {"name": "a"}}


@body("many-items", f"bodies of {INPUT_ITEMS:,} and {ITEMS:,} tiny items, and of as many as pass")
async def _many_items(suite: SuiteUnderTest) -> None:
    """Bodies of tiny items: more than the limit are refused, and as many as the limit allows disturb no stream."""
    too_many: list[tuple[str, dict[str, Any]]] = [
        (RESPONSES, {"input": _MESSAGE * INPUT_ITEMS}),
        (RESPONSES, {"input": _NOTHING * INPUT_ITEMS}),
        (CHAT, {"messages": _MESSAGE * ITEMS}),
        (CHAT, {"messages": _MESSAGE, "tools": [_TOOL] * ITEMS}),
    ]
    legal: list[tuple[str, dict[str, Any]]] = [
        (RESPONSES, {"input": _NOTHING * LEGAL_INPUT_ITEMS}),
        (RESPONSES, {"input": _MESSAGE * LEGAL_INPUT_ITEMS, "max_output_tokens": 1}),
        (CHAT, {"messages": _MESSAGE * LEGAL_ITEMS, "max_tokens": 1}),
    ]
    await bodies(lambda _: too_many, (400, 413), "max_items_per_body", rounds=len(suite.gateways))(suite)
    await bodies(lambda _: legal, range(1, 500), rounds=len(suite.gateways))(suite)


@body("huge-tokenize", "six texts of 4 MB to tokenise at once")
async def _huge_tokenize(suite: SuiteUnderTest) -> None:
    """Texts of four megabytes, none of which fits the model."""
    request = Request("/tokenize", {"model": "demo", "prompt": "word " * (TEXT_BYTES // 5 - 100)})
    await hostile.crowd(6, lambda number: hostile.require(suite.gateway(number), request, (400,)))


@body("unread-answers", "clients that ask on one connection and read nothing")
async def _unread_answers(suite: SuiteUnderTest) -> None:
    """Clients that send requests on one connection and read nothing: the gateway must close the connection."""

    async def send(number: int) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as raw:
            raw.setblocking(False)
            await loop.sock_connect(raw, suite.gateway(number))
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

    await hostile.crowd(4, send)


@body("hammered-metrics", f"{SCRAPERS} clients that ask for /metrics {SCRAPES} times each")
async def _hammered_metrics(suite: SuiteUnderTest) -> None:
    """Clients without a key that request /metrics without a pause."""

    async def scrape(number: int) -> None:
        reader, writer = await asyncio.open_connection(*suite.gateway(number))
        for _ in range(SCRAPES):
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            await reader.readexactly(int(head.partition("content-length:")[2].split("\r\n")[0]))
        writer.close()

    await hostile.crowd(SCRAPERS, scrape)


SILENT = 2000
ENDLESS_HEADS = 100
HEAD_S = 10.0  # the default of `head_timeout_s`
_PATIENCE_S = 15.0  # beyond HEAD_S


async def _require_closed(count: int, head: bytes, suite: SuiteUnderTest) -> None:
    """Each connection must be closed, also when bytes of its head keep coming, while clients are served."""
    closed = await asyncio.gather(*(_until_closed(suite.gateway(number), head) for number in range(count)))
    if still_open := closed.count(False):
        raise AssertionError(f"{still_open} of {count} connections were open after {HEAD_S + _PATIENCE_S:g} s")


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


connection("silent-connections", f"{SILENT} connections that send nothing", bound_s=60.0)(
    partial(_require_closed, SILENT, b"")
)
connection("endless-heads", f"{ENDLESS_HEADS} request heads that never end", bound_s=60.0)(
    partial(_require_closed, ENDLESS_HEADS, b"POST /v1/completions HTTP/1.1\r\nX-Slow: ")
)


@connection("gateway-drain", "SIGTERM to a gateway with streams", errors=True, breaks=True)
async def _drained_gateway(suite: SuiteUnderTest) -> None:
    """After SIGTERM the gateway must finish the streams that have begun."""
    (name, *_), address = suite.named("gateway"), suite.gateways[0]
    request = fresh(hostile.changed(suite.requests[0], max_tokens=30))
    streams = [asyncio.ensure_future(hostile.body_of(address, request, 30.0)) for _ in range(4)]
    await asyncio.sleep(0.2)
    old = suite.processes.stop(name)
    answers = await asyncio.gather(*streams)
    broken = [answer for answer in answers if answer.status != 200 or not answer.finish_reason]
    await suite.processes.back(old)
    if broken:
        raise AssertionError(f"{len(broken)} of {len(streams)} streams did not end: {broken[0]}")


@connection("infinite-numbers", "NaN and infinity in bodies")
async def _infinite_numbers(suite: SuiteUnderTest) -> None:
    """NaN and infinity in bodies of clients and of operators get a 4xx."""
    endless, nan = float("inf"), float("nan")
    odd = ({"temperature": endless}, {"temperature": nan}, {"repetition_penalty": nan})
    await bodies(_plain_with(*odd), range(400, 500), seconds=10.0)(suite)
    placement = {"placement": {"name": "adaptive", "parameters": {"x": endless}}}
    monitor = suite.ports_for("monitor", "http")[0].address
    await hostile.require(monitor, Request("/policies", placement, method="PUT"), range(400, 500))
