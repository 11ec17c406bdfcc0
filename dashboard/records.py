"""The types of the services' answers: current state, time series, found requests, and the per-class counts read
from the gateways' metrics. Fields that the pages do not use are ignored.
"""

from collections import defaultdict
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from shared.domain.demand import AskedSecond, Demand, RolesWanted, Shift
from shared.domain.instance import InstanceInfo, InstanceLoad, InstanceState, Role
from shared.domain.route import PolicySpec
from shared.domain.slo import SloReport
from shared.errors import Busy, Overloaded
from shared.wire.messages import JobReport

EMULATED = "emulated"
CLASSIFIER = "classifier"  # source of predicted lengths


class Load(InstanceLoad, frozen=True, array_like=False):
    """A load as HTTP tells it, by names."""


class InstanceRow(msgspec.Struct, frozen=True):
    """One item of the monitor's `GET /instances`."""

    instance_id: str
    role: Role
    state: InstanceState
    info: InstanceInfo
    load: Load = Load()
    state_since_s: float = 0.0  # unix seconds
    registered_s: float = 0.0
    operation: str = ""  # the flip, drain or resume under way
    death: str = ""  # why it is dead

    @property
    def emulated(self) -> bool:
        """Whether no model runs there."""
        return self.info.compatibility.engine == EMULATED

    @property
    def operable(self) -> bool:
        """Whether the monitor would take an action on it at all."""
        return self.state in (InstanceState.READY, InstanceState.DRAINING) and not self.operation

    @property
    def kv_usage(self) -> float | None:
        """Share of the KV blocks in use, 0..1; None before its first load report."""
        if not self.load.time_s or self.info.total_blocks <= 0:
            return None
        return min(1.0, max(0.0, 1.0 - self.load.free_blocks / self.info.total_blocks))


class ClusterSummary(msgspec.Struct, frozen=True):
    """The monitor's `GET /cluster`."""

    model: str = ""
    instances: dict[str, dict[str, int]] = {}  # role -> state -> how many
    totals: dict[str, int] = {}  # of the instances that are not dead
    slo: list[SloReport] = []

    def count(self, role: Role, state: InstanceState | None = None) -> int:
        """Instances of that role, in that state or in any: a dead one is missing, not gone."""
        states = self.instances.get(role.value, {})
        return sum(states.values()) if state is None else states.get(state.value, 0)


class ShiftSeen(Shift, frozen=True, kw_only=True):
    """A shift of what clients ask for, and when it was noticed (unix seconds)."""

    at_s: float


class DemandSeen(msgspec.Struct, frozen=True):
    """The monitor's `GET /demand`: the profile, its last minutes, and the roles that would serve it best."""

    demand: Demand | None = None
    seconds: list[AskedSecond] = []
    shifts: list[ShiftSeen] = []
    roles: RolesWanted | None = None


class AuditEntry(msgspec.Struct, frozen=True):
    """One item of the monitor's `GET /flips`, and its answer to a drain, resume or flip."""

    operation_id: str
    kind: str  # "flip", "drain", "resume"
    instance_id: str
    from_role: str
    to_role: str
    who: str
    started_s: float
    result: str  # "running", "succeeded", "failed"
    drain_s: float | None = None
    flip_s: float | None = None
    total_s: float | None = None
    error: str = ""
    why: str | None = None  # the reasons, where a policy asked


class EventRow(msgspec.Struct, frozen=True):
    """One item of the monitor's `GET /events`."""

    time_s: float
    kind: str
    text: str
    instance_id: str = ""
    role: str = ""
    operation_id: str = ""
    job_id: str = ""


class PolicyChange(msgspec.Struct, frozen=True):
    """Who chose a policy in place of the cluster file's."""

    who: str
    since_s: float


class PolicyChoice(msgspec.Struct, frozen=True):
    """A policy by name, with its parameters."""

    name: str
    parameters: dict[str, Any] = {}
    changed: PolicyChange | None = None
    file: PolicySpec | None = None  # what the cluster file says


class PolicyFollower(msgspec.Struct, frozen=True):
    """A scheduler or an instance, and whether it goes by the policies in force."""

    process: str
    name: str
    follows: bool
    trouble: str = ""


class PoliciesInForce(msgspec.Struct, frozen=True):
    """The monitor's `GET /policies`; by kind."""

    policies: dict[str, PolicyChoice]
    followers: list[PolicyFollower] = []
    choices: dict[str, dict[str, list[str]]] = {}  # of each kind the policies, and the parameters of each
    revision: int = 0
    trouble: str = ""


class CheckpointStatus(msgspec.Struct, frozen=True):
    """What the predictor says of its checkpoint."""

    state: str
    error: str | None = None
    path: str | None = None


