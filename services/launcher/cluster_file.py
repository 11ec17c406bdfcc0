"""The cluster file: one YAML file that says what runs where. Strict: errors name the file and the key."""

from collections import Counter
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gateway.settings import GatewaySettings
from predictor.settings import PredictorSettings
from services.cluster_monitor.settings import MonitorSettings
from services.global_scheduler.settings import SchedulerSettings
from services.launcher.model_source import resolve_model, resolve_path
from services.planner.settings import PlannerSettings
from services.worker.settings import WorkerSettings
from shared.cost.network_file import NetworkEntry
from shared.domain.instance import Role
from shared.domain.kv import Codec
from shared.domain.policies import KINDS
from shared.errors import InvalidRequest
from shared.runtime.settings import ServiceSettings

LOCAL = "local"
CLUSTERS = Path(__file__).parent / "clusters"
_MOVED = frozenset(  # from the sections into `policies`: they are one for the cluster
    kind + suffix for kind in KINDS for suffix in ("", "_parameters")
)
_COMMON = frozenset({"curve_public", "curve_secret", "monitor_url", "broadcast_address", "database_url", "model"})


class Section(BaseModel):
    """One process's part of the file: our keys, and any setting of it that the launcher does not derive."""

    model_config = ConfigDict(frozen=True, extra="allow")
    settings: ClassVar[type[ServiceSettings]] = ServiceSettings
    derived: ClassVar[frozenset[str]] = frozenset()  # settings that follow from the rest of the file

    enabled: bool = True
    env: dict[str, str] = {}  # further environment of the process

    @model_validator(mode="after")
    def _known_keys(self) -> Self:
        ours = set(type(self).model_fields)
        choices = (set(self.settings.model_fields) - self.derived - _COMMON) | ours
        for key in self.extra:
            if key in _MOVED:
                kind = key.removesuffix("_parameters")
                raise ValueError(f"{key!r} belongs to the whole cluster: write `policies: {{{kind}: …}}` at the top")
            if key not in choices:
                raise ValueError(f"unknown key {key!r}; known: {', '.join(sorted(choices))}")
        return self

    @property
    def extra(self) -> dict[str, Any]:
        """The settings of the process that the file gives."""
        return self.model_extra or {}


class LauncherSection(BaseModel):
    """How patient `polyphase up` is with its processes, in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    start_s: float = Field(300.0, gt=0)  # the longest a process may take to become healthy
    hang_s: float = Field(6.0, ge=0)  # so long without a healthy answer it is killed and started again; 0: never


class GatewaySection(Section):
    """The API. `extra`: GatewaySettings."""

    settings = GatewaySettings
    derived = frozenset(
        {"schedulers", "served_model_name", "max_model_len", "gateway_id", "predictors"}
        | {"process", "own_port", "shared_table"}
    )

    host: str = ""  # default: the address of the control host
    port: int = Field(8000, gt=0, lt=65536)
    processes: int = Field(1, gt=0, le=16)  # that listen on it together

    @property
    def names(self) -> tuple[str, ...]:
        """The processes that this section stands for."""
        return _numbered("gateway", self.processes) if self.enabled else ()

    @property
    def lossy_kv(self) -> bool:
        """Whether KV of any request may be sent with a lossy codec."""
        classes = self.extra.get("slo") or {}
        named = [each.get("lossy_kv") for each in classes.values() if isinstance(each, dict)]
        return any(codec.lossy and codec in (self.extra.get("kv_codec"), *named) for codec in Codec)


class SchedulerSection(Section):
    """The global schedulers, all alike. `extra`: SchedulerSettings."""

    settings = SchedulerSettings
    derived = frozenset({"scheduler_id", "http_host", "http_port", "rpc_address", "predictor_urls"})

    count: int = Field(1, gt=0, le=16)

    @property
    def names(self) -> tuple[str, ...]:
        """The processes that this section stands for."""
        return _numbered("scheduler", self.count)


class MonitorSection(Section):
    """The cluster monitor. `extra`: MonitorSettings."""

    settings = MonitorSettings
    derived = frozenset({"monitor_id", "http_host", "http_port", "heartbeat_address", "policies"})


class PredictorSection(Section):
    """The length predictors, all alike. `extra`: PredictorSettings."""

    settings = PredictorSettings
    derived = frozenset({"host", "port", "rpc_address"})

    count: int = Field(1, gt=0, le=16)

    @property
    def names(self) -> tuple[str, ...]:
        """The processes that this section stands for."""
        return _numbered("predictor", self.count) if self.enabled else ()


class PlannerSection(Section):
    """The planner. `extra`: PlannerSettings."""

    settings = PlannerSettings
    derived = frozenset({"http_host", "http_port"})


class DashboardSection(BaseModel):
    """The web page."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = True
    port: int = Field(8501, gt=0, lt=65536)
    env: dict[str, str] = {}


