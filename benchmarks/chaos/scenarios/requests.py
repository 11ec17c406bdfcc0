"""Scenarios of requests that must not affect other requests.

Bodies within every limit whose sum could harm others: each is charged. Bodies that have to be refused. One API key that
takes more than its share. Bodies that could hold the gateway's event loop. Requests that lose their instances.
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.chaos import hostile
from benchmarks.chaos.faults import Cases, bodies
from benchmarks.chaos.load import fresh, learn, unstreamed
from benchmarks.chaos.recovery import footprint
from benchmarks.chaos.scenario import scenario
from benchmarks.chaos.testbeds import CALLERS, CONTEXT, LOGPROBS, LONG_CONTEXT, MEMORY_BYTES, QUEUED_TOKENS, secret_of
from benchmarks.chaos.under_test import SuiteUnderTest
from benchmarks.jobs import find_row
from benchmarks.suite import until_found
from services.launcher.suite import until
from shared.errors import InstancesLost, PolyphaseError
from tools.client import CHAT, COMPLETIONS, Address, Ending, Request, Response, send

Body = tuple[str, dict[str, Any]]  # with its path
RESPONSES, _TOKENIZE = "/v1/responses", "/tokenize"
body = partial(scenario, "bodies")
loss = partial(scenario, "losses")
one_request = partial(scenario, "one request")


def completions(*changes: dict[str, Any]) -> Cases:
    """A steady user's completion in one piece, with other fields."""
    return lambda suite: [(COMPLETIONS, {**unstreamed(suite.requests[0]), **change}) for change in changes]


ITEMS, INPUT_ITEMS, LEGAL_ITEMS, LEGAL_INPUT_ITEMS = 60_000, 110_000, 1_300, 1_000
TEXT_BYTES = 4 << 20
_MESSAGE, _NOTHING = [{"role": "user", "content": "a"}], [{"a": 1}]
_TOOL = {"type": "function", "function": {"name": "a"}}


@body("many-items", f"bodies of {INPUT_ITEMS:,} and {ITEMS:,} tiny items, and of as many as pass")
async def _many_items(suite: SuiteUnderTest) -> None:
    """Bodies of tiny items: more than the limit are refused, and as many as the limit allows disturb no stream."""
    too_many: list[Body] = [
        (RESPONSES, {"input": _MESSAGE * INPUT_ITEMS}),
        (RESPONSES, {"input": _NOTHING * INPUT_ITEMS}),
        (CHAT, {"messages": _MESSAGE * ITEMS}),
        (CHAT, {"messages": _MESSAGE, "tools": [_TOOL] * ITEMS}),
    ]
    legal: list[Body] = [
        (RESPONSES, {"input": _NOTHING * LEGAL_INPUT_ITEMS}),
        (RESPONSES, {"input": _MESSAGE * LEGAL_INPUT_ITEMS, "max_output_tokens": 1}),
        (CHAT, {"messages": _MESSAGE * LEGAL_ITEMS, "max_tokens": 1}),
    ]
    await bodies(lambda _: too_many, (400, 413), "max_items_per_body", rounds=len(suite.gateways))(suite)
    await bodies(lambda _: legal, range(1, 500), rounds=len(suite.gateways))(suite)


@body("huge-tokenize", "six texts of 4 MB to tokenise at once")
async def _huge_tokenize(suite: SuiteUnderTest) -> None:
    request = Request(_TOKENIZE, {"model": "demo", "prompt": "word " * (TEXT_BYTES // 5 - 100)})
    await hostile.crowd(6, lambda number: hostile.require(suite.gateway(number), request, (400,)))


_ROUNDS = 20
_ANSWER_S = 10.0
_PICTURE = "data:image/png;base64,aGVsbG8="
_SHORT = {"prompt": "World", "max_tokens": 1}
_TEXT, _URL = {"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": _PICTURE}}
_IMAGE = {"type": "input_image", "image_url": _PICTURE, "detail": "auto"}
_PART = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}}


def _refused(name: str, description: str, reason: str, *cases: Body) -> None:
    """Every gateway answers these bodies with a 400 that gives the reason, each time."""
    one_request(name, description, bodies(lambda _: cases, (400,), reason, rounds=_ROUNDS, seconds=_ANSWER_S))


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
    "pictures on the three APIs that accept them",
    "only text",
    (CHAT, {"messages": [{"role": "user", "content": [_TEXT, _URL]}]}),
    (RESPONSES, {"input": [{"role": "user", "content": [_IMAGE]}]}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [_PART]}], "max_tokens": 5}),
)


