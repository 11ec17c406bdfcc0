"""`bench plan --part live`: started plans beside what they promise, and the planner beside a cluster that changes.

The first half plans, starts and measures clusters of unequal accelerators. The second half changes the workload or the
instances of a running cluster and checks the planner's proposals. The clusters are `factor` times as slow as their
accelerators, so that this machine can stream all tokens: arrivals, targets, links and the waits of services are as many
times as long.
"""

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import yaml

from benchmarks.experiment import Means, Session, measured, model_with_context, share_within, shots_of, slower
from benchmarks.plan_thunderserve import CaseResult, cluster, problem_of
from benchmarks.results import aim
from benchmarks.scenarios import Phase, lengths, trace_of, turning
from services.launcher.up import RunningSuite
from shared.domain.instance import Role
from shared.domain.job import Slo
from shared.plan.estimate import Estimator
from shared.plan.group import Group, Part
from shared.plan.inventory import Inventory
from shared.plan.judge import Ask, later
from shared.plan.methods.registry import method
from shared.plan.plan import Plan, plan_text, routes_of
from shared.plan.plan import Target as PlanTarget
from shared.plan.problem import Problem
from shared.plan.running import Proposal, rescheduled, survivors
from shared.plan.search import Outcome, Search, searched
from shared.sim.cluster import simulate
from shared.sim.metrics import summary
from shared.sim.spec import RunSpec
from shared.sim.workload import Workload
from shared.wire.clients.planner import PlannerClient
from tools.calibrate.host_watch import HostWatch
from tools.calibrate.target import Sample
from tools.simulate.deployment import load_deployment

MODEL, CONTEXT = "Llama-3-8B", 4096
NODES = {"a100": ("A100-SXM-80", 1), "a40": ("A40", 2), "ti": ("RTX-3090-Ti", 2)}
GBPS = 25.0  # between any two of them
SLO = Slo(ttft_s=1.0, tpot_s=0.06)
KINDS = ("code", "conversation")
REQUESTS, SEED = 3000, 1
TOKENS_PER_S = 600.0  # that come at most: the machine streams three times as many, and has other work
MIN_FACTOR = 3.0  # what the services add is small beside the accelerators' times, as it is in a real cluster
PATIENCE_S, JOB_S, DRAIN_S, PULL_S = 10.0, 600.0, 30.0, 10.0  # the services' own, in the accelerators' time


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
    def promised(self) -> Workload:
        """The requests of the run that the promise is made of."""
        return self.search.judge.workload(Ask(self.plan, self.outcome.promise.rate))


def problem_for(kind: str, data: Path | None, inventory: Inventory | None = None) -> Problem:
    """That kind of requests, of the trace where it is there, on an inventory, or that of NODES."""
    requests = replace(lengths(kind, REQUESTS, CONTEXT, SEED, data), name=kind)
    return replace(problem_of(inventory or cluster(NODES, GBPS), MODEL, requests, SLO), longest_tokens=CONTEXT)


def search_for(problem: Problem, seconds: float = inf) -> Search:
    """Judged as engines are that send KV when the prompt is computed: emulated ones do."""
    return Search(problem, perf_counter, RunSpec(streaming=False, step_budget=True), perf_counter() + seconds)


def planned(kind: str, problem: Problem, seconds: float = 60.0) -> Planned:
    search = search_for(problem, seconds)
    return Planned(kind, search, searched("best", method("best"), search))


def factor_for(tokens_per_s: float, at_most: float = TOKENS_PER_S) -> float:
    """How slow a cluster that answers so many tokens a second has to be for `at_most` to come."""
    return float(max(MIN_FACTOR, ceil(tokens_per_s / at_most)))


def file_of(one: Planned, factor: float, folder: Path, more: Mapping[str, Any] | None = None) -> Path:
    """The plan's cluster file in `folder`, so many times as slow; `more`: further sections. Returns it."""
    model = folder / "model"
    if not model.exists():
        model_with_context(model, CONTEXT)
    estimator = one.search.estimator
    target = PlanTarget(f"bench plan live ({one.kind})", str(model), MODEL)
    text = plan_text(one.problem, one.plan, estimator.costs, estimator.places, target)
    file = folder / f"{one.kind}.yaml"
    file.write_text(yaml.safe_dump(slowed(yaml.safe_load(text), factor) | dict(more or {}), sort_keys=False))
    return file


