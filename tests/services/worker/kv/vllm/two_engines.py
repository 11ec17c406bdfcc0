"""Two real engines, of which one prefills and the other decodes, beside a plain one: the same on a CPU and on GPUs,
where it is what `make gpu-check` runs.
"""

import asyncio
import re
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engine_client import LENGTHS, NEW_TOKENS, Engine, emptied, handed_over, identical, prompts, resumed
from services.worker.kv.rank_messages import PullEnded
from shared.domain.kv import Codec

ROUNDS = 3  # of all prompts at once


@dataclass
class Found:
    """Of hand-overs of `of` prompts each: how many gave the tokens of the plain engine, and how pulls ended."""

    of: int = len(LENGTHS)
    asynchronous: bool = False
    distinct: int = 0  # tokens among the references: few would prove nothing
    one_by_one: int = 0
    at_once: list[int] = field(default_factory=list)
    back: int = 0  # with the roles reversed
    zeroed: int = 0  # with zeros in the place of what was pulled: must be few
    lossy: dict[str, float] = field(default_factory=dict)  # share of first tokens that are the same, by codec
    first: float = 0.0  # share of first tokens that are the same
    cached: int = 0  # tokens of a prompt that the importer had in its prefix cache
    resumed: int = 0  # answers that went on in the other one after a third of their tokens
    prefixes: list[bool] = field(default_factory=list)  # whether answers after a cached prefix are the same
    strays: list[str] = field(default_factory=list)  # contexts of processes on devices that are not theirs
    pulls: Counter[str] = field(default_factory=Counter)
    wanted: int = 0  # pulls that there had to be


async def hand_overs(
    model: Path,
    device: str,
    *,
    source: dict[str, Any] | None = None,
    target: dict[str, Any] | None = None,
    lossy: bool = True,
    **options: Any,
) -> Found:
    """`options` are EngineArgs of all three; those of a dtype in which a batch's size does not matter make all
    identical. `source` and `target` are those of the two alone, and the plain one has the target's but its ranks.
    Asynchronous scheduling is on in the two, unless these say otherwise, and off in the plain one.
    """
    shared: dict[str, Any] = {"device": device, **options}
    ours: dict[str, Any] = {"async_scheduling": True, "extra": {"lossy": True}, **shared}
    like = {name: value for name, value in (target or {}).items() if name not in ("tp", "pp", "layers")}
    plain = Engine("plain", model, connector=False, **(shared | like | {"async_scheduling": False}))
    p = Engine("p", model, **({"block_size": 32} | ours | (source or {})))
    d = Engine("d", model, **({"block_size": 64} | ours | (target or {})))
    async with AsyncExitStack() as stack:
        for engine in (plain, p, d):
            stack.callback(engine.kill)  # also where another one does not start
        for engine in (plain, p, d):
            await stack.enter_async_context(engine)
        texts = prompts()
        references = [await plain.generate(text, NEW_TOKENS) for text in texts]
        found = Found(asynchronous=p.async_scheduling and d.async_scheduling)
        found.distinct = len({token for reference in references for token in reference})
        await _exact(found, p, d, texts, references)
        await _prefixes(found, plain, p, d, texts[-1])
        await _inexact(found, p, d, texts, references, lossy=lossy)
        for engine in (plain, p, d):
            found.strays += strays_of(engine.name, await engine.ask("devices"))
        return found


def refused_backend(error: RuntimeError) -> str:
    """Why vLLM has not this attention backend for this device and model. Raises the error if an engine died of anything
    else.
    """
    reason = re.search(r"Selected backend \S+ is not valid for this configuration\. Reason: (.*)", str(error))
    if reason is None:
        raise error
    return reason[1]


