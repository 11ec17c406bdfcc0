"""The planners of three papers: `exhaustive` (Huawei), `joint` (ZTE) and `tabu` (ThunderServe).

Where a paper leaves something open or contradicts itself, a comment says what is done here. Layouts, the estimate and
the simulator are those that all methods share.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from shared.cost.kinds import EngineKind, Stage
from shared.cost.network import rate_of
from shared.cost.step import StepTimes
from shared.cost.step_rates import step_rates_of
from shared.domain.instance import Role
from shared.plan.estimate import Estimate
from shared.plan.evaluate import Trial
from shared.plan.group import Group, Part
from shared.plan.methods.simple import SPLIT
from shared.plan.plan import Plan, canonical, routes_of
from shared.plan.problem import Problem
from shared.plan.routes import Route
from shared.plan.search import ScoredPlan, Search
from shared.policy.papers.costs import HuaweiCost
from shared.sim.outcomes import SimResult

POLICIES = "workload+split=none+dispatch=random"
_DEGREES = (1, 2, 4, 8, 16)
_SAMPLE = 200  # requests that batches are packed of
_BUDGET = 2048  # tokens of the steps from which costs are derived

Pairs = Sequence[tuple[int, int]]  # prompt and output tokens of requests


def exhaustive(search: Search) -> Iterator[ScoredPlan]:
    """One plan: the best tensor-parallel degree of each machine that holds the model, by its estimated throughput.

    Source: Huawei Algorithm 1 and eqs 1-4. Machines are independent, and each instance serves whole requests, which the
    paper's workload mapper spreads.
    """
    groups = exhaustive_groups(search)
    if groups:
        yield search.score(Plan(groups, policies=POLICIES), local=True)


def exhaustive_groups(search: Search) -> tuple[Group, ...]:
    problem = search.problem
    groups: list[Group] = []
    workload = problem.workload
    pairs = list(zip(workload.prompt_tokens[:_SAMPLE].tolist(), workload.output_tokens[:_SAMPLE].tolist(), strict=True))
    for pool, entry in enumerate(problem.inventory.pools):
        by_degree = machine_throughputs(search, entry.accelerator.name, entry.count, pairs)
        if by_degree:
            best = max(by_degree, key=lambda degree: by_degree[degree])
            group = Group(Role.DECODE, best, (Part(pool, problem.models.geometry.layers),))
            groups += [group] * (entry.count // best)
    return tuple(groups)


def machine_throughputs(search: Search, accelerator: str, count: int, pairs: Pairs) -> dict[int, float]:
    """Tokens a second of a machine, by the degrees at which its accelerators hold the model."""
    problem = search.problem
    models, heads, found = problem.models, problem.models.geometry.heads, {}
    for degree in _DEGREES:
        if count % degree or heads % degree:
            continue
        kind = EngineKind((Stage(accelerator, models.geometry.layers),), degree, problem.dtype)
        capacity = models.kv_tokens(kind)
        if capacity >= problem.longest:
            cost = batch_cost(models.times(kind))
            found[degree] = count / degree * estimated_throughput(cost, capacity, pairs)
    return found


def batch_cost(times: StepTimes) -> HuaweiCost:
    """p1…p8 of an engine with these step times. Source: Huawei eqs 3–4."""
    return HuaweiCost.from_steps(step_rates_of(times.step_time_s, _BUDGET), _BUDGET)


def estimated_throughput(cost: HuaweiCost, capacity_tokens: int, requests: Pairs) -> float:
    """Tokens a second of one instance. Source: Huawei Algorithm 1: batches are timed at their longest lengths."""
    seconds = 0.0
    for batch in packed(capacity_tokens, requests):
        prompt, output = max(p for p, _ in batch), max(o for _, o in batch)
        seconds += cost.prefill_s(len(batch), prompt) + cost.decode_s(len(batch), prompt, output)
    return sum(p + o for p, o in requests) / seconds


def packed(capacity_tokens: int, requests: Pairs) -> Iterator[tuple[tuple[int, int], ...]]:
    """The requests in order, in batches as large as the KV holds when each request is padded to the longest.

    A request joins while (b + 1)·(max S + max O) <= capacity; a batch has at least one request.
    """
    batch: list[tuple[int, int]] = []
    for request in requests:
        grown = [*batch, request]
        longest = max(p for p, _ in grown) + max(o for _, o in grown)
        if batch and len(grown) * longest > capacity_tokens:
            yield tuple(batch)
            grown = [request]
        batch = grown
    if batch:
        yield tuple(batch)


@dataclass(frozen=True, slots=True)
class Strategy:
    """An instance of one phase on accelerators of one type. rate: requests a second within the phase's target."""

    accelerator: str
    group: Group
    rate: float

    @property
    def size(self) -> int:
        return self.group.accelerators

    @property
    def each(self) -> float:
        return self.rate / self.size


