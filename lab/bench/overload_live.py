"""The live half of `polyphase bench overload`: emulated instances, a real gateway, clients over HTTP."""

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console

from lab.bench.live_clusters import SERVICES
from lab.bench.stream_client import Refused, StreamFailed, StreamResult, stream_completion
from lab.bench.throughput import tokens_per_s
from lab.calibrate.target import Target
from lab.demo.run import on_free_ports
from services.launcher.cluster_file import Cluster
from services.launcher.up import RunningSuite, running_suite
from shared.domain.job import default_itl_s

_GIB = 1 << 30
TTFT_S, TPOT_S = 3.0, 0.15
_TARGETS: dict[str, Any] = {"ttft_s": TTFT_S, "tpot_s": TPOT_S}
_LONG: dict[str, Any] = {"ttft_s": 600.0, "tpot_s": 2.0}
_INSTANCE: dict[str, Any] = {"accelerator": "A10", "kv_cache_bytes": 6 * _GIB}
CLUSTER: dict[str, Any] = {
    **SERVICES,
    "name": "bench overload (emulated)",
    "gateway": {
        "slo": {
            "default": {**_TARGETS, "when_full": "reject"},
            "batch": {**_LONG, "weight": 0.1, "when_full": "delay"},
            "plain": {**_TARGETS, "when_full": "never"},
            "plain-batch": {**_LONG, "when_full": "never"},
        }
    },
    "instance_defaults": {"engine": "emulated", "emulated_link_gbps": 10.0, "chunk_size": 512, "max_seqs": 32},
    "instances": [
        {"id": "prefill", "count": 1, "role": "prefill", **_INSTANCE},
        {"id": "decode", "count": 2, "role": "decode", **_INSTANCE},
    ],
}
PROMPT, OUTPUT = (400, 1600), (20, 100)  # tokens, uniform
LASTS_S, FROM_S, ENDS_S = 75.0, 15.0, 15.0  # of arrivals; what is counted begins; so long answers may go on
OFFERED_PER_S = 14.0  # of batch work alone: more than the cluster can do
INTERACTIVE = 0.5
SEED = 5


@dataclass(slots=True)
class _Shot:
    """A request and what became of it; times from the start of the run."""

    slo: str
    at_s: float
    prompt_tokens: int
    output_tokens: int
    seen: StreamResult | None = None
    refused: bool = False

    @property
    def met(self) -> bool:
        seen = self.seen
        return (
            seen is not None
            and seen.ttft_s <= TTFT_S
            and seen.last_s - seen.ttft_s <= TPOT_S * (self.output_tokens - 1)
            and seen.gaps_met(default_itl_s(TPOT_S))
        )


def run() -> dict[str, Any]:
    """Figures, aims and notes."""
    return asyncio.run(_run())


async def _run() -> dict[str, Any]:
    async with _suite() as (running, target):
        alone = await _measure(target, {"batch": OFFERED_PER_S})
        await running.suite.wait_idle()
        each = fmean(one.prompt_tokens + one.output_tokens for one in alone)
        capacity = _tokens_per_s(alone, "batch") / each
        rates = (INTERACTIVE * capacity, (2.0 - INTERACTIVE) * capacity)
        figures = {"live_capacity_per_s": capacity}
        for label, names in (("controlled", ("default", "batch")), ("plain", ("plain", "plain-batch"))):
            shots = await _measure(target, dict(zip(names, rates, strict=True)))
            await running.suite.wait_idle(120.0)
            figures |= _figures(f"live_{label}", shots, names, _tokens_per_s(alone, "batch"))
    wanted = {name: f"live_controlled_{name}" for name in ("interactive_attainment", "batch_share_of_left")}
    aims = {
        f"live_{name}": {"want": ">= 0.9", "got": figures[key], "met": figures[key] >= 0.9}
        for name, key in wanted.items()
    }
    return {"figures": figures, "aims": aims, "notes": ["live: emulated A10s, 1 prefill + 2 decode, one gateway"]}


@asynccontextmanager
async def _suite() -> AsyncIterator[tuple[RunningSuite, Target]]:
    cluster = on_free_ports(Cluster.model_validate(CLUSTER))
    with tempfile.TemporaryDirectory(prefix="polyphase-overload-") as folder:
        async with running_suite(cluster, Path(folder), Console(stderr=True)) as running:
            yield running, Target.local(running.suite)


async def _measure(target: Target, rates: dict[str, float]) -> list[_Shot]:
    """So many requests a second of each class for `LASTS_S`; who still waits then gives up."""
    rng = Random(SEED)
    shots = []
    for slo, rate in rates.items():
        at_s = rng.expovariate(rate)
        while at_s < LASTS_S:
            shots.append(_Shot(slo, at_s, rng.randint(*PROMPT), rng.randint(*OUTPUT)))
            at_s += rng.expovariate(rate)
    loop = asyncio.get_running_loop()
    began = loop.time()
    tasks = [asyncio.create_task(_send(target, shot, began, loop)) for shot in shots]
    await asyncio.wait(tasks, timeout=LASTS_S + ENDS_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return shots


async def _send(target: Target, shot: _Shot, began: float, loop: asyncio.AbstractEventLoop) -> None:
    await asyncio.sleep(began + shot.at_s - loop.time())
    rng = Random(f"{shot.at_s}")
    body: dict[str, object] = {
        "model": "demo",
        "prompt": [rng.randrange(300, 1200) for _ in range(shot.prompt_tokens)],
        "max_tokens": shot.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "cache_salt": secrets.token_hex(8),
    }
    try:
        shot.seen = await stream_completion(*target.api_address, body, target.api_key, shot.slo)
    except Refused:
        shot.refused = True
    except (StreamFailed, OSError):
        pass  # counts as missed


def _figures(label: str, shots: Sequence[_Shot], names: tuple[str, str], alone: float) -> dict[str, float]:
    interactive = [shot for shot in shots if shot.slo == names[0] and shot.at_s >= FROM_S]
    longest = [max(shot.seen.gaps_s) for shot in interactive if shot.seen is not None and shot.seen.gaps_s]
    used, batch = (_tokens_per_s(shots, name) for name in names)
    return {
        f"{label}_interactive_attainment": round(fmean(shot.met for shot in interactive), 4),
        f"{label}_interactive_longest_gap_p90_s": round(float(np.percentile(longest, 90)), 4) if longest else 0.0,
        f"{label}_interactive_refused": round(fmean(shot.refused for shot in interactive), 4),
        f"{label}_batch_share_of_left": round(batch / max(1e-9, alone - used), 4),
        f"{label}_throughput_of_alone": round((batch + used) / alone, 4),
    }


def _tokens_per_s(shots: Sequence[_Shot], slo: str) -> float:
    done = [(shot, shot.seen) for shot in shots if shot.slo == slo and shot.seen is not None]
    return tokens_per_s(
        [shot.prompt_tokens for shot, _ in done],
        [shot.output_tokens for shot, _ in done],
        [shot.at_s + seen.ttft_s for shot, seen in done],
        [shot.at_s + seen.last_s for shot, seen in done],
        FROM_S,
        LASTS_S,
    )