def strays_of(name: str, answer: dict[str, Any]) -> list[str]:
    """Contexts on other devices than a process's own. Each costs half a GiB there. A process that computes nothing,
    beside those of several ranks, is to have none.
    """
    own = {rank["pid"]: rank["own"] for rank in answer["ranks"]}
    processes = {each["pid"]: each["contexts"] for each in (answer["engine"], *answer["ranks"])}
    return [
        f"process {pid} of {name}, whose device is {own.get(pid)}, has a context on device {device}"
        for pid, contexts in processes.items()
        for device in contexts
        if device != own.get(pid)
    ]


async def _exact(found: Found, p: Engine, d: Engine, texts: list[list[int]], references: list[list[int]]) -> None:
    outputs = [await handed_over(p, d, text) for text in texts]
    found.one_by_one = identical(outputs, references)
    found.first = _first(outputs, references)
    await _count(found, d, len(texts))
    for _ in range(ROUNDS):
        await _forget(p, d)
        outputs = await asyncio.gather(*(handed_over(p, d, text) for text in texts))
        found.at_once.append(identical(outputs, references))
        await _count(found, d, len(texts))
    await _forget(p, d)
    outputs = await asyncio.gather(*(_moved(p, d, *each) for each in zip(texts, references, strict=True)))
    found.resumed = identical(outputs, references)
    await _count(found, d, len(texts))
    await _forget(p, d)
    found.back = identical(await asyncio.gather(*(handed_over(d, p, text) for text in texts)), references)
    await _count(found, p, len(texts))
    await emptied(d)


async def _moved(p: Engine, d: Engine, text: list[int], reference: list[int]) -> list[int]:
    known = reference[: NEW_TOKENS // 3]
    return known + await resumed(p, d, text, known)


async def _prefixes(found: Found, plain: Engine, p: Engine, d: Engine, text: list[int]) -> None:
    """A prompt of which both have the beginning in their prefix caches: the exporter computes, and the importer pulls,
    the rest.
    """
    await _forget(p, d)
    for tokens in (600, 900):
        reference = await plain.generate(text[:tokens], NEW_TOKENS)
        output = await handed_over(p, d, text[:tokens])
        found.prefixes.append(output == reference)
    await _count(found, d, 2)
    pulled = [event.tokens for event in d.events if isinstance(event, PullEnded) and event.rank == 0]
    found.cached = 900 - pulled[-1]


async def _inexact(
    found: Found, p: Engine, d: Engine, texts: list[list[int]], references: list[list[int]], *, lossy: bool
) -> None:
    for codec in (Codec.INT8, Codec.INT4, Codec.FP8) if lossy else ():
        await _forget(p, d)
        outputs = [await handed_over(p, d, text, codec=codec) for text in texts]
        found.lossy[codec.value] = _first(outputs, references)
        await _count(found, d, len(texts))
    await _forget(p, d)
    await d.ask("fault", zero=True, corrupt=False)
    found.zeroed = identical([await handed_over(p, d, text) for text in texts], references)
    await _count(found, d, len(texts))


async def _forget(*engines: Engine) -> None:
    for engine in engines:
        await engine.ask("reset")
        engine.events.clear()


async def _count(found: Found, importer: Engine, hand_overs: int) -> None:
    wanted = hand_overs * len(importer.endpoints)  # each rank pulls its own
    found.pulls += await importer.pulls(wanted)
    found.wanted += wanted


def _first(outputs: list[list[int]], references: list[list[int]]) -> float:
    return sum(output[0] == reference[0] for output, reference in zip(outputs, references, strict=True)) / len(outputs)


def show(found: Found) -> str:
    """For whoever runs it."""
    lossy = ", ".join(f"{name} {share:.2f}" for name, share in found.lossy.items())
    return (
        f"identical of {found.of}: {found.one_by_one} one by one, {found.at_once} at once, {found.back} back, "
        f"{found.resumed} resumed, {found.zeroed} with zeroed KV; first tokens {found.first:.2f}; "
        f"with {lossy or 'no codec'}; "
        f"{found.cached} of 900 tokens cached, answers the same: {found.prefixes}; "
        f"pulls {dict(found.pulls)} of {found.wanted}; stray contexts: {found.strays or 'none'}"
    )
