"""Routes: which group sends which share of the requests to which, by a linear programme over capacities.

Source: ThunderServe 3.3's two-stage transportation problem, which collapses onto its best pair as it is printed. F: the
capacities of FORMULAS section 5 bind it: what groups compute and decode, what links and the nodes' ports carry. Ours:
groups that decode may compute prompts, too, and give up decodes for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from shared.plan.costs import EngineCost

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
