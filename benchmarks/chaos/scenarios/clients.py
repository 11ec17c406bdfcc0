"""Scenarios of clients and of single requests.

Floods, slow readers, disconnect storms, bodies and answers that are within each limit and dear together, requests for
thousands of answers, and connections that send nothing or too little. A request loses the instances that it decodes on.
A request or an API key costs much, or fails, beside other requests that must not be affected.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

from benchmarks.chaos import hostile
from benchmarks.chaos.faults import bodies
from benchmarks.chaos.load import fresh, learn, unstreamed
from benchmarks.chaos.scenario import footprint, scenario
from benchmarks.chaos.testbeds import CALLERS, CONTEXT, LOGPROBS, LONG_CONTEXT, MEMORY_BYTES, QUEUED_TOKENS, secret_of
from benchmarks.chaos.under_test import SuiteUnderTest
from benchmarks.suite import find_row
from services.launcher.suite import until
from shared.errors import InstancesLost, PolyphaseError
from tools.client import CHAT, COMPLETIONS, Address, Ending, Json, Request, Response, send

STORM, SLOW, FLOOD, SLOW_HEADS = 150, 24, 800, 200
RESPONSES = "/v1/responses"
_SLOW_S = 5.0
_BIG_S = 6.0  # the client of a huge body leaves after this time
_HEAD_BYTES = 8 << 20
_HEAD = b"POST /v1/completions HTTP/1.1\r\nX-Slow: "

client = partial(scenario, "clients")
body = partial(scenario, "bodies")
connection = partial(scenario, "connections")


@client("disconnect-storm", f"{STORM} clients ask and leave at any moment")
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

    async def one_client(number: int) -> None:
        request = fresh(hostile.changed(suite.requests[0], max_tokens=2))
        answers.append(await hostile.body_of(suite.gateway(number), request, 30.0))

    with suite.outage():
        await hostile.crowd(FLOOD, one_client)
    wrong = [answer for answer in answers if answer.status not in (200, 429, 503) or answer.ending is Ending.HUNG]
    if wrong:
        raise AssertionError(f"{len(wrong)} of {len(answers)} requests had no answer or a wrong one: {wrong[0]}")


def _plain_with(*changes: Json) -> Callable[[SuiteUnderTest], list[tuple[str, Json]]]:
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
    await hostile.crowd(SLOW_HEADS, lambda n: hostile.hold_open(suite.gateway(n), _HEAD, _SLOW_S, beat_s=0.1))


@client("long-heads", "request heads of 8 MiB")
async def _long_heads(suite: SuiteUnderTest) -> None:
    """Gateways and the monitor must close the connection before the whole head has come."""
    for address in (*suite.gateways, suite.ports_for("monitor", "http")[0].address):
        accepted = await asyncio.gather(*(hostile.long_head(address, _HEAD_BYTES) for _ in range(4)))
        if max(accepted) >= _HEAD_BYTES:
            raise AssertionError(f"{address[0]}:{address[1]} accepted {max(accepted) >> 20} MiB of headers")


# Senseless parameters are the client's fault: no 5xx.
_ODD: tuple[Json, ...] = (
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
    too_many: list[tuple[str, Json]] = [
        (RESPONSES, {"input": _MESSAGE * INPUT_ITEMS}),
        (RESPONSES, {"input": _NOTHING * INPUT_ITEMS}),
        (CHAT, {"messages": _MESSAGE * ITEMS}),
        (CHAT, {"messages": _MESSAGE, "tools": [_TOOL] * ITEMS}),
    ]
    legal: list[tuple[str, Json]] = [
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

    async def one_client(number: int) -> None:
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

    await hostile.crowd(4, one_client)


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
    held = (hostile.hold_open(suite.gateway(number), head, HEAD_S + _PATIENCE_S) for number in range(count))
    if still_open := (await asyncio.gather(*held)).count(False):
        raise AssertionError(f"{still_open} of {count} connections were open after {HEAD_S + _PATIENCE_S:g} s")


connection("silent-connections", f"{SILENT} connections that send nothing", bound_s=60.0)(
    partial(_require_closed, SILENT, b"")
)
connection("endless-heads", f"{ENDLESS_HEADS} request heads that never end", bound_s=60.0)(
    partial(_require_closed, ENDLESS_HEADS, _HEAD)
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


KILLER_TOKENS, PENALISED_TOKENS = 200, 250
MAX_DEATHS = 4  # the gateway's `attempts`
PENALISED_LOSSES = 2
_POLL_S = 0.02
_REPORT_S = 10.0

loss = partial(scenario, "losses")
one_request = partial(scenario, "one request")


async def _decode_instance(suite: SuiteUnderTest, request: Request) -> str:
    """The instance that decodes the request, according to the schedulers; "" when none does."""
    try:
        return str((await find_row(suite, request.body["request_id"], phase="decode")).decode_instance)
    except PolyphaseError:
        return ""


@loss("killer-request", "a request whose every decode instance is killed as soon as it decodes")
async def _killer(suite: SuiteUnderTest) -> None:
    """Kill each instance that decodes the request: the gateway must refuse it before many instances are lost."""
    request = fresh(hostile.changed(suite.requests[0], max_tokens=KILLER_TOKENS))
    reading = asyncio.create_task(send(suite.gateways[0], request))
    killed: list[str] = []
    pids: dict[str, int] = {}
    with suite.outage():
        while not reading.done():
            name = await _decode_instance(suite, request)
            if name and killed[-1:] != [name]:
                killed.append(name)
                pids |= suite.processes.kill(name)
            await asyncio.sleep(_POLL_S)
        await suite.processes.back(pids)
        await suite.until_ready(*suite.decode)
    answer = await reading
    suite.notes.append(f"{len(killed)} instances killed")
    if answer.ending is not Ending.ERROR:
        raise AssertionError(f"the request ended as {answer.ending} after {len(killed)} deaths")
    if len(killed) > MAX_DEATHS:
        raise AssertionError(f"one request ended {len(killed)} instances: {', '.join(killed)}")

    async def reported() -> bool:
        async with suite.monitor() as monitor:
            found = await monitor.events(kinds=["request_refused"])
        return any(request.body["request_id"] in event.job_id for event in found)

    await until(reported, _REPORT_S, f"an event {InstancesLost.code}")


@loss("lose-penalised", f"a penalised request loses its instance {PENALISED_LOSSES} times", bound_s=80.0)
async def _penalised(suite: SuiteUnderTest) -> None:
    """A penalised request, which an engine has to compute again from its start, loses its instance twice."""
    kind = next(request for request in suite.requests if request.key == "penalised")
    longer = Request(kind.path, {**kind.body, "max_tokens": PENALISED_TOKENS}, key="penalised, long")
    right = (await learn(suite.gateways[0], [longer]))[longer.key]
    request = fresh(longer)
    reading = asyncio.create_task(send(suite.gateways[0], request))
    for number in range(PENALISED_LOSSES):
        found: list[str] = []

        async def decoding(found: list[str] = found) -> bool:
            found[:] = [await _decode_instance(suite, request)]
            return bool(found[0]) or reading.done()

        await until(decoding, _REPORT_S, "the request to be decoded")
        if reading.done():
            raise AssertionError(f"the request ended after {number} of {PENALISED_LOSSES} losses")
        await suite.kill_until_back(found[0])
        await suite.until_ready(found[0])
    answer = await reading
    if tuple(answer.tokens) != right.tokens:
        raise AssertionError(f"{len(answer.tokens)} tokens differ from the right {len(right.tokens)}: {answer.error}")


_ROUNDS = 20
_ANSWER_S = 10.0
_PICTURE = "data:image/png;base64,aGVsbG8="
_TOKENIZE = "/tokenize"

GREEDY_TOKENS, GREEDY_MORE, GREEDY_ROUNDS = 1_900, 28, 3
_FIT = QUEUED_TOKENS // 2 // GREEDY_TOKENS
_SHARE_S = 2.0  # the time for which prompts of one key's share, at both gateways, occupy the prefill instances

HELD_AIM_S, HELD_MAX_S = 0.05, 0.1  # CPU time for which a body may hold the event loop: the aim, and the limit
MESSAGES, PARTS, TOOLS, HELD_ITEMS = 4_095, 4_093, 2_046, 800  # as many as `max_items_per_body` allows
PROPERTIES = 500
_CALM_S, _HELD_ROUNDS, _HELD_ANSWER_S = 3.0, 5, 20.0
_TOKENS_OF_LOGPROBS = 950  # times 21 candidates: just within the limit of a body
_LOGPROBS_S = 2.0  # the time for which they occupy an instance on a CPU, whose streams wait
_WORD = " fox"  # a token of the demo's model


_SHORT = {"prompt": "World", "max_tokens": 1}
_TEXT, _URL = {"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": _PICTURE}}
_IMAGE = {"type": "input_image", "image_url": _PICTURE, "detail": "auto"}
_PART = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}}


def _refused(name: str, does: str, reason: str, *cases: tuple[str, Json]) -> None:
    """Every gateway answers these bodies with a 400 that gives the reason, each time."""
    one_request(name, does)(bodies(lambda _: cases, (400,), reason, rounds=_ROUNDS, seconds=_ANSWER_S))


# Log probabilities of a prompt of one token do not exist, and emulated engines have none.
_refused(
    "one-token-prompt-logprobs",
    "log probabilities of a prompt of one token",
    "no log probabilities",
    (COMPLETIONS, {**_SHORT, "prompt_logprobs": 1}),
    (COMPLETIONS, {**_SHORT, "echo": True, "logprobs": 1}),
)
_refused(
    "many-prompt-logprobs",
    "294,000 log probabilities of prompts in a body",
    "the limit is",
    (COMPLETIONS, {"prompt": [[400] * 1000] * 14, "max_tokens": 1, "prompt_logprobs": 20}),
)
_refused(
    "images",
    "pictures on the three APIs that take them",
    "only text",
    (CHAT, {"messages": [{"role": "user", "content": [_TEXT, _URL]}]}),
    (RESPONSES, {"input": [{"role": "user", "content": [_IMAGE]}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [_PART]}], "max_tokens": 5}),
)


@one_request(
    "key-long-prompts",
    "one API key sends long prompts, as many as fit its share and far more",
    CALLERS,
    outage_s=_SHARE_S,
)
async def _long_prompts_of_a_key(suite: SuiteUnderTest) -> None:
    """One key sends long prompts to each gateway at once: as many as fit its share of the queue, and many more."""
    served = 0
    for _ in range(GREEDY_ROUNDS):
        for answers in await asyncio.gather(*(_greedy(address) for address in suite.gateways)):
            refused = [answer for answer in answers if answer.ending is not Ending.DONE]
            for answer in refused:
                if answer.status != 429 or not answer.retry_after:
                    raise AssertionError(f"a prompt over the share was answered by {answer}")
            done = len(answers) - len(refused)
            if done < _FIT or not refused:
                raise AssertionError(f"{done} of {len(answers)} long prompts were served; {_FIT} fit the key's share")
            served += done
    sent = GREEDY_ROUNDS * len(suite.gateways) * (_FIT + GREEDY_MORE)
    suite.notes.append(f"{served} of {sent} prompts of the greedy key served, the others refused with 429")


async def _greedy(address: Address) -> list[Response]:
    body = {"model": "demo", "prompt": [400] * GREEDY_TOKENS, "max_tokens": 2, "ignore_eos": True}
    request = Request(COMPLETIONS, body, api_key=secret_of("greedy"))
    sent = (hostile.body_of(address, fresh(request), _ANSWER_S) for _ in range(_FIT + GREEDY_MORE))
    return await asyncio.gather(*sent)


@one_request("held-loop", "the largest bodies that are allowed, beside 16 streams", LONG_CONTEXT, bound_s=90.0)
async def _held_loop(suite: SuiteUnderTest) -> None:
    """The largest bodies within the limits, and some beyond them, one at a time beside the streams."""
    message = {"role": "user", "content": "a"}
    part, tool = {"type": "text", "text": "a"}, {"type": "function", "function": {"name": "a"}}
    parts, one_token = [{"role": "user", "content": [part] * PARTS}], {"max_output_tokens": 1}
    context = [{"role": "user", "content": _WORD * (CONTEXT - 100)}]
    properties = {f"p{number}": {"type": "string"} for number in range(PROPERTIES)}
    schema = _schema({"type": "object", "properties": properties, "required": list(properties)})
    expensive = _schema({"type": "string", "pattern": r"^(\w{1,9999}-){1,9999}$"})
    await _hold(
        suite,
        {
            f"{MESSAGES:,} messages": (CHAT, {"messages": [message] * MESSAGES, "max_tokens": 1}, 200),
            f"{PARTS:,} content parts": (CHAT, {"messages": parts, "max_tokens": 1}, 200),
            f"{TOOLS:,} tools": (
                CHAT,
                {"messages": [message], "tools": [tool] * TOOLS, "tool_choice": "none", "max_tokens": 1},
                200,
            ),
            f"{HELD_ITEMS:,} input items": (RESPONSES, {"input": [message] * HELD_ITEMS, **one_token}, 200),
            f"{HELD_ITEMS:,} bad input items": (RESPONSES, {"input": [{"a": 1}] * HELD_ITEMS}, 400),
            "4,096 input items": (RESPONSES, {"input": [message] * 4_096}, 400),
            "4,096 bad input items": (RESPONSES, {"input": [{"a": 1}] * 4_096}, 400),
            "a context of text": (COMPLETIONS, {"prompt": _WORD * (CONTEXT - 2), "max_tokens": 1}, 200),
            "a context of token ids": (COMPLETIONS, {"prompt": [400] * (CONTEXT - 2), "max_tokens": 1}, 200),
            "a chat of a context": (CHAT, {"messages": context, "max_tokens": 1}, 200),
            f"a schema of {PROPERTIES} properties": (
                CHAT,
                {"messages": [message], "response_format": schema, "max_tokens": 1},
                200,
            ),
            "a schema that is too expensive": (CHAT, {"messages": [message], "response_format": expensive}, 400),
            "a context to tokenise": (_TOKENIZE, {"prompt": _WORD * (CONTEXT - 2)}, 200),
            "4 MB to tokenise": (_TOKENIZE, {"prompt": "word " * 800_000}, 400),
        },
    )


@one_request(
    "held-loop-logprobs",
    "the most prompt log probabilities of a body, beside 16 streams",
    LOGPROBS,
    outage_s=_LOGPROBS_S,
    bound_s=90.0,
)
async def _held_loop_by_logprobs(suite: SuiteUnderTest) -> None:
    """The most log probabilities of prompts that a body may ask for."""
    body = {"prompt": [400] * _TOKENS_OF_LOGPROBS, "prompt_logprobs": 20, "max_tokens": 1}
    await _hold(suite, {"prompt log probabilities": (COMPLETIONS, body, 200)})


def _schema(schema: Json) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


async def _hold(suite: SuiteUnderTest, bodies: Mapping[str, tuple[str, Json, int]]) -> None:
    """Send each body (path, body, expected status) and note for how long it held the event loop.

    Raises AssertionError that names the bodies beyond HELD_MAX_S.
    """
    times = suite.loop_times
    times.reset()
    await asyncio.sleep(_CALM_S)
    suite.notes.append(f"CPU time that the event loop was held: {_ms(times.longest_s)} by the streams alone")
    longest_s = dict.fromkeys(bodies, 0.0)
    memory_bytes = []
    for _ in range(_HELD_ROUNDS):
        for name, (path, body, status) in bodies.items():
            times.reset()
            request = Request(path, {"model": "demo", **body})
            await hostile.require(suite.gateways[0], request, (status,), seconds=_HELD_ANSWER_S)
            longest_s[name] = max(longest_s[name], times.longest_s)
        memory_bytes.append(footprint(suite).memory_bytes[suite.named("gateway")[0]])
    lines = {name: f"{_ms(longest_s[name])} by {name} ({status})" for name, (_, _, status) in bodies.items()}
    suite.notes += lines.values()
    if over_aim := [name for name, seconds in longest_s.items() if seconds > HELD_AIM_S]:
        suite.notes.append(f"beyond the aim of {_ms(HELD_AIM_S)}: {', '.join(over_aim)}")
    suite.notes.append(f"memory after each round {', '.join(str(size >> 20) for size in memory_bytes)} MiB")
    # The allocator's arenas grow in the first rounds.
    if (more := memory_bytes[-1] - memory_bytes[_HELD_ROUNDS // 2]) > MEMORY_BYTES:
        raise AssertionError(f"with the same bodies in each round the gateway has {more >> 20} MiB more memory")
    if too_long := [lines[name] for name, seconds in longest_s.items() if seconds > HELD_MAX_S]:
        raise AssertionError(f"the event loop was held for more than {_ms(HELD_MAX_S)}: {'; '.join(too_long)}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"
