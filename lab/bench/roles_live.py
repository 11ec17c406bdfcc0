"""The turning workload on live emulated instances: fixed ratios, then roles that follow what is asked for."""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from lab.bench.live_clusters import SERVICES, model_with_context
from lab.bench.roles import SETTLE_S, Seen, Setting, judged, told
from lab.bench.scenarios import Phase, shares, turning
from lab.calibrate.target import Sample, Shot, Target, Traffic
from lab.suite import on_free_ports
from services.launcher.cluster_file import Cluster
from services.launcher.up import RunningSuite, running_suite
from shared.domain.job import Slo
from shared.sim.workload import Workload
from shared.wire.clients.monitor import MonitorClient

SLOWDOWN = 3.0  # so that this machine streams all their tokens
SLO = Slo(ttft_s=2.0, tpot_s=0.03).slower(SLOWDOWN)
LONGEST, CONTEXT = 7_500, 8_192
_CONVERSATION = Phase("conversation", 19.0 / SLOWDOWN, 120.0)
# Rates at which 2:2 serves conversation and not code, 3:1 code and not conversation, and 1:3 neither.
SETTING = Setting(
    "live4_full",
    ("A100-SXM-80",) * 4,
    (_CONVERSATION, Phase("code", 16.0 / SLOWDOWN, 120.0), _CONVERSATION),
    "least_load+split=full+power_of_two",
    2,
)
RATIOS = (2, 3)


def run_live(data: Path | None, ratios: Sequence[int] = RATIOS, seed: int = 1) -> dict[str, Any]:
    """The ratios and `predictive`, one suite after the other. Returns figures, aims and notes as every bench does."""
    workload = turning(SETTING.phases, LONGEST, seed, data)
    result: dict[str, Any] = {"figures": {}, "aims": {}, "notes": [f"live: {len(workload)} requests a run"]}
    with tempfile.TemporaryDirectory(prefix="polyphase-roles-") as folder:
        model_with_context(Path(folder) / "model", CONTEXT)
        runs = asyncio.run(_all(workload, ratios, Path(folder)))
    judged(SETTING.name, SETTING, runs, result)
    return result


async def _all(workload: Workload, ratios: Sequence[int], folder: Path) -> list[Seen]:
    runs = [await _run(f"{one}:{len(SETTING.accelerators) - one}", workload, one, "", folder) for one in ratios]
    return [*runs, await _run("predictive", workload, SETTING.prefills, "predictive", folder)]


async def _run(label: str, workload: Workload, prefills: int, flips: str, folder: Path) -> Seen:
    cluster = on_free_ports(Cluster.model_validate(cluster_of(folder / "model", prefills, flips)))
    async with running_suite(cluster, folder / label, Console(stderr=True)) as running:
        return await running.supervisor.during(_serve(label, running, workload))


def cluster_of(model: Path, prefills: int, flips: str) -> dict[str, Any]:
    """The cluster file, with so many prefill instances and that policy of role flips."""
    count = len(SETTING.accelerators)
    placement, split, dispatch = "least_load", "full", "power_of_two"
    return {
        **SERVICES,
        "name": "bench roles (emulated)",
        "model": str(model),
        "max_model_len": CONTEXT,
        "gateway": {"slo": {"default": SLO.targets}},
        "policies": {"placement": placement, "split": split, "dispatch": dispatch, "role_flip": flips or "off"},
        "monitor": {"drain_timeout_s": 120.0},
        "instance_defaults": {
            "engine": "emulated",
            "emulated_model": "Llama-3-8B",
            "emulated_slowdown": SLOWDOWN,
            "kv_cache_bytes": 50 << 30,
            "chunk_size": 2048,
            "max_seqs": 128,
        },
        "instances": [
            {"id": f"i{at}", "role": "prefill" if at < prefills else "decode", "accelerator": SETTING.accelerators[at]}
            for at in range(count)
        ],
    }


async def _serve(label: str, running: RunningSuite, workload: Workload) -> Seen:
    target = Target.local(running.suite)
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
    met = np.array([sample.met(SLO) for sample in samples])
    made = sorted((row["started_s"] - began_s, row["to_role"]) for row in flips if row["kind"] == "flip")
    failed = sum(row["result"] != "succeeded" for row in flips)
    noticed = [row["time_s"] - began_s for row in events]
    phases = SETTING.phases
    longest = [gap_s for sample in samples if (gap_s := sample.longest_gap_s) is not None]
    return Seen(
        label,
        shares(at_s, met, phases),
        shares(at_s, met, phases, SETTLE_S),
        failed,
        *told(phases, made, noticed),
        float(np.percentile(longest, 90)) if longest else 0.0,
    )
