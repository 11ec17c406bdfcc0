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
from typing import NamedTuple

import numpy as np

from benchmarks.cluster_files import ClusterDict, emulated, model_with_context
from benchmarks.experiment import Session, measured
from benchmarks.results import Result, at_most, merged, result
from benchmarks.scenarios import MAX_TOKENS, PREDICTION, Phase, shares, shipped, turning, with_learned_rates
from shared.domain.instance import Role
from shared.domain.job import Slo
from shared.sim.cluster import simulate
from shared.sim.outcomes import Outcomes
from shared.sim.spec import InstanceSpec, RunSpec, with_words
from shared.sim.workload import Workload

SLO = Slo(ttft_s=2.0, tpot_s=0.03)
LONGEST = 8_000
PHASE_S = 90.0
SETTLE_S = 30.0  # of a phase: what comes later shows how good the roles are, not how fast they came
DISAGGREGATED, ADAPTIVE = "least_load+split=full+power_of_two", "adaptive"
OURS = "predictive"
FLIPS = (OURS, "idle")
CLOSE, NO_WORSE, NOTICED_S = 0.05, 0.02, 30.0
SEEDS = (1, 2)
RUN = RunSpec(slo=SLO, prediction=PREDICTION, max_tokens=MAX_TOKENS, gateway_s=0.002)


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


class Figures(NamedTuple):
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


def _turns(conversation: float, code: float, seconds: float = PHASE_S) -> tuple[Phase, ...]:
    there = Phase("conversation", conversation, seconds)
    return there, Phase("code", code, seconds), there


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


def run_roles_bench(data: Path, *, live: bool = False) -> Result:
    if live:
        return run_live(data)
    work = [(setting, seed, data) for setting in SETTINGS for seed in SEEDS]
    with ProcessPoolExecutor(2) as pool:
        found = list(pool.map(simulated, *zip(*work, strict=True), chunksize=1))
    note = f"lengths: Azure's traces, where they are in {data}; targets {SLO.ttft_s} s, {SLO.tpot_s} s"
    parts = [judged(f"{one.name}_seed{seed}", one, runs) for (one, seed, _), runs in zip(work, found, strict=True)]
    return merged(result({}, notes=[note]), *parts)


def simulated(setting: Setting, seed: int, data: Path | None) -> list[Figures]:
    """Every fixed ratio (of a steady setting only the one that policies begin with), and every policy."""
    workload, count = turning(setting.phases, LONGEST, seed, data), len(setting.accelerators)
    specs = {spec.accelerator: spec for spec in shipped("roles").instances}
    kinds = list(dict.fromkeys(setting.accelerators))
    known = dict(zip(kinds, with_learned_rates(specs[kind] for kind in kinds), strict=True))

    def placed(at: int, prefills: int) -> InstanceSpec:
        role = Role.PREFILL if at < prefills else Role.DECODE
        return replace(known[setting.accelerators[at]], instance_id=f"i{at}", role=role)

    def run(label: str, prefills: int, words: str) -> Figures:
        instances = [placed(at, prefills) for at in range(count)]
        seen = simulate(workload, instances, with_words(RUN, words))
        flips = [(flip.time_s, flip.to) for flip in seen.role_flips]
        return figures_of(label, setting, seen.outcomes, SLO, flips, [at_s for at_s, _ in seen.shifts])

    ratios = (setting.prefills,) if setting.steady else range(1, count)
    fixed = [run(f"{prefills}:{count - prefills}", prefills, setting.placement) for prefills in ratios]
    return fixed + [run(flips, setting.prefills, f"{setting.placement}+role_flip={flips}") for flips in FLIPS]


