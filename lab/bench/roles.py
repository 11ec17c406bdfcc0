"""`polyphase bench roles`: roles that follow what clients ask for, beside every fixed ratio and the other policies.

Workloads turn from conversation to code and back, at rates at which roles matter; others are steady or bursty, where
flips can only do harm. Simulated, with what is known live: loads as old as broadcasts, learned rates, imperfect
predictions, summaries of the demand as late as live ones. `--live` does the turning one on emulated instances, too.
"""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from lab.bench.scenarios import MAX_TOKENS, Phase, attained, learned, turning
from lab.simulate.deployment import load_deployment
from shared.domain.instance import Role
from shared.domain.job import Slo
from shared.sim.cluster import simulate
from shared.sim.outcomes import SimResult
from shared.sim.prediction import Prediction
from shared.sim.spec import InstanceSpec, RunSpec, with_words

SLO = Slo(ttft_s=2.0, tpot_s=0.03)
LONGEST = 8_000
PHASE_S = 90.0
SETTLE_S = 30.0  # of a phase: what comes later shows how good the roles are, not how fast they came
DISAGGREGATED, ADAPTIVE = "least_load+split=full+power_of_two", "adaptive"
FLIPS = ("predictive", "pressure", "idle")
CLOSE, NO_WORSE, NOTICED_S = 0.05, 0.02, 30.0
SEEDS = (1, 2)


@dataclass(frozen=True, slots=True)
class Setting:
    """Instances by accelerator in the order in which they get the prefill role; phases; placement in words.

    prefills: with how many prefill instances the policies begin; steady: what asks for no flip.
    """

    name: str
    accelerators: tuple[str, ...]
    phases: tuple[Phase, ...]
    placement: str
    prefills: int
    steady: bool = False

    @property
    def ratios(self) -> range:
        """How many prefill instances there may be."""
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
) -> dict[str, Any]:
    """All settings. Returns figures, aims and notes as every bench does."""
    work = [(setting, seed, data) for setting in settings for seed in seeds]
    with ProcessPoolExecutor(processes) as pool:
        found = list(pool.map(_measured, work, chunksize=1))
    result: dict[str, Any] = {"figures": {}, "aims": {}, "notes": []}
    for (setting, seed, _), runs in zip(work, found, strict=True):
        judged(f"{setting.name}_seed{seed}", setting, runs, result)
    result["notes"].append(f"lengths: Azure's traces, where they are in {data}; targets {SLO.ttft_s} s, {SLO.tpot_s} s")
    return result


def _measured(work: tuple[Setting, int, Path]) -> list[Seen]:
    return measure(*work)


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
    """One instance of each place, as it knows itself."""
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
    """What a run came to."""
    outcomes, phases = result.outcomes, setting.phases
    began = float(outcomes.arrival_s[0])
    flips = [(flip.time_s - began, flip.to) for flip in result.role_flips]
    notices = [at - began for at, _ in result.shifts]
    return Seen(
        label,
        attained(outcomes, SLO, phases),
        attained(outcomes, SLO, phases, SETTLE_S),
        int((~outcomes.completed).sum()),
        *told(phases, flips, notices),
        float(np.nanpercentile(outcomes.longest_gap_s, 90)),
    )


def told(
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


def judged(name: str, setting: Setting, runs: Sequence[Seen], result: dict[str, Any]) -> None:
    """Figures of all runs, and aims of the predictive one, put into `result`."""
    figures, aims = result["figures"], result["aims"]
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
        aims[f"{name}_loss_to_no_flips"] = _at_most(NO_WORSE, max(whole for whole, _ in lost))
    else:
        aims[f"{name}_loss_to_best_ratio_of_each_phase"] = _at_most(CLOSE, max(whole for whole, _ in lost))
        aims[f"{name}_loss_to_best_ratio_once_settled"] = _at_most(CLOSE, max(settled for _, settled in lost))
        best = max(sum(one.attained) for one in fixed) / len(lost)
        aims[f"{name}_loss_to_best_ratio_of_all"] = _at_most(NO_WORSE, best - sum(ours.attained) / len(lost))
        aims[f"{name}_noticed_s"] = _at_most(NOTICED_S, ours.noticed_s)
    aims[f"{name}_turned_back"] = _at_most(0, ours.turned_back)
    aims[f"{name}_failed"] = _at_most(0, ours.failed)


def _at_most(want: float, got: float) -> dict[str, Any]:
    return {"want": f"<= {want:g}", "got": round(got, 4), "met": got <= want}
