"""The cluster file: one YAML file that defines the processes of all hosts. Errors name file, line and key."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from gateway.settings import GatewaySettings
from predictor.settings import PredictorSettings
from services.cluster_monitor.settings import MonitorSettings
from services.global_scheduler.settings import SchedulerSettings
from services.launcher.model_source import resolve_model, resolve_path, shipped_or_own
from services.planner.settings import PlannerSettings
from services.worker.settings import WorkerSettings
from shared.cost.network import NetworkEntry
from shared.domain.instance import Role
from shared.domain.kv import Codec
from shared.domain.numbers import infinite_in
from shared.domain.policies import KINDS
from shared.errors import InvalidRequest
from shared.files.faults import describe, meant, unknown
from shared.files.places import Places
from shared.files.yaml_file import read_document
from shared.runtime.keys import checked
from shared.runtime.settings import ServiceSettings, Tracing

LOCAL = "local"
CLUSTERS = Path(__file__).parent / "clusters"
_MOVED = frozenset(  # keys of `policies`, since policies hold for the whole cluster
    kind + suffix for kind in KINDS for suffix in ("", "_parameters")
)
_AT_THE_TOP = frozenset({"curve_public", "curve_secret", "cluster_token", "database_url", "model"})
COMMON = _AT_THE_TOP | {"monitor_url", "broadcast_address", "cluster_token_file", "curve_file"}


class Section(BaseModel):
    """The section of a process: our keys, and the settings of the process that the launcher does not derive."""

    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="allow")
    settings: ClassVar[type[ServiceSettings]] = ServiceSettings
    derived: ClassVar[frozenset[str]] = frozenset()  # settings that follow from the rest of the file

    enabled: bool = True
    env: dict[str, str] = Field({}, repr=False)  # further environment of the process

    @model_validator(mode="after")
    def _known_keys(self) -> Self:
        faults = [f"{key}: {fault}" for key in self.extra if (fault := self._fault_of(key))]
        if faults:
            raise ValueError("\n".join(faults))
        return self

    def _fault_of(self, key: str) -> str:
        """Why a key is not allowed here; empty if it is."""
        choices = (set(self.settings.model_fields) - self.derived - COMMON) | set(type(self).model_fields)
        if key in _MOVED:
            kind = key.removesuffix("_parameters")
            return f"it belongs to the whole cluster: write `policies: {{{kind}: …}}` at the top"
        if key in choices:
            return ""
        if key in _AT_THE_TOP:
            return "it belongs to the whole cluster: write it at the top of the file"
        if key in self.settings.model_fields:
            return "it is derived from the rest of the file: leave it out"
        return unknown("key", key, choices)

    @property
    def extra(self) -> dict[str, Any]:
        """The settings of the process that the file gives."""
        return self.model_extra or {}


class LauncherSection(BaseModel):
    """Time limits of `polyphase up` for its processes, in seconds."""

    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="forbid")

    # Until a process is healthy; None: 300, and more for an instance, see `plan.start_s_of`.
    start_s: float | None = Field(None, gt=0)
    hang_s: float = Field(6.0, ge=0)  # a process without a healthy answer for so long is killed and restarted; 0: never


class GatewaySection(Section):
    """The API. `extra`: GatewaySettings."""

    settings = GatewaySettings
    derived = frozenset(
        {"schedulers", "served_model_name", "max_model_len", "gateway_id", "predictors", "predictors_beside"}
        | {"process", "own_port", "shared_table"}
    )

    host: str = ""  # default: the address of the control host
    port: int = Field(8000, gt=0, lt=65536)
    processes: int = Field(1, gt=0, le=16)  # that share the port

    @property
    def names(self) -> tuple[str, ...]:
        return _numbered("gateway", self.processes) if self.enabled else ()

    @property
    def lossy_kv(self) -> bool:
        """Whether any request may use a lossy KV codec."""
        classes = self.extra.get("slo")
        rows = classes.values() if isinstance(classes, dict) else ()
        named = [each.get("lossy_kv") for each in rows if isinstance(each, dict)]
        return any(codec.lossy and codec in (self.extra.get("kv_codec"), *named) for codec in Codec)


class SchedulerSection(Section):
    """The global schedulers, all alike. `extra`: SchedulerSettings."""

    settings = SchedulerSettings
    derived = frozenset({"scheduler_id", "http_host", "http_port", "rpc_address", "predictor_urls"})

    count: int = Field(1, gt=0, le=16)

    @property
    def names(self) -> tuple[str, ...]:
        return _numbered("scheduler", self.count)


class MonitorSection(Section):
    """The cluster monitor. `extra`: MonitorSettings."""

    settings = MonitorSettings
    derived = frozenset(
        {"monitor_id", "http_host", "http_port", "heartbeat_address", "policies", "expected_instances"}
    ) | {"advertise_url", "scrape"}


class PredictorSection(Section):
    """The length predictors, all alike: `count` of them on the control host, or one beside each instance.
    `extra`: PredictorSettings.
    """

    settings = PredictorSettings
    derived = frozenset({"host", "port", "rpc_address"})

    count: int = Field(1, gt=0, le=16)
    beside: Literal["prefill"] | None = None  # each request is predicted beside its prefill instance

    @model_validator(mode="after")
    def _counted_or_beside(self) -> Self:
        if self.beside and self.count != 1:
            raise ValueError(f"count: with `beside` each instance has one predictor: leave count ({self.count}) out")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The processes on the control host."""
        return _numbered("predictor", self.count) if self.enabled and not self.beside else ()

    @staticmethod
    def name_beside(instance_id: str) -> str:
        return f"predictor-{instance_id}"


