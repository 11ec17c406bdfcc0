"""A running cluster as a problem of the planner, and whether it should have other roles or routes.

Each instance is a place of its own, with the step times, links and memory that it learned while serving. So roles and
routes can be planned for any engine, also on accelerators that are not in the catalogue. No model is loaded again.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import nlargest
from itertools import combinations
from math import exp, isfinite, log, sqrt

import msgspec
import numpy as np
from scipy.special import ndtri

from shared.cost.catalogue import Accelerator, Links, precision_of
from shared.cost.geometry import ModelGeometry
from shared.cost.kinds import EngineKind, EngineModels
from shared.cost.library import Library
from shared.cost.network import Link, Network, pair_of
from shared.domain.demand import Demand
from shared.domain.instance import InstanceInfo, InstanceView, Role
from shared.domain.job import Slo
from shared.domain.kv import Codec
from shared.errors import InvalidRequest
from shared.plan.estimate import Estimate, Estimator
from shared.plan.group import Group, Part
from shared.plan.inventory import Inventory, Pool
from shared.plan.plan import Plan, canonical, routes_of
from shared.plan.problem import Problem, Sample
from shared.plan.routes import Engine, EngineCost, Route
from shared.policy.outlook import InstanceClass, classify
from shared.policy.papers.thunderserve import PlanRoute
from shared.sim.spec import EngineLimits
from shared.sim.workload import Lengths, Times, Workload

REQUESTS = 480  # that represent a demand
_GOLDEN = (sqrt(5.0) - 1.0) / 2.0  # multiples of it are spread evenly: prompt and output lengths are paired at random
_UNKNOWN = Link(1.25e9, 1e-3, 1.0)  # where no KV has been sent yet: 10 Gb/s
_LINK_CLASS = 0.25  # difference of logarithms below which links count as equal
MAX_ESTIMATED = 4  # deployments within reach that are estimated in full: those with the highest rates
STRIDES = (1, 2, 4, 8)  # flips of equal groups in one step of the climb, which goes on while it gains
MIN_GAIN = 1.1  # factor of goodput below which a change is not worth a drain, and is within the estimate's error
SPARE = 1.1  # factor of the demand's rate at which goodput needs no change


@dataclass(frozen=True, slots=True)
class Expected:
    """What is expected of roles under a demand. goodput: the highest rate at which enough requests meet the SLO.

    attainment, mean ttft_s and tpot_s: at `rate`, the demand's, requests a second; None where they grow without end.
    """

    rate: float
    goodput: float
    attainment: float
    ttft_s: float | None
    tpot_s: float | None

    @classmethod
    def from_estimate(cls, estimate: Estimate, rate: float) -> "Expected":
        ttft_s, tpot_s = (one if isfinite(one) else None for one in (estimate.ttft_s, estimate.tpot_s))
        return cls(rate, estimate.goodput, estimate.attainment, ttft_s, tpot_s)


@dataclass(frozen=True)
class Fleet:
    """Instances that may get work, under a demand. local: whether decode instances may compute prompts, too.

    codec: of KV transfers. target: SLO attainment at which a rate counts as served.
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
        return Estimator(self.problem, _MeasuredCosts(self))

    @cached_property
    def problem(self) -> Problem:
        infos = [view.info for view in self.views]
        longest = min(min(one.max_model_len, self.lane_tokens(at)) for at, one in enumerate(infos))
        limits = EngineLimits(batched_tokens=max(one.chunk_size for one in infos))
        return Problem(
            self._inventory,
            EngineModels(self.library, _geometry(infos[0])),
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
        layers = self.views[0].info.compatibility.geometry.layers
        return tuple(Group(view.role, 1, (Part(at, layers),)) for at, view in enumerate(self.views))

    @cached_property
    def classes(self) -> tuple[list[InstanceClass], dict[str, int]]:
        """Classes of instances that are about alike, and the number of each instance's class."""
        return classify(self.views)

    def lane_tokens(self, at: int) -> int:
        """KV tokens of each batch in flight of an instance."""
        info = self.views[at].info
        return max(1, info.total_blocks * info.block_size // info.pipeline_parallel)

    def estimate(self, groups: Sequence[Group] | None = None, routes: Sequence[Route] = ()) -> Estimate:
        """The estimate at the demand's rate, with the present roles or those of `groups`, along `routes` if given."""
        groups = groups or self.groups
        if routes:
            return self.estimator.estimate_along(groups, routes, rate=self.demand.rate)
        return self.estimator.estimate(groups, local=self.local, rate=self.demand.rate)

    def expected(self, groups: Sequence[Group] | None = None, routes: Sequence[Route] = ()) -> Expected:
        return Expected.from_estimate(self.estimate(groups, routes), self.demand.rate)

    @cached_property
    def _inventory(self) -> Inventory:
        pools = tuple(
            Pool(view.instance_id, _accelerator(view.info, self.classes[1][view.instance_id]), 1, 0.0)
            for view in self.views
        )
        inside = {view.instance_id: _UNKNOWN for view in self.views}  # no KV goes from an instance to itself
        pairs = combinations([view.info for view in self.views], 2)
        between = {pair_of(one.instance_id, other.instance_id): _link(one, other) for one, other in pairs}
        return Inventory(pools, Network(inside, between))


class _MeasuredCosts:
    """Engine costs from what instances have measured."""

    def __init__(self, fleet: Fleet) -> None:
        self._known: dict[str, EngineCost] = {}
        self._fleet = fleet
        info = fleet.views[0].info
        self.kv_bytes = info.kv_bytes_per_token
        demand = fleet.demand
        held = 1.0 - min(1.0, demand.fresh_tokens / demand.prompt_tokens) if demand.prompt_tokens > 0 else 0.0
        self._sample = Sample.from_workload(fleet.problem.workload).with_held_share(held)
        self._engines = {
            pool.accelerator.name: self._engine(at) for at, pool in enumerate(fleet.problem.inventory.pools)
        }

    def cost_of(self, kind: EngineKind) -> EngineCost | None:
        name = kind.stages[0].accelerator
        if name not in self._known:
            self._known[name] = self._engines[name].cost(self._sample)
        return self._known[name]

    def _engine(self, at: int) -> Engine:
        view = self._fleet.views[at]
        classes, class_of = self._fleet.classes
        kind, lanes = classes[class_of[view.instance_id]], view.info.pipeline_parallel

        def decode_s(decodes: int, context: int) -> float:
            return kind.rates.token_s(lanes * decodes, lanes * context)

        seats = max(1, kind.seats // lanes)
        return Engine(kind.rates.prefill_s, decode_s, lanes, self._fleet.lane_tokens(at), seats, kind.chunk)


def workload_of(demand: Demand, longest: int) -> Workload:
    """Requests with the demand's distribution of lengths, all at time 0, cut to `longest` tokens."""
    ranks: Times = (np.arange(REQUESTS) + 0.5) / REQUESTS
    prompts = _lengths(demand.prompt_tokens, demand.prompt_spread, ranks)
    mixed: Times = np.mod(np.arange(REQUESTS) * _GOLDEN + 0.5 / REQUESTS, 1.0)
    outputs = _lengths(demand.output_tokens, demand.output_spread, mixed)
    outputs = np.minimum(outputs, max(1, longest - 1))
    prompts = np.minimum(prompts, np.maximum(1, longest - outputs))
    return Workload("the demand", np.zeros(REQUESTS), prompts, outputs)


def scaled(demand: Demand, rate: float = 1.0, prompt: float = 1.0, output: float = 1.0) -> Demand:
    """The demand with its rate and lengths multiplied. Raises InvalidRequest for factors of 0 or less."""
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
    """The slower direction of both, as measured, rounded to classes so that similar pairs are equal."""
    known = [
        (rate.from_s(source.instance_id), rate.latency_s)
        for rate, source in ((one.rates.link, other), (other.rates.link, one))
        if rate is not None
    ]
    if not known:
        return _UNKNOWN
    bytes_s = min(rate for rate, _ in known)
    return Link(exp(round(log(bytes_s) / _LINK_CLASS) * _LINK_CLASS), round(max(wait for _, wait in known), 4), 1.0)


def _accelerator(info: InstanceInfo, number: int) -> Accelerator:
    """An accelerator of which only measured rates are known: a name."""
    name = f"{info.accelerator} {info.tensor_parallel}x{info.pipeline_parallel} #{number}"
    return Accelerator(
        name=name,
        vendor="",
        memory_bytes=0.0,
        bandwidth_bytes_s=0.0,
        compute_units=0,
        matrix_flops={},
        mode="measured",
        links=Links(1.0, 1.0, 1.0),
        price_usd_hour=0.0,
        source="measured while serving",
    )


def _geometry(info: InstanceInfo) -> ModelGeometry:
    """What is known about the model without its file: the shape of its KV."""
    kv = info.compatibility.geometry
    width = kv.kv_heads * kv.head_dim
    return ModelGeometry(
        name=info.model,
        architecture="measured",
        layers=kv.layers,
        hidden=width,
        heads=kv.kv_heads,
        kv_heads=kv.kv_heads,
        head_dim=kv.head_dim,
        intermediate=width,
        vocab=1,
        max_position=info.max_model_len,
    )


@dataclass(frozen=True, slots=True)
class Rescheduling:
    """New roles and routes of groups that stay. flips: positions of groups with another role."""

    plan: Plan
    flips: tuple[int, ...]
    before: Estimate
    after: Estimate

    @property
    def changes(self) -> bool:
        return bool(self.flips)


def reschedule(estimator: Estimator, running: Plan, fixed: Collection[int] = ()) -> Rescheduling:
    """The roles that serve most of the problem's workload; the present ones where no others are clearly better.

    fixed: positions of groups whose roles must not change. Raises Incompatible for a group whose memory does not hold
    the workload's longest request. Source: ThunderServe 3.4: of the tabu search only flips of the phase, with the
    layouts as they are, and the orchestration again. Here deployments within a few flips of equal groups are compared
    by the estimate, which takes milliseconds instead of seconds.
    """
    policies, problem = running.policies, estimator.problem
    local = not policies.startswith("plan:") or any(route.prefill is None for route in running.routes)
    start = running.groups
    before = estimator.estimate(start, local=local)
    here, best = start, before
    while True:
        neighbours = _flipped(problem.inventory.alike, here, frozenset(fixed))
        promising = nlargest(MAX_ESTIMATED, neighbours, key=lambda groups: estimator.max_rate(groups, local=local))
        near = max(promising, key=lambda groups: estimator.estimate(groups, local=local).goodput, default=here)
        found = estimator.estimate(near, local=local)
        if found.goodput <= best.goodput * MIN_GAIN:
            break
        here, best = near, found
    flips = tuple(at for at, (one, other) in enumerate(zip(start, here, strict=True)) if one.role is not other.role)
    plan = Plan(here, routes_of(best), policies)
    if policies.startswith("plan:"):
        plan = Plan(here, plan.routes, plan.routed(problem))
    return Rescheduling(plan, flips, before, best)


def after_loss(plan: Plan, lost: Sequence[int]) -> tuple[tuple[Group, ...], tuple[Route, ...]]:
    """The groups that are left and the routes between them, with shares in proportion."""
    kept = [at for at in range(len(plan.groups)) if at not in set(lost)]
    number = {at: new for new, at in enumerate(kept)}
    routes = [
        Route(None if route.prefill is None else number[route.prefill], number[route.decode], route.share)
        for route in plan.routes
        if route.decode in number and (route.prefill is None or route.prefill in number)
    ]
    return tuple(plan.groups[at] for at in kept), _in_proportion(routes)


def _in_proportion(routes: Sequence[Route]) -> tuple[Route, ...]:
    """The routes with shares that sum to 1."""
    whole = sum(route.share for route in routes)
    return tuple(Route(route.prefill, route.decode, route.share / whole) for route in routes)


def _flipped(alike: Sequence[int], groups: Sequence[Group], fixed: frozenset[int]) -> Iterator[tuple[Group, ...]]:
    """`STRIDES` flips of equal groups in one direction, equal results once; at least one group decodes."""
    seen = {canonical(groups, alike)}
    for role in Role:
        for at, group in enumerate(groups):
            if group.role is not role or at in fixed:
                continue
            flipped, count = list(groups), 0
            for other in range(at, len(groups)):
                same = groups[other].role is role and canonical((groups[other],), alike) == canonical((group,), alike)
                if not same or other in fixed:
                    continue
                flipped[other] = groups[other].flipped()
                count += 1
                if count not in STRIDES:
                    continue
                key = canonical(flipped, alike)
                if key not in seen and any(one.role is Role.DECODE for one in flipped):
                    seen.add(key)
                    yield tuple(flipped)


@dataclass(frozen=True, slots=True)
class Flip:
    instance_id: str
    from_role: Role
    to_role: Role


@dataclass(frozen=True, slots=True)
class Finding:
    """Proposed roles and routes.

    now, then: what is expected of the present and of the proposed ones. routes: the proposed routes. changes_routes:
    whether they replace those in force. why: a sentence, also where nothing should change.
    """

    flips: tuple[Flip, ...]
    routes: tuple[PlanRoute, ...]
    changes_routes: bool
    now: Expected
    then: Expected
    why: str

    @property
    def changes(self) -> bool:
        return bool(self.flips) or self.changes_routes


def review(fleet: Fleet, in_force: Sequence[PlanRoute] = (), fixed: Collection[str] = ()) -> Finding:
    """The best roles and routes for the fleet's demand.

    in_force: the routes of placement `plan`; empty under another. fixed: instances whose roles must not change. Nothing
    changes where the demand is served with some spare capacity, or nothing else is clearly better.
    """
    routes = surviving_routes(fleet.views, in_force)
    now = fleet.expected(routes=routes)
    if now.goodput >= SPARE * now.rate and now.attainment >= fleet.target:
        return _without_flips(fleet, in_force, now, f"the roles serve this: {_goodput_in_words(now)}")
    positions = {at for at, view in enumerate(fleet.views) if view.instance_id in set(fixed)}
    plan = Plan(fleet.groups, routes, "adaptive" if fleet.local else "plan:")
    found = reschedule(fleet.estimator, plan, positions)
    groups = found.plan.groups
    then = fleet.expected(groups)
    if then.goodput <= MIN_GAIN * now.goodput:
        kept = f"; {len(positions)} are kept as they are" if positions else ""
        why = f"no other roles serve clearly more: {_goodput_in_words(now)}{kept}"
        return _without_flips(fleet, in_force, now, why)
    changed = (fleet.views[at] for at in found.flips)
    flips = tuple(Flip(view.instance_id, view.role, view.role.other) for view in changed)
    best = routes_by_id(fleet.views, routes_of(fleet.estimate(groups)))
    why = f"{_goodput_in_words(now)}; with {_in_words(flips, bool(in_force))} {then.goodput:.3g}"
    return Finding(flips, best, bool(in_force), now, then, why)


def _without_flips(fleet: Fleet, in_force: Sequence[PlanRoute], now: Expected, why: str) -> Finding:
    """A finding without flips, and with other routes only where no route in force has its instances any more."""
    routes = surviving_routes(fleet.views, in_force)
    dead = bool(in_force) and not routes
    here = routes_by_id(fleet.views, routes or routes_of(fleet.estimate()))
    return Finding((), here, dead, now, now, f"no route in force has its instances any more; {why}" if dead else why)


def surviving_routes(views: Sequence[InstanceView], in_force: Sequence[PlanRoute]) -> tuple[Route, ...]:
    """The routes in force whose instances exist in their roles, by position, with shares in proportion."""
    at = {(view.instance_id, view.role): position for position, view in enumerate(views)}
    found = []
    for route in in_force:
        decode = at.get((route.decode, Role.DECODE))
        prefill = at.get((route.prefill, Role.PREFILL)) if route.prefill else None
        if decode is not None and (prefill is not None or not route.prefill):
            found.append(Route(prefill, decode, route.share))
    return _in_proportion(found)


def routes_by_id(views: Sequence[InstanceView], routes: Sequence[Route]) -> tuple[PlanRoute, ...]:
    return tuple(
        PlanRoute(
            "" if route.prefill is None else views[route.prefill].instance_id,
            views[route.decode].instance_id,
            route.share,
        )
        for route in routes
    )


def _goodput_in_words(now: Expected) -> str:
    return f"{now.goodput:.3g} requests/s within the SLO, {now.rate:.3g} requested"


def _in_words(flips: Sequence[Flip], routed: bool) -> str:
    words = [f"{flip.instance_id} for {flip.to_role.value}" for flip in flips]
    if routed:
        words.append("other routes")
    return ", ".join(words[:-1]) + (" and " if len(words) > 1 else "") + words[-1]
