"""ZTE's joint optimisation: a parallel strategy for either phase, then how many instances of each.

Source: ZTE III.C (P): equation 1 maximises prefill throughput per accelerator under TTFT and memory, equation 4 the
throughput of a decode instance under TPOT and memory. F: what links them to demand (prefill meets the rate, decode
meets prefill, ties by throughput per accelerator), and that the decode instance leaves accelerators for a prefill
instance. Data and expert parallelism, which the paper also varies, are not among the layouts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil, floor

from shared.domain.instance import Role
from shared.plan.group import Group, Part
from shared.plan.methods.simple import SPLIT
from shared.plan.plan import Plan
from shared.plan.problem import Problem
from shared.plan.search import Found, Search


@dataclass(frozen=True, slots=True)
class Strategy:
    """An instance of one phase on accelerators of one type. rate: requests a second within its target."""

    accelerator: str
    group: Group
    rate: float

    @property
    def size(self) -> int:
        """Accelerators of an instance."""
        return self.group.accelerators

    @property
    def each(self) -> float:
        """Requests a second and accelerator."""
        return self.rate / self.size


@dataclass(frozen=True, slots=True)
class Ratio:
    """So many instances of either phase, and the requests a second that they serve together."""

    prefill: Strategy
    decode: Strategy
    prefills: int
    decodes: int

    @property
    def rate(self) -> float:
        """Of the phase that does less."""
        return min(self.prefills * self.prefill.rate, self.decodes * self.decode.rate)

    @property
    def accelerators(self) -> int:
        """Of both phases."""
        return self.prefills * self.prefill.size + self.decodes * self.decode.size

    @property
    def each(self) -> tuple[float, float]:
        """Throughput per accelerator, which decides ties: of both phases together, then of either by itself."""
        return self.rate / self.accelerators, self.prefill.each + self.decode.each


def joint(search: Search) -> Iterator[Found]:
    """One plan: the two types and strategies that serve the rate, or the most, with the most for each accelerator."""
    groups = joint_groups(search)
    if groups:
        yield search.judged(Plan(groups, policies=SPLIT), local=False)


def joint_groups(search: Search, per_accelerator: bool = False) -> tuple[Group, ...]:
    """Its groups; none where no ratio is possible. per_accelerator: see `recommended`."""
    ratio = recommended(search, per_accelerator)
    if ratio is None:
        return ()
    groups = (*_placed(search, ratio.prefill, ratio.prefills), *_placed(search, ratio.decode, ratio.decodes, ratio))
    return groups if {group.role for group in groups} == set(Role) else ()


def recommended(search: Search, per_accelerator: bool = False) -> Ratio | None:
    """The ratio for the rate that is asked for, else for the highest that can be served; None where none can.

    per_accelerator: decode instances, too, are chosen by throughput per accelerator instead of per instance (ours, a
    start of `best`).
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
    """All that keep the phase's target, on one accelerator type each."""
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
    """N_P = ceil(QPS / T_p), then the least Y with Y·T_d >= min(QPS, N_P·T_p); all there is without a rate."""
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
    """On the pools of its type in turn; after the prefill instances where both phases share the type."""
    pools = search.problem.inventory.pools
    left = {pool: entry.count for pool, entry in enumerate(pools) if entry.accelerator.name == strategy.accelerator}
    if beside is not None and beside.prefill.accelerator == strategy.accelerator:
        for group in _placed(search, beside.prefill, beside.prefills):
            for pool, used in group.uses.items():
                left[pool] -= used
    made: list[Group] = []
    for _ in range(count):
        pool = max(left, key=lambda one: left[one])
        if left[pool] < strategy.size:
            break
        left[pool] -= strategy.size
        parts = tuple(Part(pool, part.layers) for part in strategy.group.parts)
        made.append(Group(strategy.group.role, strategy.group.tensor_parallel, parts))
    return made
