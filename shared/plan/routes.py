"""Routes: which group sends which share of the requests to which, by a linear programme over capacities.

Source: ThunderServe 3.3's two-stage transportation problem, which collapses onto its best pair as it is printed. F: the
capacities of FORMULAS section 5 bind it: what groups compute and decode, what links and the nodes' ports carry. Ours:
groups that decode may compute prompts, too, and give up decodes for it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise
from math import inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from shared.cost.catalogue import bytes_of
from shared.cost.kinds import EngineKind
from shared.cost.network import Link, Network, pair_of, rate_of
from shared.cost.step import Batch
from shared.plan.group import Group
from shared.plan.inventory import Inventory
from shared.plan.problem import Problem, Sample
from shared.sim.workload import Times

# MERGED costs.py
# What a group's engine costs on a workload: a few numbers out of the step times that the simulator takes, too.


KV_SHARE = 0.8  # of the memory that decodes fill where work still flows: above it they preempt each other


@dataclass(frozen=True, slots=True)
class EngineCost:
    """prefill_s: of each sampled prompt alone, chunk by chunk, shape [n]. lanes: batches in flight.

    batch: decodes of a lane that its memory and its seats hold. base_s, more_s: a decode step of b of them takes
    base_s + more_s * b, at the workload's mean context.
    """

    prefill_s: Times
    lanes: int
    batch: float
    base_s: float
    more_s: float

    @property
    def prefills_per_s(self) -> float:
        """Prompts a second when it does nothing else."""
        return self.lanes / float(self.prefill_s.mean())

    def decode_s(self, batch: float) -> float:
        """A step of so many decodes of a lane."""
        return self.base_s + self.more_s * batch

    def batch_within(self, step_s: float) -> float:
        """Decodes of a lane that a step of that length and the memory allow."""
        by_time = (step_s - self.base_s) / self.more_s if self.more_s > 0 else inf
        return max(0.0, min(self.batch, by_time))


@dataclass(frozen=True, slots=True)
class Engine:
    """What an engine's cost follows from.

    chunk_s: of a step that computes so many tokens after so many. decode_s: of a lane's step of so many decodes whose
    contexts sum to so many tokens. lane_tokens, seats: of KV and of decodes, of a lane. chunk: tokens of a step.
    """

    chunk_s: Callable[[int, int], float]
    decode_s: Callable[[int, int], float]
    lanes: int
    lane_tokens: int
    seats: int
    chunk: int

    def cost(self, sample: Sample, held: float = 0.0) -> EngineCost:
        """On such requests. held: the share of a prompt that is there before it comes, in a prefix cache."""
        prefill_s = np.array([self._prompt_s(tokens, int(held * tokens)) for tokens in sample.prompts.tolist()])
        batch = min(KV_SHARE * self.lane_tokens / sample.context, float(max(1, self.seats)))
        one, most = 1, max(2, int(batch))
        first_s = self.decode_s(one, int(sample.context))
        last_s = self.decode_s(most, int(most * sample.context))
        more_s = max(0.0, last_s - first_s) / (most - one)
        return EngineCost(prefill_s, self.lanes, max(1.0, batch), first_s - more_s, more_s)

    def _prompt_s(self, tokens: int, held: int) -> float:
        """A prompt that has the engine to itself."""
        return sum(self.chunk_s(min(self.chunk, tokens - at), at) for at in range(held, tokens, self.chunk))


class EngineCosts(Protocol):
    """Engine costs of one problem. kv_bytes: of a token, as engines keep it."""

    kv_bytes: float

    def of(self, kind: EngineKind) -> EngineCost | None:
        """What such an engine costs; None for a kind that the model does not fit."""
        ...


class Costs:
    """By the cost model, each worked out once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._known: dict[EngineKind, EngineCost | None] = {}
        geometry = problem.shop.geometry
        self._longest = problem.longest
        self.kv_bytes = geometry.kv_bytes_per_token(
            bytes_of(geometry.dtype if problem.dtype is None else problem.dtype)
        )

    def of(self, kind: EngineKind) -> EngineCost | None:
        """See `EngineCosts`."""
        if kind not in self._known:
            self._known[kind] = self._made(kind)
        return self._known[kind]

    def _made(self, kind: EngineKind) -> EngineCost | None:
        problem = self._problem
        lane_tokens = problem.shop.kv_tokens(kind) // kind.lanes
        if lane_tokens < self._longest:
            return None
        times, limits = problem.shop.times(kind), problem.limits

        def chunk_s(tokens: int, before: int) -> float:
            return times.step_time_s(Batch(((tokens, before),)))

        seats = limits.sequences // kind.lanes
        engine = Engine(chunk_s, times.decode_time_s, kind.lanes, lane_tokens, seats, limits.batched_tokens)
        return engine.cost(problem.sample)


