"""`polyphase bench prefix`: prefix cache hits of the adaptive placement, beside a placement that ignores caches and an
oracle.

Mooncake's traces run on simulated instances; chats of several turns run on four real engines of this machine.
"""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

from benchmarks.cluster_files import ClusterDict, LlamaShape, engines_on_cpu
from benchmarks.quotas import QuotaSession, measured_under_quotas
from benchmarks.results import Aim, Result, at_least, at_most, in_turns, merged, progress, result
from benchmarks.scenarios import SEED, instances, shipped
from shared.domain.instance import Role
from shared.domain.job import Slo
from shared.domain.prompt import block_hashes
from shared.domain.route import PolicySpec
from shared.errors import NotFound, Unavailable
from shared.sim.cluster import simulate
from shared.sim.metrics import summary
from shared.sim.outcomes import SimResult
from shared.sim.spec import with_words
from shared.sim.traces import read_trace
from shared.sim.workload import Workload, oracle_tokens
from tools.calibrate.target import Target
from tools.client import StreamFailed, completion_body, stream_completion

SYSTEMS = {"adaptive": "adaptive", "least_load": "least_load+split=none+power_of_two"}
HITS, TTFT, BALANCE = 0.9, 0.6, 1.5  # aims: of an oracle's hits, of the other's mean TTFT, busiest over mean


def run_prefix_bench(
    data: Path, rounds: int = 2, *, simulated: bool = True, on_engines: bool = True, processes: int = 2
) -> Result:
    """rounds: of both placements on real engines. Raises NotFound without traces, Unavailable without quotas."""
    parts: list[Result] = []
    if simulated:
        note = f"simulated: TTFT {SLO.ttft_s:g} s, TPOT {SLO.tpot_s:g} s; rates are shares of what least_load serves"
        with ProcessPoolExecutor(processes) as pool:
            parts += [*pool.map(traced, TRACES, traces(data)), {"notes": [note]}]
    if on_engines:
        cores = dict.fromkeys(NAMES, CORES)
        work = partial(_play, rounds)
        parts.append(live(asyncio.run(measured_under_quotas(SHAPE, cores, cluster_of, work, LIVE_SEED))))
    return merged(*parts)


def imbalance(computed: Sequence[float]) -> float:
    """The most that one instance computed over the mean; 1.0 where all computed as much."""
    return max(computed) * len(computed) / max(1e-9, sum(computed))


def aims_of(at: str, hits: float, ttft: float, imbalance: float) -> dict[str, Aim]:
    return {
        f"{at}_hits_of_oracle": at_least(HITS, hits),
        f"{at}_ttft_over_least_load": at_most(TTFT, ttft),
        f"{at}_imbalance": at_most(BALANCE, imbalance),
    }


# Mooncake's traces on eight simulated nodes.

TRACES = {name: Path("traces/mooncake") / f"{name}_trace.jsonl" for name in ("conversation", "synthetic")}
REQUESTS = 4_000  # the first of each
SHARES = (0.5, 0.75, 0.9)  # of what `least_load` serves when all come at once
SLO = Slo()  # the default class
DIGITS = {  # of the simulated figures
    "saved_share": 4,
    "ttft_mean_s": 3,
    "ttft_p50_s": 3,
    "ttft_p99_s": 2,
    "tpot_mean_s": 4,
    "attainment": 4,
    "longest_gap_p90_s": 3,
    "longest_gap_max_s": 3,
    "imbalance": 3,
}


def traces(data: Path) -> list[Path]:
    """Raises NotFound where one is missing."""
    for path in TRACES.values():
        if not (data / path).is_file():
            raise NotFound(f"no {data / path}: it is Mooncake's FAST25-release/traces/{path.name}")
    return [data / path for path in TRACES.values()]