GREEDY_TOKENS, GREEDY_MORE, GREEDY_ROUNDS = 1_900, 28, 3
_FIT = QUEUED_TOKENS // 2 // GREEDY_TOKENS
_SHARE_S = 2.0  # the time for which prompts of one key's share, at both gateways, occupy the prefill instances


@one_request(
    "key-long-prompts",
    "one API key sends long prompts, as many as fit its share and far more",
    bed=CALLERS,
    outage_s=_SHARE_S,
)
async def _long_prompts_of_a_key(suite: SuiteUnderTest) -> None:
    served = 0
    for _ in range(GREEDY_ROUNDS):
        for answers in await asyncio.gather(*(_greedy(address) for address in suite.gateways)):
            refused = [answer for answer in answers if answer.ending is not Ending.DONE]
            wrong = [answer for answer in refused if answer.status != 429 or not answer.retry_after]
            assert not wrong, f"a prompt over the share was answered by {wrong[0]}"
            done = len(answers) - len(refused)
            shared = _FIT <= done < len(answers)
            assert shared, f"{done} of {len(answers)} long prompts were served; {_FIT} fit the key's share"
            served += done
    sent = GREEDY_ROUNDS * len(suite.gateways) * (_FIT + GREEDY_MORE)
    suite.notes.append(f"{served} of {sent} prompts of the greedy key served, the others refused with 429")


async def _greedy(address: Address) -> list[Response]:
    prompt = {"model": "demo", "prompt": [400] * GREEDY_TOKENS, "max_tokens": 2, "ignore_eos": True}
    request = Request(COMPLETIONS, prompt, api_key=secret_of("greedy"))
    sent = (hostile.body_of(address, fresh(request), _ANSWER_S) for _ in range(_FIT + GREEDY_MORE))
    return await asyncio.gather(*sent)


HELD_AIM_S, HELD_MAX_S = 0.05, 0.1  # CPU time for which a body may hold the event loop: the aim, and the limit
MESSAGES, PARTS, TOOLS, HELD_ITEMS = 4_095, 4_093, 2_046, 800  # as many as `max_items_per_body` allows
PROPERTIES = 500
_CALM_S, _HELD_ROUNDS, _HELD_ANSWER_S = 3.0, 5, 20.0
_TOKENS_OF_LOGPROBS = 950  # times 21 candidates: just within the limit of a body
_LOGPROBS_S = 2.0  # the time for which they occupy an instance on a CPU, whose streams wait
_WORD = " fox"  # a token of the demo's model


@one_request("held-loop", "the largest bodies that are allowed, beside 16 streams", bed=LONG_CONTEXT, bound_s=90.0)
async def _held_loop(suite: SuiteUnderTest) -> None:
    def chat(messages: list[dict[str, Any]], status: int = 200, **more: Any) -> tuple[str, dict[str, Any], int]:
        return CHAT, {"messages": messages, "max_tokens": 1, **more}, status

    part = {"type": "text", "text": "a"}
    properties = {f"p{number}": {"type": "string"} for number in range(PROPERTIES)}
    schema = _schema({"type": "object", "properties": properties, "required": list(properties)})
    expensive = _schema({"type": "string", "pattern": r"^(\w{1,9999}-){1,9999}$"})
    few_items = {"input": _MESSAGE * HELD_ITEMS, "max_output_tokens": 1}
    await _hold(
        suite,
        {
            f"{MESSAGES:,} messages": chat(_MESSAGE * MESSAGES),
            f"{PARTS:,} content parts": chat([{"role": "user", "content": [part] * PARTS}]),
            f"{TOOLS:,} tools": chat(_MESSAGE, tools=[_TOOL] * TOOLS, tool_choice="none"),
            f"{HELD_ITEMS:,} input items": (RESPONSES, few_items, 200),
            f"{HELD_ITEMS:,} bad input items": (RESPONSES, {"input": _NOTHING * HELD_ITEMS}, 400),
            "4,096 input items": (RESPONSES, {"input": _MESSAGE * 4_096}, 400),
            "4,096 bad input items": (RESPONSES, {"input": _NOTHING * 4_096}, 400),
            "a context of text": (COMPLETIONS, {"prompt": _WORD * (CONTEXT - 2), "max_tokens": 1}, 200),
            "a context of token ids": (COMPLETIONS, {"prompt": [400] * (CONTEXT - 2), "max_tokens": 1}, 200),
            "a chat of a context": chat([{"role": "user", "content": _WORD * (CONTEXT - 100)}]),
            f"a schema of {PROPERTIES} properties": chat(_MESSAGE, response_format=schema),
            "a schema that is too expensive": chat(_MESSAGE, 400, response_format=expensive),
            "a context to tokenise": (_TOKENIZE, {"prompt": _WORD * (CONTEXT - 2)}, 200),
            "4 MB to tokenise": (_TOKENIZE, {"prompt": "word " * 800_000}, 400),
        },
    )