_TANGENTS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the most of its time that a decode group can give to prompts


@dataclass(frozen=True, slots=True)
class Capacity:
    """Requests a second. prefills: of a group that does nothing but compute prompts, or of one that decodes if it did.

    decodes: of one that decodes and computes no prompts. cuts: (a, b): decodes are at most a - b * share, where share
    of its time goes to prompts.
    """

    prefills: float
    decodes: float = 0.0
    cuts: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Route:
    """A share of the requests: computed by one group and decoded by another, by their positions in the plan.

    prefill None: the group that decodes computes the prompts, too.
    """

    prefill: int | None
    decode: int
    share: float


@dataclass(frozen=True, slots=True)
class Flows:
    """Requests a second. sent: from prefill group i to decode group j, shape [p, d]. local: that a decode group
    computes itself, shape [d].
    """

    sent: NDArray[np.float64]
    local: NDArray[np.float64]

    @property
    def rate(self) -> float:
        """In all."""
        return float(self.sent.sum() + self.local.sum())

    def times(self, factor: float) -> "Flows":
        """So many times as much."""
        return Flows(self.sent * factor, self.local * factor)


def prefill_capacity(cost: EngineCost, load: float) -> Capacity:
    """Of a group that only computes prompts, and may be busy for that share of the time."""
    return Capacity(load * cost.prefills_per_s)


def decode_capacity(cost: EngineCost, tpot_s: float, output: float, load: float) -> Capacity:
    """Of a group that decodes `output` tokens a request within `tpot_s` a token.

    With a share f of its time for prompts a token takes step / (1 - f). So its batch b meets step(b) <= tpot (1 - f)
    and the rate is lanes * b / (output * step(b) / (1 - f)), concave in f: taken as the least of a few tangents.
    """

    def rate(share: float) -> float:
        batch = cost.batch_within(load * tpot_s * (1.0 - share))
        return cost.lanes * batch * (1.0 - share) / (output * cost.decode_s(batch)) if batch > 0 else 0.0

    none = rate(0.0)
    if none <= 0.0:
        return Capacity(load * cost.prefills_per_s)
    most_share = 1.0 - cost.base_s / (load * tpot_s)  # above it not even one decode is in time
    points = [(share * most_share, rate(share * most_share)) for share in _TANGENTS]
    cuts = []
    for (one, at), (other, then) in pairwise(points):
        slope = (at - then) / (other - one)
        cuts.append((at + slope * one, slope))
    return Capacity(load * cost.prefills_per_s, none, tuple(cuts))


@dataclass(frozen=True, slots=True)
class Joints:
    """What joins prefill groups and decode groups. pair_per_s: requests a second whose KV the path carries, [p, d].

    ports: for each direction of a node's port, which pairs (i, j) pass it with which share of their KV, and how many
    requests' whole KV it carries a second.
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

    worth: of a request that goes that way, shape [p + 1, d], the last row for those that are computed where they are
    decoded; ThunderServe's D, the share of them within the SLO. 1 for all by default.
    """
    p, d = len(prefill), len(decode)
    if not d or (not p and not local):
        return Flows(np.zeros((p, d)), np.zeros(d))
    pairs = p * d  # variables: what is sent, pair by pair, then what each computes for itself
    table = _Table(pairs + d)
    for i, capacity in enumerate(prefill):
        table.add([(i * d + j, 1.0) for j in range(d)], capacity.prefills)
    for j, capacity in enumerate(decode):
        into = [(i * d + j, 1.0) for i in range(p)]
        for most, slope in capacity.cuts or ((0.0, 0.0),):
            share = slope / capacity.prefills if capacity.prefills > 0 else 0.0
            table.add([*into, (pairs + j, 1.0 + share)], most)
    for over, most in joints.ports:
        table.add([(i * d + j, part) for i, j, part in over], most)
    gain = np.ones(pairs + d) if worth is None else worth.ravel()
    upper = np.concatenate([joints.pair_per_s.ravel(), np.full(d, np.inf if local else 0.0)])
    flat = table.highest(gain, upper)
    return Flows(flat[:pairs].reshape(p, d), flat[pairs:])


