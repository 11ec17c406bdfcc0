"""`polyphase bench live`: the simulator beside a live cluster, calibrated on it within the same run.

Two clusters: the demo's, with real engines, and one of emulated accelerators. On each: calibrate, then the same
requests under several policies, live through the gateway and simulated, in turn. Aims: every mean within 15 %, and of
two policies that really differ the better one is the same in both.
"""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TypeVar

from rich.console import Console

from lab.bench.live_clusters import (
    EMULATED,
    METRICS,
    REAL,
    Means,
    Replay,
    Scenario,
    Variant,
    replay_live,
    replay_simulated,
    workload_of,
)
from lab.calibrate.live import Calibrated, calibrate
from lab.calibrate.target import Target, Traffic
from lab.suite import on_free_ports
from services.launcher.cluster_file import Cluster
from services.launcher.up import RunningSuite, running_suite

AIM_PERCENT = 15.0
TOLD_APART = 0.15  # a live difference between the policies of less than this share decides nothing
TRIES = 3  # of each measurement, when others use this machine meanwhile ...
QUIET_CORES = 0.15  # ... by more than this
SEED = 7


class _Measured(Protocol):
    @property
    def foreign_cores(self) -> float: ...


Measured = TypeVar("Measured", bound=_Measured)


@dataclass(frozen=True, slots=True)
class Round:
    """By variant what was live and what was simulated, and the calibrations before and after the replays."""

    calibrations: tuple[Calibrated, ...]
    pairs: Mapping[str, tuple[Replay, Means]]


def run_live_bench(scenarios: Sequence[Scenario] = (EMULATED, REAL)) -> dict[str, Any]:
    """All scenarios, one after the other."""
    return asyncio.run(_bench(scenarios))


async def _bench(scenarios: Sequence[Scenario]) -> dict[str, Any]:
    result: dict[str, Any] = {"figures": {}, "aims": {}, "notes": []}
    for scenario in scenarios:
        cluster = on_free_ports(Cluster.model_validate(scenario.cluster))
        with tempfile.TemporaryDirectory(prefix="polyphase-live-") as folder:
            async with running_suite(cluster, Path(folder), Console(stderr=True)) as running:
                compared = await running.supervisor.during(compare(running, scenario))
        for part, entries in compared.items():
            result[part] = result[part] + entries if part == "notes" else result[part] | entries
    return result


async def compare(running: RunningSuite, scenario: Scenario) -> dict[str, Any]:
    """Calibrate, replay and simulate on a cluster that runs."""
    target = Target.local(running.suite)
    traffic = await Traffic.to(target, SEED)
    latest = await _calibrated(running, target)
    workload = workload_of(scenario, latest, traffic.max_model_len, SEED)
    found: list[Round] = []
    for number in range(scenario.rounds):
        calibrations, pairs = [latest], {}
        first = number % len(scenario.variants)  # another one each time: what drifts with time favours none
        for variant in scenario.variants[first:] + scenario.variants[:first]:
            live = await _undisturbed(partial(replay_live, target, traffic, workload, variant))
            await running.suite.wait_idle()
            if scenario.drifts:
                latest = await _calibrated(running, target)
                calibrations.append(latest)
            around = calibrations[-2:]
            said = [await asyncio.to_thread(replay_simulated, scenario, one, workload, variant) for one in around]
            pairs[variant.label] = (live, Means.average(said))
        found.append(Round(tuple(calibrations), pairs))
    result = judged(scenario, found)
    result["figures"] |= {f"{scenario.name}_rate_per_s": workload.rate, **_conditions(scenario, found)}
    result["notes"].append(f"{scenario.name}: {scenario.title}; {len(workload)} requests, {scenario.rounds} rounds")
    return result


async def _calibrated(running: RunningSuite, target: Target) -> Calibrated:
    found = await _undisturbed(partial(calibrate, target, SEED))
    await running.suite.wait_idle()
    return found


async def _undisturbed(measure: Callable[[], Awaitable[Measured]]) -> Measured:
    """What was measured while nobody else used this machine; after some tries, at the quietest of them."""
    tries: list[Measured] = []
    while len(tries) < TRIES:
        tries.append(await measure())
        if tries[-1].foreign_cores <= QUIET_CORES:
            break
    return min(tries, key=lambda one: one.foreign_cores)