class PlannerSection(Section):
    """The planner. `extra`: PlannerSettings."""

    settings = PlannerSettings
    derived = frozenset({"http_host", "http_port"})


class DashboardSection(BaseModel):
    """The web page."""

    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="forbid")

    enabled: bool = True
    port: int = Field(8501, gt=0, lt=65536)
    login: bool = False  # with those keys of `gateway.api_keys_file` that have a role
    env: dict[str, str] = Field({}, repr=False)


class InstanceSection(Section):
    """One instance, or `count` identical ones named id-0, id-1, … `extra`: WorkerSettings."""

    settings = WorkerSettings
    derived = frozenset(
        {"instance_id", "rpc_port", "http_port", "kv_port", "heartbeat_address", "emulated_links", "lossy_kv"}
    )

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    role: Role
    host: str = ""  # a name of `hosts`; default: the control host
    count: int = Field(1, gt=0, le=1024)
    # Numbers of the devices of its host; empty: the next free ones. See `devices`.
    devices: tuple[Annotated[int, Field(ge=0, strict=True)], ...] = ()
    resources: dict[
        str, float
    ] = {}  # with --on ray: resources that its Ray node must have besides CPUs and accelerators

    @field_validator("devices")
    @classmethod
    def _each_once(cls, given: tuple[int, ...]) -> tuple[int, ...]:
        if twice := [number for number in given if given.count(number) > 1]:
            raise ValueError(f"device {twice[0]} is named twice")
        return given

    @property
    def ids(self) -> tuple[str, ...]:
        return _numbered(self.id, self.count)


def with_defaults(data: Any) -> Any:
    """The content of a file, with its `instance_defaults` merged into each of its `instances`."""
    if not isinstance(data, dict) or not isinstance(data.get("instances"), list):
        return data
    defaults = data.get("instance_defaults")
    if not isinstance(defaults, dict):
        return data
    merged = [{**defaults, **entry} if isinstance(entry, dict) else entry for entry in data["instances"]]
    return {**data, "instances": merged}


def _numbered(name: str, count: int) -> tuple[str, ...]:
    return (name,) if count == 1 else tuple(f"{name}-{index}" for index in range(count))


