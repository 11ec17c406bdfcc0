"""Requests that lose the instances they decode on: one that ends each of them, and one that cannot be carried."""

import asyncio
from collections.abc import Mapping
from typing import Any

from lab.chaos import hostile
from lab.chaos.arena import Arena
from lab.chaos.clusters import CALLERS, CONTEXT, LOGPROBS, LONG_CONTEXT, MEMORY_BYTES, QUEUED_TOKENS, secret_of
from lab.chaos.hostile import wanting
from lab.chaos.load import Address, Ask, Ending, Reply, fresh, learn, send
from lab.chaos.scenario import Scenario, footprint
from services.launcher.suite import until
from shared.errors import InstancesLost, PolyphaseError

KILLER_TOKENS, PINNED_TOKENS = 200, 250
MOST_DEATHS = 4  # the gateway's `attempts`
LOSSES_OF_PINNED = 2
_POLL_S = 0.02
_REPORT_S = 10.0


async def _decodes_on(arena: Arena, job_id: str) -> str:
    """The instance that decodes the request, as schedulers know it; empty where none does."""
    for scheduler in arena.suite.schedulers():
        async with scheduler:
            try:
                rows = await scheduler.requests(phase="decode")
            except PolyphaseError:
                continue
        for row in rows:
            if job_id in row["job_id"]:
                return str(row["decode_instance"])
    return ""


def _job_id(ask: Ask) -> str:
    """Part of its job's id."""
    return str(ask.body["request_id"])


async def _killer(arena: Arena) -> None:
    """Each instance that decodes the request is killed as soon as it does; few die, and the request is refused."""
    ask = fresh(wanting(dict(arena.asks[0].body), max_tokens=KILLER_TOKENS))
    reading = asyncio.create_task(send(arena.gateways[0], ask))
    killed: list[str] = []
    pids: dict[str, int] = {}
    with arena.away():
        while not reading.done():
            name = await _decodes_on(arena, _job_id(ask))
            if name and killed[-1:] != [name]:
                killed.append(name)
                pids |= arena.processes.kill(name)
            await asyncio.sleep(_POLL_S)
        await arena.processes.back(pids)
        await arena.roles.ready(*arena.decode)
    reply = await reading
    arena.notes.append(f"{len(killed)} instances killed")
    _check_refused(reply, killed)

    async def told() -> bool:
        async with arena.suite.monitor() as monitor:
            found = await monitor.events(kind="request_refused")
        return any(_job_id(ask) in event["job_id"] for event in found)

    await until(told, _REPORT_S, f"an event {InstancesLost.code}")


def _check_refused(reply: Reply, killed: list[str]) -> None:
    if reply.ending is not Ending.ERROR:
        raise AssertionError(f"the request ended as {reply.ending} after {len(killed)} deaths")
    if len(killed) > MOST_DEATHS:
        raise AssertionError(f"{len(killed)} instances died of one request: {', '.join(killed)}")


async def _pinned(arena: Arena) -> None:
    """A penalised request, which an engine has to run again from its start, loses its instance again and again."""
    pinned = next(ask for ask in arena.asks if ask.key == "penalised")
    longer = Ask("penalised, long", pinned.path, {**pinned.body, "max_tokens": PINNED_TOKENS})
    right = (await learn(arena.gateways[0], [longer]))[longer.key]
    ask = fresh(longer)
    reading = asyncio.create_task(send(arena.gateways[0], ask))
    for number in range(LOSSES_OF_PINNED):
        found: list[str] = []

        async def decoding(found: list[str] = found) -> bool:
            found[:] = [await _decodes_on(arena, _job_id(ask))]
            return bool(found[0]) or reading.done()

        await until(decoding, _REPORT_S, "the request to be decoded")
        if reading.done():
            raise AssertionError(f"the request ended after {number} of {LOSSES_OF_PINNED} losses")
        await arena.processes.back(arena.processes.kill(found[0]))
        await arena.roles.ready(found[0])
    reply = await reading
    if tuple(reply.tokens) != right.tokens:
        raise AssertionError(f"{len(reply.tokens)} tokens, which are not the right {len(right.tokens)}: {reply.error}")


