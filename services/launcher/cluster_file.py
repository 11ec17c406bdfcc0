"""The cluster file: one YAML file that defines the processes of all hosts. Errors name file, line and key.

The section of a process accepts its own keys, which are the fields of its class below, and the settings of the process
without those that `GIVEN_ELSEWHERE` names. To add a key that

- one process reads: add it to the settings class of the process. The section accepts the setting without a change here.
- the launcher computes for a process: add it to the settings class and here to the table, and compute it in `plan`.
- has one value for all processes: the same, with a field of `Cluster` from which `plan` takes the value.
- only the launcher reads: add a field to the class of the section.

A rule that concerns several sections, or the top of the file, is a function in `RULES`.
"""

from collections.abc import Callable, Iterator
from enum import Enum, auto
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
PREDICTOR_BESIDE = "predictor-"  # begins the names of predictors beside instances


class KeyKind(Enum):
    """Who gives a key of a section."""

    OWN = auto()  # the file, for the launcher: a field of the section's class
    SETTING = auto()  # the file, for the process: a field of its settings
    DERIVED = auto()  # the launcher, from the rest of the file
    CLUSTER = auto()  # the file, once for all sections: a field of `Cluster`
    POLICY = auto()  # the file, once for all sections: in `Cluster.policies`


ACCEPTED = (KeyKind.OWN, KeyKind.SETTING)

# The keys that a section does not accept, unless its class has a field of the name. A row holds for its settings class
# and for the subclasses of that class, so that a row with ServiceSettings holds for all processes.
GIVEN_ELSEWHERE: tuple[tuple[type[ServiceSettings], KeyKind, tuple[str, ...]], ...] = (
    (ServiceSettings, KeyKind.CLUSTER, ("model", "database_url", "cluster_token", "curve_public", "curve_secret")),
    (ServiceSettings, KeyKind.POLICY, KINDS),
    (ServiceSettings, KeyKind.POLICY, tuple(f"{kind}_parameters" for kind in KINDS)),
    (ServiceSettings, KeyKind.DERIVED, ("cluster_token_file", "curve_file")),
    (GatewaySettings, KeyKind.DERIVED, ("gateway_id", "served_model_name", "max_model_len")),
    (GatewaySettings, KeyKind.DERIVED, ("schedulers", "predictors", "predictors_beside")),
    (GatewaySettings, KeyKind.DERIVED, ("process", "own_port", "shared_table")),
    (SchedulerSettings, KeyKind.DERIVED, ("scheduler_id", "http_host", "http_port", "rpc_address")),
    (SchedulerSettings, KeyKind.DERIVED, ("monitor_url", "broadcast_address", "predictor_urls")),
    (MonitorSettings, KeyKind.DERIVED, ("monitor_id", "http_host", "http_port", "advertise_url")),
    (MonitorSettings, KeyKind.DERIVED, ("heartbeat_address", "broadcast_address")),
    (MonitorSettings, KeyKind.DERIVED, ("policies", "expected_instances", "scrape")),
    (PredictorSettings, KeyKind.DERIVED, ("host", "port", "rpc_address")),
    (PlannerSettings, KeyKind.DERIVED, ("http_host", "http_port", "monitor_url", "broadcast_address")),
    (WorkerSettings, KeyKind.DERIVED, ("instance_id", "rpc_port", "http_port", "kv_port")),
    (WorkerSettings, KeyKind.DERIVED, ("monitor_url", "heartbeat_address", "broadcast_address")),
    (WorkerSettings, KeyKind.DERIVED, ("emulated_links", "lossy_kv")),
)


class Section(BaseModel):
    """The section of a process: the section's own keys, and settings of the process."""

    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="allow")
    settings: ClassVar[type[ServiceSettings]] = ServiceSettings

    enabled: bool = True
    env: dict[str, str] = Field({}, repr=False)  # further environment of the process

    @classmethod
    def key_kinds(cls) -> dict[str, KeyKind]:
        """All keys that the section knows, with the one kind of each. It accepts those of the kinds `ACCEPTED`."""
        kinds = dict.fromkeys(cls.settings.model_fields, KeyKind.SETTING)
        for process, kind, keys in GIVEN_ELSEWHERE:
            if issubclass(cls.settings, process):
                kinds.update(dict.fromkeys(keys, kind))
        kinds.update(dict.fromkeys(cls.model_fields, KeyKind.OWN))
        return kinds

    @property
    def extra(self) -> dict[str, Any]:
        """The settings of the process that the file gives."""
        return self.model_extra or {}

    @model_validator(mode="after")
    def _only_accepted_keys(self) -> Self:
        kinds = self.key_kinds()
        _raise_if_any([f"{key}: {fault}" for key in self.extra for fault in _faults_of_key(key, kinds)])
        return self


def _faults_of_key(key: str, kinds: dict[str, KeyKind]) -> Iterator[str]:
    """Why a section with keys of these kinds does not accept the key."""
    match kinds.get(key):
        case KeyKind.OWN | KeyKind.SETTING:
            return
        case KeyKind.DERIVED:
            yield "it is derived from the rest of the file: leave it out"
        case KeyKind.CLUSTER:
            yield "it belongs to the whole cluster: write it at the top of the file"
        case KeyKind.POLICY:
            policy = key.removesuffix("_parameters")
            yield f"it belongs to the whole cluster: write `policies: {{{policy}: …}}` at the top"
        case None:
            yield unknown("key", key, [known for known, kind in kinds.items() if kind in ACCEPTED])