def traced(trace: str, file: Path) -> Result:
    """The trace at several rates under both systems."""
    work = read_trace(file).head(REQUESTS)
    unbounded, pooled = oracles(work)
    total, capacity = int(work.prompt_tokens.sum()), len(work) / run("least_load", work.at_once()).duration_s
    figures = {
        f"{trace}_oracle_saved_share": round(unbounded / total, 4),
        f"{trace}_pooled_oracle_saved_share": round(pooled / total, 4),
    }
    aims: dict[str, Aim] = {}
    for share in SHARES:
        at, rate = f"{trace}_at_{round(100 * share)}_percent", share * capacity
        figures[f"{at}_per_s"] = round(rate, 3)
        found = {system: point_of(work, run(system, work.at_rate(rate))) for system in SYSTEMS}
        for system, point in found.items():
            figures |= {f"{at}_{system}_{name}": round(value, DIGITS[name]) for name, value in point.items()}
        mine, other = found["adaptive"], found["least_load"]
        hits = mine["saved_share"] * total / pooled
        aims |= aims_of(at, hits, mine["ttft_mean_s"] / other["ttft_mean_s"], mine["imbalance"])
    return result(figures, aims)


def oracles(work: Workload) -> list[int]:
    """Tokens that a cache for all instances would save: without bounds, and as large as all nodes' KV memory."""
    assert work.prefixes is not None  # these traces name them
    prompts = list(zip(work.prefixes, work.prompt_tokens.tolist(), strict=True))
    blocks = sum(node.kv_tokens for node in instances("prefix")) // work.prefix_block_tokens
    return [sum(oracle_tokens(prompts, work.prefix_block_tokens, bound, work.answers)) for bound in (None, blocks)]


def run(system: str, work: Workload) -> SimResult:
    spec = replace(shipped("prefix").run, slo=SLO, seed=SEED)
    return simulate(work, instances("prefix"), with_words(spec, SYSTEMS[system]))


def point_of(work: Workload, seen: SimResult) -> dict[str, float]:
    """saved_share: of prompt tokens that no instance computed. imbalance: of computed tokens."""
    computed = [use.prefill_tokens for use in seen.instances]
    saved = float(1.0 - sum(computed) / work.prompt_tokens.sum())
    figures = {**summary(seen, SLO), "saved_share": saved, "imbalance": imbalance(computed)}
    return {name: figures[name] for name in DIGITS}


# Chats of several turns on four real engines of this machine.

NAMES, CORES = tuple(f"node{at}" for at in range(4)), 0.4  # and the rest of two cores for everything else
# 17 million parameters: a prompt token takes two ms on so much of a core, and the services add little to a prompt.
SHAPE = LlamaShape(4096, 384, 1024, 8, 6, 3, 4096)
CHATS, TURNS, CHATS_PER_S, ANSWER_TOKENS = 24, 5, 0.5, 12
SYSTEM_TOKENS, FIRST_TOKENS, LATER_TOKENS, REPLY_TOKENS = 85, (205, 475), (40, 120), (40, 80)
PAUSE_S = (3.0, 9.0)  # between an answer and the next message: uniform
LIVE_SEED = 21


class Turn(NamedTuple):
    """One request of a chat. prompt: token ids; pause_s: after the answer before, or the start of the run."""

    prompt: list[int]
    pause_s: float


@dataclass(frozen=True, slots=True)
class Played:
    """One replay. ttft_s: by number of the turn; computed: prompt tokens by instance; hit, oracle: tokens in all."""

    ttft_s: Sequence[tuple[int, float]]
    computed: Sequence[float]
    hit: float
    oracle: float


def chats(count: int, turns: int, per_s: float, seed: int) -> list[list[Turn]]:
    """`count` chats that begin as a Poisson process, `per_s` a second, the first at once. All have one system prompt.

    Each prompt is the conversation so far and something new. Replies are fixed beforehand, so that every system gets
    the same prompts.
    """
    rng, found, at_s = Random(seed), list[list[Turn]](), 0.0

    def message(low: int, high: int) -> list[int]:
        return rng.choices(range(300, 1200), k=rng.randint(low, high))

    system = message(SYSTEM_TOKENS, SYSTEM_TOKENS)
    for _ in range(count):
        prompt, chat = system, list[Turn]()
        for number in range(turns):
            prompt = prompt + message(*(LATER_TOKENS if number else FIRST_TOKENS))
            chat.append(Turn(prompt, rng.uniform(*PAUSE_S) if number else at_s))
            prompt = prompt + message(*REPLY_TOKENS)
        found.append(chat)
        at_s += rng.expovariate(per_s)
    return found


