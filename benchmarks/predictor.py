"""`polyphase bench predictor`: the parts of the predictor benchmark, and the TTFT cost of a prediction (prediction off,
beside the prefill, before the prefill).

The other parts are in `predictor_bayes`, `predictor_latency`, `predictor_full_size` and `predictor_worth`.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from benchmarks.predictor_bayes import run_bayes
from benchmarks.predictor_full_size import run_full_size
from benchmarks.predictor_latency import run_latency
from benchmarks.predictor_worth import run_worth
from benchmarks.results import merged
from benchmarks.suite import started
from services.launcher.cluster_file import Cluster, load_cluster
from shared.errors import InvalidRequest
from tools.client import ApiClient, Ask, Prompts

# The TTFT cost of a prediction, with real engines and a real classifier on this machine's CPU. TetriInfer, section
# 3.3.2 and figure 17: in parallel a prefill takes 10 % longer under stress, and less otherwise.

MODES = ("off", "parallel", "sequential")
ROUNDS = 3
LOADS = {"light": (1, 24), "stress": (12, 96)}  # at once, requests
PROMPT_TOKENS, OUTPUT_TOKENS = (60, 400), 16
Waits = dict[tuple[str, str], list[tuple[float, float]]]  # mode, load → p50 and p99 of TTFT in seconds, of each round


def run_modes() -> dict[str, Any]:
    """Medians over the rounds. No aim: what is measured are two cores that engines and classifier share."""
    return asyncio.run(_run())


async def _run() -> dict[str, Any]:
    waits: Waits = defaultdict(list)
    predicted: dict[str, list[float]] = defaultdict(list)
    for number in range(ROUNDS):
        for mode in (*MODES[number:], *MODES[:number]):
            async with started(_cluster(mode), console=Console(quiet=True)) as running:
                plan = running.plan
                found = await running.supervisor.during(_measure(plan.api_url, plan.model))
                predicted[mode].append(await _classified(plan.predictor_url))
            for load, seen in found.items():
                waits[mode, load].append(seen)
    figures = {f"classified_{mode}": median(shares) for mode, shares in predicted.items()}
    for (mode, load), rounds in waits.items():
        for at, name in enumerate(("p50", "p99")):
            figures[f"ttft_{load}_{mode}_{name}_ms"] = 1e3 * median(one[at] for one in rounds)
            over = [one[at] / base[at] for one, base in zip(rounds, waits["off", load], strict=True)]
            if mode != "off":
                figures[f"ttft_{load}_{mode}_{name}_over_off"] = median(over)
    note = (
        f"modes: {ROUNDS} rounds; at once and in all: {LOADS}; prompts of {PROMPT_TOKENS} tokens, {OUTPUT_TOKENS} out"
    )
    return {"figures": figures, "aims": {}, "notes": [note]}


async def _measure(url: str, model: str) -> dict[str, tuple[float, float]]:
    async with ApiClient(url, model) as api:
        prompts = await Prompts.of(api)
        await _ttfts(api, prompts, 2, 6, seed=99)  # warm
        found = {}
        for name, (at_once, count) in LOADS.items():
            ttfts = await _ttfts(api, prompts, at_once, count, seed=at_once)
            p50, p99 = np.percentile(ttfts, (50, 99))
            found[name] = float(p50), float(p99)
        return found


async def _classified(url: str) -> float:
    """The classifier's share of all requested predictions; 0 without any."""
    async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as http:
        text = (await http.get("/metrics")).raise_for_status().text
    counts = {
        sample.labels["source"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "polyphase_predictor_latency_seconds_count"
    }
    return counts.get("classifier", 0.0) / (sum(counts.values()) or 1.0)


async def _ttfts(api: ApiClient, prompts: Prompts, at_once: int, count: int, seed: int) -> list[float]:
    few = asyncio.Semaphore(at_once)

    async def one(number: int, prompt: list[int]) -> float:
        async with few:
            return (await api.stream(Ask(prompt, OUTPUT_TOKENS, f"mode-{seed}-{number}"))).ttft_s or 0.0

    drawn = prompts.various(count, *PROMPT_TOKENS, seed=seed)
    return list(await asyncio.gather(*(one(*each) for each in enumerate(drawn))))


def _cluster(mode: str) -> Cluster:
    cluster = load_cluster(Path("laptop"))
    changed = {
        "gateway": cluster.gateway.model_copy(update={"predict": mode}),
        "dashboard": cluster.dashboard.model_copy(update={"enabled": False}),
        "planner": cluster.planner.model_copy(update={"enabled": False}),
        "predictor": cluster.predictor.model_copy(update={"use": "classifier"}),
    }
    return cluster.model_copy(update=changed)


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "bayes": run_bayes,
    "latency": run_latency,
    "full_size": run_full_size,
    "modes": run_modes,
    "worth": run_worth,
}


def run_predictor_bench(parts: Sequence[str] = ()) -> dict[str, Any]:
    """The parts that are named, or all. Raises InvalidRequest for one that is unknown."""
    if unknown := set(parts) - set(PARTS):
        raise InvalidRequest(f"unknown part {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    return merged(*(PARTS[name]() for name in parts or PARTS))
