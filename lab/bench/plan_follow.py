"""`bench plan --part live`, following: what the planner makes of a running cluster when things change.

A plan is started and serves; then clients ask for something else, or an instance is gone for good. Once with the
planner, which applies what it proposes, and once without it.
"""

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from lab.bench.plan_follow_cases import Followed, followed_loss, followed_shift
from lab.bench.plan_live_cases import CONTEXT, file_of, slower, slower_slo
from lab.bench.plan_promise import WARM, no_trace, shots
from lab.bench.plan_thunderserve import Part, aim
from lab.bench.policies_live import share_within
from lab.bench.turning import turning
from lab.calibrate.host_watch import HostWatch
from lab.calibrate.target import Target
from lab.calibrate.traffic import Sample, Traffic
from lab.demo.run import on_free_ports
from services.launcher.cluster_file import load_cluster
from services.launcher.up import RunningSuite, running_suite
from shared.domain.job import Slo
from shared.sim.workload import Workload
from shared.wire.clients.planner import PlannerClient

PROPOSED_S = 1.0  # from the notice
BACK = 0.9  # of what the proposal said of attainment
LAST = 0.4  # of a phase: its end shows how good the roles are, not how fast they came
DRAIN_S, TAIL_S = 30.0, 60.0  # in the accelerators' time; on this machine's clock, for what is still being applied
BROKEN = {"POLYPHASE_WORKER_ENGINE": "gone"}  # with it no worker starts: the launcher tries in vain
_ENDED = ("applied", "failed", "refused", "withdrawn")


@dataclass(frozen=True, slots=True)
class Ran:
    """One run. By phase: settled, the share of its last part within the SLO. changed_s: when the second phase began,

    unix time; proposals: of the planner since then, oldest first; failed: requests, and why.
    """

    settled: tuple[float, float]
    failed: tuple[str, ...]
    changed_s: float
    foreign_cores: float
    proposals: tuple[Mapping[str, Any], ...] = ()


def case_follow(data: Path) -> Part:
    """A shift and a loss, each with and without the planner."""
    figures: dict[str, float] = {}
    aims: dict[str, dict[str, Any]] = {}
    notes = [*no_trace("code", data), *no_trace("conversation", data)]
    for case in (followed_shift, followed_loss):
        one = case(data)
        followed, alone = (asyncio.run(ran(one, data, planner)) for planner in (True, False))
        found, met = judged(one, followed, alone)
        figures |= found
        aims |= met
        notes += [_case(one), *story(one, followed, alone)]
    return figures, aims, notes


async def ran(one: Followed, data: Path | None, planner: bool) -> Ran:
    """Start the plan, with a planner that applies what it proposes or without any, and send both phases."""
    workload = slower(turning(one.phases, CONTEXT, 1, data), one.factor)
    section = {"auto": True, "drain_timeout_s": one.factor * DRAIN_S} if planner else {"enabled": False}
    with tempfile.TemporaryDirectory(prefix="polyphase-follow-") as folder:
        file = file_of(one.one, one.factor, Path(folder), {"planner": section})
        cluster = on_free_ports(load_cluster(file))
        async with running_suite(cluster, Path(folder) / "state", Console(stderr=True)) as running:
            return await running.supervisor.during(_served(one, running, workload, planner))


async def _served(one: Followed, running: RunningSuite, workload: Workload, planner: bool) -> Ran:
    target = Target.local(running.suite)
    traffic = await Traffic.to(target, seed=1)
    await traffic.closed(WARM, 2)
    await running.suite.wait_idle()
    began_s = time.time()
    change_s = one.factor * one.phases[0].seconds
    async with HostWatch(target.launcher_pid) as watch, asyncio.TaskGroup() as group:
        sending = group.create_task(traffic.tried(shots(workload)))
        if one.lost:
            group.create_task(_lose(running, one.lost, change_s))
    answers = sending.result()
    proposals = await _proposals(running.suite.state.planner_url, began_s + change_s) if planner else ()
    settled = settled_shares(answers, workload, one)
    failed = tuple(answer for answer in answers if isinstance(answer, str))
    return Ran(settled, failed, began_s + change_s, watch.mean_cores, proposals)


async def _lose(running: RunningSuite, name: str, after_s: float) -> None:
    """Kill an instance, and let none of the launcher's further starts succeed."""
    await asyncio.sleep(after_s)
    await running.supervisor.restart(name, BROKEN)


async def _proposals(url: str, since_s: float) -> tuple[Mapping[str, Any], ...]:
    """Those made since then, oldest first, once all have ended or time is up."""
    give_up = time.monotonic() + TAIL_S
    async with PlannerClient(url) as client:
        while True:
            found = [entry for entry in await client.proposals(100) if entry["made_s"] >= since_s]
            if all(entry["state"] in _ENDED for entry in found) or time.monotonic() > give_up:
                return tuple(found[::-1])
            await asyncio.sleep(1.0)


def settled_shares(answers: Sequence[Sample | str], workload: Workload, one: Followed) -> tuple[float, float]:
    """By phase the share of its last requests within the SLO; those that failed are not."""
    slo = slower_slo(one.one.problem.slo, one.factor)
    met = np.array([isinstance(answer, Sample) and met_both(answer, slo) for answer in answers])
    found, start_s = [], 0.0
    for phase in one.phases:
        end_s = start_s + one.factor * phase.seconds
        last = (workload.arrival_s >= end_s - LAST * (end_s - start_s)) & (workload.arrival_s < end_s)
        found.append(float(met[last].mean()) if last.any() else float("nan"))
        start_s = end_s
    return found[0], found[1]