LOSSES = (
    Scenario("killer-request", "a request whose every decode instance is killed as soon as it decodes", _killer),
    Scenario(
        "lose-penalised", f"a penalised request loses its instance {LOSSES_OF_PINNED} times", _pinned, bound_s=80.0
    ),
)

# MERGED one_request.py
# One request or one API key that costs much, or goes wrong, beside others that must not notice.


_ROUNDS = 20
_ANSWER_S = 10.0
_PICTURE = "data:image/png;base64,aGVsbG8="
_CHAT, _COMPLETE, _RESPOND, _TOKENISE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"

GREEDY_TOKENS, GREEDY_MORE, GREEDY_ROUNDS = 1_900, 28, 3
_FIT = QUEUED_TOKENS // 2 // GREEDY_TOKENS
_SHARE_S = 2.0  # that the prompts of a key's share at both gateways take the prefill instances: others wait behind them

HELD_AIM_S, HELD_MOST_S = 0.05, 0.1  # CPU time of a turn of the event loop: the aim, and what fails
MESSAGES, PARTS, TOOLS, INPUT_ITEMS = 4_095, 4_093, 2_046, 800  # as many as `max_items_per_body` allows
PROPERTIES = 500
_CALM_S, _HELD_ROUNDS, _HELD_ANSWER_S = 3.0, 5, 20.0
_TOKENS_OF_LOGPROBS = 950  # times 21 candidates: just within the limit of a body
_LOGPROBS_S = 2.0  # that an instance on a CPU takes for them: the streams that it serves wait
_WORD = " fox"  # a token of the demo's model


async def _refused(arena: Arena, path: str, body: dict[str, Any], says: str) -> None:
    """Every gateway answers this body with a 400 that gives the reason, again and again."""
    for number in range(_ROUNDS):
        address = arena.gateways[number % len(arena.gateways)]
        reply = await hostile.body_of(address, Ask("rude", path, {"model": "demo", **body}), _ANSWER_S)
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
    replies = await asyncio.gather(
        *(hostile.body_of(address, fresh(ask), _ANSWER_S) for _ in range(_FIT + GREEDY_MORE))
    )
    if None in replies:
        raise AssertionError(f"a prompt of the greedy key was not answered within {_ANSWER_S:.0f} s")
    return [reply for reply in replies if reply is not None]


async def held_loop(arena: Arena) -> None:
    """The largest bodies within the limits, and some beyond them, each by itself beside the streams."""
    said = {"role": "user", "content": "a"}
    part, tool = {"type": "text", "text": "a"}, {"type": "function", "function": {"name": "a"}}
    parts = [{"role": "user", "content": [part] * PARTS}]
    context = [{"role": "user", "content": _WORD * (CONTEXT - 100)}]
    properties = {f"p{number}": {"type": "string"} for number in range(PROPERTIES)}
    schema = _wanted({"type": "object", "properties": properties, "required": list(properties)})
    dear = _wanted({"type": "string", "pattern": r"^(\w{1,9999}-){1,9999}$"})
    await _hold(
        arena,
        {
            f"{MESSAGES:,} messages": (_CHAT, {"messages": [said] * MESSAGES, "max_tokens": 1}, 200),
            f"{PARTS:,} content parts": (_CHAT, {"messages": parts, "max_tokens": 1}, 200),
            f"{TOOLS:,} tools": (
                _CHAT,
                {"messages": [said], "tools": [tool] * TOOLS, "tool_choice": "none", "max_tokens": 1},
                200,
            ),
            f"{INPUT_ITEMS:,} input items": (_RESPOND, {"input": [said] * INPUT_ITEMS, "max_output_tokens": 1}, 200),
            f"{INPUT_ITEMS:,} bad input items": (_RESPOND, {"input": [{"a": 1}] * INPUT_ITEMS}, 400),
            "4,096 input items": (_RESPOND, {"input": [said] * 4_096}, 400),
            "4,096 bad input items": (_RESPOND, {"input": [{"a": 1}] * 4_096}, 400),
            "a context of text": (_COMPLETE, {"prompt": _WORD * (CONTEXT - 2), "max_tokens": 1}, 200),
            "a context of token ids": (_COMPLETE, {"prompt": [400] * (CONTEXT - 2), "max_tokens": 1}, 200),
            "a chat of a context": (_CHAT, {"messages": context, "max_tokens": 1}, 200),
            f"a schema of {PROPERTIES} properties": (
                _CHAT,
                {"messages": [said], "response_format": schema, "max_tokens": 1},
                200,
            ),
            "a schema that is too expensive": (_CHAT, {"messages": [said], "response_format": dear}, 400),
            "a context to tokenise": (_TOKENISE, {"prompt": _WORD * (CONTEXT - 2)}, 200),
            "4 MB to tokenise": (_TOKENISE, {"prompt": "word " * 800_000}, 400),
        },
    )


