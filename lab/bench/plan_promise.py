"""`bench plan --part live`, the promise: what a plan says it does, beside what it does when it is started.

The plan's own file, slowed, as a suite with every service real and emulated engines; through its gateway the very
requests of the simulated run that the promise is made of. Means are over all of them, attainment over those that come
once the cluster is full, on both sides.
"""

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from lab.bench.live_replay import Means
from lab.bench.plan_live_cases import KINDS, Planned, factor_for, file_of, planned, problem_for, slower, slower_slo
from lab.bench.plan_thunderserve import Part, aim
from lab.bench.policies_live import share_within
from lab.bench.turning import trace_of
from lab.calibrate.host_watch import HostWatch
from lab.calibrate.target import Target
from lab.calibrate.traffic import Sample, Shot, Traffic
from lab.demo.run import on_free_ports
from lab.simulate.deployment import load_deployment
from services.launcher.cluster_file import load_cluster
from services.launcher.up import RunningSuite, running_suite
from shared.domain.job import Slo
from shared.plan.judge import later
from shared.sim.cluster import simulate
from shared.sim.metrics import summary
from shared.sim.workload import Workload

AIM_PERCENT = 15.0
WARM = (Shot(64, 4),) * 8  # before it counts: connections and code that nobody has used yet
_SIDES = ("ttft_mean_s", "tpot_mean_s", "attainment_share")


@dataclass(frozen=True, slots=True)
class Told:
    """Of one run, in the accelerators' time: mean TTFT and TPOT, and the settled share within the SLO."""

    ttft_mean_s: float
    tpot_mean_s: float
    attainment_share: float


@dataclass(frozen=True, slots=True)
class Kept:
    """A promise, what became of it, and what the simulator says of the file that was started."""

    promised: Told
    live: Told
    simulated: Told
    factor: float
    foreign_cores: float


def case_promise(data: Path, kinds: Sequence[str] = KINDS) -> Part:
    """A plan for each kind of requests, started."""
    figures: dict[str, float] = {}
    aims: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    for kind in kinds:
        one = planned(kind, problem_for(kind, data))
        kept = kept_promise(one)
        found, met = compared(f"promise_{kind}", kept)
        figures |= found
        aims |= met
        notes += [*no_trace(kind, data), story(one, kept)]
    return figures, aims, notes


def no_trace(kind: str, data: Path) -> list[str]:
    """That a trace is not there."""
    return [] if trace_of(kind, data) else [f"{kind}: no Azure trace below {data}: made requests of the same means"]


def kept_promise(one: Planned, most: int | None = None) -> Kept:
    """Start the plan and send the requests of its promise; the first `most` of them, to see only that it works."""
    promise, workload = one.outcome.promise, one.promised
    workload = workload if most is None else workload.head(most)
    factor = factor_for(promise.figures["output_tokens_per_s"])
    slow = slower(workload, factor)
    with tempfile.TemporaryDirectory(prefix="polyphase-promise-") as name:
        file = file_of(one, factor, Path(name))
        samples, foreign_cores = asyncio.run(_replayed(file, slow, Path(name) / "state"))
        simulated = simulated_file(file, slow, one.problem.slo, factor)
    promised = Told(promise.figures["ttft_mean_s"], promise.figures["tpot_mean_s"], promise.attainment)
    return Kept(promised, told(samples, slow, one.problem.slo, factor), simulated, factor, foreign_cores)


async def _replayed(file: Path, workload: Workload, state: Path) -> tuple[list[Sample], float]:
    cluster = on_free_ports(load_cluster(file))
    async with running_suite(cluster, state, Console(stderr=True)) as running:
        return await running.supervisor.during(_sent(running, workload))


async def _sent(running: RunningSuite, workload: Workload) -> tuple[list[Sample], float]:
    target = Target.local(running.suite)
    traffic = await Traffic.to(target, seed=1)
    await traffic.closed(WARM, 2)
    await running.suite.wait_idle()
    async with HostWatch(target.launcher_pid) as watch:
        samples = await traffic.timed(shots(workload))
    return samples, watch.mean_cores


def shots(workload: Workload) -> list[Shot]:
    """A workload as requests to be sent."""
    rows = zip(workload.prompt_tokens, workload.output_tokens, workload.arrival_s, strict=True)
    return [Shot(int(prompt), int(output), float(at)) for prompt, output, at in rows]


def told(samples: Sequence[Sample], workload: Workload, slo: Slo, factor: float) -> Told:
    """What clients saw of a workload on a cluster that is `factor` times as slow."""
    means = Means.of(samples)
    counts = np.flatnonzero(later(workload.arrival_s))
    share = share_within([samples[at] for at in counts], slower_slo(slo, factor))
    return Told(means.ttft / factor, means.tpot / factor, share)


def simulated_file(file: Path, workload: Workload, slo: Slo, factor: float) -> Told:
    """What the simulator makes of a file that is `factor` times as slow."""
    deployment, slow = load_deployment(file), slower_slo(slo, factor)
    result = simulate(workload, deployment.instances, deployment.run)
    figures, out = summary(result, slow), result.outcomes
    share = float(out.met(slow)[later(out.arrival_s)].mean())
    return Told(figures["ttft_mean_s"] / factor, figures["tpot_mean_s"] / factor, share)


def compared(name: str, kept: Kept) -> tuple[dict[str, float], Mapping[str, dict[str, Any]]]:
    """Figures of all three sides, and an aim for each: live within so many percent of what was promised."""
    figures = {f"{name}_times_as_slow": kept.factor, f"{name}_foreign_cores": round(kept.foreign_cores, 3)}
    aims = {}
    for what in _SIDES:
        promised, live = getattr(kept.promised, what), getattr(kept.live, what)
        stem, unit = what.rsplit("_", 1)
        for side, value in (("promised", promised), ("live", live), ("file", getattr(kept.simulated, what))):
            figures[f"{name}_{stem}_{side}_{unit}"] = round(value, 5)
        off = 100.0 * (live / promised - 1.0)
        figures[f"{name}_{stem}_off_percent"] = round(off, 2)
        want = f"within {AIM_PERCENT:g} % of the promise"
        aims[f"{name}_{stem}"] = aim(want, f"{off:+.1f} %", abs(off) <= AIM_PERCENT)
    return figures, aims


def story(one: Planned, kept: Kept) -> str:
    """What was started, and how it went."""
    inventory, promise = one.problem.inventory, one.outcome.promise
    groups = "; ".join(f"{group.role.value} {group.words(inventory)} {group.layout}" for group in one.plan.groups)
    return (
        f"promise, {one.kind}: {groups}; {one.plan.policies.split(':')[0]}; {len(one.promised)} requests at "
        f"{promise.rate:.2f}/s (goodput {promise.goodput:.2f}), {kept.factor:g} times as slow: TTFT "
        f"{kept.promised.ttft_mean_s:.3f} s promised, {kept.live.ttft_mean_s:.3f} s live; TPOT "
        f"{kept.promised.tpot_mean_s:.4f}, {kept.live.tpot_mean_s:.4f} s; attainment "
        f"{100 * kept.promised.attainment_share:.1f}, {100 * kept.live.attainment_share:.1f} %"
    )