class InstanceSection(Section):
    """One instance, or `count` alike ones, named id-0, id-1, … `extra`: WorkerSettings."""

    settings = WorkerSettings
    derived = frozenset(
        {"instance_id", "rpc_port", "http_port", "kv_port", "heartbeat_address", "emulated_links", "lossy_kv"}
    )

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    role: Role
    host: str = ""  # a name of `hosts`; default: the control host
    count: int = Field(1, gt=0, le=1024)

    @property
    def ids(self) -> tuple[str, ...]:
        """The instances that this entry stands for."""
        return _numbered(self.id, self.count)


class Cluster(BaseModel):
    """The whole file."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    name: str
    model: str  # a folder or a Hugging Face name
    served_model_name: str = ""
    max_model_len: int = Field(2048, gt=0)
    database_url: str = ""  # default: SQLite in the data folder
    curve_public: str = ""
    curve_secret: str = ""
    ports: int = Field(18100, gt=1023, lt=65536)  # the first of the suite's own ports
    hosts: dict[str, str] = {}  # name → address, where there is more than this machine
    control: str = ""  # the host of everything but the instances

    network: NetworkEntry | None = None  # between the `node`s of instances: for emulated engines and the simulator
    policies: dict[str, Any] = {}  # the monitor's: see `shared.policy.written.from_file`
    launcher: LauncherSection = LauncherSection()
    gateway: GatewaySection = GatewaySection()
    scheduler: SchedulerSection = SchedulerSection()
    monitor: MonitorSection = MonitorSection()
    predictor: PredictorSection = PredictorSection()
    planner: PlannerSection = PlannerSection()
    dashboard: DashboardSection = DashboardSection()
    instance_defaults: dict[str, Any] = {}
    instances: tuple[InstanceSection, ...] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _apply_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("instances"), list):
            return data
        defaults = data.get("instance_defaults") or {}
        merged = [{**defaults, **entry} if isinstance(entry, dict) else entry for entry in data["instances"]]
        return {**data, "instances": merged}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name, count in Counter(self.instance_ids).items():
            if count > 1:
                raise ValueError(f"instances: the id {name!r} is used twice")
        known = ", ".join(self.hosts) or "none"
        for entry in self.instances:
            if entry.host and entry.host not in self.hosts:
                raise ValueError(f"instances: {entry.id}: host {entry.host!r} is not in `hosts` (known: {known})")
            if entry.extra.get("node") and self.network is None:
                raise ValueError(f"instances: {entry.id}: node: the file has no `network`")
        if self.hosts and self.control not in self.hosts:
            raise ValueError(f"control: must name the control plane's host, one of `hosts` ({known})")
        if bool(self.curve_public) != bool(self.curve_secret):
            raise ValueError("curve_public, curve_secret: both or none; `polyphase keys curve` makes a pair")
        if len(self.hosts) > 1 and not self.curve_public:
            raise ValueError("curve_public: needed between hosts; `polyphase keys curve` makes a pair")
        return self

    @property
    def instance_ids(self) -> tuple[str, ...]:
        """All of them, in the order of the file."""
        return tuple(name for entry in self.instances for name in entry.ids)


def load_cluster(file: Path) -> Cluster:
    """Read a cluster file; a bare name means one of those shipped. Raises InvalidRequest."""
    if not file.exists() and (CLUSTERS / f"{file}.yaml").exists():
        file = CLUSTERS / f"{file}.yaml"
    try:
        data = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise InvalidRequest(f"{file}: {error}") from error
    if not isinstance(data, dict):
        raise InvalidRequest(f"{file}: expected a mapping of keys at the top")
    try:
        cluster = Cluster.model_validate(data)
    except ValidationError as error:
        raise InvalidRequest(describe(file, error)) from error
    changes: dict[str, Any] = {"model": resolve_model(cluster.model, file.parent)}
    if checkpoint := cluster.predictor.extra.get("checkpoint"):
        found = resolve_path(Path(checkpoint), file.parent)
        changes["predictor"] = cluster.predictor.model_copy(update={"checkpoint": str(found)})
    return cluster.model_copy(update=changes)


def _numbered(name: str, count: int) -> tuple[str, ...]:
    return (name,) if count == 1 else tuple(f"{name}-{index}" for index in range(count))


def describe(where: object, error: ValidationError, at: str = "") -> str:
    """All faults, one a line, each with the file and the key."""
    lines = []
    for fault in error.errors():
        key = ".".join(str(part) for part in (*([at] if at else []), *fault["loc"]))
        lines.append(f"{where}: {key + ': ' if key else ''}{fault['msg'].removeprefix('Value error, ')}")
    return "\n".join(lines)
