"""What the dashboard reads: the answers of the services' HTTP APIs that `shared` does not define, and the endpoints.

Fields that no page shows are left out. Times are unix seconds.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from shared.domain.demand import AskedSecond, Demand, RolesWanted
from shared.domain.instance import InstanceInfo, InstanceLoad, InstanceState, Role
from shared.domain.route import PolicySpec
from shared.domain.slo import SloReport
from shared.domain.verdict import Verdict
from shared.errors import Busy, Overloaded
from shared.timeline import RequestTimeline
from shared.wire.api import Event, NoticedShift, Operation
from shared.wire.messages import JobReport

EMULATED = "emulated"
CLASSIFIER = "classifier"  # source of predicted lengths
LOST_STATES = ("lost", "dead", "unresponsive")
Column = list[float | None]
T = TypeVar("T")


class Load(InstanceLoad, frozen=True, array_like=False):
    """A load by field names, as HTTP answers have it."""


class InstanceRow(msgspec.Struct, frozen=True):
    """One instance. operation: the flip, drain or resume that runs; death: why it is dead."""

    instance_id: str
    role: Role
    state: InstanceState
    info: InstanceInfo
    load: Load = Load()
    state_since_s: float = 0.0
    operation: str = ""
    death: str = ""

    @property
    def emulated(self) -> bool:
        return self.info.compatibility.engine == EMULATED

    @property
    def operable(self) -> bool:
        """Whether the monitor would accept an operation on it."""
        return self.state in (InstanceState.READY, InstanceState.DRAINING) and not self.operation

    @property
    def kv_usage(self) -> float | None:
        """Share of the KV blocks in use, 0..1; None before its first load report."""
        if not self.load.time_s or self.info.total_blocks <= 0:
            return None
        return min(1.0, max(0.0, self.load.kv_used_share(self.info.total_blocks)))


class ClusterSummary(msgspec.Struct, frozen=True):
    """instances: counts by role and state. totals: of the instances that are not dead."""

    model: str = ""
    instances: dict[str, dict[str, int]] = {}
    totals: dict[str, int] = {}
    slo: list[SloReport] = []

    def ready(self, role: Role) -> int:
        return self.instances.get(role.value, {}).get(InstanceState.READY.value, 0)


class DemandAnswer(msgspec.Struct, frozen=True):
    """The demand profile, its last seconds and shifts, and the roles that would serve it best."""

    demand: Demand | None = None
    seconds: list[AskedSecond] = []
    shifts: list[NoticedShift] = []
    roles: RolesWanted | None = None


class PolicyChange(msgspec.Struct, frozen=True):
    who: str
    since_s: float


class PolicyChoice(msgspec.Struct, frozen=True):
    """The policy of one kind that is in force; `file`: the one of the cluster file."""

    name: str
    parameters: dict[str, Any] = {}
    changed: PolicyChange | None = None
    file: PolicySpec | None = None


class PolicyFollower(msgspec.Struct, frozen=True):
    """A scheduler or an instance, and whether it uses the policies in force."""

    process: str
    name: str
    follows: bool
    trouble: str = ""


class PoliciesInForce(msgspec.Struct, frozen=True):
    """By kind of policy. choices: the policies of each kind, and the parameters of each."""

    policies: dict[str, PolicyChoice]
    followers: list[PolicyFollower] = []
    choices: dict[str, dict[str, list[str]]] = {}
    revision: int = 0
    trouble: str = ""


class Mark(msgspec.Struct, frozen=True):
    time_s: float
    kind: str
    text: str
    instance_id: str = ""


class History(msgspec.Struct, frozen=True):
    """Series of the cluster. classes, class_targets: those of each SLO class."""

    from_s: float
    to_s: float
    time_s: list[float]
    series: dict[str, Column]
    targets: dict[str, float | None] = {}
    classes: dict[str, dict[str, Column]] = {}
    class_targets: dict[str, dict[str, float | None]] = {}
    marks: list[Mark] = []

    def for_class(self, slo: str) -> "History":
        """The same with the series of one class where there are any; unchanged for an unknown class."""
        if slo not in self.classes:
            return self
        series = {**self.series, **self.classes[slo]}
        return msgspec.structs.replace(self, series=series, targets=self.class_targets.get(slo, {}))


class InstanceColumns(msgspec.Struct, frozen=True):
    role: list[str | None] = []
    state: list[str | None] = []
    kv_used: Column = []
    running: Column = []
    waiting: Column = []
    queued_prefill_tokens: Column = []
    inflight: Column = []
    staged_bytes: Column = []


class InstanceHistory(msgspec.Struct, frozen=True):
    from_s: float
    to_s: float
    time_s: list[float]
    instances: dict[str, InstanceColumns]


class Step(msgspec.Struct, frozen=True):
    """A step of an instance's engine. expected_s: by the cost model or the calibration; learned_s: by what the instance
    has learned since its start.
    """

    seconds: float
    prefill_tokens: int = 0
    decodes: int = 0
    expected_s: float | None = None
    learned_s: float | None = None

    @property
    def kind(self) -> str:
        if not self.decodes:
            return "prefill"
        return "both" if self.prefill_tokens else "decode"


class LogTail(msgspec.Struct, frozen=True):
    lines: list[str] = []


class RequestRow(JobReport):
    """A request found by a search. caller: the name of the API key, empty without one."""

    caller: str = ""


class SearchPage(msgspec.Struct, frozen=True):
    """more: there are results beyond these."""

    rows: list[RequestRow]
    more: bool = False


class CheckpointStatus(msgspec.Struct, frozen=True):
    """State of the predictor's checkpoint: missing, loading, loaded or broken."""

    state: str
    error: str | None = None
    path: str | None = None


