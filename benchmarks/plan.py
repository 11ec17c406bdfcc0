"""`polyphase bench plan`, and its part `live`: started plans beside what they promise, and the planner beside a cluster
that changes. The other parts are in `plan_cases`.

The live clusters are `factor` times as slow as their accelerators, so that this machine can stream all tokens:
arrivals, targets, links and the waits of services are as many times as long.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from benchmarks import plan_cases as cases
from benchmarks.cluster_files import model_with_context, write_cluster
from benchmarks.experiment import LiveRun, Means, Session, measured, slower
from benchmarks.plan_cases import cluster, ethernet, problem_of
from benchmarks.results import Aim, Figures, Result, aim, merged, result, run_parts
from benchmarks.scenarios import Phase, lengths, trace_of, turning
from services.launcher.up import RunningSuite
from shared.domain.instance import Role
from shared.domain.job import Slo
from shared.plan.estimate import Estimator
from shared.plan.evaluate import Trial, later
from shared.plan.group import Group, Part
from shared.plan.methods.registry import method
from shared.plan.plan import Plan, plan_text, routes_of
from shared.plan.plan import Target as PlanTarget
from shared.plan.problem import Problem
from shared.plan.running import Rescheduling, after_loss, reschedule
from shared.plan.search import AS_SERVED, Outcome, Search, run_method
from shared.sim.outcomes import SimResult
from shared.sim.workload import Times, Workload
from shared.wire.api.planner import Proposal as LiveProposal
from shared.wire.api.planner import ProposalState
from shared.wire.clients.planner import PlannerClient


def run_plan_bench(data: Path, parts: Sequence[str] = (), processes: int = 2) -> Result:
    """The parts of these names, all without any. processes: that search, where there are many inventories."""
    all_parts: dict[str, Callable[[], Result]] = {
        "thunderserve": partial(cases.case_32, data),
        "precision": partial(cases.case_precision, data),
        "sizes": partial(cases.case_sizes, data),
        "bandwidth": cases.case_bandwidth,
        "loss": partial(cases.case_loss, data),
        "oracle": partial(cases.case_oracle, processes),
        "huawei": partial(cases.case_huawei, data),
        "zte": cases.case_zte,
        "scale": cases.case_scale,
        "beside": partial(cases.case_beside, processes),
        "prefixes": partial(cases.case_prefixes, data, processes),
        "live": partial(case_live, data),
    }
    return run_parts(all_parts, parts)


def case_live(data: Path) -> Result:
    missing = [f"{kind}: no Azure trace below {data}: synthetic requests" for kind in KINDS if not trace_of(kind, data)]
    follow = (followed(case(data), data) for case in (shift, loss))
    return merged(*(promise(kind, data) for kind in KINDS), *follow, result({}, notes=missing))


# Plans and their cluster files.

MODEL, CONTEXT = "Llama-3-8B", 4096
SLO = Slo(ttft_s=1.0, tpot_s=0.06)
KINDS = ("code", "conversation")
REQUESTS, SEED = 3000, 1
MIN_FACTOR = 3.0  # what the services add is small beside the accelerators' times, as it is in a real cluster
PATIENCE_S, JOB_S, DRAIN_S, PULL_S = 10.0, 600.0, 30.0, 10.0  # the services' own, in the accelerators' time
Nodes = Mapping[str, tuple[str, int]]
NODES: Nodes = {"a100": ("A100-SXM-80", 1), "a40": ("A40", 2), "ti": ("RTX-3090-Ti", 2)}
GBPS = 25.0  # between any two of them


@dataclass(frozen=True)
class Planned:
    """A plan, its search, and the kind of requests."""

    kind: str
    search: Search
    outcome: Outcome

    @property
    def problem(self) -> Problem:
        return self.search.problem

    @property
    def plan(self) -> Plan:
        return self.outcome.plan

    @property
    def names(self) -> tuple[str, ...]:
        return self.plan.names(self.problem)

    def groups_text(self) -> str:
        return f"{cases.groups_text(self.problem, self.plan.groups)}; {self.plan.policies.split(':')[0]}"


def search_for(kind: str, data: Path | None, nodes: Nodes = NODES, gbps: float = GBPS) -> Search:
    """Judged as engines are that send KV when the prompt is computed, as emulated ones do."""
    requests = replace(lengths(kind, REQUESTS, CONTEXT, SEED, data), name=kind)
    problem = replace(problem_of(cluster(nodes, ethernet(gbps)), MODEL, requests, SLO), longest_tokens=CONTEXT)
    return Search(problem, perf_counter, replace(AS_SERVED, streaming=False), perf_counter() + 60.0, robust=0.0)


def factor_for(tokens_per_s: float, max_tokens_per_s: float) -> float:
    """How slow a cluster that answers so many tokens a second has to be for `max_tokens_per_s` to arrive here."""
    return float(max(MIN_FACTOR, ceil(tokens_per_s / max_tokens_per_s)))


def file_of(one: Planned, factor: float, folder: Path, more: Mapping[str, Any] | None = None) -> Path:
    """Write the plan's cluster file, with all times that requests see `factor` times as long, into `folder`.

    more: further sections.
    """
    model = folder / "model"
    if not model.exists():
        model_with_context(model, CONTEXT)
    estimator = one.search.estimator
    target = PlanTarget(f"bench plan live ({one.kind})", str(model), MODEL)
    content = yaml.safe_load(plan_text(one.problem, one.plan, estimator.costs, estimator.places, target))
    gateway = content["gateway"]
    slo = {name: {key: factor * value for key, value in each.items()} for name, each in gateway["slo"].items()}
    waits = {"patience_s": factor * PATIENCE_S, "job_timeout_s": factor * JOB_S}
    engine = {"emulated_slowdown": factor, "pull_timeout_s": factor * PULL_S}
    content |= {
        "name": one.kind,
        "planner": {"enabled": False},
        "predictor": {"enabled": False},
        "dashboard": {"enabled": False},
        "gateway": {**gateway, "slo": slo, **waits},
        "monitor": {"drain_timeout_s": factor * DRAIN_S},
        "instance_defaults": {**content["instance_defaults"], **engine},
        **(more or {}),
    }
    return write_cluster(folder, content)


# The promise: the plan's own file is started and gets the requests of the simulated run that the promise is made of.
# Means are over all requests; attainment is of those that arrive once the cluster is full, on both sides.

AIM_PERCENT = 15.0
PROMISE_TOKENS_PER_S = 600.0  # that arrive at most: the machine streams three times as many, and has other work


@dataclass(frozen=True, slots=True)
class Kept:
    """A promise, and the result of the started plan: mean TTFT and TPOT, and the settled share within the SLO."""

    promised: Figures
    live: Figures
    factor: float
    foreign_cores: float


def promise(kind: str, data: Path) -> Result:
    """A plan for that kind of requests, started."""
    search = search_for(kind, data)
    one = Planned(kind, search, run_method("best", method("best"), search))
    found = one.outcome.promise
    note = f"promise, {kind}: {one.groups_text()}; {found.rate:.2f} requests/s (goodput {found.goodput:.2f})"
    return merged(compared(f"promise_{kind}", keep(one)), result({}, notes=[note]))


def keep(one: Planned, max_requests: int | None = None) -> Kept:
    """Start the plan and send the requests of its promise; with `max_requests` only the first of them, as a check."""
    promise = one.outcome.promise
    workload = one.search.evaluator.requests(Trial(one.plan, promise.rate)).workload
    workload = workload.head(max_requests) if max_requests else workload
    factor = factor_for(promise.figures["output_tokens_per_s"], PROMISE_TOKENS_PER_S)
    slow, slo = slower(workload, factor), one.problem.slo.slower(factor)

    async def send(on: Session) -> LiveRun:
        await on.warm_up()
        return await on.send(slow, slo=slo)

    with tempfile.TemporaryDirectory(prefix="polyphase-promise-") as folder:
        run = asyncio.run(measured(file_of(one, factor, Path(folder)), send))
    promised = {name: promise.figures[name] for name in ("ttft_mean_s", "tpot_mean_s")}
    promised["attainment_share"] = promise.attainment
    return Kept(promised, promise_figures(run.result, slo, factor), factor, run.foreign_cores)


def promise_figures(seen: SimResult, slo: Slo, factor: float) -> Figures:
    """What clients saw on a cluster that is `factor` times as slow. slo: of that cluster."""
    means, settled = Means.from_result(seen, factor), later(seen.outcomes.arrival_s)
    share = float(seen.outcomes.met(slo)[settled].mean())
    return {"ttft_mean_s": means.ttft, "tpot_mean_s": means.tpot, "attainment_share": share}


def compared(name: str, kept: Kept) -> Result:
    """Figures of both sides, and an aim for each: live within so many percent of what was promised."""
    figures = {f"{name}_times_as_slow": kept.factor, f"{name}_foreign_cores": round(kept.foreign_cores, 3)}
    aims: dict[str, Aim] = {}
    for what, promised in kept.promised.items():
        live, (stem, unit) = kept.live[what], what.rsplit("_", 1)
        off = 100.0 * (live / promised - 1.0)
        figures |= {
            f"{name}_{stem}_promised_{unit}": round(promised, 5),
            f"{name}_{stem}_live_{unit}": round(live, 5),
            f"{name}_{stem}_off_percent": round(off, 2),
        }
        want = f"within {AIM_PERCENT:g} % of the promise"
        aims[f"{name}_{stem}"] = aim(want, f"{off:+.1f} %", abs(off) <= AIM_PERCENT)
    return result(figures, aims)


# Following a change. Each accelerator is a group, so that flips can change much; roles are those that rescheduling
# finds for the first workload. The policies are plain disaggregation: under `adaptive`, decode instances compute
# prompts, too, and flips have less to mend.

FOLLOWED_NODES: Nodes = {"a100": ("A100-SXM-80", 1), "a40": ("A40", 2), "a10": ("A10", 4)}
FOLLOWED_GBPS = 100.0
FOLLOWED_TOKENS_PER_S = 800.0  # that arrive at most
PLAIN = "least_load+split=full+power_of_two"
BEFORE_S, AFTER_S = 90.0, 160.0  # on this machine's clock; answers that have ended are short ones at first
SHARE = 0.8  # of the goodput that the simulator finds for roles as they should be
AT_FIRST = 0.4  # of the goodput before a shift: what streams many tokens would slow all of it, and few requests a
# second take long to show a change
PROPOSED_S = 1.0  # from the notice, at most
BACK = 0.9  # of the attainment that the proposal expects, at least
LAST = 0.4  # of a phase: its end shows how good the roles are, not how fast they came
PLANNER_DRAIN_S = 30.0  # in the accelerators' time
TAIL_S = 60.0  # on this machine's clock, for what is still being applied
BROKEN = {"POLYPHASE_WORKER_ENGINE": "gone"}  # with it no worker starts: each restart by the launcher fails
_ENDED = ("applied", "failed", "refused", "withdrawn")


@dataclass(frozen=True)
class Change:
    """phases: before and after, in the accelerators' time. lost: the instance that is killed then, if any.

    before, after: the simulated goodput then, without and with the flips of the proposal.
    """

    name: str
    one: Planned
    phases: tuple[Phase, Phase]
    factor: float
    lost: str
    before: float
    after: float


def shift(data: Path | None) -> Change:
    """Clients turn from conversation to code."""
    one, search = _started(data), search_for("code", data, FOLLOWED_NODES, FOLLOWED_GBPS)
    before, after = _goodputs(search, one.plan, rescheduled_roles(search.estimator, one.plan))
    first, then = (float(each.problem.workload.output_tokens.mean()) for each in (one.search, search))
    factor, phases = paced(
        ("conversation", AT_FIRST * one.outcome.promise.goodput, first), ("code", SHARE * after, then)
    )
    return Change("shift", one, phases, factor, "", before, after)


def loss(data: Path | None) -> Change:
    """Conversation goes on, and the group is lost whose loss flips make up for best."""
    one = _started(data)
    candidates = []
    for lost in range(len(one.plan.groups)):
        left = by_roles(after_loss(one.plan, [lost])[0])
        if len(left.roles) == len(Role):
            proposal = rescheduled_roles(one.search.estimator, left)
            if proposal.before.goodput > 0.0:
                candidates.append((lost, left, proposal))
    lost, left, proposal = max(candidates, key=lambda row: row[2].after.goodput / row[2].before.goodput)
    before, after = _goodputs(one.search, left, proposal)
    rate = SHARE * min(one.outcome.promise.goodput, after)
    demand = "conversation", rate, float(one.problem.workload.output_tokens.mean())
    factor, phases = paced(demand, demand)
    return Change("loss", one, phases, factor, one.names[lost], before, after)


def paced(*demands: tuple[str, float, float]) -> tuple[float, tuple[Phase, Phase]]:
    """How slow the cluster has to be, and the phases before and after the change.

    demands: of each phase its kind, requests a second and mean tokens of an answer.
    """
    factor = factor_for(max(rate * output for _, rate, output in demands), FOLLOWED_TOKENS_PER_S)
    before, after = (
        Phase(kind, rate, seconds / factor)
        for (kind, rate, _), seconds in zip(demands, (BEFORE_S, AFTER_S), strict=True)
    )
    return factor, (before, after)


def by_roles(groups: tuple[Group, ...]) -> Plan:
    """The groups under plain disaggregation."""
    return Plan(groups, policies=PLAIN)


def rescheduled_roles(estimator: Estimator, running: Plan) -> Rescheduling:
    """A proposal of roles alone; rescheduling takes groups that decode to compute prompts only along routes."""
    routes = routes_of(estimator.estimate(running.groups, local=False))
    found = reschedule(estimator, Plan(running.groups, routes, "plan:"))
    return replace(found, plan=by_roles(found.plan.groups))


def _started(data: Path | None) -> Planned:
    """Roles for conversation, found from one instance that decodes on."""
    search = search_for("conversation", data, FOLLOWED_NODES, FOLLOWED_GBPS)
    layers = search.problem.models.geometry.layers
    places = [at for at, pool in enumerate(search.problem.inventory.pools) for _ in range(pool.count)]
    roles = [Role.DECODE] + [Role.PREFILL] * (len(places) - 1)
    first = tuple(Group(role, 1, (Part(at, layers),)) for role, at in zip(roles, places, strict=True))
    plan = rescheduled_roles(search.estimator, by_roles(first)).plan
    goodput = search.evaluator.goodput(plan, search.estimator.estimate(plan.groups, local=False).goodput)
    outcome = Outcome("rescheduled", plan, search.evaluator.promise(plan, goodput), 0.0, 0.0, 0)
    return Planned("conversation", search, outcome)


def _goodputs(search: Search, plan: Plan, proposal: Rescheduling) -> tuple[float, float]:
    evaluator = search.evaluator
    return evaluator.goodput(plan, proposal.before.goodput), evaluator.goodput(proposal.plan, proposal.after.goodput)


@dataclass(frozen=True, slots=True)
class Ran:
    """One run. settled: by phase, the share of its last part within the SLO. failed: the errors of requests.

    changed_s: when the second phase began, unix time. proposals: of the planner since then, oldest first.
    """

    settled: tuple[float, float]
    failed: tuple[str, ...]
    changed_s: float
    foreign_cores: float
    proposals: tuple[LiveProposal, ...] = ()


def followed(change: Change, data: Path | None) -> Result:
    """The change with the planner, and without it."""
    with_planner, without = (asyncio.run(ran(change, data, planner)) for planner in (True, False))
    return judged(change, with_planner, without)


async def ran(change: Change, data: Path | None, planner: bool) -> Ran:
    """Start the plan, with a planner that applies its proposals or without any, and send both phases."""
    workload = slower(turning(change.phases, CONTEXT, 1, data), change.factor)
    section = {"auto": True, "drain_timeout_s": change.factor * PLANNER_DRAIN_S} if planner else {"enabled": False}
    with tempfile.TemporaryDirectory(prefix="polyphase-follow-") as folder:
        file = file_of(change.one, change.factor, Path(folder), {"planner": section})
        return await measured(file, partial(_served, change, workload, planner))


async def _served(change: Change, workload: Workload, planner: bool, on: Session) -> Ran:
    await on.warm_up()
    change_s, slo = change.factor * change.phases[0].seconds, change.one.problem.slo.slower(change.factor)
    async with asyncio.TaskGroup() as group:
        sending = group.create_task(on.send(workload, slo=slo, may_fail=True))
        if change.lost:
            group.create_task(_lose(on.running, change.lost, change_s))
    run = sending.result()
    changed_s = run.began_s + change_s
    proposals = await _proposals(on.suite.state.planner_url, changed_s) if planner else ()
    settled = settled_shares(workload.arrival_s, run.result.outcomes.met(slo), change)
    return Ran(settled, tuple(run.failures), changed_s, run.foreign_cores, proposals)


async def _lose(running: RunningSuite, name: str, after_s: float) -> None:
    """Kill an instance and have every restart of it fail."""
    await asyncio.sleep(after_s)
    await running.supervisor.restart(name, BROKEN)


async def _proposals(url: str, since_s: float) -> tuple[LiveProposal, ...]:
    """Proposals since then, oldest first, once all have ended or TAIL_S are over."""
    deadline = time.monotonic() + TAIL_S
    async with PlannerClient(url) as client:
        while True:
            found = [entry for entry in await client.proposals(100) if entry.made_s >= since_s]
            if all(entry.state in _ENDED for entry in found) or time.monotonic() > deadline:
                return tuple(found[::-1])
            await asyncio.sleep(1.0)


def settled_shares(arrival_s: Times, met: NDArray[np.bool_], change: Change) -> tuple[float, float]:
    """By phase the share of its last requests within the SLO; those that failed are not."""
    found, start_s = [], 0.0
    for phase in change.phases:
        end_s = start_s + change.factor * phase.seconds
        last = (arrival_s >= end_s - LAST * (end_s - start_s)) & (arrival_s < end_s)
        found.append(float(met[last].mean()) if last.any() else float("nan"))
        start_s = end_s
    return found[0], found[1]


def judged(change: Change, followed: Ran, alone: Ran) -> Result:
    """Figures of the runs with and without the planner, and aims for the planner."""
    name = f"follow_{change.name}"
    figures = {
        f"{name}_times_as_slow": change.factor,
        f"{name}_simulated_goodput_without_per_s": round(change.before, 3),
        f"{name}_simulated_goodput_with_per_s": round(change.after, 3),
        f"{name}_rate_per_s": round(change.phases[1].rate, 3),
    }
    for label, run in (("with", followed), ("without", alone)):
        figures |= {
            f"{name}_before_{label}_share": round(run.settled[0], 4),
            f"{name}_after_{label}_share": round(run.settled[1], 4),
            f"{name}_failed_{label}": len(run.failed),
            f"{name}_foreign_cores_{label}": round(run.foreign_cores, 3),
        }
    answer = answering(change, followed.proposals)
    cause = answer.cause if answer else "nothing"
    aims: dict[str, Aim] = {
        f"{name}_proposed": aim(f"for a {change.name}", cause, cause == change.name),
        f"{name}_failed": aim("no request", f"{len(followed.failed)}", not followed.failed),
    }
    notes = [f"{change.name}: {change.one.groups_text()}; lost: {change.lost or 'none'}"]
    notes += [f"{change.name}: a request failed: {reason[:200]}" for reason in sorted(set(followed.failed))[:3]]
    if answer is None:
        return result(figures, aims, notes)
    took_s, promised = answer.made_s - answer.noticed_s, answer.then.attainment or 0.0
    applied_s = max((step.at_s for step in answer.steps), default=answer.made_s)
    flips = ", ".join(f"{flip.instance_id} to {flip.to_role}" for flip in answer.flips) or "routes alone"
    error = f" ({answer.error})" if answer.error else ""
    notes.append(f"{change.name}: {answer.state}: {flips}{error}")
    figures |= {
        f"{name}_noticed_s": round(answer.noticed_s - followed.changed_s, 3),
        f"{name}_proposed_after_notice_s": round(took_s, 3),
        f"{name}_thought_s": round(answer.took_s, 3),
        f"{name}_applied_after_notice_s": round(applied_s - answer.noticed_s, 3),
        f"{name}_promised_share": round(promised, 4),
    }
    back, better = followed.settled[1], followed.settled[1] - alone.settled[1]
    aims |= {
        f"{name}_proposed_after_notice_s": aim(f"<= {PROPOSED_S:g}", f"{took_s:.2f}", took_s <= PROPOSED_S),
        f"{name}_applied": aim("applied", answer.state, answer.state is ProposalState.APPLIED),
        f"{name}_back": aim(f">= {BACK:g} of the {promised:.3f} promised", f"{back:.3f}", back >= BACK * promised),
        f"{name}_better_than_without": aim("more than without", f"{better:+.3f}", better > 0.0),
    }
    return result(figures, aims, notes)


def answering(change: Change, proposals: Sequence[LiveProposal]) -> LiveProposal | None:
    """The first proposal for that reason, else for any; of those applied, if any was."""
    found = [entry for entry in proposals if entry.cause == change.name] or list(proposals)
    return next((entry for entry in found if entry.state is ProposalState.APPLIED), found[0] if found else None)
