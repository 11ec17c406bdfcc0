"""Routes: which group sends which share of the requests to which, by a linear programme over capacities.

Source: ThunderServe 3.3's two-stage transportation problem. As printed it collapses onto its best pair, so here it is
bound by capacities: what groups compute and decode, and what links and the nodes' ports carry. Groups that decode may
compute prompts, too, and decode less for it.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise
from math import inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.cost.catalogue import bytes_of
from shared.cost.kinds import EngineKind
from shared.cost.network import Link, Network, pair_of, rate_of
from shared.cost.step import Batch
from shared.plan.group import Group
from shared.plan.inventory import Inventory
from shared.plan.linear import Programme
from shared.plan.problem import Problem, Sample
from shared.sim.workload import Times

KV_SHARE = 0.8  # of the memory that decodes may fill: above it they preempt each other
_TANGENTS = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of the most time that a decode group can give to prompts


@dataclass(frozen=True, slots=True)
class EngineCost:
    """What an engine costs on a workload, from the step times that the simulator uses, too.

    prefill_s: of each sampled prompt alone, chunk by chunk, shape [n]. lanes: batches in flight. batch: decodes of a
    lane that its memory and its seats hold. base_s, more_s: a step of b decodes takes base_s + more_s * b, at the
    workload's mean context.
    """

    prefill_s: Times
    lanes: int
    batch: float
    base_s: float
    more_s: float

    @property
    def prefills_per_s(self) -> float:
        return self.lanes / float(self.prefill_s.mean())

    def decode_s(self, batch: float) -> float:
        return self.base_s + self.more_s * batch

    def batch_within(self, step_s: float) -> float:
        """Decodes of a lane that a step of that length and the memory allow."""
        by_time = (step_s - self.base_s) / self.more_s if self.more_s > 0 else inf
        return max(0.0, min(self.batch, by_time))


@dataclass(frozen=True, slots=True)
class Engine:
    """What an engine's cost follows from.

    chunk_s: seconds of a step that computes (tokens, after earlier tokens). decode_s: seconds of a lane's step of
    (decodes, their contexts' sum). lane_tokens, seats: KV tokens and decodes of a lane. chunk: tokens of a step.
    """

    chunk_s: Callable[[int, int], float]
    decode_s: Callable[[int, int], float]
    lanes: int
    lane_tokens: int
    seats: int
    chunk: int

    def cost(self, sample: Sample, load_s: float = 0.0) -> EngineCost:
        """The cost on such requests. load_s: seconds to load a token's KV from host memory."""

        def prompt_s(tokens: int, held: int, hosted: int) -> float:
            chunks = range(held, tokens, self.chunk)
            return load_s * hosted + sum(self.chunk_s(min(self.chunk, tokens - at), at) for at in chunks)

        lengths = zip(sample.prompts.tolist(), sample.held.tolist(), sample.hosted.tolist(), strict=True)
        prefill_s = np.array([prompt_s(*each) for each in lengths])
        batch = min(KV_SHARE * self.lane_tokens / sample.context, float(max(1, self.seats)))
        one, most = 1, max(2, int(batch))
        first_s = self.decode_s(one, int(sample.context))
        last_s = self.decode_s(most, int(most * sample.context))
        more_s = max(0.0, last_s - first_s) / (most - one)
        return EngineCost(prefill_s, self.lanes, max(1.0, batch), first_s - more_s, more_s)


class EngineCosts(Protocol):
    """Engine costs of one problem. kv_bytes: of a token, as engines store it."""

    kv_bytes: float

    def cost_of(self, kind: EngineKind) -> EngineCost | None:
        """The cost of such an engine; None if the model does not fit."""
        ...


class Costs:
    """Engine costs by the cost model, each worked out once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._known: dict[EngineKind, EngineCost | None] = {}
        geometry = problem.models.geometry
        self.kv_bytes = geometry.kv_bytes_per_token(bytes_of(problem.dtype or geometry.dtype))

    def cost_of(self, kind: EngineKind) -> EngineCost | None:
        if kind not in self._known:
            self._known[kind] = self._made(kind)
        return self._known[kind]

    def _made(self, kind: EngineKind) -> EngineCost | None:
        problem = self._problem
        lane_tokens = problem.models.kv_tokens(kind) // kind.lanes
        if lane_tokens < problem.longest:
            return None
        times, limits = problem.models.times(kind), problem.limits

        def chunk_s(tokens: int, before: int) -> float:
            return times.step_time_s(Batch(((tokens, before),)))

        seats = limits.sequences // kind.lanes
        engine = Engine(chunk_s, times.decode_time_s, kind.lanes, lane_tokens, seats, limits.batched_tokens)
        if kind.lanes > 1:
            return engine.cost(problem.sample.with_held_share(0.0))  # pipelines are without prefix caches
        return engine.cost(problem.sample, problem.models.host_token_s(kind))


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a group can do, in requests a second.

    prefills: if it only computed prompts. decodes: if it only decodes. cuts: pairs (a, b), each a bound of the decodes
    by a - b * share, where `share` of its time goes to prompts.
    """

    prefills: float
    decodes: float = 0.0
    cuts: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """A share of the requests, computed by one group and decoded by another, by their positions in the plan.

    prefill None: the group that decodes computes the prompts, too.
    """

    prefill: int | None
    decode: int
    share: float


@dataclass(frozen=True, slots=True)
class Flows:
    """Requests a second. sent: from prefill group i to decode group j, [p, d]. local: all on decode group j, [d]."""

    sent: NDArray[np.float64]
    local: NDArray[np.float64]

    @property
    def rate(self) -> float:
        return float(self.sent.sum() + self.local.sum())

    def times(self, factor: float) -> "Flows":
        return Flows(self.sent * factor, self.local * factor)


def prefill_capacity(cost: EngineCost, load: float) -> Capacity:
    """The capacity of a group that only computes prompts, and may be busy for `load` of the time."""
    return Capacity(load * cost.prefills_per_s)


def decode_capacity(cost: EngineCost, tpot_s: float, output: float, load: float) -> Capacity:
    """The capacity of a group that decodes `output` tokens a request within `tpot_s` a token.

    With a share f of its time for prompts a token takes step / (1 - f). So its batch b meets step(b) <= tpot (1 - f)
    and the rate is lanes * b / (output * step(b) / (1 - f)). That is concave in f, and bounded by a few tangents.
    """

    def rate(share: float) -> float:
        batch = cost.batch_within(load * tpot_s * (1.0 - share))
        return cost.lanes * batch * (1.0 - share) / (output * cost.decode_s(batch)) if batch > 0 else 0.0

    none = rate(0.0)
    if none <= 0.0:
        return Capacity(load * cost.prefills_per_s)
    most_share = 1.0 - cost.base_s / (load * tpot_s)  # above it a single decode is too slow
    points = [(share * most_share, rate(share * most_share)) for share in _TANGENTS]
    cuts = []
    for (one, at), (other, then) in pairwise(points):
        slope = (at - then) / (other - one)
        cuts.append((at + slope * one, slope))
    return Capacity(load * cost.prefills_per_s, none, tuple(cuts))


@dataclass(frozen=True, slots=True)
class Joints:
    """The network between prefill and decode groups. pair_per_s: requests a second whose KV the path carries, [p, d].

    ports: for each direction of a node's port, the pairs (i, j) that pass it with a share of their KV, and the number
    of requests a second whose whole KV it carries.
    """

    pair_per_s: NDArray[np.float64]
    ports: Sequence[tuple[Sequence[tuple[int, int, float]], float]] = ()


def best_flows(
    prefill: Sequence[Capacity],
    decode: Sequence[Capacity],
    joints: Joints,
    *,
    local: bool = True,
    worth: NDArray[np.float64] | None = None,
) -> Flows:
    """The flows with the highest worth. local: decode groups may compute prompts.

    worth: of a request by its groups, shape [p + 1, d], the last row for requests computed where they are decoded;
    ThunderServe's D, the share of them within the SLO. By default 1 for all.
    """
    p, d = len(prefill), len(decode)
    if not d or (not p and not local):
        return Flows(np.zeros((p, d)), np.zeros(d))
    pairs = p * d  # variables: what is sent, pair by pair, then what each computes for itself
    programme = Programme(pairs + d)
    for i, capacity in enumerate(prefill):
        programme.add({i * d + j: 1.0 for j in range(d)}, capacity.prefills)
    for j, capacity in enumerate(decode):
        into = {i * d + j: 1.0 for i in range(p)}
        for most, slope in capacity.cuts or ((0.0, 0.0),):
            share = slope / capacity.prefills if capacity.prefills > 0 else 0.0
            programme.add({**into, pairs + j: 1.0 + share}, most)
    for passing, most in joints.ports:
        programme.add({i * d + j: part for i, j, part in passing}, most)
    gain = np.ones(pairs + d) if worth is None else worth.ravel()
    upper = np.concatenate([joints.pair_per_s.ravel(), np.full(d, np.inf if local else 0.0)])
    flat = programme.minimise(-gain, upper)
    return Flows(flat[:pairs].reshape(p, d), flat[pairs:])


Place = tuple[tuple[str, int], ...]  # (node, layers) in the order of the layers


class Places:
    """The places of groups and the links between them, each worked out once. kv_bytes: of a mean request."""

    def __init__(self, inventory: Inventory, kv_bytes_per_request: float) -> None:
        self._inventory = inventory
        self.kv_bytes = kv_bytes_per_request
        self._links: dict[tuple[Place, Place], Link] = {}
        self._ports: dict[str, float] = {}

    def link(self, source: Place, target: Place) -> Link:
        """The path of KV: all layers travel at once, each from its node to its node; the slowest sets the pace."""
        key = (source, target)
        if key not in self._links:
            self._links[key] = self._joined(source, target)
        return self._links[key]

    def joints(self, prefill: Sequence[Group], decode: Sequence[Group]) -> Joints:
        froms = [group.place(self._inventory) for group in prefill]
        tos = [group.place(self._inventory) for group in decode]
        pairs = np.array([[rate_of(self.link(a, b)) for b in tos] for a in froms]).reshape(len(froms), len(tos))
        out: dict[str, list[tuple[int, int, float]]] = {}
        into: dict[str, list[tuple[int, int, float]]] = {}
        for i, a in enumerate(froms):
            for j, b in enumerate(tos):
                for (one, other), share in _shares(a, b).items():
                    if one != other:
                        out.setdefault(one, []).append((i, j, share))
                        into.setdefault(other, []).append((i, j, share))
        ports = [(passing, self._port(node) / self.kv_bytes) for way in (out, into) for node, passing in way.items()]
        return Joints(pairs / self.kv_bytes, ports)

    def _port(self, node: str) -> float:
        if node not in self._ports:
            self._ports[node] = rate_of(self._inventory.network.port(node))
        return self._ports[node]

    def _joined(self, source: Place, target: Place) -> Link:
        network = self._inventory.network
        paths = {pair: (network.path(*pair), share) for pair, share in _shares(source, target).items()}
        if len(paths) == 1:
            return next(iter(paths.values()))[0]
        passing: dict[tuple[str, str], float] = {}  # share of the KV that passes each node's port, by direction
        for (one, other), (_, share) in paths.items():
            if one != other:
                passing["out", one] = passing.get(("out", one), 0.0) + share
                passing["into", other] = passing.get(("into", other), 0.0) + share
        ports_s = (share / self._port(node) for (_, node), share in passing.items())
        slowest_s = max((share / rate_of(link) for link, share in paths.values()))
        slowest_s = max((slowest_s, *ports_s))
        return Link(1.0 / slowest_s, max(link.latency_s for link, _ in paths.values()), 1.0)

    def network(self, places: Sequence[Place]) -> Network:
        """The network for the simulator, with each place as a node."""
        inside: dict[str, Link] = {}
        between: dict[tuple[str, str], Link] = {}
        for one, other in combinations_with_replacement(dict.fromkeys(places), 2):
            if one == other:
                inside[place_name(one)] = self.link(one, one)
            else:
                between[pair_of(place_name(one), place_name(other))] = self.link(one, other)
        return Network(inside, between)


def place_name(place: Place) -> str:
    """The node's name, or the names of several nodes with the layers that they hold."""
    return place[0][0] if len(place) == 1 else "+".join(f"{node}.{layers}" for node, layers in place)


def _shares(source: Place, target: Place) -> Counter[tuple[str, str]]:
    """The shares of a token's KV that go from one node to another, by both."""
    found: Counter[tuple[str, str]] = Counter()
    total = sum(layers for _, layers in source)
    sources, targets = deque(source), deque(target)
    while sources:
        (one, here), (other, there) = sources.popleft(), targets.popleft()
        layers = min(here, there)
        found[one, other] += layers / total  # type: ignore[assignment]
        if here > layers:
            sources.appendleft((one, here - layers))
        if there > layers:
            targets.appendleft((other, there - layers))
    return found