class _Compared(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def variants(self) -> tuple[Variant, ...]: ...


def judged(scenario: _Compared, rounds: Sequence[Round]) -> dict[str, Any]:
    """Medians over the rounds of the means, side by side; of their errors; and which policy wins."""
    figures: dict[str, float] = {}
    aims: dict[str, dict[str, Any]] = {}
    for variant in scenario.variants:
        for metric in METRICS:
            pairs = [_means(one, variant.label, metric) for one in rounds]
            off = median(100.0 * (said / seen - 1.0) for seen, said in pairs)
            name = f"{scenario.name}_{variant.label}_{metric}"
            figures[f"{name}_live_ms"] = 1e3 * median(seen for seen, _ in pairs)
            figures[f"{name}_simulated_ms"] = 1e3 * median(said for _, said in pairs)
            figures[f"{name}_off_percent"] = off
            aims[f"{name}_off_percent"] = {
                "want": f"within {AIM_PERCENT:g}",
                "got": round(off, 2),
                "met": abs(off) <= AIM_PERCENT,
            }
    winners = _winners(scenario, rounds, figures)
    aims |= winners
    aims[f"{scenario.name}_the_policies_differ"] = {
        "want": "in a mean at least",
        "got": f"in {len(winners)}",
        "met": bool(winners),
    }
    return {"figures": figures, "aims": aims, "notes": []}


def _winners(scenario: _Compared, rounds: Sequence[Round], figures: dict[str, float]) -> dict[str, dict[str, Any]]:
    """An aim for each mean that really differs between the first variant and another: who is better, live and not."""
    first, *others = (variant.label for variant in scenario.variants)
    aims: dict[str, dict[str, Any]] = {}
    for other in others:
        for metric in METRICS:
            pairs = [(_means(one, first, metric), _means(one, other, metric)) for one in rounds]
            live = median(after[0] / before[0] for before, after in pairs)
            simulated = median(after[1] / before[1] for before, after in pairs)
            name = f"{scenario.name}_{metric}_{other}_over_{first}"
            figures |= {f"{name}_live": live, f"{name}_simulated": simulated}
            if abs(live - 1.0) >= TOLD_APART:
                want, got = (first if ratio > 1.0 else other for ratio in (live, simulated))
                name = f"{scenario.name}_{first}_or_{other}_by_{metric}"
                aims[name] = {"want": want, "got": got, "met": want == got}
    return aims


def _means(one: Round, label: str, metric: str) -> tuple[float, float]:
    """Live and simulated."""
    live, said = one.pairs[label]
    return float(getattr(live.means, metric)), float(getattr(said, metric))


def _conditions(scenario: Scenario, rounds: Sequence[Round]) -> dict[str, float]:
    """What to know when an error is large: how well steps were fitted, and what else ran on this machine."""
    figures: dict[str, float] = {}
    for number, one in enumerate(rounds):
        round_ = f"{scenario.name}_round{number}"
        for turn, found in enumerate(one.calibrations):
            figures |= _fitted(f"{round_}_calibration{turn}", found)
        for label, (live, said) in one.pairs.items():
            figures[f"{round_}_{label}_foreign_cores"] = live.foreign_cores
            for metric in METRICS:
                seen = getattr(live.means, metric)
                figures[f"{round_}_{label}_{metric}_live_ms"] = 1e3 * seen
                figures[f"{round_}_{label}_{metric}_off_percent"] = 100.0 * (getattr(said, metric) / seen - 1.0)
    return figures


def _fitted(name: str, found: Calibrated) -> dict[str, float]:
    control = found.calibration.control
    figures = {f"{name}_foreign_cores": found.foreign_cores, f"{name}_lost_steps": float(found.lost_steps)}
    for part in ("gateway_s", "hop_s", "token_s", "link_latency_s"):
        figures[f"{name}_{part.removesuffix('_s')}_ms"] = 1e3 * getattr(control, part)
    for at, kind in enumerate(found.calibration.kinds):
        figures[f"{name}_kind{at}_step_mape_percent"] = kind.mape_percent
        figures[f"{name}_kind{at}_catalogue_mape_percent"] = kind.naive_mape_percent
        figures |= {f"{name}_kind{at}_slowdown_{k}": value for k, value in enumerate(kind.slowdown)}
    return figures
