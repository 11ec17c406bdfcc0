"""`polyphase bench prefix`: prefix cache hits of the adaptive placement, beside a placement that ignores caches and an
oracle.

Mooncake's traces run on simulated instances; chats of several turns run on four real engines of this machine.
"""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np

from benchmarks.experiment import WHO
from benchmarks.real_engines import LlamaShape, QuotaSuite, cluster_file, measured_under_quotas
from benchmarks.results import Result, at_least, at_most, merged, progress, rotated
from benchmarks.scenarios import learned
from benchmarks.suite import metric
from services.launcher.suite import Suite
from shared.domain.instance import Role
from shared.domain.job import Slo
from shared.domain.prompt import block_hashes
from shared.domain.route import PolicySpec
from shared.errors import NotFound, Unavailable
from shared.sim.cluster import simulate
from shared.sim.metrics import attainment
from shared.sim.spec import InstanceSpec, RunSpec, with_words
from shared.sim.traces import read_trace
from shared.sim.workload import Workload
from tools.calibrate.target import Target
from tools.client import CHAT, StreamFailed, chat_body, stream_completion
from tools.simulate.deployment import Deployment, load_deployment


def oracle_tokens(
    prompts: Iterable[tuple[Sequence[int], int]], block_tokens: int, blocks: int | None = None
) -> list[int]:
    """Tokens of each prompt that such a cache would save. prompts: in order of arrival, ids of whole blocks and tokens.

    It holds every block of every prompt from the moment of its arrival, before anybody has computed it; of more than
    `blocks` (None: any number) the least recently used are forgotten. As in an engine the longest run of blocks from
    the start counts, and the last token is always computed.
    """
    held, found = OrderedDict[int, None](), []
    for ids, tokens in prompts:
        run = next((at for at, block in enumerate(ids) if block not in held), len(ids))
        found.append(max(0, min(run * block_tokens, tokens - 1)))
        for block in ids:
            held[block] = None
            held.move_to_end(block)
        while blocks is not None and len(held) > blocks:
            held.popitem(last=False)
    return found


def imbalance(computed: Sequence[float]) -> float:
    """The most that one instance computed over the mean; 1.0 where all computed as much."""
    return max(computed) * len(computed) / max(1e-9, sum(computed))


# Mooncake's traces on eight simulated nodes.

TRACES = {name: Path("traces/mooncake") / f"{name}_trace.jsonl" for name in ("conversation", "synthetic")}
REQUESTS = 4_000  # the first of each
SYSTEMS = {"adaptive": "adaptive", "least_load": "least_load+split=none+power_of_two"}
SHARES = (0.5, 0.75, 0.9)  # of what `least_load` serves when all come at once
SLO = Slo()  # the default class
SEED = 1


@dataclass(frozen=True, slots=True)
class Point:
    """One run. saved_tokens: prompt tokens that no instance computed. imbalance: of computed tokens."""

    rate: float
    saved_tokens: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    attainment: float
    imbalance: float
    longest_gap_p90_s: float  # of the requests' longest gaps
    longest_gap_max_s: float


@dataclass(frozen=True, slots=True)
class Oracles:
    """Tokens that a cache for all would have saved: one without bounds, one as large as all nodes' KV memory."""

    unbounded: int
    pooled: int


@dataclass(frozen=True, slots=True)
class Case:
    """A trace on the cluster."""

    trace: str
    data: Path

    def work(self) -> Workload:
        return _work(self.data / TRACES[self.trace])

    def oracles(self) -> Oracles:
        work, nodes = self.work(), instances()
        assert work.prefixes is not None  # these traces name them
        prompts = list(zip(work.prefixes, work.prompt_tokens.tolist(), strict=True))
        blocks = sum(node.kv_tokens for node in nodes) // work.prefix_block_tokens
        found = (sum(oracle_tokens(prompts, work.prefix_block_tokens, most)) for most in (None, blocks))
        return Oracles(*found)

    def capacity(self) -> float:
        work = self.work()
        return len(work) / simulate(work.at_once(), instances(), _run("least_load")).duration_s

    def point(self, system: str, rate: float) -> Point:
        work = self.work().at_rate(rate)
        result = simulate(work, instances(), _run(system))
        rows = result.outcomes
        computed = [use.prefill_tokens for use in result.instances]
        median_s, last_s = (float(np.percentile(rows.ttft_s, share)) for share in (50, 99))
        return Point(
            rate,
            int(work.prompt_tokens.sum()) - sum(computed),
            float(np.mean(rows.ttft_s)),
            median_s,
            last_s,
            float(np.nanmean(rows.tpot_s)),
            attainment(rows, SLO).every,
            imbalance(computed),
            float(np.nanpercentile(rows.longest_gap_s, 90)),
            float(np.nanmax(rows.longest_gap_s)),
        )


