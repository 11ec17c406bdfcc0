"""Scenarios of clients and connections: floods, slow readers, clients that leave, connections that send too little."""

import asyncio
import socket
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

from benchmarks.chaos import hostile
from benchmarks.chaos.faults import bodies
from benchmarks.chaos.load import fresh
from benchmarks.chaos.scenario import scenario
from benchmarks.chaos.scenarios.requests import completions
from benchmarks.chaos.under_test import SuiteUnderTest
from tools.client import Ending, Request, Response

client = partial(scenario, "clients")
connection = partial(scenario, "connections")

STORM, SLOW, FLOOD, SLOW_HEADS = 150, 24, 800, 200
_SLOW_S = 5.0
_BIG_S = 6.0  # the client of a huge body leaves after this time
_HEAD_BYTES = 8 << 20
_HEAD = b"POST /v1/completions HTTP/1.1\r\nX-Slow: "
_METRICS = b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"


@client("disconnect-storm", f"{STORM} clients send a request and leave at any moment")
async def _disconnect_storm(suite: SuiteUnderTest) -> None:
    rng = Random(suite.rng.getrandbits(32))
    await hostile.leaving_clients(suite.gateways, suite.requests, STORM, 3.0, rng)


@client("slow-readers", f"{SLOW} streams of 200 tokens whose clients read nothing for 5 s")
async def _slow_readers(suite: SuiteUnderTest) -> None:
    request = hostile.changed(suite.requests[0], max_tokens=200)
    await hostile.crowd(SLOW, lambda n: hostile.never_read(suite.gateway(n), fresh(request), _SLOW_S))


@client("flood", f"{FLOOD} requests at once", errors=True)
async def _flood(suite: SuiteUnderTest) -> None:
    """More requests at once than may queue: the gateway refuses some, with Retry-After."""
    answers: list[Response] = []

    async def send_one(number: int) -> None:
        request = fresh(hostile.changed(suite.requests[0], max_tokens=2))
        answers.append(await hostile.body_of(suite.gateway(number), request, 30.0))

    with suite.outage():
        await hostile.crowd(FLOOD, send_one)
    wrong = [answer for answer in answers if answer.status not in (200, 429, 503) or answer.ending is Ending.HUNG]
    assert not wrong, f"{len(wrong)} of {len(answers)} requests had no answer or a wrong one: {wrong[0]}"


def _expensive(name: str, description: str, **fields: Any) -> None:
    """The gateway must answer it without a 5xx, or not before its client leaves."""
    client(name, description, bodies(completions(fields), range(500), seconds=_BIG_S))


_GRAMMAR = {"regex": "((((a{1,60}){1,60}){1,60})b){1,60}"}
_expensive("thousand-prompts", "a body with 1,000 prompts, whose client leaves after 6 s", prompt=["Hello"] * 1000)
_expensive("many-choices", "a body with n = 5,000, whose client leaves after 6 s", n=5000, temperature=0.5)
_expensive("costly-grammar", "a short regex that takes minutes to compile", structured_outputs=_GRAMMAR)


@client("slow-heads", f"{SLOW_HEADS} requests that come a byte a tenth of a second")
async def _slow_heads(suite: SuiteUnderTest) -> None:
    await hostile.crowd(SLOW_HEADS, lambda n: hostile.hold_open(suite.gateway(n), _HEAD, _SLOW_S, beat_s=0.1))


@client("long-heads", "request heads of 8 MiB")
async def _long_heads(suite: SuiteUnderTest) -> None:
    """Gateways and the monitor must close the connection before the whole head has come."""
    for address in (*suite.gateways, suite.ports_for("monitor", "http")[0].address):
        accepted = await asyncio.gather(*(hostile.long_head(address, _HEAD_BYTES) for _ in range(4)))
        assert max(accepted) < _HEAD_BYTES, f"{address[0]}:{address[1]} accepted {max(accepted) >> 20} MiB of headers"


# Senseless parameters are the client's fault: no 5xx.
client(
    "odd-bodies",
    "well-formed bodies with senseless parameters",
    bodies(
        completions(
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
        ),
        range(1, 500),
        seconds=5.0,
    ),
)


