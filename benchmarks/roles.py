"""`polyphase bench roles`: role flips that follow the demand, beside every fixed ratio and the other flip policies.

Workloads turn from conversation to code and back, at rates at which roles matter; others are steady or bursty, where
flips can only do harm. The simulator knows what a live cluster knows: loads as old as broadcasts, learned rates,
imperfect predictions, and summaries of the demand with live delays. `--live` runs one turning workload on emulated
instances.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from benchmarks.experiment import Session, measured, model_with_context
from benchmarks.results import Result, at_most, result
from benchmarks.scenarios import MAX_TOKENS, Phase, attained, learned, shares, turning
from benchmarks.suite import BARE
from shared.domain.instance import Role
from shared.domain.job import Slo
from shared.sim.cluster import simulate
from shared.sim.outcomes import SimResult
from shared.sim.prediction import Prediction
from shared.sim.spec import InstanceSpec, RunSpec, with_words
from shared.sim.workload import Workload
from tools.calibrate.target import Sample
from tools.simulate.deployment import load_deployment

SLO = Slo(ttft_s=2.0, tpot_s=0.03)
LONGEST = 8_000
PHASE_S = 90.0
SETTLE_S = 30.0  # of a phase: what comes later shows how good the roles are, not how fast they came
DISAGGREGATED, ADAPTIVE = "least_load+split=full+power_of_two", "adaptive"
FLIPS = ("predictive", "idle")
CLOSE, NO_WORSE, NOTICED_S = 0.05, 0.02, 30.0
SEEDS = (1, 2)


@dataclass(frozen=True, slots=True)
class Setting:
    """Instances by accelerator in the order in which they get the prefill role; phases; placement in words.

    prefills: with how many prefill instances the policies begin; steady: no flip is needed.
    """

    name: str
    accelerators: tuple[str, ...]
    phases: tuple[Phase, ...]
    placement: str
    prefills: int
    steady: bool = False

    @property
    def ratios(self) -> range:
        return range(1, len(self.accelerators))


class Seen(NamedTuple):
    """One run, by phase where there are lists. noticed_s, settled_s: from the turn to the first notice, and to the last
    flip, at worst; turned_back: flips against the direction of an earlier one of the same phase.
    """

    label: str
    attained: list[float]
    settled: list[float]
    failed: int
    flips: int
    turned_back: int
    noticed_s: float
    settled_s: float
    longest_gap_p90_s: float = 0.0  # of the requests' longest gaps


def _turns(conversation: float, code: float) -> tuple[Phase, ...]:
    there = Phase("conversation", conversation, PHASE_S)
    return there, Phase("code", code, PHASE_S), there


A100, L40S = "A100-SXM-80", "L40S"
SETTINGS = tuple(
    Setting(f"{name}_{how}", accelerators, phases, placement, prefills, steady)
    for name, accelerators, phases, prefills, steady in (
        ("equal8", (A100,) * 8, _turns(36.0, 36.0), 4, False),
        ("mixed8", (L40S,) * 4 + (A100,) * 4, _turns(24.0, 28.0), 4, False),
        ("equal3", (A100,) * 3, _turns(8.0, 12.0), 1, False),
        ("pair", (A100,) * 2, _turns(5.0, 6.0), 1, True),
        ("bursts4", (A100,) * 4, (Phase("conversation", 19.0, 2 * PHASE_S, "bursts"),), 2, True),
        ("onoff4", (A100,) * 4, (Phase("conversation", 12.0, 2 * PHASE_S, "on_off"),), 2, True),
        ("code4", (A100,) * 4, (Phase("code", 17.0, 2 * PHASE_S, "bursts"),), 3, True),
    )
    for how, placement in (("full", DISAGGREGATED), ("adaptive", ADAPTIVE))
)


def run_roles_bench(
    data: Path, settings: Sequence[Setting] = SETTINGS, seeds: Sequence[int] = SEEDS, processes: int = 2
) -> Result:
    work = [(setting, seed, data) for setting in settings for seed in seeds]
    with ProcessPoolExecutor(processes) as pool:
        found = list(pool.map(measure, *zip(*work, strict=True), chunksize=1))
    note = f"lengths: Azure's traces, where they are in {data}; targets {SLO.ttft_s} s, {SLO.tpot_s} s"
    whole = result({}, notes=[note])
    for (setting, seed, _), runs in zip(work, found, strict=True):
        judged(f"{setting.name}_seed{seed}", setting, runs, whole)
    return whole


def measure(setting: Setting, seed: int, data: Path | None) -> list[Seen]:
    """Every fixed ratio (of a steady setting only the one that policies begin with), and every policy."""
    workload = turning(setting.phases, LONGEST, seed, data)
    kinds = _kinds(setting)

    def one(label: str, prefills: int, flips: str) -> Seen:
        words = f"{setting.placement}+role_flip={flips}" if flips else setting.placement
        return seen(label, setting, simulate(workload, _instances(kinds, prefills), with_words(_RUN, words)))

    ratios = (setting.prefills,) if setting.steady else setting.ratios
    count = len(kinds)
    fixed = [one(f"{prefills}:{count - prefills}", prefills, "") for prefills in ratios]
    return fixed + [one(flips, setting.prefills, flips) for flips in FLIPS]


_RUN = RunSpec(
    slo=SLO, prediction=Prediction(width_tokens=200, buckets=10, accuracy=0.75), max_tokens=MAX_TOKENS, gateway_s=0.002
)


def _kinds(setting: Setting) -> list[InstanceSpec]:
    """The instance of each place, with learned rates."""
    shipped = {
        one.accelerator: one for one in load_deployment(Path(__file__).with_name("clusters") / "roles.yaml").instances
    }
    rng = Random(1)
    known = {name: learned(shipped[name], rng) for name in dict.fromkeys(setting.accelerators)}
    return [known[name] for name in setting.accelerators]


def _instances(kinds: Sequence[InstanceSpec], prefills: int) -> list[InstanceSpec]:
    return [
        replace(one, instance_id=f"i{at}", role=Role.PREFILL if at < prefills else Role.DECODE)
        for at, one in enumerate(kinds)
    ]


def seen(label: str, setting: Setting, result: SimResult) -> Seen:
    outcomes, phases = result.outcomes, setting.phases
    began = float(outcomes.arrival_s[0])
    flips = [(flip.time_s - began, flip.to) for flip in result.role_flips]
    notices = [at - began for at, _ in result.shifts]
    return Seen(
        label,
        attained(outcomes, SLO, phases),
        attained(outcomes, SLO, phases, SETTLE_S),
        int((~outcomes.completed).sum()),
        *flip_figures(phases, flips, notices),
        float(np.nanpercentile(outcomes.longest_gap_s, 90)),
    )


def flip_figures(
    phases: Sequence[Phase], flips: Sequence[tuple[float, str]], notices: Sequence[float]
) -> tuple[int, int, float, float]:
    """Flips, those that turned back, the latest first notice of a turn and the latest last flip after it."""
    turned_back, noticed_s, settled_s, start_s = 0, 0.0, 0.0, 0.0
    for number, phase in enumerate(phases):
        end_s = start_s + phase.seconds
        inside = [(at, to) for at, to in flips if start_s <= at < end_s]
        turned_back += sum(to != before for (_, before), (_, to) in pairwise(inside))
        settled_s = max([settled_s, *(at - start_s for at, _ in inside)])
        if number:
            noticed_s = max(
                noticed_s, min((at - start_s for at in notices if start_s <= at < end_s), default=phase.seconds)
            )
        start_s = end_s
    return len(flips), turned_back, noticed_s, settled_s


def judged(name: str, setting: Setting, runs: Sequence[Seen], into: Result) -> None:
    """Add figures of all runs, and aims of the predictive one."""
    figures, aims = into["figures"], into["aims"]
    for one in runs:
        for number, (whole, settled) in enumerate(zip(one.attained, one.settled, strict=True)):
            figures[f"{name}_{one.label}_phase{number}_share"] = round(whole, 4)
            figures[f"{name}_{one.label}_phase{number}_settled_share"] = round(settled, 4)
        figures[f"{name}_{one.label}_flips"] = one.flips
        figures[f"{name}_{one.label}_longest_gap_p90_s"] = round(one.longest_gap_p90_s, 4)
    ours = next(one for one in runs if one.label == "predictive")
    fixed = [one for one in runs if one.label not in FLIPS]
    figures[f"{name}_noticed_s"], figures[f"{name}_last_flip_s"] = round(ours.noticed_s, 1), round(ours.settled_s, 1)
    lost = [
        (
            max(one.attained[at] for one in fixed) - ours.attained[at],
            max(one.settled[at] for one in fixed) - ours.settled[at],
        )
        for at in range(len(setting.phases))
    ]
    if setting.steady:
        aims[f"{name}_loss_to_no_flips"] = at_most(NO_WORSE, max(whole for whole, _ in lost))
    else:
        aims[f"{name}_loss_to_best_ratio_of_each_phase"] = at_most(CLOSE, max(whole for whole, _ in lost))
        aims[f"{name}_loss_to_best_ratio_once_settled"] = at_most(CLOSE, max(settled for _, settled in lost))
        best = max(sum(one.attained) for one in fixed) / len(lost)
        aims[f"{name}_loss_to_best_ratio_of_all"] = at_most(NO_WORSE, best - sum(ours.attained) / len(lost))
        aims[f"{name}_noticed_s"] = at_most(NOTICED_S, ours.noticed_s)
    aims[f"{name}_turned_back"] = at_most(0, ours.turned_back)
    aims[f"{name}_failed"] = at_most(0, ours.failed)


# The turning workload on live emulated instances, so slow that this machine can stream all tokens.

SLOWDOWN = 3.0
LIVE_SLO = SLO.slower(SLOWDOWN)
LIVE_LONGEST, CONTEXT = 7_500, 8_192
_CONVERSATION = Phase("conversation", 19.0 / SLOWDOWN, 120.0)
# Rates at which 2:2 serves conversation and not code, 3:1 code and not conversation, and 1:3 neither.
LIVE = Setting(
    "live4_full", (A100,) * 4, (_CONVERSATION, Phase("code", 16.0 / SLOWDOWN, 120.0), _CONVERSATION), DISAGGREGATED, 2
)
RATIOS = (2, 3)


def run_live(data: Path | None, ratios: Sequence[int] = RATIOS, seed: int = 1) -> Result:
    """The ratios and `predictive`, one suite after the other."""
    workload = turning(LIVE.phases, LIVE_LONGEST, seed, data)
    arms = [(f"{one}:{len(LIVE.accelerators) - one}", one, "") for one in ratios]
    with tempfile.TemporaryDirectory(prefix="polyphase-roles-") as name:
        model = model_with_context(Path(name) / "model", CONTEXT)
        runs = [
            asyncio.run(measured(cluster_of(model, prefills, flips), partial(_serve, label, workload)))
            for label, prefills, flips in (*arms, ("predictive", LIVE.prefills, "predictive"))
        ]
    whole = result({}, notes=[f"live: {len(workload)} requests a run"])
    judged(LIVE.name, LIVE, runs, whole)
    return whole


def cluster_of(model: Path, prefills: int, flips: str) -> dict[str, Any]:
    """The cluster file, with so many prefill instances and that policy of role flips."""
    routing = {"placement": "least_load", "split": "full", "dispatch": "power_of_two"}
    return {
        **BARE,
        "name": "bench roles (emulated)",
        "model": str(model),
        "max_model_len": CONTEXT,
        "gateway": {"slo": {"default": LIVE_SLO.targets}},
        "policies": {**routing, "role_flip": flips or "off"},
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
            {"id": f"i{at}", "role": "prefill" if at < prefills else "decode", "accelerator": accelerator}
            for at, accelerator in enumerate(LIVE.accelerators)
        ],
    }


async def _serve(label: str, workload: Workload, on: Session) -> Seen:
    sent = await on.send(workload)  # raises when a request fails
    async with on.suite.monitor() as monitor:
        flips, events = await monitor.flips(limit=1_000), await monitor.events(limit=1_000, kind="demand_shift")
    return seen_live(label, sent.samples, flips, events)


def seen_live(label: str, samples: Sequence[Sample], flips: Sequence[Any], events: Sequence[Any]) -> Seen:
    """A run as clients, the audit and the events show it."""
    began_s = min(sample.sent_s - sample.shot.at_s for sample in samples)
    at_s = np.array([sample.shot.at_s for sample in samples])
    met = np.array([sample.met(LIVE_SLO) for sample in samples])
    made = sorted((row["started_s"] - began_s, row["to_role"]) for row in flips if row["kind"] == "flip")
    failed = sum(row["result"] != "succeeded" for row in flips)
    noticed = [row["time_s"] - began_s for row in events]
    phases = LIVE.phases
    longest = [gap_s for sample in samples if (gap_s := sample.longest_gap_s) is not None]
    return Seen(
        label,
        shares(at_s, met, phases),
        shares(at_s, met, phases, SETTLE_S),
        failed,
        *flip_figures(phases, made, noticed),
        float(np.percentile(longest, 90)) if longest else 0.0,
    )
