"""Requests of wished lengths at wished moments, through the gateway, with the times that a client sees."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

import httpx

from lab.bench.stream_client import StreamFailed, stream_completion
from lab.calibrate.target import Target
from shared.domain.job import Slo, itl_met
from shared.errors import Unavailable

Result = TypeVar("Result")
_TEXT = "The river ran past stone houses, quiet gardens and a harbour full of copper engines; people came. "


@dataclass(frozen=True, slots=True)
class Shot:
    """One request to be. at_s: seconds after the first. slo: its class, "" for the default."""

    prompt_tokens: int
    output_tokens: int
    at_s: float = 0.0
    slo: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One request that was. sent_s: unix time; jct_s: until its last token; gaps_s: between one token and the next."""

    request_id: str
    shot: Shot
    sent_s: float
    ttft_s: float
    jct_s: float
    gaps_s: tuple[float, ...] = ()

    @property
    def tpot_s(self) -> float | None:
        """None with fewer than two tokens."""
        gaps = self.shot.output_tokens - 1
        return (self.jct_s - self.ttft_s) / gaps if gaps else None

    @property
    def longest_gap_s(self) -> float | None:
        """Between two of its events; None with fewer."""
        return max(self.gaps_s, default=None)

    def met(self, slo: Slo) -> bool:
        """Whether TTFT, TPOT and the gaps between its events were within these targets."""
        over = sum(gap_s > slo.itl_s for gap_s in self.gaps_s)
        return self.ttft_s <= slo.ttft_s and (self.tpot_s or 0.0) <= slo.tpot_s and itl_met(len(self.gaps_s), over)


class Traffic:
    """Sends greedy completions of exact lengths; no two prompts begin alike, so that no prefix cache finds any."""

    def __init__(self, target: Target, model: str, tokens: Sequence[int], max_model_len: int, seed: int) -> None:
        self.max_model_len = max_model_len
        self._target = target
        self._model = model
        self._tokens = tokens
        self._rng = Random(seed)
        self._run = secrets.token_hex(3)
        self._sent = 0

    @classmethod
    async def to(cls, target: Target, seed: int = 0) -> "Traffic":
        """For the model behind the API. Raises Unavailable."""
        headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        async with httpx.AsyncClient(base_url=target.api_url, headers=headers, timeout=10, trust_env=False) as http:
            try:
                answer = await http.get("/v1/models")
                served = answer.raise_for_status().json()["data"][0]
                answer = await http.post("/tokenize", json={"model": served["id"], "prompt": _TEXT})
                tokens = answer.raise_for_status().json()["tokens"]
            except httpx.HTTPError as error:
                raise Unavailable(f"{target.api_url}: {error}") from error
        return cls(target, served["id"], tokens, int(served["max_model_len"]), seed)

    async def closed(self, shots: Sequence[Shot], concurrency: int) -> list[Sample]:
        """All of them, `concurrency` at a time. Raises Unavailable when one fails."""
        pending = list(shots)[::-1]
        samples: list[Sample] = []

        async def worker() -> None:
            while pending:
                samples.append(await self._send(pending.pop()))

        await _all([worker() for _ in range(concurrency)])
        return samples

    async def timed(self, shots: Sequence[Shot]) -> list[Sample]:
        """Each at its time, in their order. Raises Unavailable when one fails."""
        return await _in_time(shots, self._send)

    async def tried(self, shots: Sequence[Shot]) -> list[Sample | str]:
        """Each at its time, in their order; of one that fails, why."""

        async def one(shot: Shot) -> Sample | str:
            try:
                return await self._send(shot)
            except (StreamFailed, OSError) as error:
                return str(error) or type(error).__name__

        return await _in_time(shots, one)

    async def _send(self, shot: Shot) -> Sample:
        self._sent += 1
        name = f"m{self._run}n{self._sent}"
        body: dict[str, object] = {
            "model": self._model,
            "prompt": self._rng.choices(self._tokens, k=shot.prompt_tokens),
            "max_tokens": shot.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "request_id": name,
            "cache_salt": name,
        }
        sent_s = time.time()
        host, port = self._target.api_address
        seen = await stream_completion(host, port, body, self._target.api_key, shot.slo)
        return Sample(name, shot, sent_s, seen.ttft_s, seen.last_s, seen.gaps_s)


async def _in_time(shots: Sequence[Shot], send: Callable[[Shot], Awaitable[Result]]) -> list[Result]:
    loop = asyncio.get_running_loop()
    began = loop.time()
    found: dict[int, Result] = {}

    async def later(number: int, shot: Shot) -> None:
        await asyncio.sleep(began + shot.at_s - loop.time())
        found[number] = await send(shot)

    await _all([later(number, shot) for number, shot in enumerate(shots)])
    return [found[number] for number in range(len(shots))]


async def _all(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except* (StreamFailed, OSError) as failures:
        first: BaseException = failures
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise Unavailable(f"a request failed: {first}") from None