@dataclass(frozen=True, slots=True)
class Ratio:
    """Numbers of prefill and decode instances, and the requests a second that they serve together."""

    prefill: Strategy
    decode: Strategy
    prefills: int
    decodes: int

    @property
    def rate(self) -> float:
        return min(self.prefills * self.prefill.rate, self.decodes * self.decode.rate)

    @property
    def accelerators(self) -> int:
        return self.prefills * self.prefill.size + self.decodes * self.decode.size

    @property
    def each(self) -> tuple[float, float]:
        """Throughput per accelerator, which decides ties: of both phases together, then of each phase."""
        return self.rate / self.accelerators, self.prefill.each + self.decode.each


def joint(search: Search) -> Iterator[ScoredPlan]:
    """One plan: a parallel strategy and an accelerator type for each phase, and the number of instances of each.

    Source: ZTE III.C: equation 1 maximises prefill throughput per accelerator under TTFT and memory, equation 4 the
    throughput of a decode instance under TPOT and memory. The paper does not say how they meet the demand: here prefill
    meets the rate, decode meets prefill, throughput per accelerator decides ties, and decode leaves accelerators for a
    prefill instance. Data and expert parallelism, which the paper also varies, are not among the layouts.
    """
    groups = joint_groups(search)
    if groups:
        yield search.score(Plan(groups, policies=SPLIT), local=False)


def joint_groups(search: Search, per_accelerator: bool = False) -> tuple[Group, ...]:
    """The groups of `joint`; empty where no ratio is possible. per_accelerator: see `recommended`."""
    ratio = recommended(search, per_accelerator)
    if ratio is None:
        return ()
    groups = (*_placed(search, ratio.prefill, ratio.prefills), *_placed(search, ratio.decode, ratio.decodes, ratio))
    return groups if {group.role for group in groups} == set(Role) else ()


def recommended(search: Search, per_accelerator: bool = False) -> Ratio | None:
    """The ratio for the problem's rate, else for the highest rate that can be served; None where there is none.

    per_accelerator: choose decode instances by throughput per accelerator, too (not in the paper; a start of `best`).
    """
    problem = search.problem
    counts = _counts(problem)
    prefills, decodes = _by_type(strategies(search, Role.PREFILL)), _by_type(strategies(search, Role.DECODE))
    ways: list[Ratio] = []
    for of_prefill in prefills.values():
        prefill = max(of_prefill, key=lambda one: one.each)
        for of_decode in decodes.values():
            best_first = sorted(of_decode, key=lambda one: -(one.each if per_accelerator else one.rate))
            ratios = (_ratio(prefill, decode, counts, problem.rate) for decode in best_first)
            ways += [ratio for ratio in ratios if ratio is not None][:1]
    if problem.rate:
        enough = [ratio for ratio in ways if ratio.rate >= problem.rate]
        if enough:
            return max(enough, key=lambda ratio: (-ratio.accelerators, ratio.each))
    return max(ways, key=lambda ratio: (round(ratio.rate, 3), ratio.each), default=None)


def strategies(search: Search, role: Role) -> list[Strategy]:
    """All strategies that meet the phase's target, each on one accelerator type."""
    problem, layouts = search.problem, search.estimator.layouts
    slo, output = problem.slo, problem.sample.output
    found: list[Strategy] = []
    for pool, entry in enumerate(problem.inventory.pools):
        for size in (1, 2, 4, 8, 16):
            for group in layouts.all({pool: size}, role) if size <= entry.count else ():
                cost = layouts.cost(group)
                if role is Role.PREFILL:
                    on_time = float((cost.prefill_s <= slo.ttft_s).mean()) >= problem.target
                    rate = cost.prefills_per_s if on_time else 0.0
                else:
                    batch = cost.batch_within(slo.tpot_s)
                    rate = cost.lanes * batch / (output * cost.decode_s(batch)) if batch >= 1.0 else 0.0
                if rate > 0.0:
                    found.append(Strategy(entry.accelerator.name, group, rate))
    return found