async def held_loop_by_logprobs(arena: Arena) -> None:
    """The most log probabilities of prompts that a body may ask for."""
    body = {"prompt": [400] * _TOKENS_OF_LOGPROBS, "prompt_logprobs": 20, "max_tokens": 1}
    await _hold(arena, {"prompt log probabilities": (_COMPLETE, body, 200)})


def _wanted(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


async def _hold(arena: Arena, bodies: Mapping[str, tuple[str, dict[str, Any], int]]) -> None:
    """Send each, with the status that is right, and note how long it held the event loop.

    Raises AssertionError that names those beyond HELD_MOST_S.
    """
    times = arena.loop_times
    times.reset()
    await asyncio.sleep(_CALM_S)
    arena.notes.append(f"CPU time that the event loop was held: {_ms(times.longest_s)} by the streams alone")
    longest_s, said = dict.fromkeys(bodies, 0.0), dict.fromkeys(bodies, "")
    held_bytes = []
    for _ in range(_HELD_ROUNDS):
        for name, (path, body, status) in bodies.items():
            times.reset()
            ask = Ask("large", path, {"model": "demo", **body})
            reply = await hostile.body_of(arena.gateways[0], ask, _HELD_ANSWER_S)
            if reply is None or reply.status != status:
                raise AssertionError(f"{name}, for which {status} is right: {reply and (reply.status, reply.error)}")
            longest_s[name] = max(longest_s[name], times.longest_s)
            said[name] = f"{_ms(longest_s[name])} by {name} ({status})"
        held_bytes.append(footprint(arena).memory_bytes[arena.named("gateway")[0]])
    arena.notes += said.values()
    if beyond := [name for name, seconds in longest_s.items() if seconds > HELD_AIM_S]:
        arena.notes.append(f"beyond the aim of {_ms(HELD_AIM_S)}: {', '.join(beyond)}")
    arena.notes.append(f"memory after each round {', '.join(f'{held >> 20}' for held in held_bytes)} MiB")
    if (more := held_bytes[-1] - held_bytes[_HELD_ROUNDS // 2]) > MEMORY_BYTES:  # an allocator's arenas grow at first
        raise AssertionError(f"the same bodies again and again, and the gateway has {more >> 20} MiB more memory")
    if too_long := [said[name] for name, seconds in longest_s.items() if seconds > HELD_MOST_S]:
        raise AssertionError(f"the event loop was held for more than {_ms(HELD_MOST_S)}: {'; '.join(too_long)}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


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
    Scenario(
        "held-loop", "the largest bodies that are allowed, beside 16 streams", held_loop, LONG_CONTEXT, bound_s=90.0
    ),
    Scenario(
        "held-loop-logprobs",
        "the most prompt log probabilities of a body, beside 16 streams",
        held_loop_by_logprobs,
        LOGPROBS,
        away_s=_LOGPROBS_S,
        bound_s=90.0,
    ),
)
