"""A running cluster as a problem of the planner: each instance on a place of its own, as fast as it was measured to be.

What an inventory's engines get from the cost model these get from what their instances have learned while serving:
step times, links, memory. So roles and routes can be thought about for any engine, on accelerators that nobody listed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from math import exp, isfinite, log, sqrt

import msgspec
import numpy as np
from scipy.special import ndtri

from shared.cost.catalogue import Accelerator, Links, precision_of
from shared.cost.geometry import ModelGeometry
from shared.cost.kinds import EngineKind, Workshop
from shared.cost.library import Library
from shared.cost.network import Network
from shared.cost.transfer import Link
from shared.domain.demand import Demand
from shared.domain.instance import InstanceInfo, InstanceView
from shared.domain.job import Slo
from shared.domain.kv import Codec
from shared.errors import InvalidRequest
from shared.plan.costs import Engine, EngineCost
from shared.plan.estimate import Estimate, Estimator
from shared.plan.group import Group, Part
from shared.plan.inventory import Inventory, Pool
from shared.plan.problem import Problem, Sample
from shared.plan.routes import Route
from shared.policy.role_harm import Sort, sorted_out
from shared.sim.spec import EngineLimits
from shared.sim.workload import Lengths, Times, Workload

REQUESTS = 480  # that stand for a demand
_GOLDEN = (sqrt(5.0) - 1.0) / 2.0  # steps of it fall evenly: lengths of prompts and answers are paired without pattern
_UNKNOWN = Link(1.25e9, 1e-3, 1.0)  # where no KV has gone yet: 10 Gb/s
_LINK_CLASS = 0.25  # of a logarithm: links that differ by less are alike


@dataclass(frozen=True, slots=True)
class Expected:
    """What is expected of roles under a demand. goodput: the highest rate at which enough requests meet the SLO.

    attainment, ttft_s, tpot_s: at `rate`, the demand's, requests a second; means, None where they grow without end.
    """

    rate: float
    goodput: float
    attainment: float
    ttft_s: float | None
    tpot_s: float | None

    @classmethod
    def of(cls, estimate: Estimate, rate: float) -> "Expected":
        """Of an estimate at that rate."""
        ttft_s, tpot_s = (one if isfinite(one) else None for one in (estimate.ttft_s, estimate.tpot_s))
        return cls(rate, estimate.goodput, estimate.attainment, ttft_s, tpot_s)


@dataclass(frozen=True)
class Fleet:
    """Instances that may get work, under a demand. local: whether those that decode may compute prompts, too.

    codec: in which KV travels between them. target: SLO attainment at which a rate counts as served.
    """

    views: tuple[InstanceView, ...]
    demand: Demand
    library: Library = field(compare=False)
    local: bool = True
    codec: Codec = Codec.RAW
    target: float = 0.9

    def __post_init__(self) -> None:
        if not self.views:
            raise InvalidRequest("no instance is ready")

    @cached_property
    def estimator(self) -> Estimator:
        """Of these instances under this demand."""
        return Estimator(self.problem, _Measured(self))

    @cached_property
    def problem(self) -> Problem:
        """As the planner's methods take it."""
        infos = [view.info for view in self.views]
        longest = min(min(one.max_model_len, self.lane_tokens(at)) for at, one in enumerate(infos))
        limits = EngineLimits(batched_tokens=max(one.chunk_size for one in infos))
        return Problem(
            self._inventory,
            Workshop(self.library, _geometry(infos[0])),
            workload_of(self.demand, longest),
            slo=Slo(ttft_s=self.demand.ttft_s, tpot_s=self.demand.tpot_s),
            rate=self.demand.rate,
            target=self.target,
            limits=limits,
            codec=self.codec,
            longest_tokens=1,
            dtype=precision_of(infos[0].dtype) if infos[0].dtype else None,
        )

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The instances, in their order."""
        layers = self.views[0].info.compatibility.geometry.layers
        return tuple(Group(view.role, 1, (Part(at, layers),)) for at, view in enumerate(self.views))

    @cached_property
    def sorts(self) -> tuple[list[Sort], dict[str, int]]:
        """What instances are alike, and which one each is like."""
        return sorted_out(self.views)

    def lane_tokens(self, at: int) -> int:
        """KV of a batch in flight of that instance."""
        info = self.views[at].info
        return max(1, info.total_blocks * info.block_size // info.pipeline_parallel)

    def estimate(self, groups: Sequence[Group] | None = None, routes: Sequence[Route] = ()) -> Estimate:
        """At the demand's rate, with roles as they are or those of `groups`, along `routes` or else the best ones."""
        groups = groups or self.groups
        if routes:
            return self.estimator.along(groups, routes, rate=self.demand.rate)
        return self.estimator.of(groups, local=self.local, rate=self.demand.rate)

    def expected(self, groups: Sequence[Group] | None = None, routes: Sequence[Route] = ()) -> Expected:
        """The same in five numbers."""
        return Expected.of(self.estimate(groups, routes), self.demand.rate)

    @cached_property
    def _inventory(self) -> Inventory:
        pools = tuple(
            Pool(view.instance_id, _accelerator(view.info, self.sorts[1][view.instance_id]), 1, 0.0)
            for view in self.views
        )
        inside = {view.instance_id: _UNKNOWN for view in self.views}  # nothing goes from an instance to itself
        between = {}
        for one, other in combinations([view.info for view in self.views], 2):
            between[min(one.instance_id, other.instance_id), max(one.instance_id, other.instance_id)] = _link(
                one, other
            )
        return Inventory(pools, Network(inside, between))


