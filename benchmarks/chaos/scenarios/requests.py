"""Scenarios of single requests.

A request loses the instances that it decodes on. A request or an API key costs much, or fails, beside other requests
that must not be affected.
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.chaos import hostile
from benchmarks.chaos.faults import bodies
from benchmarks.chaos.load import fresh, learn
from benchmarks.chaos.scenario import footprint, scenario
from benchmarks.chaos.scenarios.clients import RESPONSES
from benchmarks.chaos.testbeds import CALLERS, CONTEXT, LOGPROBS, LONG_CONTEXT, MEMORY_BYTES, QUEUED_TOKENS, secret_of
from benchmarks.chaos.under_test import SuiteUnderTest
from benchmarks.suite import find_row
from services.launcher.suite import until
from shared.errors import InstancesLost, PolyphaseError
from tools.client import CHAT, COMPLETIONS, Address, Ending, Request, Response, send

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
        return str((await find_row(suite, request.body["request_id"], phase="decode"))["decode_instance"])
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
            found = await monitor.events(kind="request_refused")
        return any(request.body["request_id"] in event["job_id"] for event in found)

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
        await suite.until_back(found[0])
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
MESSAGES, PARTS, TOOLS, INPUT_ITEMS = 4_095, 4_093, 2_046, 800  # as many as `max_items_per_body` allows
PROPERTIES = 500
_CALM_S, _HELD_ROUNDS, _HELD_ANSWER_S = 3.0, 5, 20.0
_TOKENS_OF_LOGPROBS = 950  # times 21 candidates: just within the limit of a body
_LOGPROBS_S = 2.0  # the time for which they occupy an instance on a CPU, whose streams wait
_WORD = " fox"  # a token of the demo's model


_SHORT = {"prompt": "World", "max_tokens": 1}
_TEXT, _URL = {"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": _PICTURE}}
_IMAGE = {"type": "input_image", "image_url": _PICTURE, "detail": "auto"}
_PART = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}}


def _refused(name: str, does: str, reason: str, *cases: tuple[str, dict[str, Any]]) -> None:
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
            f"{INPUT_ITEMS:,} input items": (RESPONSES, {"input": [message] * INPUT_ITEMS, **one_token}, 200),
            f"{INPUT_ITEMS:,} bad input items": (RESPONSES, {"input": [{"a": 1}] * INPUT_ITEMS}, 400),
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


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


async def _hold(suite: SuiteUnderTest, bodies: Mapping[str, tuple[str, dict[str, Any], int]]) -> None:
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