class Cluster(BaseModel):
    """The whole file."""

    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="forbid", protected_namespaces=())

    name: str
    model: str  # a folder or a Hugging Face name
    served_model_name: str = ""
    max_model_len: int = Field(2048, gt=0)
    database_url: str = Field("", repr=False)  # default: SQLite in the data folder
    curve_public: str = ""
    curve_secret: str = Field("", repr=False)
    cluster_token: SecretStr = SecretStr("")  # default: created at the first start
    ports: int = Field(18100, gt=1023, lt=65536)  # the first of the suite's own ports
    hosts: dict[str, str] = {}  # name → address, if the cluster has several hosts
    control: str = ""  # the host of all processes but the instances
    monitors: int = Field(1, ge=1, le=3)  # all but one are standbys

    network: NetworkEntry | None = (
        None  # links between the `node`s of instances, for emulated engines and the simulator
    )
    tracing: Tracing | None = None  # of gateways, schedulers and instances, unless their sections differ
    policies: dict[str, Any] = {}  # the monitor's: see `shared.policy.registry.from_file`
    launcher: LauncherSection = LauncherSection()
    gateway: GatewaySection = GatewaySection()
    scheduler: SchedulerSection = SchedulerSection()
    monitor: MonitorSection = MonitorSection()
    predictor: PredictorSection = PredictorSection()
    planner: PlannerSection = PlannerSection()
    dashboard: DashboardSection = DashboardSection()
    instance_defaults: dict[str, Any] = {}
    instances: tuple[InstanceSection, ...] = Field(min_length=1)

    _places: Places | None = PrivateAttr(None)

    @model_validator(mode="before")
    @classmethod
    def _apply_defaults(cls, data: Any) -> Any:
        return with_defaults(data)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        faults = [*self._of_instances(), *self._of_hosts()]
        if faults:
            raise ValueError("\n".join(faults))
        return self

    def _of_instances(self) -> Iterator[str]:
        """Faults of the instances, each beginning with the key."""
        seen: set[str] = set()
        for index, entry in enumerate(self.instances):
            at = f"instances.{index}"
            if twice := [name for name in entry.ids if name in seen]:
                yield f"{at}.id: another instance already has the name {twice[0]!r}"
            seen |= set(entry.ids)
            if self.predictor.beside and (taken := [name for name in entry.ids if name.startswith("predictor-")]):
                yield f"{at}.id: {taken[0]!r} is reserved for predictors beside instances: choose another"
            if entry.host and entry.host not in self.hosts:
                yield f"{at}.host: {unknown('host', entry.host, self.hosts)}"
            if entry.extra.get("node") and self.network is None:
                yield f"{at}.node: the file has no `network`"

    def _of_hosts(self) -> Iterator[str]:
        if self.hosts and self.control not in self.hosts:
            near, known = meant(self.control, list(self.hosts)), ", ".join(self.hosts)
            yield f"control: must name the control plane's host, one of `hosts` ({known}){near}"
        if not self.hosts and self.control:
            yield f"control: {self.control!r} is not a host, since the file has no `hosts`"
        if bool(self.curve_public) != bool(self.curve_secret):
            there, other = sorted(("curve_public", "curve_secret"), key=lambda key: not getattr(self, key))
            yield f"{there}: {other} is missing; `polyphase keys curve` creates both"
        if token := self.cluster_token.get_secret_value():
            try:
                checked(token, "cluster_token")
            except InvalidRequest as error:
                yield error.message

    def from_places(self, places: Places) -> Self:
        """The same cluster with the places of its keys, so that later faults name their line."""
        known = self.model_copy()
        known._places = places
        return known

    def places(self, otherwise: str = "cluster file") -> Places:
        """The places of its keys; of a cluster that is not from a file only its name."""
        return self._places or Places(otherwise)

    @property
    def instance_ids(self) -> tuple[str, ...]:
        """All instances in the order of the file."""
        return tuple(name for entry in self.instances for name in entry.ids)

    @property
    def expected_instances(self) -> dict[str, str]:
        """The enabled instances of all hosts with their initial roles."""
        return {name: str(entry.role) for entry in self.instances if entry.enabled for name in entry.ids}


def load_cluster(file: Path) -> Cluster:
    """Read a cluster file, or a shipped one by its name. Raises InvalidRequest."""
    file = shipped_or_own(file, CLUSTERS)
    document = read_document(file)
    data, places = document.mapping(), document.places
    if where := infinite_in(data):
        raise InvalidRequest(places.tell(where, "must be a finite number"))
    try:
        cluster = Cluster.model_validate(data)
    except ValidationError as error:
        raise InvalidRequest(describe(places, error, kind=Cluster)) from error
    changes: dict[str, Any] = {"model": resolve_model(cluster.model, file.parent)}
    checkpoint = cluster.predictor.extra.get("checkpoint")
    if isinstance(checkpoint, str) and checkpoint:
        found = resolve_path(Path(checkpoint), file.parent)
        changes["predictor"] = cluster.predictor.model_copy(update={"checkpoint": str(found)})
    return cluster.model_copy(update=changes).from_places(places)
