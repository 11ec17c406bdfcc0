"""Answers of the monitor's HTTP API. Operations, events and outcomes, which other services report too, are in
`shared.wire.api`.

Times are unix seconds.
"""

from typing import Any

from msgspec import Struct, structs

from shared.domain.demand import AskedSecond, Demand, RolesWanted
from shared.domain.instance import Compatibility, InstanceInfo, InstanceLoad, InstanceState, Promised, Role
from shared.domain.route import PolicySpec
from shared.domain.slo import SloReport
from shared.wire.api import NoticedShift

EMULATED = "emulated"
Column = list[float | None]


class PromisedByName(Promised, frozen=True, array_like=False):
    """A promised decode by field names."""


class LoadByName(InstanceLoad, frozen=True, array_like=False):
    """A load by field names, as HTTP answers have it; on the other wires it is a list."""

    promised: tuple[PromisedByName, ...] = ()

    @classmethod
    def from_load(cls, load: InstanceLoad) -> "LoadByName":
        promised = tuple(PromisedByName(**structs.asdict(each)) for each in load.promised)
        return cls(**{**structs.asdict(load), "promised": promised})


class Registered(Struct, frozen=True):
    """The answer to a registration."""

    instance_id: str
    state: InstanceState


class InstanceRow(Struct, frozen=True):
    """One instance. operation: the flip, drain or resume that runs; death: why it is dead.

    connected: whether the monitor's RPC connection to it stands.
    """

    instance_id: str
    role: Role
    state: InstanceState
    state_since_s: float
    registered_s: float
    operation: str
    death: str
    connected: bool
    info: InstanceInfo
    load: LoadByName

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


class ClusterSummary(Struct, frozen=True):
    """A summary of the cluster.

    compatibility: of the instances; None without a living one. instances: counts by role and state. known: by role,
    dead ones included. totals: sums over the loads of living instances. operations: those that run, by instance.
    """

    time_s: float
    sequence: int
    model: str
    compatibility: Compatibility | None
    instances: dict[str, dict[str, int]]
    known: dict[str, int]
    totals: dict[str, int]
    operations: dict[str, str]
    slo: list[SloReport]

    def ready(self, role: Role) -> int:
        return self.instances.get(role.value, {}).get(InstanceState.READY.value, 0)


class NewsAccepted(Struct, frozen=True):
    """How many outcomes and seconds of demand were new."""

    outcomes: int = 0
    demand: int = 0


class DemandAnswer(Struct, frozen=True):
    """The demand profile, its last seconds and shifts, and the roles that would serve it best."""

    demand: Demand | None = None
    seconds: list[AskedSecond] = []
    shifts: list[NoticedShift] = []
    roles: RolesWanted | None = None


class PolicyChange(Struct, frozen=True):
    who: str
    since_s: float


class PolicyChoice(Struct, frozen=True):
    """The policy of one kind that is in force; `file`: the one of the cluster file. changed: None for the file's."""

    name: str
    parameters: dict[str, Any] = {}
    file: PolicySpec | None = None
    changed: PolicyChange | None = None

    @property
    def spec(self) -> PolicySpec:
        return PolicySpec(self.name, self.parameters)


class PolicyFollower(Struct, frozen=True):
    """A scheduler or an instance, and whether it uses the policies in force."""

    process: str
    name: str
    revision: int
    follows: bool
    trouble: str = ""


class PoliciesInForce(Struct, frozen=True):
    """By kind of policy. trouble: why earlier changes are not known. choices: the policies of each kind, and the
    parameters of each.
    """

    revision: int
    trouble: str
    policies: dict[str, PolicyChoice]
    choices: dict[str, dict[str, tuple[str, ...]]]
    followers: list[PolicyFollower]


class AdapterRow(Struct, frozen=True):
    """An adapter that was loaded at run time. instances: that serve it. trouble: by instance, why it does not."""

    name: str
    path: str
    digest: str
    who: str
    since_s: float
    instances: list[str]
    trouble: dict[str, str] = {}


class AdapterFollower(Struct, frozen=True):
    """A gateway, whether it serves the adapters in force, and keys of those that its requests have."""

    gateway_id: str
    revision: int
    follows: bool
    in_use: tuple[str, ...] = ()


class AdaptersInForce(Struct, frozen=True):
    """The adapters that were loaded at run time. trouble: why they are not known."""

    revision: int
    trouble: str
    adapters: list[AdapterRow]
    gateways: list[AdapterFollower]


class Mark(Struct, frozen=True):
    """An event or a flip that charts of the history show. kind: of an event, or "flip"."""

    time_s: float
    kind: str
    instance_id: str
    text: str


class History(Struct, frozen=True):
    """Series of the cluster, point by point of `step_s` seconds. classes, class_targets: those of each SLO class.

    targets: of the class with the most requests.
    """

    from_s: int
    to_s: int
    step_s: int
    time_s: list[int]
    series: dict[str, Column]
    targets: dict[str, float | None]
    classes: dict[str, dict[str, Column]]
    class_targets: dict[str, dict[str, float | None]]
    marks: list[Mark]

    def for_class(self, slo: str) -> "History":
        """The same with the series of one class where there are any; unchanged for an unknown class."""
        if slo not in self.classes:
            return self
        series = {**self.series, **self.classes[slo]}
        return structs.replace(self, series=series, targets=self.class_targets.get(slo, {}))


class InstanceColumns(Struct, frozen=True):
    """The history of one instance; None where nothing is known."""

    role: list[str | None] = []
    state: list[str | None] = []
    kv_used: Column = []
    running: Column = []
    waiting: Column = []
    queued_prefill_tokens: Column = []
    inflight: Column = []
    staged_bytes: Column = []


class InstanceHistory(Struct, frozen=True):
    """Series of each instance, point by point of `step_s` seconds."""

    from_s: int
    to_s: int
    step_s: int
    time_s: list[int]
    instances: dict[str, InstanceColumns]
