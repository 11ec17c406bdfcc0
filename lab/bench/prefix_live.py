"""Chats on four real engines of this machine: what they find in their prefix caches under either placement."""

import asyncio
import re
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from lab.bench.prefix_chats import Chat, chats, messages_of
from lab.bench.prefix_oracle import imbalance, oracle_tokens
from lab.bench.quota_suite import QuotaSuite, cluster_file, running_under_quotas
from lab.bench.random_llama import LlamaShape
from lab.bench.stream_client import StreamFailed, stream_completion
from lab.calibrate.target import Target
from services.launcher.up import RunningSuite
from shared.domain.instance import Role
from shared.domain.prompt import block_hashes
from shared.domain.route import PolicySpec
from shared.errors import Unavailable

INSTANCES, CORES = 4, 0.4  # and the rest of two cores for everything else
# 17 million parameters: a prompt token takes two ms on so much of a core, and the services add little to a prompt.
SHAPE = LlamaShape(4096, 384, 1024, 8, 6, 3, 4096)
MAX_MODEL_LEN, CHUNK, SEATS = 4096, 256, 32
KV_BYTES, STAGING_BYTES = 512 << 20, 64 << 20
SYSTEMS = ("adaptive", "least_load")  # placements; everything else is the default
CHATS, TURNS, CHATS_PER_S, ANSWER_TOKENS = 24, 5, 0.5, 12
SEED = 21
WHO = "polyphase bench prefix"
_COUNTER = re.compile(r"^vllm:prefix_cache_(queries|hits)_total (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Found:
    """What an instance has looked up in its prefix cache and found there, in prompt tokens."""

    queried: float
    hit: float

    @classmethod
    def of(cls, metrics: str) -> "Found":
        """From a worker's metrics. Raises Unavailable where they lack it."""
        said = dict(_COUNTER.findall(metrics))
        if said.keys() != {"queries", "hits"}:
            raise Unavailable("a worker's metrics lack vllm:prefix_cache_queries or vllm:prefix_cache_hits")
        return cls(float(said["queries"]), float(said["hits"]))


@dataclass(frozen=True, slots=True)
class Request:
    """One that was answered. sent_s: on the loop's clock."""

    chat: int
    turn: int
    sent_s: float
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """One replay. computed: prompt tokens by instance; hit, oracle: tokens in all."""

    system: str
    requests: Sequence[Request]
    computed: Mapping[str, float]
    hit: float
    oracle: float

    @property
    def imbalance(self) -> float:
        """See `imbalance`."""
        return imbalance(list(self.computed.values()))


async def run_live(rounds: int, console: Console) -> list[Run]:
    """Both placements in turn, so many rounds. Raises Unavailable where this machine allows no CPU quotas."""
    with tempfile.TemporaryDirectory(prefix="polyphase-prefix-") as folder:
        cores = dict.fromkeys(names(), CORES)
        async with running_under_quotas(QuotaSuite, Path(folder), console, SHAPE, cores, cluster_of) as suite:
            running = suite.running
            return await running.supervisor.during(_measure(running, rounds, console))


def names() -> list[str]:
    """Of the instances."""
    return [f"node{at}" for at in range(INSTANCES)]


def cluster_of(model: Path) -> dict[str, Any]:
    """The cluster file: each instance serves whole requests."""
    instances = [{"id": name, "role": Role.DECODE.value} for name in names()]
    memory = {"kv_cache_bytes": KV_BYTES, "staging_bytes": STAGING_BYTES}
    return cluster_file("prefix", model, instances, MAX_MODEL_LEN, chunk_size=CHUNK, max_seqs=SEATS, **memory)


async def _measure(running: RunningSuite, rounds: int, console: Console) -> list[Run]:
    target, runs = Target.local(running.suite), list[Run]()
    async with httpx.AsyncClient(timeout=10.0, trust_env=False) as http:
        meter = Meter(running, target, http)
        await meter.play(SYSTEMS[0], chats(2 * INSTANCES, 2, 1.0, SEED - 1))  # rates are learned while serving
        for number in range(rounds):
            said = chats(CHATS, TURNS, CHATS_PER_S, SEED + number)
            for system in SYSTEMS if number % 2 else SYSTEMS[::-1]:
                run = await meter.play(system, said)
                ttft_s = sum(one.ttft_s for one in run.requests) / len(run.requests)
                line = f"{system:10} mean TTFT {ttft_s:.2f} s, hits {run.hit / run.oracle:.2f} of the oracle's"
                console.print(f"{line}, load max/mean {run.imbalance:.2f}", soft_wrap=True)
                runs.append(run)
    return runs


class Meter:
    """Sends chats to the suite and notes what came of them."""

    def __init__(self, running: RunningSuite, target: Target, http: httpx.AsyncClient) -> None:
        self._running = running
        self._target = target
        self._http = http

    async def play(self, placement: str, said: Sequence[Chat]) -> Run:
        """All chats, under a salt of their own: nothing of an earlier run can be found. Raises Unavailable."""
        suite = self._running.suite
        await suite.wait_idle()
        await suite.set_policies({"placement": PolicySpec(placement)}, WHO)
        infos = {name: entry["info"] for name, entry in (await suite.instances()).items()}
        prompts = {
            (at, number): await self._tokens(messages_of(turn))
            for at, chat in enumerate(said)
            for number, turn in enumerate(chat.turns)
        }
        before = await self._found(infos)
        requests = await self._send(said)
        await suite.wait_idle()
        after = await self._found(infos)
        size = next(iter(infos.values()))["block_size"]
        order = [prompts[one.chat, one.turn] for one in sorted(requests, key=lambda one: one.sent_s)]
        oracle = oracle_tokens([(block_hashes(ids, block_tokens=size), len(ids)) for ids in order], size)
        hit = {name: after[name].hit - before[name].hit for name in infos}
        computed = {name: after[name].queried - before[name].queried - hit[name] for name in infos}
        return Run(placement, requests, computed, sum(hit.values()), sum(oracle))

    async def _tokens(self, messages: list[dict[str, str]]) -> list[int]:
        body = {"model": self._target.model, "messages": messages, "add_generation_prompt": True}
        answer = await self._http.post(f"{self._target.api_url}/tokenize", json=body)
        tokens: list[int] = answer.raise_for_status().json()["tokens"]
        return tokens

    async def _found(self, infos: Mapping[str, Mapping[str, Any]]) -> dict[str, Found]:
        return {name: Found.of((await self._http.get(f"{info['http']}/metrics")).text) for name, info in infos.items()}

    async def _send(self, said: Sequence[Chat]) -> list[Request]:
        salt, loop, found = secrets.token_hex(8), asyncio.get_running_loop(), list[Request]()
        began = loop.time()

        async def one(at: int, chat: Chat) -> None:
            await asyncio.sleep(began + chat.starts_s - loop.time())
            for number, turn in enumerate(chat.turns):
                await asyncio.sleep(turn.pause_s)
                body: dict[str, object] = {
                    "model": self._target.model,
                    "messages": messages_of(turn),
                    "max_tokens": ANSWER_TOKENS,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": True,
                    "cache_salt": salt,
                }
                sent_s = loop.time()
                seen = await stream_completion(*self._target.api_address, body, path="/v1/chat/completions")
                found.append(Request(at, number, sent_s, seen.ttft_s))

        try:
            async with asyncio.TaskGroup() as group:
                for at, chat in enumerate(said):
                    group.create_task(one(at, chat))
        except* (StreamFailed, OSError) as failures:
            raise Unavailable(f"a request failed: {failures.exceptions[0]}") from None
        return found
