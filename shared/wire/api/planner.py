"""Answers of the planner's HTTP API: the running cluster, proposals for it, and searches for plans.

Times are unix seconds, rates requests a second, shares and attainments 0..1.
"""

from enum import StrEnum
from typing import Any, ClassVar

from msgspec import Struct, field

from shared.domain.demand import Demand
from shared.domain.instance import InstanceState, Role

LOST_STATES = ("lost", "dead", "unresponsive")


class Figures(Struct, frozen=True):
    """Figures of a cluster at `rate`. goodput: the highest rate within the SLO. Expected and promised latencies are
    means; None where they grow without end.
    """

    rate: float | None = None
    goodput: float | None = None
    attainment: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None


class Promise(Figures, frozen=True):
    """Expected by the search that made the plan."""

    ttft_s: float | None = field(default=None, name="ttft_mean_s")
    tpot_s: float | None = field(default=None, name="tpot_mean_s")
    usd_per_million_tokens: float | None = None
    usd_per_hour: float | None = None


class Measured(Struct, frozen=True):
    """Of the running cluster over the last `window_s`. Latencies are medians of the class with the most requests."""

    goodput: ClassVar[None] = None  # it is not measured

    requests: int
    window_s: float
    attainment: float
    ttft_s: float | None = field(name="ttft_p50_s")
    tpot_s: float | None = field(name="tpot_p50_s")
    rate: float


class FleetInstance(Struct, frozen=True):
    """An instance as the planner counts it. state: an InstanceState, or lost. load: share of its capacity, 0..1."""

    instance_id: str
    role: Role
    state: str = InstanceState.READY
    accelerator: str = ""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    load: float | None = None

    @property
    def lost(self) -> bool:
        return self.state in LOST_STATES


class RouteShare(Struct, frozen=True):
    """A pair and its share of the requests; without `prefill` the decode instance computes the prompts."""

    prefill: str | None
    decode: str
    share: float


class Fleet(Struct, frozen=True):
    """The running cluster and its plan.

    trouble: why nothing can be proposed. routes_in_force: whether placement follows `routes`; else they are what the
    planner expects. auto: whether proposals are applied at once; why_not_auto: why not at the moment.
    """

    time_s: float
    trouble: str
    instances: list[FleetInstance]
    placement: str
    routes_in_force: bool
    routes: list[RouteShare]
    demand: Demand | None
    expected: Figures | None
    measured: Measured | None
    auto: bool = False
    why_not_auto: str = ""
    promise: Promise | None = None


class ProposalState(StrEnum):
    """How a proposal stands."""

    OPEN = "open"
    APPLYING = "applying"
    APPLIED = "applied"
    FAILED = "failed"  # a step did not succeed; those before it stand
    REFUSED = "refused"
    WITHDRAWN = "withdrawn"  # the situation changed before anybody decided


class RoleChange(Struct, frozen=True):
    instance_id: str
    from_role: Role
    to_role: Role


class ProposalStep(Struct, frozen=True):
    """A step of a proposal that has ended: a flip, or the change of routes. at_s: its end."""

    at_s: float
    what: str
    ok: bool
    text: str = ""


class Proposal(Struct, frozen=True, kw_only=True):
    """Other roles and routes for the running cluster.

    cause: why the planner reviewed the roles; noticed_s: when it noticed that. took_s: how long the review took. now,
    then: expected figures before and after. who: decided on it.
    """

    state: ProposalState
    cause: str
    why: str
    flips: list[RoleChange]
    routes: list[RouteShare]
    changes_routes: bool
    now: Figures
    then: Figures
    made_s: float
    noticed_s: float
    took_s: float
    proposal_id: str
    decided_s: float | None
    who: str
    steps: list[ProposalStep]
    error: str


class Review(Struct, frozen=True):
    """The result of a review on request: a proposal, or None and why."""

    proposal: Proposal | None
    why: str


class BestFlips(Struct, frozen=True):
    """The flips that would serve a changed cluster best, and the figures with them."""

    flips: list[RoleChange]
    expected: Figures


class WhatIf(Struct, frozen=True):
    """Expected figures now, after the change with the present roles, and with the best flips. why: a remark."""

    now: Figures
    then: Figures
    best: BestFlips | None
    why: str


class SearchState(StrEnum):
    """How a search stands."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


class SearchProgress(Struct, frozen=True):
    """best_goodput: None until there is a plan. elapsed_s: since the search began."""

    what: str
    best_goodput: float | None
    elapsed_s: float


class PlanGroup(Struct, frozen=True):
    """One instance of a plan. role: prefill, decode or both."""

    name: str
    role: str
    accelerators: str
    layout: str
    tensor_parallel: int
    price_usd_hour: float


class ComparedMethod(Promise, frozen=True, kw_only=True):
    """The best plan of another search method."""

    method: str


class PlanEndurance(Struct, frozen=True):
    """What a plan serves without the group whose loss costs most, after the best flips of others.

    lost: that group, in words. goodput: requests a second. flips: groups that change their roles. given_up: share of
    goodput that the plan costs for it.
    """

    lost: str
    goodput: float
    flips: int
    given_up: float


class SearchResult(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The plan of a search. stopped: the search was ended before its time. cluster_file: only in the answer for a
    single search.
    """

    method: str
    workload: str
    groups: list[PlanGroup]
    routes: list[RouteShare]
    policies: str
    promise: Promise
    compared: list[ComparedMethod]
    why: str
    stopped: bool
    took_s: float
    cluster_file: str = ""
    endurance: PlanEndurance | None = None


class PlanSearch(Struct, frozen=True, kw_only=True):
    """A search for a plan. request: the body that started it; in lists without its inventory, and with a list of
    requests in words.
    """

    state: SearchState
    plan_id: str
    who: str
    submitted_s: float
    ended_s: float | None
    error: str
    progress: SearchProgress
    request: dict[str, Any]
    result: SearchResult | None

    @property
    def ended(self) -> bool:
        return self.state not in (SearchState.WAITING, SearchState.RUNNING)
