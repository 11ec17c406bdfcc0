"""The turning workload on live emulated instances: fixed ratios, then roles that follow what is asked for."""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from lab.bench.live_clusters import MODEL
from lab.bench.roles import SETTLE_S, Seen, Setting, judged, told
from lab.bench.turning import Phase, shares, turning
from lab.calibrate.target import Target
from lab.calibrate.traffic import Sample, Shot, Traffic
from lab.demo.run import on_free_ports
from services.launcher.cluster_file import Cluster
from services.launcher.up import RunningSuite, running_suite
from shared.domain.job import Slo
from shared.sim.workload import Workload
from shared.wire.clients.monitor import MonitorClient

SLO = Slo(ttft_s=4.0, tpot_s=0.13)
LONGEST = 1_900
_CONVERSATION = Phase("conversation", 2.2, 60.0)
# Slow accelerators and a large model: few requests a second ask for all of them, and this machine can serve those.
SETTING = Setting(
    "live4_full",
    ("A10",) * 4,
    (_CONVERSATION, Phase("code", 7.0, 60.0), _CONVERSATION),
    "least_load+split=full+power_of_two",
    2,
)
RATIOS = tuple(SETTING.ratios)


def run_live(data: Path | None, ratios: Sequence[int] = RATIOS, seed: int = 1) -> dict[str, Any]:
    """Every ratio and `predictive`, one suite after the other. Returns figures, aims and notes as every bench does."""
    workload = turning(SETTING.phases, LONGEST, seed, data)
    result: dict[str, Any] = {"figures": {}, "aims": {}, "notes": [f"live: {len(workload)} requests a run"]}
    runs = asyncio.run(_all(workload, ratios))
    judged(SETTING.name, SETTING, runs, result)
    return result


async def _all(workload: Workload, ratios: Sequence[int]) -> list[Seen]:
    runs = [await _run(f"{one}:{len(SETTING.accelerators) - one}", workload, one, "") for one in ratios]
    return [*runs, await _run("predictive", workload, SETTING.prefills, "predictive")]


async def _run(label: str, workload: Workload, prefills: int, flips: str) -> Seen:
    cluster = on_free_ports(Cluster.model_validate(cluster_of(prefills, flips)))
    with tempfile.TemporaryDirectory(prefix="polyphase-roles-") as folder:
        async with running_suite(cluster, Path(folder), Console(stderr=True)) as running:
            return await running.supervisor.during(_serve(label, running, workload))


def cluster_of(prefills: int, flips: str) -> dict[str, Any]:
    """The cluster file, with so many prefill instances and that policy of role flips."""
    count = len(SETTING.accelerators)
    placement, split, dispatch = "least_load", "full", "power_of_two"
    return {
        "name": "bench roles (emulated)",
        "model": str(MODEL),
        "served_model_name": "demo",
        "max_model_len": 2048,
        "predictor": {"enabled": False},
        "dashboard": {"enabled": False},
        "gateway": {"slo": {"default": {"ttft_s": SLO.ttft_s, "tpot_s": SLO.tpot_s}}},
        "policies": {"placement": placement, "split": split, "dispatch": dispatch, "role_flip": flips or "off"},
        "monitor": {"drain_timeout_s": 60.0},
        "instance_defaults": {
            "engine": "emulated",
            "emulated_model": "Llama-2-13B",
            "kv_cache_bytes": 24 << 30,
            "chunk_size": 1024,
            "max_seqs": 48,
        },
        "instances": [
            {"id": f"i{at}", "role": "prefill" if at < prefills else "decode", "accelerator": SETTING.accelerators[at]}
            for at in range(count)
        ],
    }


async def _serve(label: str, running: RunningSuite, workload: Workload) -> Seen:
    target = Target.local(running.suite.state)
    traffic = await Traffic.to(target, seed=1)
    rows = zip(workload.prompt_tokens, workload.output_tokens, workload.arrival_s, strict=True)
    shots = [Shot(int(prompt), int(output), float(at)) for prompt, output, at in rows]
    samples = await traffic.timed(shots)  # raises when one fails
    async with MonitorClient(target.monitor_url) as monitor:
        flips, events = await monitor.flips(limit=1_000), await monitor.events(limit=1_000, kind="demand_shift")
    return seen(label, samples, flips, events)


def seen(label: str, samples: Sequence[Sample], flips: Sequence[Any], events: Sequence[Any]) -> Seen:
    """What a run came to, from what clients, the audit and the events say."""
    began_s = min(sample.sent_s - sample.shot.at_s for sample in samples)
    at_s = np.array([sample.shot.at_s for sample in samples])
    met = np.array([sample.ttft_s <= SLO.ttft_s and (sample.tpot_s or 0.0) <= SLO.tpot_s for sample in samples])
    made = sorted((row["started_s"] - began_s, row["to_role"]) for row in flips if row["kind"] == "flip")
    failed = sum(row["result"] != "succeeded" for row in flips)
    noticed = [row["time_s"] - began_s for row in events]
    phases = SETTING.phases
    return Seen(
        label, shares(at_s, met, phases), shares(at_s, met, phases, SETTLE_S), failed, *told(phases, made, noticed)
    )