def cases(data: Path) -> Iterator[Case]:
    """All traces. Raises NotFound where they are not."""
    for trace, path in TRACES.items():
        if not (data / path).is_file():
            raise NotFound(f"no {data / path}: it is Mooncake's FAST25-release/traces/{path.name}")
        yield Case(trace, data)


@cache
def _work(path: Path) -> Workload:
    return read_trace(path).head(REQUESTS)


@cache
def instances() -> tuple[InstanceSpec, ...]:
    """The nodes, each with the rates that it would have learned of itself."""
    rng = Random(SEED)
    return tuple(learned(one, rng) for one in _deployment().instances)


@cache
def _deployment() -> Deployment:
    return load_deployment(Path(__file__).with_name("clusters") / "prefix.yaml")


def _run(system: str) -> RunSpec:
    return with_words(replace(_deployment().run, slo=SLO, seed=SEED), SYSTEMS[system])


# Chats of several turns: each prompt is the conversation so far and something new.

_WORDS = """
river stone house quiet garden harbour copper engine people road winter morning letter window market bridge forest
silver table captain island summer machine paper village mountain teacher station yellow button
"""
SYSTEM_WORDS, FIRST_WORDS, LATER_WORDS, ANSWER_WORDS = 60, (150, 350), (30, 90), (30, 60)
PAUSE_S = (3.0, 9.0)  # between an answer and the next message: uniform


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a chat. messages: its whole prompt; pause_s: after the answer before."""

    messages: tuple[tuple[str, str], ...]  # role, text
    pause_s: float


@dataclass(frozen=True, slots=True)
class Chat:
    """starts_s: of its first turn."""

    starts_s: float
    turns: tuple[Turn, ...]


def chats(count: int, turns: int, per_s: float, seed: int) -> list[Chat]:
    """`count` chats that begin as a Poisson process, `per_s` a second, the first at once. All have one system prompt.

    The assistant's answers are fixed beforehand, so that every system gets the
    same prompts.
    """
    rng = Random(seed)
    system, made, at_s = ("system", _text(rng, SYSTEM_WORDS)), [], 0.0
    for _ in range(count):
        made.append(Chat(at_s, _turns(rng, system, turns)))
        at_s += rng.expovariate(per_s)
    return made


def _turns(rng: Random, system: tuple[str, str], count: int) -> tuple[Turn, ...]:
    messages, found = [system], []
    for number in range(count):
        messages.append(("user", _text(rng, rng.randint(*(LATER_WORDS if number else FIRST_WORDS)))))
        found.append(Turn(tuple(messages), rng.uniform(*PAUSE_S) if number else 0.0))
        messages.append(("assistant", _text(rng, rng.randint(*ANSWER_WORDS))))
    return tuple(found)


def messages_of(turn: Turn) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in turn.messages]


def _text(rng: Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS.split(), k=words))


# Chats on four real engines of this machine.

INSTANCES, CORES = 4, 0.4  # and the rest of two cores for everything else
# 17 million parameters: a prompt token takes two ms on so much of a core, and the services add little to a prompt.
SHAPE = LlamaShape(4096, 384, 1024, 8, 6, 3, 4096)
MAX_MODEL_LEN, CHUNK, SEATS = 4096, 256, 32
KV_BYTES, STAGING_BYTES = 512 << 20, 64 << 20
LIVE_SYSTEMS = ("adaptive", "least_load")  # placements; everything else is the default
CHATS, TURNS, CHATS_PER_S, ANSWER_TOKENS = 24, 5, 0.5, 12
LIVE_SEED = 21


@dataclass(frozen=True, slots=True)
class Found:
    """What an instance has looked up in its prefix cache and found there, in prompt tokens."""

    queried: float
    hit: float

    @classmethod
    def of(cls, metrics: str) -> "Found":
        """From a worker's metrics. Raises Unavailable where they lack it."""
        return cls(*(metric(metrics, f"vllm:prefix_cache_{name}_total") for name in ("queries", "hits")))


@dataclass(frozen=True, slots=True)
class Request:
    """An answered request. sent_s: on the loop's clock."""

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
        return imbalance(list(self.computed.values()))