def slowed(content: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """A plan's file with all times that requests see `factor` times as long, and nothing beside what serves them."""
    gateway = content["gateway"]
    slo = {name: {key: factor * value for key, value in one.items()} for name, one in gateway["slo"].items()}
    waits = {"patience_s": factor * PATIENCE_S, "job_timeout_s": factor * JOB_S}
    engine = {"emulated_slowdown": factor, "pull_timeout_s": factor * PULL_S}
    return {
        **content,
        "planner": {"enabled": False},
        "predictor": {"enabled": False},
        "dashboard": {"enabled": False},
        "gateway": {**gateway, "slo": slo, **waits},
        "monitor": {"drain_timeout_s": factor * DRAIN_S},
        "instance_defaults": {**content["instance_defaults"], **engine},
    }


# The promise: the plan's own file is started and gets the requests of the simulated run that the promise is made of.
# Means are over all requests; attainment is of those that come once the cluster is full, on both sides.

AIM_PERCENT = 15.0
_SIDES = ("ttft_mean_s", "tpot_mean_s", "attainment_share")


@dataclass(frozen=True, slots=True)
class PromiseFigures:
    """Of one run, in the accelerators' time: mean TTFT and TPOT, and the settled share within the SLO."""

    ttft_mean_s: float
    tpot_mean_s: float
    attainment_share: float


@dataclass(frozen=True, slots=True)
class Kept:
    """A promise, the live result, and the simulation of the started file."""

    promised: PromiseFigures
    live: PromiseFigures
    simulated: PromiseFigures
    factor: float
    foreign_cores: float


def case_promise(data: Path, kinds: Sequence[str] = KINDS) -> CaseResult:
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
        notes += [*no_trace(kind, data), kept_story(one, kept)]
    return figures, aims, notes


def no_trace(kind: str, data: Path) -> list[str]:
    return [] if trace_of(kind, data) else [f"{kind}: no Azure trace below {data}: made requests of the same means"]


def kept_promise(one: Planned, most: int | None = None) -> Kept:
    """Start the plan and send the requests of its promise; the first `most` of them, to see only that it works."""
    promise, workload = one.outcome.promise, one.promised
    workload = workload if most is None else workload.head(most)
    factor = factor_for(promise.figures["output_tokens_per_s"])
    slow = slower(workload, factor)
    with tempfile.TemporaryDirectory(prefix="polyphase-promise-") as name:
        file = file_of(one, factor, Path(name))
        samples, foreign_cores = asyncio.run(measured(file, partial(_sent, slow)))
        simulated = simulated_file(file, slow, one.problem.slo, factor)
    promised = PromiseFigures(promise.figures["ttft_mean_s"], promise.figures["tpot_mean_s"], promise.attainment)
    return Kept(promised, seen_by_clients(samples, slow, one.problem.slo, factor), simulated, factor, foreign_cores)


async def _sent(workload: Workload, on: Session) -> tuple[Sequence[Sample], float]:
    await on.warm_up()
    sent = await on.send(workload)
    return sent.samples, sent.foreign_cores


def seen_by_clients(samples: Sequence[Sample], workload: Workload, slo: Slo, factor: float) -> PromiseFigures:
    """What clients saw of a workload on a cluster that is `factor` times as slow."""
    means = Means.from_samples(samples)
    counts = np.flatnonzero(later(workload.arrival_s))
    share = share_within([samples[at] for at in counts], slo.slower(factor))
    return PromiseFigures(means.ttft / factor, means.tpot / factor, share)


def simulated_file(file: Path, workload: Workload, slo: Slo, factor: float) -> PromiseFigures:
    """What the simulator makes of a file that is `factor` times as slow."""
    deployment, slow = load_deployment(file), slo.slower(factor)
    result = simulate(workload, deployment.instances, deployment.run)
    figures, out = summary(result, slow), result.outcomes
    share = float(out.met(slow)[later(out.arrival_s)].mean())
    return PromiseFigures(figures["ttft_mean_s"] / factor, figures["tpot_mean_s"] / factor, share)


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


def kept_story(one: Planned, kept: Kept) -> str:
    inventory, promise = one.problem.inventory, one.outcome.promise
    groups = "; ".join(f"{group.role.value} {group.words(inventory)} {group.layout}" for group in one.plan.groups)
    return (
        f"promise, {one.kind}: {groups}; {one.plan.policies.split(':')[0]}; {len(one.promised)} requests at "
        f"{promise.rate:.2f}/s (goodput {promise.goodput:.2f}), {kept.factor:g} times as slow: TTFT "
        f"{kept.promised.ttft_mean_s:.3f} s promised, {kept.live.ttft_mean_s:.3f} s live; TPOT "
        f"{kept.promised.tpot_mean_s:.4f}, {kept.live.tpot_mean_s:.4f} s; attainment "
        f"{100 * kept.promised.attainment_share:.1f}, {100 * kept.live.attainment_share:.1f} %"
    )


# Following a change. Each accelerator is a group, so that flips can change much; roles are those that rescheduling
# finds for the first workload. The policies are plain disaggregation: under `adaptive`, decode instances compute
# prompts, too, and flips have less to mend.

FOLLOWED_NODES = {"a100": ("A100-SXM-80", 1), "a40": ("A40", 2), "a10": ("A10", 4)}
FOLLOWED_GBPS = 100.0
PLAIN = "least_load+split=full+power_of_two"
BEFORE_S, AFTER_S = 90.0, 160.0  # on this machine's clock; answers that have ended are short ones at first
SHARE = 0.8  # of the goodput that the simulator finds for roles as they should be
AT_FIRST = 0.4  # of the goodput before a shift: what streams many tokens would slow all of it, and few requests a
# second take long to show a change
FOLLOWED_TOKENS_PER_S = 800.0  # that come at most


@dataclass(frozen=True)
class Followed:
    """phases: before and after, in the accelerators' time. lost: the instance that is gone then, if any.

    flips: who would change roles by the cost model. before, after: the simulated goodput then of the roles that there
    are, and of those that there would be.
    """

    name: str
    one: Planned
    phases: tuple[Phase, Phase]
    factor: float
    lost: str
    flips: tuple[str, ...]
    before: float
    after: float


def followed_shift(data: Path | None) -> Followed:
    one, search = _started("conversation", data), _search("code", data)
    proposal = turned(search.estimator, one.plan)
    before, after = _goodputs(search, one.plan, proposal)
    names = one.plan.names(one.problem)
    flips = tuple(names[at] for at in proposal.flips)
    rates = AT_FIRST * one.outcome.promise.goodput, SHARE * after
    make = partial(_followed, "shift", one, search, ("conversation", "code"), rates)
    return make("", flips, before, after)


def followed_loss(data: Path | None) -> Followed:
    """Conversation goes on, and the group is gone whose loss flips make up for best."""
    one = _started("conversation", data)
    lost, left, proposal = max(_losses(one), key=lambda found: found[2].after.goodput / found[2].before.goodput)
    before, after = _goodputs(one.search, left, proposal)
    names = one.plan.names(one.problem)
    others = [name for at, name in enumerate(names) if at != lost]
    flips = tuple(others[at] for at in proposal.flips)
    rate = SHARE * min(one.outcome.promise.goodput, after)
    make = partial(_followed, "loss", one, one.search, ("conversation",) * 2, (rate, rate))
    return make(names[lost], flips, before, after)


def by_roles(groups: tuple[Group, ...]) -> Plan:
    """The groups under plain disaggregation."""
    return Plan(groups, policies=PLAIN)


def turned(estimator: Estimator, running: Plan) -> Proposal:
    """What rescheduling finds for them: it takes no groups that decode to compute prompts only along routes."""
    groups = running.groups
    routes = routes_of(estimator.of(groups, local=False))
    found = rescheduled(estimator, Plan(groups, routes, "plan:"))
    return replace(found, plan=by_roles(found.plan.groups))


def _search(kind: str, data: Path | None) -> Search:
    return search_for(problem_for(kind, data, cluster(FOLLOWED_NODES, FOLLOWED_GBPS)))


def _started(kind: str, data: Path | None) -> Planned:
    """Roles for that kind of requests, from one instance that decodes on."""
    search = _search(kind, data)
    problem = search.problem
    layers = problem.shop.geometry.layers
    places = [at for at, pool in enumerate(problem.inventory.pools) for _ in range(pool.count)]
    roles = [Role.DECODE] + [Role.PREFILL] * (len(places) - 1)
    first = tuple(Group(role, 1, (Part(at, layers),)) for role, at in zip(roles, places, strict=True))
    plan = turned(search.estimator, by_roles(first)).plan
    goodput = search.judge.goodput(plan, search.estimator.of(plan.groups, local=False).goodput)
    return Planned(kind, search, Outcome("rescheduled", plan, search.judge.promise(plan, goodput), 0.0, 0.0, 0))


def _losses(one: Planned) -> list[tuple[int, Plan, Proposal]]:
    """By group that may be lost: the remaining plan, and the proposal of flips for it."""
    found = []
    for lost in range(len(one.plan.groups)):
        left = by_roles(survivors(one.plan, [lost])[0])
        if len(left.roles) == len(Role):
            found.append((lost, left, turned(one.search.estimator, left)))
    return [row for row in found if row[2].before.goodput > 0.0]


def _goodputs(search: Search, plan: Plan, proposal: Proposal) -> tuple[float, float]:
    judge = search.judge
    return judge.goodput(plan, proposal.before.goodput), judge.goodput(proposal.plan, proposal.after.goodput)


def _followed(
    name: str,
    one: Planned,
    then: Search,
    kinds: Sequence[str],
    rates: Sequence[float],
    lost: str,
    flips: tuple[str, ...],
    before: float,
    after: float,
) -> Followed:
    outputs = [float(search.problem.workload.output_tokens.mean()) for search in (one.search, then)]
    factor = factor_for(max(rate * mean for rate, mean in zip(rates, outputs, strict=True)), FOLLOWED_TOKENS_PER_S)
    seconds = (BEFORE_S / factor, AFTER_S / factor)
    first, second = (Phase(*row) for row in zip(kinds, rates, seconds, strict=True))
    return Followed(name, one, (first, second), factor, lost, flips, before, after)


PROPOSED_S = 1.0  # from the notice
BACK = 0.9  # of the attainment that the proposal expects
LAST = 0.4  # of a phase: its end shows how good the roles are, not how fast they came
FOLLOWED_DRAIN_S, FOLLOWED_TAIL_S = (
    30.0,
    60.0,
)  # in the accelerators' time; on this machine's clock, for what is still being applied
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


def case_follow(data: Path) -> CaseResult:
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
        notes += [_case(one), *followed_story(one, followed, alone)]
    return figures, aims, notes


async def ran(one: Followed, data: Path | None, planner: bool) -> Ran:
    """Start the plan, with a planner that applies what it proposes or without any, and send both phases."""
    workload = slower(turning(one.phases, CONTEXT, 1, data), one.factor)
    section = {"auto": True, "drain_timeout_s": one.factor * FOLLOWED_DRAIN_S} if planner else {"enabled": False}
    with tempfile.TemporaryDirectory(prefix="polyphase-follow-") as folder:
        file = file_of(one.one, one.factor, Path(folder), {"planner": section})
        return await measured(file, partial(_served, one, workload, planner))


async def _served(one: Followed, workload: Workload, planner: bool, on: Session) -> Ran:
    await on.warm_up()
    began_s = time.time()
    change_s = one.factor * one.phases[0].seconds
    async with HostWatch(on.target.launcher_pid) as watch, asyncio.TaskGroup() as group:
        sending = group.create_task(on.traffic.tried(shots_of(workload)))
        if one.lost:
            group.create_task(_lose(on.running, one.lost, change_s))
    answers = sending.result()
    proposals = await _proposals(on.suite.state.planner_url, began_s + change_s) if planner else ()
    settled = settled_shares(answers, workload, one)
    failed = tuple(answer for answer in answers if isinstance(answer, str))
    return Ran(settled, failed, began_s + change_s, watch.mean_cores, proposals)


async def _lose(running: RunningSuite, name: str, after_s: float) -> None:
    """Kill an instance and have every restart of it fail."""
    await asyncio.sleep(after_s)
    await running.supervisor.restart(name, BROKEN)


async def _proposals(url: str, since_s: float) -> tuple[Mapping[str, Any], ...]:
    """Proposals since then, oldest first, once all have ended or FOLLOWED_TAIL_S are over."""
    give_up = time.monotonic() + FOLLOWED_TAIL_S
    async with PlannerClient(url) as client:
        while True:
            found = [entry for entry in await client.proposals(100) if entry["made_s"] >= since_s]
            if all(entry["state"] in _ENDED for entry in found) or time.monotonic() > give_up:
                return tuple(found[::-1])
            await asyncio.sleep(1.0)


def settled_shares(answers: Sequence[Sample | str], workload: Workload, one: Followed) -> tuple[float, float]:
    """By phase the share of its last requests within the SLO; those that failed are not."""
    slo = one.one.problem.slo.slower(one.factor)
    met = np.array([isinstance(answer, Sample) and answer.met(slo) for answer in answers])
    found, start_s = [], 0.0
    for phase in one.phases:
        end_s = start_s + one.factor * phase.seconds
        last = (workload.arrival_s >= end_s - LAST * (end_s - start_s)) & (workload.arrival_s < end_s)
        found.append(float(met[last].mean()) if last.any() else float("nan"))
        start_s = end_s
    return found[0], found[1]


def judged(one: Followed, followed: Ran, alone: Ran) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    """Figures of both runs, and aims for the planner."""
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


def followed_story(one: Followed, followed: Ran, alone: Ran) -> list[str]:
    lines = [_proposal(entry, followed.changed_s) for entry in followed.proposals]
    shares = (
        f"{one.name}: last {LAST:.0%} of a phase within the SLO, before and after: {_both(followed)} with the planner, "
        f"{_both(alone)} without; failed {len(followed.failed)} and {len(alone.failed)}"
    )
    reasons = [f"{one.name}: a request failed: {reason[:200]}" for reason in sorted(set(followed.failed))[:3]]
    return [f"{one.name}: {line}" for line in lines] + [shares, *reasons]


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
    return float(max((step["at_s"] for step in entry["steps"]), default=entry["made_s"]))


def _both(run: Ran) -> str:
    return f"{run.settled[0]:.3f}, {run.settled[1]:.3f}"


def case_live(data: Path) -> CaseResult:
    kept, followed = case_promise(data), case_follow(data)
    notes = list(dict.fromkeys(kept[2] + followed[2]))  # a missing trace is noted once
    return kept[0] | followed[0], kept[1] | followed[1], notes