def figures_of(
    label: str, setting: Setting, seen: Outcomes, slo: Slo, flips: Sequence[tuple[float, str]], notices: Sequence[float]
) -> Figures:
    """flips: time and new role. notices: times of demand shifts. The first phase begins at 0."""
    met = seen.met(slo)
    return Figures(
        label,
        shares(seen.arrival_s, met, setting.phases),
        shares(seen.arrival_s, met, setting.phases, SETTLE_S),
        int((~seen.completed).sum()),
        *flip_figures(setting.phases, flips, notices),
        float(np.nanpercentile(seen.longest_gap_s, 90)),
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
            first_s = min((at - start_s for at in notices if start_s <= at < end_s), default=phase.seconds)
            noticed_s = max(noticed_s, first_s)
        start_s = end_s
    return len(flips), turned_back, noticed_s, settled_s


def judged(name: str, setting: Setting, runs: Sequence[Figures]) -> Result:
    """Figures of all runs, and aims of the predictive one."""
    figures: dict[str, float] = {}
    for one in runs:
        for number, (whole, settled) in enumerate(zip(one.attained, one.settled, strict=True)):
            figures[f"{name}_{one.label}_phase{number}_share"] = round(whole, 4)
            figures[f"{name}_{one.label}_phase{number}_settled_share"] = round(settled, 4)
        figures[f"{name}_{one.label}_flips"] = one.flips
        figures[f"{name}_{one.label}_longest_gap_p90_s"] = round(one.longest_gap_p90_s, 4)
    ours = next(one for one in runs if one.label == OURS)
    fixed = [one for one in runs if one.label not in FLIPS]
    figures[f"{name}_noticed_s"], figures[f"{name}_last_flip_s"] = round(ours.noticed_s, 1), round(ours.settled_s, 1)

    def loss(field: str) -> float:
        """To the best ratio of each phase, in the worst phase."""
        best = np.max([getattr(one, field) for one in fixed], axis=0)
        return float(np.max(best - getattr(ours, field)))

    if setting.steady:
        aims = {"loss_to_no_flips": at_most(NO_WORSE, loss("attained"))}
    else:
        count = len(setting.phases)
        mean_loss = max(sum(one.attained) for one in fixed) / count - sum(ours.attained) / count
        aims = {
            "loss_to_best_ratio_of_each_phase": at_most(CLOSE, loss("attained")),
            "loss_to_best_ratio_once_settled": at_most(CLOSE, loss("settled")),
            "loss_to_best_ratio_of_all": at_most(NO_WORSE, mean_loss),
            "noticed_s": at_most(NOTICED_S, ours.noticed_s),
        }
    aims |= {"turned_back": at_most(0, ours.turned_back), "failed": at_most(0, ours.failed)}
    return result(figures, {f"{name}_{key}": aim for key, aim in aims.items()})


# The turning workload on live emulated instances, so slow that this machine can stream all tokens.

SLOWDOWN = 3.0
LIVE_LONGEST, CONTEXT = 7_500, 8_192
# Rates at which 2:2 serves conversation and not code, 3:1 code and not conversation, and 1:3 neither.
LIVE = Setting("live4_full", (A100,) * 4, _turns(19.0 / SLOWDOWN, 16.0 / SLOWDOWN, 120.0), DISAGGREGATED, 2)
LIVE_ARMS = (("2:2", 2, "off"), ("3:1", 3, "off"), (OURS, LIVE.prefills, OURS))  # label, prefill instances, role_flip


def run_live(data: Path | None) -> Result:
    """The ratios and `predictive`, one suite after the other."""
    workload = turning(LIVE.phases, LIVE_LONGEST, 1, data)
    with tempfile.TemporaryDirectory(prefix="polyphase-roles-") as folder:
        model = model_with_context(Path(folder) / "model", CONTEXT)
        runs = [
            asyncio.run(measured(cluster_of(model, prefills, flips), partial(_served, label, workload)))
            for label, prefills, flips in LIVE_ARMS
        ]
    return merged(result({}, notes=[f"live: {len(workload)} requests a run"]), judged(LIVE.name, LIVE, runs))


def cluster_of(model: Path, prefills: int, flips: str) -> ClusterDict:
    """A cluster with so many prefill instances and that policy of role flips."""
    roles = [Role.PREFILL if at < prefills else Role.DECODE for at in range(len(LIVE.accelerators))]
    return emulated(
        f"roles {prefills} {flips}",
        [{"id": f"i{at}", "role": role.value} for at, role in enumerate(roles)],
        {"emulated_slowdown": SLOWDOWN, "kv_cache_bytes": 50 << 30, "chunk_size": 2048, "max_seqs": 128},
        model=str(model),
        max_model_len=CONTEXT,
        gateway={"slo": {"default": SLO.slower(SLOWDOWN).targets}},
        policies={"placement": "least_load", "split": "full", "dispatch": "power_of_two", "role_flip": flips},
        monitor={"drain_timeout_s": 120.0},
    )


async def _served(label: str, workload: Workload, on: Session) -> Figures:
    slo = SLO.slower(SLOWDOWN)
    run = await on.send(workload, slo=slo)
    async with on.suite.monitor() as monitor:
        flips, events = await monitor.flips(limit=1_000), await monitor.events(limit=1_000, kinds=["demand_shift"])
    made = sorted((row.started_s - run.began_s, row.to_role) for row in flips if row.kind == "flip")
    failed = sum(row.result != "succeeded" for row in flips)
    notices = [row.time_s - run.began_s for row in events]
    found = figures_of(label, LIVE, run.result.outcomes, slo, made, notices)
    return found._replace(failed=found.failed + failed)