async def run_live(rounds: int) -> list[Run]:
    """Both placements in turn, so many rounds. Raises Unavailable where this machine allows no CPU quotas."""
    cores = dict.fromkeys(names(), CORES)
    return await measured_under_quotas(QuotaSuite, SHAPE, cores, cluster_of, partial(_measure, rounds), LIVE_SEED)


def names() -> list[str]:
    return [f"node{at}" for at in range(INSTANCES)]


def cluster_of(model: Path) -> dict[str, Any]:
    """The cluster file: each instance serves whole requests."""
    instances = [{"id": name, "role": Role.DECODE.value} for name in names()]
    memory = {"kv_cache_bytes": KV_BYTES, "staging_bytes": STAGING_BYTES}
    return cluster_file("prefix", model, instances, MAX_MODEL_LEN, chunk_size=CHUNK, max_seqs=SEATS, **memory)


async def _measure(rounds: int, suite: QuotaSuite) -> list[Run]:
    runs: list[Run] = []
    async with httpx.AsyncClient(timeout=10.0, trust_env=False) as http:
        player = Player(suite.suite, suite.target, http)
        warm_up = chats(2 * INSTANCES, 2, 1.0, LIVE_SEED - 1)  # rates are learned while serving
        await player.play(LIVE_SYSTEMS[0], warm_up)
        for number in range(rounds):
            conversations = chats(CHATS, TURNS, CHATS_PER_S, LIVE_SEED + number)
            for system in rotated(LIVE_SYSTEMS, number + 1):
                run = await player.play(system, conversations)
                ttft_s = sum(one.ttft_s for one in run.requests) / len(run.requests)
                line = f"{system:10} mean TTFT {ttft_s:.2f} s, hits {run.hit / run.oracle:.2f} of the oracle's"
                progress(f"{line}, load max/mean {run.imbalance:.2f}")
                runs.append(run)
    return runs


@dataclass(frozen=True, slots=True)
class Player:
    """Sends chats to the suite and collects the results."""

    _suite: Suite
    _target: Target
    _http: httpx.AsyncClient

    async def play(self, placement: str, conversations: Sequence[Chat]) -> Run:
        """All chats, under a salt of their own: nothing of an earlier run can be found. Raises Unavailable."""
        suite = self._suite
        await suite.wait_idle()
        await suite.set_policies({"placement": PolicySpec(placement)}, WHO)
        infos = {name: entry["info"] for name, entry in (await suite.instances()).items()}
        prompts = {
            (at, number): await self._tokens(messages_of(turn))
            for at, chat in enumerate(conversations)
            for number, turn in enumerate(chat.turns)
        }
        before = await self._found(infos)
        requests = await self._send(conversations)
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

    async def _send(self, conversations: Sequence[Chat]) -> list[Request]:
        salt, loop, found = secrets.token_hex(8), asyncio.get_running_loop(), list[Request]()
        began = loop.time()

        async def one(at: int, chat: Chat) -> None:
            await asyncio.sleep(began + chat.starts_s - loop.time())
            for number, turn in enumerate(chat.turns):
                await asyncio.sleep(turn.pause_s)
                body = chat_body(messages_of(turn), ANSWER_TOKENS, self._target.model, cache_salt=salt)
                sent_s = loop.time()
                seen = await stream_completion(*self._target.api_address, body, path=CHAT)
                found.append(Request(at, number, sent_s, seen.ttft_s))

        try:
            async with asyncio.TaskGroup() as group:
                for at, chat in enumerate(conversations):
                    group.create_task(one(at, chat))
        except* (StreamFailed, OSError) as failures:
            raise Unavailable(f"a request failed: {failures.exceptions[0]}") from None
        return found


HITS, TTFT, BALANCE = 0.9, 0.6, 1.5  # aims: of an oracle's hits, of the other's mean TTFT, busiest over mean


@dataclass(frozen=True, slots=True)
class PrefixOptions:
    """rounds: of both placements on real engines. simulated, live: whether to do that part."""

    rounds: int = 2
    simulated: bool = True
    live: bool = True


@dataclass(frozen=True, slots=True)
class Traced:
    """A trace at several rates. points: by share of capacity and system."""

    trace: str
    prompt_tokens: int
    oracles: Oracles
    points: Mapping[tuple[float, str], Point]