class ObservedStatus(msgspec.Struct, frozen=True):
    observations: int = 0


class RollingAccuracy(msgspec.Struct, frozen=True):
    """Shares of the last answers whose bucket was predicted correctly; None if unknown."""

    classifier: float | None = None
    commonest: float | None = None
    prompt_length: float | None = None


class Reality(msgspec.Struct, frozen=True):
    """How the classifier's predictions turned out. recent: predicted and actual tokens of an answer, newest last."""

    answers: int = 0
    accuracy: RollingAccuracy = RollingAccuracy()
    mean_error_tokens: float | None = None
    recent: list[tuple[float, float]] = []


class LengthSource(msgspec.Struct, frozen=True):
    """source: classifier or observed. why: the reason when the classifier is not used. fallbacks: predictions that
    observed lengths made in the classifier's place, by cause.
    """

    source: str
    checkpoint: CheckpointStatus
    observed: ObservedStatus = ObservedStatus()
    why: str = ""
    reality: Reality = Reality()
    fallbacks: dict[str, int] = {}

    @property
    def fallen_back(self) -> bool:
        """Whether observed lengths are used although there is a checkpoint."""
        return self.source != CLASSIFIER and (bool(self.why) or self.checkpoint.state in ("loaded", "broken"))


class FleetInstance(msgspec.Struct, frozen=True):
    """An instance as the planner counts it. load: share of its capacity, 0..1."""

    instance_id: str
    role: Role
    state: str = "ready"
    accelerator: str = ""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    load: float | None = None

    @property
    def lost(self) -> bool:
        return self.state in LOST_STATES


class PlanRoute(msgspec.Struct, frozen=True):
    """A pair and its share of the requests; without `prefill` the decode instance computes the prompts."""

    decode: str
    prefill: str | None = None
    share: float = 0.0


class Figures(msgspec.Struct, frozen=True):
    """Figures of a cluster at `rate` requests a second. goodput: the highest rate within the SLO. Expected and promised
    latencies are means, measured ones medians.
    """

    rate: float | None = None
    goodput: float | None = None
    attainment: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None


class Measured(Figures, frozen=True):
    """Of the running cluster over the last `window_s`."""

    ttft_s: float | None = msgspec.field(default=None, name="ttft_p50_s")
    tpot_s: float | None = msgspec.field(default=None, name="tpot_p50_s")
    requests: int = 0
    window_s: float = 0.0


class Promise(Figures, frozen=True):
    """Expected by the search that made the plan."""

    ttft_s: float | None = msgspec.field(default=None, name="ttft_mean_s")
    tpot_s: float | None = msgspec.field(default=None, name="tpot_mean_s")
    usd_per_million_tokens: float | None = None
    usd_per_hour: float | None = None


class PlannedDemand(msgspec.Struct, frozen=True):
    """The demand that the planner plans for; tokens are means."""

    rate: float | None = None
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None


class Fleet(msgspec.Struct, frozen=True):
    """The running cluster and its plan. trouble: why nothing can be proposed."""

    instances: list[FleetInstance]
    trouble: str = ""
    auto: bool = False
    routes: list[PlanRoute] = []
    routes_in_force: bool = False
    placement: str = ""
    demand: PlannedDemand | None = None
    expected: Figures | None = None
    measured: Measured | None = None
    promise: Promise | None = None


class RoleChange(msgspec.Struct, frozen=True):
    instance_id: str
    from_role: str
    to_role: str


class ProposalStep(msgspec.Struct, frozen=True):
    at_s: float
    what: str
    ok: bool = True
    text: str = ""


class Proposal(msgspec.Struct, frozen=True):
    """state: open, applying, applied, failed, refused or withdrawn. now, then: expected figures before and after.
    took_s: how long the planner computed.
    """

    proposal_id: str
    state: str
    made_s: float
    cause: str = ""
    why: str = ""
    took_s: float | None = None
    flips: list[RoleChange] = []
    routes: list[PlanRoute] = []
    changes_routes: bool = False
    now: Figures | None = None
    then: Figures | None = None
    decided_s: float | None = None
    who: str = ""
    steps: list[ProposalStep] = []
    error: str = ""


