"""Clients of `polyphase bench soak` in a process of their own, under a CPU quota: hostile ones, or legal load.

Run as `python -m benchmarks.soak_clients hostile|legal PORT SECONDS`. Every kind of hostile client is bounded in count
and rate; the process ends by itself after SECONDS.
"""

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random

from benchmarks.chaos import hostile
from tools.client import CHAT, COMPLETIONS, Request, StreamFailed, completion_body, send, stream_completion

HOST = "127.0.0.1"
PAUSE_S = 0.5  # between two attacks of one hostile client
LEGAL_STREAMS = 8
_ANSWER_S = 20.0  # a hostile client leaves after that
_BODY_BYTES = 3_900_000

Address = tuple[str, int]
Attack = Callable[[Address, Random], Awaitable[object]]


def _completion(**more: object) -> Request:
    return Request(COMPLETIONS, {"model": "demo", "prompt": "Hello", "max_tokens": 4, **more})


async def _many_items(address: Address, rng: Random) -> None:
    """The largest body of the smallest items, of one of the kinds that a body may have."""
    messages = [{"role": "user", "content": "a"}] * 60_000
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    bodies = [
        Request("/v1/responses", {"model": "demo", "input": [{"role": "user", "content": ""}] * 90_000}),
        Request(CHAT, {"model": "demo", "messages": messages}),
        Request(CHAT, {"model": "demo", "messages": messages[:1], "tools": [tool] * 40_000}),
        _completion(stop=["a"] * 200_000),
    ]
    await hostile.body_of(address, rng.choice(bodies), _ANSWER_S)


async def _long_text(address: Address, rng: Random) -> None:
    """The largest text to tokenise."""
    ask = Request("/tokenize", {"model": "demo", "prompt": "a b " * (_BODY_BYTES // 4)})
    await hostile.body_of(address, ask, _ANSWER_S)


async def _prompt_logprobs(address: Address, rng: Random) -> None:
    """Log probabilities of a prompt of one token."""
    await hostile.body_of(address, _completion(prompt=[5], max_tokens=1, prompt_logprobs=1), _ANSWER_S)


async def _costly_grammar(address: Address, rng: Random) -> None:
    """A new large schema each time, so that no verdict of a cache serves it."""
    name = f"p{rng.getrandbits(60)}"
    schema = {"type": "object", "properties": {f"{name}{n}": {"type": "string"} for n in range(1500)}}
    response_format = {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
    message = {"role": "user", "content": "Hello"}
    body = {"model": "demo", "messages": [message], "max_tokens": 4, "response_format": response_format}
    await hostile.body_of(address, Request(CHAT, body), _ANSWER_S)


async def _unread(address: Address, rng: Random) -> None:
    """Streams that are not read."""
    await hostile.never_read(address, _completion(max_tokens=200, stream=True), 3.0)


async def _disconnect(address: Address, rng: Random) -> None:
    """A stream that is left at any moment."""
    await hostile.leave(address, _completion(max_tokens=200, stream=True), rng.uniform(0.0, 1.0))


async def _silent(address: Address, rng: Random) -> None:
    """Connections that send nothing."""
    writers = []
    for _ in range(20):
        with suppress(OSError):
            writers.append((await asyncio.open_connection(*address))[1])
    await asyncio.sleep(5.0)
    for writer in writers:
        writer.transport.abort()


async def _metrics(address: Address, rng: Random) -> None:
    """`/metrics`, again and again."""
    for _ in range(20):
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")
            await reader.read()
            writer.close()


async def _bad_number(address: Address, rng: Random) -> None:
    """Numbers that JSON does not have, and numbers out of any range."""
    payload = b'{"model": "demo", "prompt": "a", "temperature": %s}' % rng.choice([b"NaN", b"Infinity", b"1e999"])
    head = b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    with suppress(OSError):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(head % len(payload) + payload)
        await reader.read()
        writer.close()


async def _image(address: Address, rng: Random) -> None:
    """An image, which the demo model cannot see."""
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {"model": "demo", "messages": [{"role": "user", "content": [part]}], "max_tokens": 4}
    await send(address, Request(CHAT, body), _ANSWER_S)


ATTACKS: tuple[Attack, ...] = (
    _many_items,
    _long_text,
    _prompt_logprobs,
    _costly_grammar,
    _unread,
    _disconnect,
    _silent,
    _metrics,
    _bad_number,
    _image,
)


async def _hostile(address: Address, until_s: float) -> dict[str, int]:
    """One client for each attack. Returns how often each attack was made."""
    made = {attack.__name__.lstrip("_"): 0 for attack in ATTACKS}

    async def client(number: int, attack: Attack) -> None:
        rng = Random(number)
        while time.monotonic() < until_s:
            with suppress(OSError):
                await attack(address, rng)
            made[attack.__name__.lstrip("_")] += 1
            await asyncio.sleep(PAUSE_S)

    async with asyncio.TaskGroup() as group:
        for number, attack in enumerate(ATTACKS):
            group.create_task(client(number, attack))
    return made


async def _legal(address: Address, until_s: float) -> dict[str, int]:
    """Short streams, `LEGAL_STREAMS` at a time. Returns how many were whole and how many failed."""
    made = {"whole": 0, "failed": 0}
    numbers = itertools.count()

    async def client() -> None:
        while time.monotonic() < until_s:
            body = completion_body(f"{next(numbers)} fox", 16)
            try:
                await stream_completion(*address, body)
                made["whole"] += 1
            except (StreamFailed, OSError):
                made["failed"] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(LEGAL_STREAMS):
            group.create_task(client())
    return made


def main() -> None:
    """Print how often each was done as one JSON object."""
    kind, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    run = {"hostile": _hostile, "legal": _legal}[kind]
    print(json.dumps(asyncio.run(run((HOST, port), time.monotonic() + seconds))))


if __name__ == "__main__":
    main()