def cluster_of(model: Path) -> ClusterDict:
    """Each instance serves whole requests."""
    nodes = [{"id": name, "role": Role.DECODE.value} for name in NAMES]
    memory = {"kv_cache_bytes": 512 << 20, "staging_bytes": 64 << 20}
    return engines_on_cpu("prefix", model, nodes, 4096, chunk_size=256, max_seqs=32, **memory)


async def _play(rounds: int, on: QuotaSession) -> list[dict[str, Played]]:
    await _played(on, "adaptive", chats(2 * len(NAMES), 2, 1.0, LIVE_SEED - 1))  # rates are learned while serving

    async def play(number: int, system: str) -> Played:
        played = await _played(on, system, chats(CHATS, TURNS, CHATS_PER_S, LIVE_SEED + number))
        progress(f"{system}: {live_figures([played])}")
        return played

    return await in_turns(SYSTEMS, rounds, play)


async def _played(on: QuotaSession, placement: str, conversations: Sequence[Sequence[Turn]]) -> Played:
    """All chats, under a salt of their own, which separates them from earlier runs. Raises Unavailable."""
    await on.use({"placement": PolicySpec(placement)})
    names = [f"vllm:prefix_cache_{name}_total" for name in ("queries", "hits")]
    before = await on.metrics(*names)
    sent = sorted(await _send(on.target, conversations))
    await on.suite.wait_idle()
    after = await on.metrics(*names)
    queried, hit = (np.array([after[name][at] - before[name][at] for name in after]) for at in (0, 1))
    size = (await on.instances())[0].block_size
    prompts = [conversations[at][number].prompt for _, at, number, _ in sent]
    oracle = oracle_tokens([(block_hashes(ids, block_tokens=size), len(ids)) for ids in prompts], size)
    ttft_s = [(number, seconds) for _, _, number, seconds in sent]
    return Played(ttft_s, (queried - hit).tolist(), float(hit.sum()), sum(oracle))


async def _send(target: Target, conversations: Sequence[Sequence[Turn]]) -> list[tuple[float, int, int, float]]:
    """Time of sending, chat, turn and TTFT of each request. Raises Unavailable when one fails."""
    salt, loop, found = secrets.token_hex(8), asyncio.get_running_loop(), list[tuple[float, int, int, float]]()

    async def play_chat(at: int, chat: Sequence[Turn]) -> None:
        for number, turn in enumerate(chat):
            await asyncio.sleep(turn.pause_s)
            body, sent_mono = completion_body(turn.prompt, ANSWER_TOKENS, target.model, cache_salt=salt), loop.time()
            found.append((sent_mono, at, number, (await stream_completion(*target.api_address, body)).ttft_s))

    try:
        async with asyncio.TaskGroup() as group:
            for at, chat in enumerate(conversations):
                group.create_task(play_chat(at, chat))
    except* (StreamFailed, OSError) as failures:
        raise Unavailable(f"a request failed: {failures.exceptions[0]}") from None
    return found


def live_figures(runs: Sequence[Played]) -> dict[str, float]:
    """Of several rounds of one system."""
    ttft = [seconds for run in runs for _, seconds in run.ttft_s]
    later = [seconds for run in runs for turn, seconds in run.ttft_s if turn]
    return {
        "hits_of_oracle": round(sum(run.hit for run in runs) / sum(run.oracle for run in runs), 4),
        "ttft_mean_s": round(float(np.mean(ttft)), 4),
        "later_turns_ttft_mean_s": round(float(np.mean(later)), 4),
        "imbalance": round(max(imbalance(run.computed) for run in runs), 3),
    }


def live(rounds: Sequence[Mapping[str, Played]]) -> Result:
    """Figures and aims of all rounds together."""
    by_system = {system: live_figures([found[system] for found in rounds]) for system in SYSTEMS}
    figures = {f"live_{system}_{key}": value for system, found in by_system.items() for key, value in found.items()}
    mine, other = by_system["adaptive"], by_system["least_load"]
    aims = aims_of("live", mine["hits_of_oracle"], mine["ttft_mean_s"] / other["ttft_mean_s"], mine["imbalance"])
    return result(figures, aims, [f"live: {len(rounds[0]['adaptive'].ttft_s)} requests a run"])