class BestFlips(msgspec.Struct, frozen=True):
    """The flips that would serve a changed cluster best, and the figures with them."""

    flips: list[RoleChange] = []
    expected: Figures | None = None


class WhatIf(msgspec.Struct, frozen=True):
    """Expected figures now, after the change with the present roles, and with the best flips. why: a remark."""

    now: Figures | None = None
    then: Figures | None = None
    best: BestFlips | None = None
    why: str = ""


class SearchProgress(msgspec.Struct, frozen=True):
    what: str = ""
    best_goodput: float | None = None
    elapsed_s: float | None = None


class PlanGroup(msgspec.Struct, frozen=True):
    """One instance of a plan."""

    name: str
    role: str
    accelerators: str = ""
    layout: str = ""
    price_usd_hour: float | None = None


class MethodGoodput(msgspec.Struct, frozen=True):
    method: str
    goodput: float | None = None


class SearchResult(msgspec.Struct, frozen=True):
    """The plan of a search. cluster_file: only in the answer for a single search."""

    method: str = ""
    groups: list[PlanGroup] = []
    routes: list[PlanRoute] = []
    policies: str = ""
    promise: Promise = Promise()
    compared: list[MethodGoodput] = []
    cluster_file: str = ""


class PlanSearch(msgspec.Struct, frozen=True):
    """A search for a plan. state: waiting, running, done, cancelled or failed."""

    plan_id: str
    state: str
    submitted_s: float
    who: str = ""
    ended_s: float | None = None
    progress: SearchProgress | None = None
    result: SearchResult | None = None
    error: str = ""

    @property
    def ended(self) -> bool:
        return self.state not in ("waiting", "running")


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[T]):
    """A GET request of a service and the type of its answer. path: may contain `{id}`."""

    service: str
    path: str
    answer: type[T]


VERDICT = Endpoint("monitor", "/verdict", Verdict)
CLUSTER = Endpoint("monitor", "/cluster", ClusterSummary)
INSTANCES = Endpoint("monitor", "/instances", list[InstanceRow])
HISTORY = Endpoint("monitor", "/history", History)
INSTANCE_HISTORY = Endpoint("monitor", "/history/instances", InstanceHistory)
DETAILS = Endpoint("monitor", "/instances/{id}/details", dict[str, Any])  # the fields depend on the instance
LOG = Endpoint("monitor", "/instances/{id}/log", LogTail)
OPERATIONS = Endpoint("monitor", "/flips", list[Operation])
OPERATION = Endpoint("monitor", "/operations/{id}", Operation)
EVENTS = Endpoint("monitor", "/events", list[Event])
POLICIES = Endpoint("monitor", "/policies", PoliciesInForce)
DEMAND = Endpoint("monitor", "/demand", DemandAnswer)
REQUEST_SEARCH = Endpoint("scheduler", "/requests/search", SearchPage)
RECENT_REQUESTS = Endpoint("scheduler", "/requests", list[JobReport])
REQUEST = Endpoint("scheduler", "/requests/{id}", JobReport)
TIMELINE = Endpoint("scheduler", "/requests/{id}/timeline", RequestTimeline)
SCHEDULER_HEALTH: Endpoint[Any] = Endpoint("scheduler", "/health", Any)
GATEWAY_HEALTH: Endpoint[Any] = Endpoint("gateway", "/health", Any)
LENGTH_SOURCE = Endpoint("predictor", "/v1/model", LengthSource)
FLEET = Endpoint("planner", "/fleet", Fleet)
PROPOSALS = Endpoint("planner", "/proposals", list[Proposal])
PLAN_SEARCHES = Endpoint("planner", "/plans", list[PlanSearch])
PLAN_SEARCH = Endpoint("planner", "/plans/{id}", PlanSearch)

_WAITING, _DELAYED, _REFUSED = "polyphase_gateway_delayed_jobs", "polyphase_delayed_total", "polyphase_refused_total"
_OVERLOAD = (Busy.code, Overloaded.code)


class ClassLoad(msgspec.Struct, frozen=True):
    """One SLO class at the gateway: requests that wait for those of heavier classes; since its processes started, the
    requests that had to wait and those refused because of overload.
    """

    slo: str
    waiting: int = 0
    delayed: int = 0
    refused: int = 0


def class_loads(*metrics: str) -> list[ClassLoad]:
    """The sums over the texts of `GET /metrics` of all gateway processes, for classes with any count."""
    names = (_WAITING, _DELAYED, _REFUSED)
    lines = (line for text in metrics for line in text.splitlines() if line.startswith(names))
    counts: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(names, 0))
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            if sample.name != _REFUSED or sample.labels["cause"] in _OVERLOAD:
                counts[sample.labels["slo"]][sample.name] += int(sample.value)
    return [ClassLoad(slo, *counts[slo].values()) for slo in sorted(counts)]