def run_prefix_bench(data: Path, options: PrefixOptions | None = None, processes: int = 2) -> dict[str, Any]:
    """Figures, aims and notes, as every bench gives them. Raises NotFound without the traces, and Unavailable where
    this machine allows no CPU quotas.
    """
    chosen = options or PrefixOptions()
    parts: list[Result] = []
    if chosen.simulated:
        parts += map(traced, _simulate(list(cases(data)), processes))
        note = f"simulated: TTFT {SLO.ttft_s:g} s, TPOT {SLO.tpot_s:g} s; rates are shares of what least_load serves"
        parts.append({"notes": [note]})
    if chosen.live:
        parts.append(live(asyncio.run(run_live(chosen.rounds))))
    return merged(*parts)


def _simulate(found: Sequence[Case], processes: int) -> list[Traced]:
    with ProcessPoolExecutor(processes) as pool:
        rates = list(pool.map(Case.capacity, found))
        oracles = list(pool.map(Case.oracles, found))
        keys = [(at, share, system) for at, share, system in product(range(len(found)), SHARES, SYSTEMS)]
        points = pool.map(
            Case.point, [found[at] for at, *_ in keys], [key[2] for key in keys], [s * rates[at] for at, s, _ in keys]
        )
        by_key = dict(zip(keys, points, strict=True))
    return [
        Traced(
            case.trace,
            int(case.work().prompt_tokens.sum()),
            oracles[at],
            {(share, system): point for (of, share, system), point in by_key.items() if of == at},
        )
        for at, case in enumerate(found)
    ]


def traced(one: Traced) -> dict[str, Any]:
    total, figures, aims = one.prompt_tokens, dict[str, float](), dict[str, Any]()
    figures[f"{one.trace}_oracle_saved_share"] = round(one.oracles.unbounded / total, 4)
    figures[f"{one.trace}_pooled_oracle_saved_share"] = round(one.oracles.pooled / total, 4)
    for share in SHARES:
        at = f"{one.trace}_at_{round(100 * share)}_percent"
        mine, other = (one.points[share, system] for system in ("adaptive", "least_load"))
        figures[f"{at}_per_s"] = round(mine.rate, 3)
        for system, point in (("adaptive", mine), ("least_load", other)):
            figures |= {f"{at}_{system}_{name}": value for name, value in _figures(point, total).items()}
        aims |= _aims(at, mine.saved_tokens / one.oracles.pooled, mine.ttft_mean_s / other.ttft_mean_s, mine.imbalance)
    return {"figures": figures, "aims": aims, "notes": []}


def live(runs: Sequence[Run]) -> dict[str, Any]:
    """Figures and aims of chats on real engines, all rounds together."""
    figures: dict[str, float] = {}
    for system in ("adaptive", "least_load"):
        mine = [run for run in runs if run.system == system]
        ttft = [one.ttft_s for run in mine for one in run.requests]
        later = [one.ttft_s for run in mine for one in run.requests if one.turn]
        figures |= {
            f"live_{system}_hits_of_oracle": round(sum(run.hit for run in mine) / sum(run.oracle for run in mine), 4),
            f"live_{system}_ttft_mean_s": round(sum(ttft) / len(ttft), 4),
            f"live_{system}_later_turns_ttft_mean_s": round(sum(later) / len(later), 4),
            f"live_{system}_imbalance": round(max(run.imbalance for run in mine), 3),
        }
    aims = _aims(
        "live",
        figures["live_adaptive_hits_of_oracle"],
        figures["live_adaptive_ttft_mean_s"] / figures["live_least_load_ttft_mean_s"],
        figures["live_adaptive_imbalance"],
    )
    return {"figures": figures, "aims": aims, "notes": [f"live: {len(runs[0].requests)} requests a run"]}


def _figures(point: Point, prompt_tokens: int) -> dict[str, float]:
    return {
        "saved_share": round(point.saved_tokens / prompt_tokens, 4),
        "ttft_mean_s": round(point.ttft_mean_s, 3),
        "ttft_p50_s": round(point.ttft_p50_s, 3),
        "ttft_p99_s": round(point.ttft_p99_s, 2),
        "tpot_mean_s": round(point.tpot_mean_s, 4),
        "attainment": round(point.attainment, 4),
        "longest_gap_p90_s": round(point.longest_gap_p90_s, 3),
        "longest_gap_max_s": round(point.longest_gap_max_s, 3),
        "imbalance": round(point.imbalance, 3),
    }


def _aims(at: str, hits: float, ttft: float, imbalance: float) -> dict[str, Any]:
    return {
        f"{at}_hits_of_oracle": at_least(HITS, hits),
        f"{at}_ttft_over_least_load": at_most(TTFT, ttft),
        f"{at}_imbalance": at_most(BALANCE, imbalance),
    }