class ObservedStatus(msgspec.Struct, frozen=True):
    """What the predictor learnt from finished answers."""

    observations: int = 0
    accuracy: float | None = None


class RollingAccuracy(msgspec.Struct, frozen=True):
    """Shares of the last answers whose bucket was predicted correctly; None if unknown."""

    classifier: float | None = None
    commonest: float | None = None
    prompt_length: float | None = None


class Reality(msgspec.Struct, frozen=True):
    """What became of the classifier's predictions. recent: expected and true tokens of an answer, the newest last."""

    model: str = ""
    answers: int = 0
    accuracy: RollingAccuracy = RollingAccuracy()
    mean_error_tokens: float | None = None
    believed: bool = True
    recent: list[tuple[float, float]] = []


class LengthSource(msgspec.Struct, frozen=True):
    """The predictor's `GET /v1/model`. why: the classifier is not believed; fallbacks: answers without it, by cause."""

    source: str  # "classifier" or "observed"
    checkpoint: CheckpointStatus
    observed: ObservedStatus = ObservedStatus()
    why: str = ""
    reality: Reality = Reality()
    fallbacks: dict[str, int] = {}

    @property
    def fallen_back(self) -> bool:
        """Whether there is a classifier that is not to answer, or a checkpoint that should have brought one."""
        return self.source != CLASSIFIER and (bool(self.why) or self.checkpoint.state in ("loaded", "broken"))


Column = list[float | None]
RANGES = {"5 min": 5, "15 min": 15, "1 h": 60, "6 h": 360, "24 h": 1440}  # minutes
POINTS = 120


class Mark(msgspec.Struct, frozen=True):
    """A moment at which something happened."""

    time_s: float
    kind: str
    text: str
    instance_id: str = ""


class History(msgspec.Struct, frozen=True):
    """The monitor's `GET /history`. Times are unix seconds; `classes`: the columns of each SLO class."""

    from_s: float
    to_s: float
    step_s: float
    time_s: list[float]
    series: dict[str, Column]
    targets: dict[str, float | None] = {}
    classes: dict[str, dict[str, Column]] = {}
    class_targets: dict[str, dict[str, float | None]] = {}
    marks: list[Mark] = []

    def of(self, slo: str) -> "History":
        """The same with what one class had in place of all; of all for a class that is not known."""
        if slo not in self.classes:
            return self
        series = {**self.series, **self.classes[slo]}
        return msgspec.structs.replace(self, series=series, targets=self.class_targets.get(slo, {}))


class InstanceColumns(msgspec.Struct, frozen=True):
    """One instance over time."""

    role: list[str | None] = []
    state: list[str | None] = []
    kv_used: Column = []
    running: Column = []
    waiting: Column = []
    queued_prefill_tokens: Column = []
    inflight: Column = []
    staged_bytes: Column = []


class InstanceHistory(msgspec.Struct, frozen=True):
    """The monitor's `GET /history/instances`."""

    from_s: float
    to_s: float
    step_s: float
    time_s: list[float]
    instances: dict[str, InstanceColumns]


class LogTail(msgspec.Struct, frozen=True):
    """The last lines of an instance's log."""

    lines: list[str] = []


class FoundRow(JobReport):
    """A request as a search finds it. caller: the name of the key that asked, empty without one."""

    caller: str = ""


class Found(msgspec.Struct, frozen=True):
    """The scheduler's `GET /requests/search`; `more`: there are others beyond these."""

    rows: list[FoundRow]
    more: bool = False


_WAITING, _DELAYED, _REFUSED = "polyphase_gateway_delayed_jobs", "polyphase_delayed_total", "polyphase_refused_total"
_FOR_LOAD = (Busy.code, Overloaded.code)


class ClassLoad(msgspec.Struct, frozen=True):
    """One SLO class at the gateway: jobs that wait there now for heavier classes, and since its processes started those
    that had to and those that were refused for load.
    """

    slo: str
    waiting: int = 0
    delayed: int = 0
    refused: int = 0


def class_loads(*metrics: str) -> list[ClassLoad]:
    """Of the texts of `GET /metrics` of every process, by name; only classes of which something was counted."""
    told = (line for text in metrics for line in text.splitlines())
    lines = (line for line in told if line.startswith((_WAITING, _DELAYED, _REFUSED)))
    counts: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys((_WAITING, _DELAYED, _REFUSED), 0))
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            if sample.name != _REFUSED or sample.labels["cause"] in _FOR_LOAD:
                counts[sample.labels["slo"]][sample.name] += int(sample.value)
    return [ClassLoad(slo, *counts[slo].values()) for slo in sorted(counts)]
