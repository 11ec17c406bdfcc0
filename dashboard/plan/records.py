"""What the planner answers, as types. Fields that the page does not use are ignored. Times are unix seconds."""

import msgspec

from shared.domain.instance import Role

LOST = ("lost", "dead", "unresponsive")


class FleetInstance(msgspec.Struct, frozen=True):
    """One instance as the planner counts it. load: 0..1 of what it can do."""

    instance_id: str
    role: Role
    state: str = "ready"
    accelerator: str = ""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    load: float | None = None

    @property
    def lost(self) -> bool:
        """Whether the plan has to do without it."""
        return self.state in LOST


class Route(msgspec.Struct, frozen=True):
    """A pair and its share of the requests; without `prefill`, the decode instance computes the prompts itself."""

    decode: str
    prefill: str | None = None
    share: float = 0.0


class Expected(msgspec.Struct, frozen=True):
    """What the planner expects at `rate` requests a second; goodput is the most that keeps the SLO. Means."""

    rate: float | None = None
    goodput: float | None = None
    attainment: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None


class Measured(msgspec.Struct, frozen=True):
    """What the running cluster did over the last `window_s`."""

    requests: int = 0
    window_s: float = 0.0
    attainment: float | None = None
    ttft_p50_s: float | None = None
    tpot_p50_s: float | None = None
    rate: float | None = None


class Promise(msgspec.Struct, frozen=True):
    """What a plan was said to do when it was made."""

    rate: float | None = None
    goodput: float | None = None
    attainment: float | None = None
    ttft_mean_s: float | None = None
    tpot_mean_s: float | None = None
    usd_per_million_tokens: float | None = None
    usd_per_hour: float | None = None


class PlannedFor(msgspec.Struct, frozen=True):
    """The demand that the planner plans for; tokens are means."""

    rate: float | None = None
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None


class Fleet(msgspec.Struct, frozen=True):
    """`GET /fleet`. trouble: why nothing can be proposed; empty where it can."""

    time_s: float
    instances: list[FleetInstance]
    trouble: str = ""
    auto: bool = False
    routes: list[Route] = []
    routes_in_force: bool = False
    placement: str = ""
    demand: PlannedFor | None = None
    expected: Expected | None = None
    measured: Measured | None = None
    promise: Promise | None = None


class Flip(msgspec.Struct, frozen=True):
    """An instance that is to change its role."""

    instance_id: str
    from_role: str
    to_role: str


class Step(msgspec.Struct, frozen=True):
    """One thing that was done for a proposal."""

    at_s: float
    what: str
    ok: bool = True
    text: str = ""


class Proposal(msgspec.Struct, frozen=True):
    """One of `GET /proposals`. state: open, applying, applied, failed, refused, withdrawn. took_s: to work it out."""

    proposal_id: str
    state: str
    made_s: float
    cause: str = ""
    why: str = ""
    took_s: float | None = None
    flips: list[Flip] = []
    routes: list[Route] = []
    changes_routes: bool = False
    now: Expected | None = None
    then: Expected | None = None
    decided_s: float | None = None
    who: str = ""
    steps: list[Step] = []
    error: str = ""


class Best(msgspec.Struct, frozen=True):
    """The flips that would serve a changed cluster best, and what to expect of them."""

    flips: list[Flip] = []
    expected: Expected | None = None


class WhatIf(msgspec.Struct, frozen=True):
    """`POST /what-if`: as it is, with the roles as they are, with the best flips. why: what is to be said of it."""

    now: Expected | None = None
    then: Expected | None = None
    best: Best | None = None
    why: str = ""


class Progress(msgspec.Struct, frozen=True):
    """How far a search is."""

    what: str = ""
    best_goodput: float | None = None
    elapsed_s: float | None = None


class PlanGroup(msgspec.Struct, frozen=True):
    """One instance of a plan."""

    name: str
    role: str
    accelerators: str = ""
    layout: str = ""
    tensor_parallel: int = 1
    price_usd_hour: float | None = None


class Compared(msgspec.Struct, frozen=True):
    """What another method found."""

    method: str
    goodput: float | None = None


class Result(msgspec.Struct, frozen=True):
    """What a search found. cluster_file: only where one search is asked for."""

    method: str = ""
    groups: list[PlanGroup] = []
    routes: list[Route] = []
    policies: str = ""
    promise: Promise = Promise()
    compared: list[Compared] = []
    cluster_file: str = ""


class PlanSearch(msgspec.Struct, frozen=True):
    """One of `GET /plans`. state: waiting, running, done, cancelled, failed."""

    plan_id: str
    state: str
    submitted_s: float
    who: str = ""
    ended_s: float | None = None
    progress: Progress | None = None
    result: Result | None = None
    error: str = ""

    @property
    def ended(self) -> bool:
        """Whether nothing more comes of it."""
        return self.state not in ("waiting", "running")