def _by_type(found: Iterable[Strategy]) -> dict[str, list[Strategy]]:
    types: dict[str, list[Strategy]] = {}
    for strategy in found:
        types.setdefault(strategy.accelerator, []).append(strategy)
    return types


def _counts(problem: Problem) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for pool in problem.inventory.pools:
        found.setdefault(pool.accelerator.name, []).append(pool.count)
    return found


def _ratio(prefill: Strategy, decode: Strategy, counts: dict[str, list[int]], rate: float) -> Ratio | None:
    """N_P = ceil(QPS / T_p), then the least Y with Y·T_d >= min(QPS, N_P·T_p); all accelerators without a rate."""
    most_p = sum(count // prefill.size for count in counts[prefill.accelerator])
    most_d = sum(count // decode.size for count in counts[decode.accelerator])
    if prefill.accelerator != decode.accelerator:
        want = rate or min(most_p * prefill.rate, most_d * decode.rate)
        prefills = min(most_p, max(1, ceil(want / prefill.rate - 1e-9)))
        decodes = min(most_d, max(1, ceil(min(want, prefills * prefill.rate) / decode.rate - 1e-9)))
        return Ratio(prefill, decode, prefills, decodes) if most_p and most_d else None
    total = sum(counts[prefill.accelerator])
    ways = []
    for prefills in range(1, total // prefill.size + 1):
        left = floor((total - prefills * prefill.size) / decode.size)
        if left < 1:
            break
        want = min(prefills * prefill.rate, rate or prefills * prefill.rate)
        ways.append(Ratio(prefill, decode, prefills, min(left, max(1, ceil(want / decode.rate - 1e-9)))))
    if rate and (enough := [way for way in ways if way.rate >= rate]):
        return min(enough, key=lambda way: way.accelerators)
    return max(ways, key=lambda way: (round(way.rate, 6), -way.accelerators), default=None)


def _placed(search: Search, strategy: Strategy, count: int, beside: Ratio | None = None) -> list[Group]:
    """Groups on the pools of the strategy's type; after the prefill instances where both phases share the type."""
    pools = search.problem.inventory.pools
    left = {pool: entry.count for pool, entry in enumerate(pools) if entry.accelerator.name == strategy.accelerator}
    if beside is not None and beside.prefill.accelerator == strategy.accelerator:
        for group in _placed(search, beside.prefill, beside.prefills):
            for pool, used in group.uses.items():
                left[pool] -= used
    groups: list[Group] = []
    for _ in range(count):
        pool = max(left, key=lambda one: left[one])
        if left[pool] < strategy.size:
            break
        left[pool] -= strategy.size
        parts = tuple(Part(pool, part.layers) for part in strategy.group.parts)
        groups.append(replace(strategy.group, parts=parts))
    return groups


ROUNDS = 3
_DAMPING = 0.5  # share of the new routes in the mixture with the old
_UNSEEN = 0.95  # worth of a route that no request took


def orchestrated(search: Search, groups: Sequence[Group]) -> Iterator[ScoredPlan]:
    """The groups under routes: the linear programme and the simulator in turn, a few damped rounds.

    Source: ThunderServe 3.3. As D depends on the load, what a run shows of a route is its worth in the next round.
    """
    estimate = search.estimator.estimate(groups, local=False)
    plan = _along(search, groups, routes_of(estimate))
    if plan is None:
        return
    goodput = search.evaluator.goodput(plan, estimate.goodput or 0.3 * estimate.most)
    yield plan, goodput
    for _ in range(ROUNDS - 1):
        if search.over() or goodput <= 0.0:
            return
        worth = _worth(search, search.evaluator.result(Trial(plan, goodput)), estimate)
        better = search.estimator.estimate(groups, local=False, worth=worth)
        mixed = _mixed(plan.routes, routes_of(better))
        following = _along(search, groups, mixed)
        if following is None or following.routes == plan.routes:
            return
        plan = following
        goodput = search.evaluator.goodput(plan, goodput)
        yield plan, goodput


def _along(search: Search, groups: Sequence[Group], routes: tuple[Route, ...]) -> Plan | None:
    if not routes:
        return None
    plan = Plan(tuple(groups), routes)
    return replace(plan, policies=plan.routed(search.problem))


def _worth(search: Search, result: SimResult, estimate: Estimate) -> NDArray[np.float64]:
    """D, the share of each pair's requests within the SLO in a run, shape [p + 1, d]."""
    out = result.outcomes
    met = out.met(search.problem.slo)
    worth = np.full((len(estimate.prefill) + 1, len(estimate.decode)), _UNSEEN)
    for i, prefill in enumerate(estimate.prefill):
        for j, decode in enumerate(estimate.decode):
            went = (out.prefill_instance == prefill) & (out.decode_instance == decode)
            if went.any():
                worth[i, j] = max(0.01, float(met[went].mean()))
    return worth


def _mixed(old: tuple[Route, ...], new: tuple[Route, ...]) -> tuple[Route, ...]:
    shares: dict[tuple[int | None, int], float] = {}
    for routes, part in ((old, 1.0 - _DAMPING), (new, _DAMPING)):
        for route in routes:
            key = (route.prefill, route.decode)
            shares[key] = shares.get(key, 0.0) + part * route.share
    return tuple(Route(prefill, decode, share) for (prefill, decode), share in shares.items())


STEPS, NEIGHBOURS, MEMORY = 100, 10, 5  # N_step, N_neigh, N_mem
_TRIES = 4  # draws until a neighbour is valid
_FINALISTS = 2

Cell = tuple[Role, tuple[tuple[int, int], ...]]  # a group before its layout: phase, and accelerators by pool
Cells = tuple[Cell, ...]


def tabu(search: Search) -> Iterator[ScoredPlan]:
    """A tabu search over the construction and the phases of groups; the best few deployments are orchestrated.

    Source: ThunderServe Algorithms 1 and 2 and section 3.3. Deployments need both phases, are tabu by their canonical
    form, and are evaluated once, by the estimate.
    """
    walk = _Walk(search)
    for groups in walk.finalists():
        yield from orchestrated(search, groups)
        if search.over():
            return


class _Walk:
    def __init__(self, search: Search) -> None:
        self._search = search
        self._rng = search.rng()
        self._layouts = search.estimator.layouts
        self._worth: dict[object, tuple[float, tuple[Group, ...]]] = {}
        self._alike = search.problem.inventory.alike

    def finalists(self) -> list[tuple[Group, ...]]:
        start = self._start()
        if start is None:
            return []
        here, tabu_list = start, deque([self._key(start)], MEMORY)
        self._value(start)
        for step in range(STEPS):
            if self._search.over():
                break
            near = {self._key(cells): cells for cells in self._neighbours(here)}
            fresh = [cells for key, cells in near.items() if key not in tabu_list]
            if not fresh:
                continue
            here = max(fresh, key=self._value)
            tabu_list.append(self._key(here))
            if step % 10 == 0:
                self._search.report(f"tabu: step {step} of {STEPS}, {len(self._worth)} deployments", None)
        best = sorted(self._worth.values(), key=lambda one: -one[0])
        return [groups for worth, groups in best[:_FINALISTS] if worth > 0.0]

    def _start(self) -> Cells | None:
        """Clusters of well-connected accelerators, merged until each holds the model; random phases, both present."""
        clusters = _clusters(self._search)
        kept: list[Counter[int]] = []
        loose: Counter[int] = Counter()
        for uses in clusters:
            if self._holds(uses):
                kept.append(uses)
            else:
                loose += uses
                if self._holds(loose):
                    kept.append(loose)
                    loose = Counter()
        if len(kept) == 1:
            halves = self._halved(kept[0], 0.5)
            kept = list(halves) if halves is not None else kept
        if len(kept) < 2:
            return None
        roles = [Role.PREFILL, Role.DECODE, *self._rng.choices(list(Role), k=len(kept) - 2)]
        self._rng.shuffle(roles)
        return tuple((role, tuple(sorted(uses.items()))) for role, uses in zip(roles, kept, strict=True))

    def _neighbours(self, here: Cells) -> Iterator[Cells]:
        for _ in range(NEIGHBOURS):
            for _ in range(_TRIES):
                move = self._rng.choice((self._flip, self._split, self._merge, self._move))
                found = move(list(here))
                if found is not None and len({role for role, _ in found}) == 2:
                    yield tuple(sorted(found, key=repr))
                    break

    def _flip(self, cells: list[Cell]) -> list[Cell] | None:
        at = self._rng.randrange(len(cells))
        role, uses = cells[at]
        cells[at] = (role.other, uses)
        return cells

    def _split(self, cells: list[Cell]) -> list[Cell] | None:
        """floor(g_t * r) of each type go to the first half."""
        _, uses = cells.pop(self._rng.randrange(len(cells)))
        halves = self._halved(Counter(dict(uses)), self._rng.random())
        return None if halves is None else [*cells, *((self._phase(), tuple(sorted(half.items()))) for half in halves)]

    def _merge(self, cells: list[Cell]) -> list[Cell] | None:
        if len(cells) < 3:
            return None
        (_, one), (_, other) = (cells.pop(self._rng.randrange(len(cells))) for _ in range(2))
        merged = Counter(dict(one)) + Counter(dict(other))
        return [*cells, (self._phase(), tuple(sorted(merged.items())))] if self._holds(merged) else None

    def _move(self, cells: list[Cell]) -> list[Cell] | None:
        if len(cells) < 2:
            return None
        source, target = self._rng.sample(range(len(cells)), 2)
        given, taken = Counter(dict(cells[source][1])), Counter(dict(cells[target][1]))
        pool = self._rng.choice(sorted(given))
        count = self._rng.randint(1, given[pool])
        given -= Counter({pool: count})
        taken += Counter({pool: count})
        if not self._holds(taken) or (given and not self._holds(given)):
            return None
        moved = [cell for at, cell in enumerate(cells) if at not in (source, target)]
        moved.append((cells[target][0], tuple(sorted(taken.items()))))
        return [*moved, (cells[source][0], tuple(sorted(given.items())))] if given else moved

    def _halved(self, uses: Counter[int], ratio: float) -> tuple[Counter[int], Counter[int]] | None:
        first = +Counter({pool: int(count * ratio) for pool, count in uses.items()})
        second = uses - first
        return (first, second) if first and second and self._holds(first) and self._holds(second) else None

    def _phase(self) -> Role:
        return self._rng.choice(list(Role))

    def _holds(self, uses: Counter[int]) -> bool:
        """The paper's early check: the memory holds a copy of the model."""
        problem = self._search.problem
        room = sum(problem.inventory.pools[pool].accelerator.memory_bytes * count for pool, count in uses.items())
        if problem.one_node and len({problem.inventory.pools[pool].node for pool in uses}) > 1:
            return False
        return room >= problem.models.geometry.weight_bytes(2.0) and bool(self._layouts.all(uses, Role.DECODE))

    def _key(self, cells: Cells) -> object:
        return tuple(
            sorted((role.value, tuple(sorted((self._alike[pool], n) for pool, n in uses))) for role, uses in cells)
        )

    def _value(self, cells: Cells) -> float:
        """f of Algorithm 1: the estimate of the best layouts of all groups."""
        layouts = (self._layouts.best(dict(uses), role) for role, uses in cells)
        groups = tuple(group for group in layouts if group is not None)
        key = canonical(groups, self._alike)
        if key not in self._worth:
            self._worth[key] = (self._search.estimator.estimate(groups, local=False).goodput, groups)
        return self._worth[key][0]


def _clusters(search: Search) -> list[Counter[int]]:
    """Accelerators by hierarchical clustering of their bandwidths, cut between nodes."""
    inventory = search.problem.inventory
    devices = [pool for pool, entry in enumerate(inventory.pools) for _ in range(entry.count)]
    if len(devices) == 1:
        return [Counter(devices)]
    nodes = [inventory.pools[pool].node for pool in devices]
    rates = np.array([[rate_of(inventory.network.path(one, other)) for other in nodes] for one in nodes])
    apart = 1.0 / rates
    np.fill_diagonal(apart, 0.0)
    cut = max(1.0 / rate_of(link) for link in inventory.network.inside.values())
    labels: Sequence[int] = fcluster(linkage(squareform(apart, checks=False), "average"), cut * 1.001, "distance")
    found: dict[int, Counter[int]] = {}
    for label, pool in zip(labels, devices, strict=True):
        found.setdefault(int(label), Counter())[pool] += 1
    return list(found.values())