@one_request(
    "held-loop-logprobs",
    "the most prompt log probabilities of a body, beside 16 streams",
    bed=LOGPROBS,
    outage_s=_LOGPROBS_S,
    bound_s=90.0,
)
async def _held_loop_by_logprobs(suite: SuiteUnderTest) -> None:
    most = {"prompt": [400] * _TOKENS_OF_LOGPROBS, "prompt_logprobs": 20, "max_tokens": 1}
    await _hold(suite, {"prompt log probabilities": (COMPLETIONS, most, 200)})


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


async def _hold(suite: SuiteUnderTest, cases: Mapping[str, tuple[str, dict[str, Any], int]]) -> None:
    """Send each case (path, body, expected status) and note for how long it held the event loop.

    Raises AssertionError that names the bodies beyond HELD_MAX_S.
    """
    times = suite.loop_times
    times.reset()
    await asyncio.sleep(_CALM_S)
    suite.notes.append(f"CPU time that the event loop was held: {_ms(times.longest_s)} by the streams alone")
    longest_s = dict.fromkeys(cases, 0.0)
    memory_bytes = []
    for _ in range(_HELD_ROUNDS):
        for name, (path, content, status) in cases.items():
            times.reset()
            request = Request(path, {"model": "demo", **content})
            await hostile.require(suite.gateways[0], request, (status,), seconds=_HELD_ANSWER_S)
            longest_s[name] = max(longest_s[name], times.longest_s)
        memory_bytes.append(footprint(suite).memory_bytes[suite.named("gateway")[0]])
    lines = {name: f"{_ms(longest_s[name])} by {name} ({status})" for name, (_, _, status) in cases.items()}
    suite.notes += lines.values()
    if over_aim := [name for name, seconds in longest_s.items() if seconds > HELD_AIM_S]:
        suite.notes.append(f"beyond the aim of {_ms(HELD_AIM_S)}: {', '.join(over_aim)}")
    suite.notes.append(f"memory after each round {', '.join(str(size >> 20) for size in memory_bytes)} MiB")
    more = memory_bytes[-1] - memory_bytes[_HELD_ROUNDS // 2]  # the allocator's arenas grow in the first rounds
    assert more <= MEMORY_BYTES, f"with the same bodies in each round the gateway has {more >> 20} MiB more memory"
    too_long = [lines[name] for name, seconds in longest_s.items() if seconds > HELD_MAX_S]
    assert not too_long, f"the event loop was held for more than {_ms(HELD_MAX_S)}: {'; '.join(too_long)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


KILLER_TOKENS, PENALISED_TOKENS = 200, 250
MAX_DEATHS = 4  # the gateway's `attempts`
PENALISED_LOSSES = 2
_POLL_S = 0.02
_REPORT_S = 10.0


async def _decode_instance(suite: SuiteUnderTest, request: Request) -> str | None:
    try:
        return (await find_row(suite, request.body["request_id"], phase="decode")).decode_instance
    except PolyphaseError:
        return None


@loss("killer-request", "a request whose every decode instance is killed as soon as it decodes")
async def _killer(suite: SuiteUnderTest) -> None:
    """The gateway must refuse the request before many instances are lost, and report it."""
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
    assert answer.ending is Ending.ERROR, f"the request ended as {answer.ending} after {len(killed)} deaths"
    assert len(killed) <= MAX_DEATHS, f"one request ended {len(killed)} instances: {', '.join(killed)}"

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
    for _ in range(PENALISED_LOSSES):
        name = await until_found(partial(_decode_instance, suite, request), _REPORT_S, "the request to be decoded")
        await suite.kill_until_back(name)
        await suite.until_ready(name)
    answer = await reading
    same = tuple(answer.tokens) == right.tokens
    assert same, f"{len(answer.tokens)} tokens differ from the right {len(right.tokens)}: {answer.error}"
