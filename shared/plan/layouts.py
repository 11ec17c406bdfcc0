"""Layouts: the ways to divide the model over a set of accelerators.

Source: ThunderServe Algorithm 2, with all (TP, PP) whose product is the number of accelerators.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import floor

from shared.cost.geometry import kv_capacity_tokens
from shared.cost.kinds import EngineKind, Stage, even_layers
from shared.cost.network import rate_of
from shared.cost.step import Batch
from shared.domain.instance import Role
from shared.plan.group import Group, Part
from shared.plan.problem import Problem
from shared.plan.routes import EngineCost, EngineCosts

_TP = (1, 2, 4, 8, 16)
MAX_STAGES = 8
_BATCH = 16  # decodes of the step by which stages are compared


class Layouts:
    """The layouts of one problem: tensor-parallel degree, order of stages, layers of each."""

    def __init__(self, problem: Problem, costs: EngineCosts) -> None:
        self._problem = problem
        self._costs = costs
        self._known: dict[tuple[Role, tuple[tuple[int, int], ...]], tuple[Group, ...]] = {}
        self._layer_s: dict[tuple[str, int, Role, str], float] = {}
        self._room: dict[tuple[str, int, int, str], int] = {}
        self._alike = problem.inventory.alike

    def cost(self, group: Group) -> EngineCost:
        found = self._costs.cost_of(group.kind(self._problem.inventory, self._problem.dtype))
        assert found is not None
        return found

    def all(self, uses: Mapping[int, int], role: Role) -> tuple[Group, ...]:
        """The layouts that hold the model and the longest request; none where the memory is too small."""
        key = (role, tuple(sorted(uses.items())))
        if key not in self._known:
            precisions = ("", *self._problem.quantised) if role is Role.PREFILL else ("",)
            found = [
                group
                for degree in self._degrees(uses)
                for precision in precisions
                for group in self._with_degree(uses, degree, role, precision)
            ]
            self._known[key] = tuple(dict.fromkeys(found))
        return self._known[key]

    def best(self, uses: Mapping[int, int], role: Role) -> Group | None:
        """The best layout: for prefill by latency, for decode by throughput within the TPOT target."""
        return max(self.all(uses, role), key=self.worth, default=None)

    def worth(self, group: Group) -> float:
        """What is best for the group's role: a short time of prompts, or many decodes."""
        cost = self.cost(group)
        if group.role is Role.PREFILL:
            return -float(cost.prefill_s.mean())
        batch = cost.batch_within(self._problem.slo.tpot_s)
        return cost.lanes * batch / cost.decode_s(batch) if batch >= 1.0 else -cost.decode_s(1.0)

    def _degrees(self, uses: Mapping[int, int]) -> list[int]:
        """Degrees of tensor parallelism, which stays inside one node and type: it divides what each pool gives."""
        heads = self._problem.models.geometry.heads
        return [t for t in _TP if heads % t == 0 and all(count % t == 0 for count in uses.values())]

    def _with_degree(self, uses: Mapping[int, int], degree: int, role: Role, precision: str) -> list[Group]:
        pools = [pool for pool, count in sorted(uses.items()) for _ in range(count // degree)]
        if len(pools) > min(MAX_STAGES, self._problem.models.geometry.layers):
            return []
        ordered = self._ordered(pools)
        found = []
        for weights in self._weights(ordered, degree, role, precision):
            layers = self._layers(ordered, degree, weights, precision)
            if layers is None:
                continue
            group = Group(role, degree, tuple(map(Part, ordered, layers)), precision)
            if self._costs.cost_of(group.kind(self._problem.inventory, self._problem.dtype)) is not None:
                found.append(group)
        return found

    def _ordered(self, pools: Sequence[int]) -> tuple[int, ...]:
        if len(set(pools)) == 1:
            return tuple(pools)
        network, at = self._problem.inventory.network, self._problem.inventory.pools
        rates = tuple(tuple(rate_of(network.path(at[one].node, at[other].node)) for other in pools) for one in pools)
        return tuple(pools[position] for position in widest_path(rates))

    def _weights(self, pools: Sequence[int], degree: int, role: Role, precision: str) -> list[list[float]]:
        """Layers in proportion to speed; for decode also to memory, which admits more requests."""
        names = [self._problem.inventory.pools[pool].accelerator.name for pool in pools]
        if len(set(names)) == 1:
            return [[1.0] * len(pools)]
        speed = [1.0 / self._layer_time_s(name, degree, role, precision) for name in names]
        memory = [self._problem.models.device(name).memory_bytes for name in names]
        return [speed, memory] if role is Role.DECODE else [speed]

    def _layers(
        self, pools: Sequence[int], degree: int, weights: Sequence[float], precision: str
    ) -> tuple[int, ...] | None:
        total = self._problem.models.geometry.layers
        names = [self._problem.inventory.pools[pool].accelerator.name for pool in pools]
        rooms = [self._max_layers(name, degree, len(pools), precision) for name in names]
        if sum(rooms) < total or min(rooms) < 1:
            return None
        if len(set(weights)) == 1 and len(set(rooms)) == 1:
            return even_layers(total, len(pools))
        return proportional(total, weights, rooms)

    def _layer_time_s(self, name: str, degree: int, role: Role, precision: str) -> float:
        key = (name, degree, role, precision)
        if key not in self._layer_s:
            problem = self._problem
            stages = (Stage(name, problem.models.geometry.layers),)
            kind = EngineKind(stages, degree, precision or problem.dtype)
            times, context = problem.models.times(kind), int(problem.sample.context)
            self._layer_s[key] = (
                times.step_time_s(Batch(((problem.limits.batched_tokens, 0),)))
                if role is Role.PREFILL
                else times.decode_time_s(_BATCH, _BATCH * context)
            )
        return self._layer_s[key]

    def _max_layers(self, name: str, degree: int, stages: int, precision: str) -> int:
        """Layers that a stage's memory holds beside the KV of the longest request in each lane."""
        key = (name, degree, stages, precision)
        if key not in self._room:
            problem = self._problem
            device, geometry, need = problem.models.device(name), problem.models.geometry, problem.longest * stages

            dtype, kept = (precision, problem.dtype) if precision else (problem.dtype, None)

            def fits(layers: int) -> bool:
                part = geometry.part(layers)
                return kv_capacity_tokens(device, part, tensor_parallel=degree, dtype=dtype, kv_dtype=kept) >= need

            self._room[key] = next((n for n in range(geometry.layers, 0, -1) if fits(n)), 0)
        return self._room[key]


def proportional(total: int, weights: Sequence[float], rooms: Sequence[int]) -> tuple[int, ...]:
    """`total` divided into whole numbers in proportion to the weights, each from 1 to its room; the rooms suffice."""
    counts = [1] * len(weights)
    left = total - len(weights)
    while left:
        open_ = [at for at in range(len(weights)) if counts[at] < rooms[at]]
        whole = sum(weights[at] for at in open_)
        wants = {at: min(rooms[at] - counts[at], floor(left * weights[at] / whole)) for at in open_}
        if not any(wants.values()):
            # Less than one each: the stage that is furthest below its share.
            neediest = max(open_, key=lambda at: weights[at] / (counts[at] + 1))
            wants = {neediest: 1}
        for at, more in wants.items():
            counts[at] += more
            left -= more
    return tuple(counts)


@lru_cache(maxsize=4096)
def widest_path(rates: tuple[tuple[float, ...], ...]) -> tuple[int, ...]:
    """The order of stages whose slowest hop is fastest, and of several such orders the one with the fastest hops.

    rates: bytes a second from one stage to the other, shape [n, n]. Source: ThunderServe Algorithm 2, a bitmask dynamic
    programme over the stages in the path so far and the last of them.
    """
    count = len(rates)
    best: dict[tuple[int, int], tuple[float, float, tuple[int, ...]]] = {
        (1 << at, at): (float("inf"), 0.0, (at,)) for at in range(count)
    }
    for mask in range(1, 1 << count):
        for last in range(count):
            so_far = best.get((mask, last))
            if so_far is None:
                continue
            slowest, total, path = so_far
            for after in range(count):
                if mask & 1 << after:
                    continue
                rate = rates[last][after]
                found = (min(slowest, rate), total + rate, (*path, after))
                key = (mask | 1 << after, after)
                if key not in best or found[:2] > best[key][:2]:
                    best[key] = found
    full = (1 << count) - 1
    return max((best[full, last] for last in range(count)), key=lambda one: one[:2])[2]