def _raise_if_any(faults: list[str]) -> None:
    """One error for pydantic, with a line for each fault that begins with the key; `describe` adds the places."""
    if faults:
        raise ValueError("\n".join(faults))


class LauncherSection(BaseModel):
    """Time limits of `polyphase up` for its processes, in seconds."""

    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="forbid")

    # Until a process is healthy; None: 300, and more for an instance, see `plan.start_s_of`.
    start_s: float | None = Field(None, gt=0)
    hang_s: float = Field(6.0, ge=0)  # a process without a healthy answer for so long is killed and restarted; 0: never


class GatewaySection(Section):
    """The API. `extra`: GatewaySettings."""

    settings = GatewaySettings

    host: str = ""  # default: the address of the control host
    port: int = Field(8000, gt=0, lt=65536)
    processes: int = Field(1, gt=0, le=16)  # that share the port

    @property
    def names(self) -> tuple[str, ...]:
        return _numbered("gateway", self.processes) if self.enabled else ()

    @property
    def lossy_kv(self) -> bool:
        """Whether any request may use a lossy KV codec."""
        named = [self.extra.get("kv_codec")]
        classes = self.extra.get("slo")
        if isinstance(classes, dict):
            named += [each.get("lossy_kv") for each in classes.values() if isinstance(each, dict)]
        return any(codec in named for codec in Codec if codec.lossy)


class SchedulerSection(Section):
    """The global schedulers, all alike. `extra`: SchedulerSettings."""

    settings = SchedulerSettings

    count: int = Field(1, gt=0, le=16)

    @property
    def names(self) -> tuple[str, ...]:
        return _numbered("scheduler", self.count)


class MonitorSection(Section):
    """The cluster monitor. `extra`: MonitorSettings."""

    settings = MonitorSettings


class PredictorSection(Section):
    """The length predictors, all alike: `count` of them on the control host, or one beside each instance.
    `extra`: PredictorSettings.
    """

    settings = PredictorSettings

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
        return f"{PREDICTOR_BESIDE}{instance_id}"


class PlannerSection(Section):
    """The planner. `extra`: PlannerSettings."""

    settings = PlannerSettings


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

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    role: Role
    host: str = ""  # a name of `hosts`; default: the control host
    count: int = Field(1, gt=0, le=1024)
    # Numbers of the devices of its host; empty: the next free ones. See `devices`.
    devices: tuple[Annotated[int, Field(ge=0, strict=True)], ...] = ()
    # With --on ray: resources that its Ray node must have besides CPUs and accelerators.
    resources: dict[str, float] = {}

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

    # Links between the `node`s of instances, for emulated engines and the simulator.
    network: NetworkEntry | None = None
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
    def _follows_rules(self) -> Self:
        _raise_if_any([fault for rule in RULES for fault in rule(self)])
        return self

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


def instance_names_are_unique(cluster: Cluster) -> Iterator[str]:
    seen: set[str] = set()
    for index, entry in enumerate(cluster.instances):
        if repeated := [name for name in entry.ids if name in seen]:
            yield f"instances.{index}.id: another instance already has the name {repeated[0]!r}"
        seen.update(entry.ids)


def instance_names_are_not_of_predictors(cluster: Cluster) -> Iterator[str]:
    if not cluster.predictor.beside:
        return
    for index, entry in enumerate(cluster.instances):
        if reserved := [name for name in entry.ids if name.startswith(PREDICTOR_BESIDE)]:
            fault = f"{reserved[0]!r} is reserved for predictors beside instances: choose another"
            yield f"instances.{index}.id: {fault}"


def instances_are_on_known_hosts(cluster: Cluster) -> Iterator[str]:
    for index, entry in enumerate(cluster.instances):
        if entry.host and entry.host not in cluster.hosts:
            yield f"instances.{index}.host: {unknown('host', entry.host, cluster.hosts)}"


def instances_on_nodes_have_a_network(cluster: Cluster) -> Iterator[str]:
    if cluster.network is not None:
        return
    for index, entry in enumerate(cluster.instances):
        if entry.extra.get("node"):
            yield f"instances.{index}.node: the file has no `network`"


def control_is_one_of_the_hosts(cluster: Cluster) -> Iterator[str]:
    if cluster.hosts and cluster.control not in cluster.hosts:
        similar, known = meant(cluster.control, list(cluster.hosts)), ", ".join(cluster.hosts)
        yield f"control: must name the control plane's host, one of `hosts` ({known}){similar}"
    if cluster.control and not cluster.hosts:
        yield f"control: {cluster.control!r} is not a host, since the file has no `hosts`"


def curve_keys_are_a_pair(cluster: Cluster) -> Iterator[str]:
    if cluster.curve_public and not cluster.curve_secret:
        yield "curve_public: curve_secret is missing; `polyphase keys curve` creates both"
    if cluster.curve_secret and not cluster.curve_public:
        yield "curve_secret: curve_public is missing; `polyphase keys curve` creates both"


def cluster_token_is_usable(cluster: Cluster) -> Iterator[str]:
    token = cluster.cluster_token.get_secret_value()
    if not token:
        return
    try:
        checked(token, "cluster_token")
    except InvalidRequest as error:
        yield error.message


# Each rule yields its faults as `key: fault`, with the full key, such as `instances.0.id`.
RULES: tuple[Callable[[Cluster], Iterator[str]], ...] = (
    instance_names_are_unique,
    instance_names_are_not_of_predictors,
    instances_are_on_known_hosts,
    instances_on_nodes_have_a_network,
    control_is_one_of_the_hosts,
    curve_keys_are_a_pair,
    cluster_token_is_usable,
)


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