SCRAPES, SCRAPERS, PIPELINED = 40, 20, 400
_UNREAD_S = 15.0


@partial(scenario, "bodies")("unread-answers", "clients that send requests on one connection and read nothing")
async def _unread_answers(suite: SuiteUnderTest) -> None:
    """The gateway must close the connection."""

    async def pipeline(number: int) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as raw:
            raw.setblocking(False)
            await loop.sock_connect(raw, suite.gateway(number))
            try:
                async with asyncio.timeout(_UNREAD_S):
                    await loop.sock_sendall(raw, _METRICS * PIPELINED)
                    while True:
                        await asyncio.sleep(0.5)
                        with suppress(BlockingIOError):
                            raw.send(b"\r\n")
            except TimeoutError:
                raise AssertionError(f"after {_UNREAD_S:.0f} s an unread answer still has its connection") from None
            except ConnectionError:
                return

    await hostile.crowd(4, pipeline)


@partial(scenario, "bodies")("hammered-metrics", f"{SCRAPERS} clients that request /metrics {SCRAPES} times each")
async def _hammered_metrics(suite: SuiteUnderTest) -> None:
    async def scrape(number: int) -> None:
        reader, writer = await asyncio.open_connection(*suite.gateway(number))
        for _ in range(SCRAPES):
            writer.write(_METRICS)
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            await reader.readexactly(int(head.partition("content-length:")[2].split("\r\n")[0]))
        writer.close()

    await hostile.crowd(SCRAPERS, scrape)


SILENT, ENDLESS_HEADS = 2000, 100
HEAD_S = 10.0  # the default of `head_timeout_s`
_PATIENCE_S = 15.0  # beyond HEAD_S


def _must_be_closed(name: str, description: str, count: int, head: bytes) -> None:
    """Each connection must be closed, also when bytes of its head keep coming, while clients are served."""

    async def hold_open(suite: SuiteUnderTest) -> None:
        held = (hostile.hold_open(suite.gateway(number), head, HEAD_S + _PATIENCE_S) for number in range(count))
        still_open = (await asyncio.gather(*held)).count(False)
        assert not still_open, f"{still_open} of {count} connections were open after {HEAD_S + _PATIENCE_S:g} s"

    connection(name, description, hold_open, bound_s=60.0)


_must_be_closed("silent-connections", f"{SILENT} connections that send nothing", SILENT, b"")
_must_be_closed("endless-heads", f"{ENDLESS_HEADS} request heads that never end", ENDLESS_HEADS, _HEAD)


@connection("gateway-drain", "SIGTERM to a gateway with streams", errors=True, breaks=True)
async def _drained_gateway(suite: SuiteUnderTest) -> None:
    """After SIGTERM the gateway must finish the streams that have begun."""
    (name, *_), address = suite.named("gateway"), suite.gateways[0]
    request = fresh(hostile.changed(suite.requests[0], max_tokens=30))
    streams = [asyncio.ensure_future(hostile.body_of(address, request, 30.0)) for _ in range(4)]
    await asyncio.sleep(0.2)
    old = suite.processes.stop(name)
    answers = await asyncio.gather(*streams)
    await suite.processes.back(old)
    broken = [answer for answer in answers if answer.status != 200 or not answer.finish_reason]
    assert not broken, f"{len(broken)} of {len(streams)} streams did not end: {broken[0]}"


@connection("infinite-numbers", "NaN and infinity in bodies")
async def _infinite_numbers(suite: SuiteUnderTest) -> None:
    infinite, nan = float("inf"), float("nan")
    odd = completions({"temperature": infinite}, {"temperature": nan}, {"repetition_penalty": nan})
    await bodies(odd, range(400, 500), seconds=10.0)(suite)
    placement = {"placement": {"name": "adaptive", "parameters": {"x": infinite}}}
    monitor = suite.ports_for("monitor", "http")[0].address
    await hostile.require(monitor, Request("/policies", placement, method="PUT"), range(400, 500))
