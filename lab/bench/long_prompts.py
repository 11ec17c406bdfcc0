"""How long a long prompt holds up the event loop of a gateway, and with it every stream.

The gateway's application in this process on a loop that times each of its callbacks; tokens come from a timer.
"""

import asyncio
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from gateway.alone import TimerTokens
from gateway.app import prepare_environment, running
from gateway.auth import KeyRing
from gateway.settings import GatewaySettings
from services.launcher.model_source import PROJECT

LENGTHS = (8_000, 32_000, 120_000)
ROUNDS = 5
AIM_MS = 5.0
_WORD = " fox"  # a token of the demo's model
_MODEL = PROJECT / "models" / "demo"


def run_long_prompts() -> dict[str, Any]:
    """The longest callback, in ms, of each length as text and as token ids: medians."""
    prepare_environment()
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # than the demo's model has; nothing computes here
    return asyncio.run(_measured())


async def _measured() -> dict[str, Any]:
    settings = GatewaySettings(
        schedulers=("tcp://127.0.0.1:9",), model=str(_MODEL), served_model_name="demo", max_model_len=131_072
    )
    async with running(settings, KeyRing(()), TimerTokens(0.001)) as app:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60) as client:
            await _longest_ms(client, 1_000)
            return {
                kind: {str(tokens): await _median(client, tokens, as_ids=kind == "ids") for tokens in LENGTHS}
                for kind in ("text", "ids")
            }


async def _median(client: httpx.AsyncClient, tokens: int, *, as_ids: bool) -> float:
    return round(statistics.median([await _longest_ms(client, tokens, as_ids=as_ids) for _ in range(ROUNDS)]), 2)


async def _longest_ms(client: httpx.AsyncClient, tokens: int, *, as_ids: bool = False) -> float:
    prompt: object = [300 + number % 500 for number in range(tokens)] if as_ids else _WORD * tokens
    body = {"model": "demo", "prompt": prompt, "max_tokens": 4, "stream": True, "temperature": 0, "ignore_eos": True}
    request = client.build_request("POST", "/v1/completions", json=body)
    with _timed_callbacks() as times:
        await asyncio.sleep(0)  # the making of the body is not the gateway's
        answer = await client.send(request)
    if not answer.is_success:
        raise RuntimeError(f"{answer.status_code}: {answer.text[:500]}")
    return max(times) * 1e3


@contextmanager
def _timed_callbacks() -> Iterator[list[float]]:
    """CPU seconds that each callback of the loop takes: on a machine of its own it takes no longer."""
    times: list[float] = []
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        times.append(time.thread_time() - began)

    asyncio.Handle._run = timed  # type: ignore[method-assign,assignment]
    try:
        yield times
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]