class _Table:
    """The rows of a linear programme over variables of 0 or more: each a sum that has a most."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []
        self._bounds: list[float] = []

    def add(self, entries: Sequence[tuple[int, float]], most: float) -> None:
        """One row, by variable and coefficient."""
        for column, value in entries:
            self._rows.append(len(self._bounds))
            self._columns.append(column)
            self._values.append(value)
        self._bounds.append(most)

    def highest(self, gain: NDArray[np.float64], upper: NDArray[np.float64]) -> NDArray[np.float64]:
        """The variables, each at most its `upper`, with the highest gain; zeros where there are none."""
        shape = (len(self._bounds), self._size)
        table = coo_array((self._values, (self._rows, self._columns)), shape=shape).tocsr()
        below = LinearConstraint(table, -np.inf, np.array(self._bounds))
        found = milp(-gain, constraints=below, bounds=Bounds(0.0, upper))  # none is whole: half the time of `linprog`
        return np.maximum(found.x, 0.0) if found.x is not None else np.zeros(self._size)


# MERGED places.py
# Where groups stand, and how fast KV gets from one to another.


Place = tuple[tuple[str, int], ...]  # (node, layers) in the order of the layers


class Places:
    """The places of one inventory and the links between them, each worked out once. kv_bytes: of a mean request."""

    def __init__(self, inventory: Inventory, kv_bytes_per_request: float) -> None:
        self._inventory = inventory
        self.kv_bytes = kv_bytes_per_request
        self._links: dict[tuple[Place, Place], Link] = {}
        self._ports: dict[str, float] = {}

    def link(self, source: Place, target: Place) -> Link:
        """The path of KV: each layer's goes from its node to its node, all at once; the slowest sets the pace."""
        key = (source, target)
        if key not in self._links:
            self._links[key] = self._joined(source, target)
        return self._links[key]

    def joints(self, prefill: Sequence[Group], decode: Sequence[Group]) -> Joints:
        """What joins these groups, in requests a second."""
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
        passing: dict[tuple[str, str], float] = {}  # what leaves and enters by each node's port
        for (one, other), (_, share) in paths.items():
            if one != other:
                passing["out", one] = passing.get(("out", one), 0.0) + share
                passing["into", other] = passing.get(("into", other), 0.0) + share
        ports_s = (share / self._port(node) for (_, node), share in passing.items())
        slowest_s = max((share / rate_of(link) for link, share in paths.values()))
        slowest_s = max((slowest_s, *ports_s))
        return Link(1.0 / slowest_s, max(link.latency_s for link, _ in paths.values()), 1.0)

    def network(self, places: Sequence[Place]) -> Network:
        """For the simulator: each place as a node of its own name."""
        inside: dict[str, Link] = {}
        between: dict[tuple[str, str], Link] = {}
        for one, other in combinations_with_replacement(dict.fromkeys(places), 2):
            if one == other:
                inside[place_name(one)] = self.link(one, one)
            else:
                between[pair_of(place_name(one), place_name(other))] = self.link(one, other)
        return Network(inside, between)


def place_name(place: Place) -> str:
    """The node's, or those of the nodes that hold its stages with their layers."""
    return place[0][0] if len(place) == 1 else "+".join(f"{node}.{layers}" for node, layers in place)


def _shares(source: Place, target: Place) -> Counter[tuple[str, str]]:
    """Of a token's KV, what goes from which node to which."""
    found: Counter[tuple[str, str]] = Counter()
    total = sum(layers for _, layers in source)
    for one, other, layers in _overlaps(source, target):
        found[one, other] += layers / total  # type: ignore[assignment]
    return found


def _overlaps(source: Place, target: Place) -> Iterator[tuple[str, str, int]]:
    ends_a, ends_b = list(source), list(target)
    a = b = 0
    left_a, left_b = ends_a[0][1], ends_b[0][1]
    while True:
        step = min(left_a, left_b)
        yield ends_a[a][0], ends_b[b][0], step
        left_a -= step
        left_b -= step
        if not left_a:
            a += 1
            if a == len(ends_a):
                return
            left_a = ends_a[a][1]
        if not left_b:
            b += 1
            left_b = ends_b[b][1]