class _Measured:
    """Engine costs by what instances have measured."""

    def __init__(self, fleet: Fleet) -> None:
        self._known: dict[str, EngineCost] = {}
        self._fleet = fleet
        self._sample = Sample.of(fleet.problem.workload)
        info = fleet.views[0].info
        self.kv_bytes = info.kv_bytes_per_token
        demand = fleet.demand
        self._held = 1.0 - min(1.0, demand.fresh_tokens / demand.prompt_tokens) if demand.prompt_tokens > 0 else 0.0
        self._engines = {
            pool.accelerator.name: self._engine(at) for at, pool in enumerate(fleet.problem.inventory.pools)
        }

    def of(self, kind: EngineKind) -> EngineCost | None:
        """See `EngineCosts`."""
        name = kind.stages[0].accelerator
        if name not in self._known:
            self._known[name] = self._engines[name].cost(self._sample, self._held)
        return self._known[name]

    def _engine(self, at: int) -> Engine:
        view = self._fleet.views[at]
        sorts, numbers = self._fleet.sorts
        sort, lanes = sorts[numbers[view.instance_id]], view.info.pipeline_parallel

        def decode_s(decodes: int, context: int) -> float:
            return sort.rates.decode_s(lanes * decodes, lanes * context)

        seats = max(1, sort.seats // lanes)
        return Engine(sort.rates.prefill_s, decode_s, lanes, self._fleet.lane_tokens(at), seats, sort.chunk)


def workload_of(demand: Demand, longest: int) -> Workload:
    """Requests that are spread as the demand's are, all at once; those of more than `longest` tokens cut to it."""
    ranks: Times = (np.arange(REQUESTS) + 0.5) / REQUESTS
    prompts = _lengths(demand.prompt_tokens, demand.prompt_spread, ranks)
    mixed: Times = np.mod(np.arange(REQUESTS) * _GOLDEN + 0.5 / REQUESTS, 1.0)
    outputs = _lengths(demand.output_tokens, demand.output_spread, mixed)
    outputs = np.minimum(outputs, max(1, longest - 1))
    prompts = np.minimum(prompts, np.maximum(1, longest - outputs))
    return Workload("the demand", np.zeros(REQUESTS), prompts, outputs)


def changed(demand: Demand, rate: float = 1.0, prompt: float = 1.0, output: float = 1.0) -> Demand:
    """The demand with its rate and lengths so many times as much. Raises InvalidRequest for factors of 0 or less."""
    if min(rate, prompt, output) <= 0.0:
        raise InvalidRequest("factors of rate and lengths must be positive")
    return msgspec.structs.replace(
        demand,
        rate=demand.rate * rate,
        prompt_tokens=demand.prompt_tokens * prompt,
        fresh_tokens=demand.fresh_tokens * prompt,
        fresh_squares=demand.fresh_squares * prompt * prompt,
        output_tokens=demand.output_tokens * output,
    )


def _lengths(mean: float, spread: float, ranks: Times) -> Lengths:
    """Log-normal lengths with that mean, by their ranks in 0..1."""
    ranks = np.clip(ranks, 1e-3, 1.0 - 1e-3)
    drawn = np.exp(spread * ndtri(ranks))
    found: Lengths = np.maximum(1, np.rint(mean * drawn / drawn.mean())).astype(np.int64)
    return found


def _link(one: InstanceInfo, other: InstanceInfo) -> Link:
    """The slower of both directions, by what has come that way; in classes, so that alike pairs are alike."""
    known = [
        (rate.from_s(source.instance_id), rate.latency_s)
        for rate, source in ((one.rates.link, other), (other.rates.link, one))
        if rate is not None
    ]
    if not known:
        return _UNKNOWN
    bytes_s = min(rate for rate, _ in known)
    return Link(exp(round(log(bytes_s) / _LINK_CLASS) * _LINK_CLASS), round(max(wait for _, wait in known), 4), 1.0)


def _accelerator(info: InstanceInfo, sort: int) -> Accelerator:
    """A name for what only its measured rates say something of."""
    name = f"{info.accelerator} {info.tensor_parallel}x{info.pipeline_parallel} #{sort}"
    return Accelerator(name, "", 0.0, 0.0, 0, {}, "measured", Links(1.0, 1.0, 1.0), 0.0, "measured while serving")


def _geometry(info: InstanceInfo) -> ModelGeometry:
    """What is known of the model without its file: the shape of its KV."""
    kv = info.compatibility.geometry
    width = kv.kv_heads * kv.head_dim
    return ModelGeometry(
        info.model, "measured", kv.layers, width, kv.kv_heads, kv.kv_heads, kv.head_dim, width, 1, info.max_model_len
    )
