"""Two real engines on one device, of which one prefills and the other decodes, beside a plain one: the same on a CPU
and on a GPU, where it is what `make gpu-check` runs.
"""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.domain.kv import Codec
from tests.services.worker.kv.vllm.engine_client import (
    LENGTHS,
    NEW_TOKENS,
    Engine,
    emptied,
    handed_over,
    identical,
    prompts,
)
from tests.tiny_models import make_llama

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
    pulls: Counter[str] = field(default_factory=Counter)
    wanted: int = 0  # pulls that there had to be


async def hand_overs(folder: Path, device: str, *, head_dim: int = 32, **options: Any) -> Found:
    """`options` are EngineArgs of all three; those of a dtype in which a batch's size does not matter make all
    identical. Asynchronous scheduling is on in the two and off in the plain one.
    """
    model = make_llama(folder, head_dim=head_dim)
    more: dict[str, Any] = {"device": device, **options}
    plain = Engine("plain", model, connector=False, async_scheduling=False, **more)
    p = Engine("p", model, block_size=32, async_scheduling=True, extra={"lossy": True}, **more)
    d = Engine("d", model, block_size=64, async_scheduling=True, extra={"lossy": True}, **more)
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
        await _inexact(found, p, d, texts, references)
        return found


async def _exact(found: Found, p: Engine, d: Engine, texts: list[list[int]], references: list[list[int]]) -> None:
    outputs = [await handed_over(p, d, text) for text in texts]
    found.one_by_one = identical(outputs, references)
    await _count(found, d, len(texts))
    for _ in range(ROUNDS):
        await _forget(p, d)
        outputs = await asyncio.gather(*(handed_over(p, d, text) for text in texts))
        found.at_once.append(identical(outputs, references))
        await _count(found, d, len(texts))
    await _forget(p, d)
    found.back = identical(await asyncio.gather(*(handed_over(d, p, text) for text in texts)), references)
    await _count(found, p, len(texts))
    await emptied(d)


async def _inexact(found: Found, p: Engine, d: Engine, texts: list[list[int]], references: list[list[int]]) -> None:
    for codec in (Codec.INT8, Codec.INT4, Codec.FP8):
        await _forget(p, d)
        outputs = [await handed_over(p, d, text, codec=codec) for text in texts]
        same = sum(output[0] == reference[0] for output, reference in zip(outputs, references, strict=True))
        found.lossy[codec.value] = same / len(texts)
        await _count(found, d, len(texts))
    await _forget(p, d)
    await d.ask("fault", zero=True, corrupt=False)
    found.zeroed = identical([await handed_over(p, d, text) for text in texts], references)
    await _count(found, d, len(texts))


async def _forget(*engines: Engine) -> None:
    for engine in engines:
        await engine.ask("reset")
        engine.events.clear()


async def _count(found: Found, importer: Engine, wanted: int) -> None:
    found.pulls += await importer.pulls(wanted)
    found.wanted += wanted


def show(found: Found) -> str:
    """For whoever runs it."""
    lossy = ", ".join(f"{name} {share:.2f}" for name, share in found.lossy.items())
    return (
        f"identical of {found.of}: {found.one_by_one} one by one, {found.at_once} at once, {found.back} back, "
        f"{found.zeroed} with zeroed KV; first tokens with {lossy}; pulls {dict(found.pulls)} of {found.wanted}"
    )