def met_both(sample: Sample, slo: Slo) -> bool:
    """Whether it met its targets."""
    return share_within([sample], slo) == 1.0


def judged(one: Followed, followed: Ran, alone: Ran) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    """Figures of both runs, and what the planner had to do."""
    name = f"follow_{one.name}"
    figures = {
        f"{name}_times_as_slow": one.factor,
        f"{name}_simulated_goodput_without_per_s": round(one.before, 3),
        f"{name}_simulated_goodput_with_per_s": round(one.after, 3),
        f"{name}_rate_per_s": round(one.phases[1].rate, 3),
    }
    for label, run in (("with", followed), ("without", alone)):
        figures |= {
            f"{name}_before_{label}_share": round(run.settled[0], 4),
            f"{name}_after_{label}_share": round(run.settled[1], 4),
            f"{name}_failed_{label}": len(run.failed),
            f"{name}_foreign_cores_{label}": round(run.foreign_cores, 3),
        }
    answer = answering(one, followed.proposals)
    cause = answer["cause"] if answer else "nothing"
    aims = {
        f"{name}_proposed": aim(f"for a {one.name}", cause, cause == one.name),
        f"{name}_failed": aim("no request", f"{len(followed.failed)}", not followed.failed),
    }
    if answer is None:
        return figures, aims
    took_s = answer["made_s"] - answer["noticed_s"]
    promised = float(answer["then"]["attainment"])
    figures |= {
        f"{name}_noticed_s": round(answer["noticed_s"] - followed.changed_s, 3),
        f"{name}_proposed_after_notice_s": round(took_s, 3),
        f"{name}_thought_s": round(answer["took_s"], 3),
        f"{name}_applied_after_notice_s": round(_applied_s(answer) - answer["noticed_s"], 3),
        f"{name}_promised_share": round(promised, 4),
    }
    back, better = followed.settled[1], followed.settled[1] - alone.settled[1]
    aims |= {
        f"{name}_proposed_after_notice_s": aim(f"<= {PROPOSED_S:g}", f"{took_s:.2f}", took_s <= PROPOSED_S),
        f"{name}_applied": aim("applied", answer["state"], answer["state"] == "applied"),
        f"{name}_back": aim(f">= {BACK:g} of the {promised:.3f} promised", f"{back:.3f}", back >= BACK * promised),
        f"{name}_better_than_without": aim("more than without", f"{better:+.3f}", better > 0.0),
    }
    return figures, aims


def answering(one: Followed, proposals: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The first proposal for that reason, else for any; of those applied, if any was."""
    found = [entry for entry in proposals if entry["cause"] == one.name] or list(proposals)
    return next((entry for entry in found if entry["state"] == "applied"), found[0] if found else None)


def story(one: Followed, followed: Ran, alone: Ran) -> list[str]:
    """What happened when, in seconds after the change."""
    told = [_proposal(entry, followed.changed_s) for entry in followed.proposals]
    shares = (
        f"{one.name}: last {LAST:.0%} of a phase within the SLO, before and after: {_both(followed)} with the planner, "
        f"{_both(alone)} without; failed {len(followed.failed)} and {len(alone.failed)}"
    )
    reasons = [f"{one.name}: a request failed: {reason[:200]}" for reason in sorted(set(followed.failed))[:3]]
    return [f"{one.name}: {line}" for line in told] + [shares, *reasons]


def _case(one: Followed) -> str:
    inventory, (first, second) = one.one.problem.inventory, one.phases
    groups = "; ".join(
        f"{name} {group.role.value} {group.words(inventory)} {group.layout}"
        for name, group in zip(one.one.plan.names(one.one.problem), one.one.plan.groups, strict=True)
    )
    what = f"{one.lost} is lost" if one.lost else f"{second.kind} at {second.rate:.2f}/s comes"
    return (
        f"{one.name}: {groups}; plain disaggregation; {first.kind} at {first.rate:.2f}/s, then {what}; goodput then "
        f"{one.before:.2f}/s simulated, {one.after:.2f} with flips of {', '.join(one.flips) or 'none'}; "
        f"{one.factor:g} times as slow"
    )


def _proposal(entry: Mapping[str, Any], changed_s: float) -> str:
    flips = ", ".join(f"{flip['instance_id']} to {flip['to_role']}" for flip in entry["flips"]) or "routes alone"
    took_s = entry["made_s"] - entry["noticed_s"]
    now, then = entry["now"], entry["then"]
    return (
        f"{entry['cause']} noticed {entry['noticed_s'] - changed_s:.1f} s after the change, proposed {took_s:.2f} s "
        f"later ({flips}; goodput {now['goodput']:.2f} → {then['goodput']:.2f}, attainment {now['attainment']:.2f} → "
        f"{then['attainment']:.2f} at {now['rate']:.2f}/s on this machine's clock), {entry['state']} "
        f"{_applied_s(entry) - changed_s:.1f} s after the change{_because(entry)}"
    )


def _because(entry: Mapping[str, Any]) -> str:
    return f" ({entry['error']})" if entry.get("error") else ""


def _applied_s(entry: Mapping[str, Any]) -> float:
    """When its last step ended."""
    return float(max((step["at_s"] for step in entry["steps"]), default=entry["made_s"]))


def _both(run: Ran) -> str:
    return f"{run.settled[0]:.3f}, {run.settled[1]:.3f}"
