"""The cluster file: one YAML file that defines the processes of all hosts. Errors name file, line and key.

The section of a process accepts its own keys, which are the fields of its class below, and the settings of the process
that neither the launcher derives nor the whole cluster shares. To add a key that

- one process reads: add it to the settings class of the process. The section accepts the setting without a change here.
- the launcher computes for a process: add it to the settings class and to `derived` of the section, and compute it in
  `plan`.
- has one value for all processes: the same, with `CLUSTER_KEYS` and a field of `Cluster` from which `plan` takes it.
- only the launcher reads: add a field to the class of the section.

A rule that concerns several sections, or the top of the file, is a function in `RULES`.
"""

import os
from collections.abc import Callable, Iterable, Iterator
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
from shared.files.faults import Fault, describe, meant, unknown
from shared.files.places import Places
from shared.files.yaml_file import read_document
from shared.runtime.keys import checked
from shared.runtime.settings import ServiceSettings, Tracing

LOCAL = "local"
CLUSTERS = Path(__file__).parent / "clusters"
_NAME_BYTES = 255  # as file systems allow
PREDICTOR_BESIDE = "predictor-"  # begins the names of predictors beside instances


class KeyKind(Enum):
    """Who gives a key of a section."""

    OWN = auto()  # the file, for the launcher: a field of the section's class
    SETTING = auto()  # the file, for the process: a field of its settings
    DERIVED = auto()  # the launcher, from the rest of the file
    CLUSTER = auto()  # the file, once for all sections: a field of `Cluster`
    POLICY = auto()  # the file, once for all sections: in `Cluster.policies`


ACCEPTED = (KeyKind.OWN, KeyKind.SETTING)
CLUSTER_KEYS = ("model", "database_url", "cluster_token", "curve_public", "curve_secret")
_POLICY_KEYS = (*KINDS, *(f"{kind}_parameters" for kind in KINDS))
_REFUSALS = {
    KeyKind.DERIVED: "it is derived from the rest of the file: leave it out",
    KeyKind.CLUSTER: "it belongs to the whole cluster: write it at the top of the file",
    KeyKind.POLICY: "it belongs to the whole cluster: write `policies: {{{policy}: …}}` at the top",
}


class Section(BaseModel):
    """The section of a process: the section's own keys, and settings of the process."""

    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="allow")
    settings: ClassVar[type[ServiceSettings]] = ServiceSettings
    derived: ClassVar[tuple[str, ...]] = ()  # settings that the launcher computes

    enabled: bool = True
    env: dict[str, str] = Field({}, repr=False)  # further environment of the process

    @classmethod
    def key_kinds(cls) -> dict[str, KeyKind]:
        """All keys that the section knows, with the one kind of each. It accepts those of the kinds `ACCEPTED`."""
        return {
            **dict.fromkeys(cls.settings.model_fields, KeyKind.SETTING),
            **dict.fromkeys(CLUSTER_KEYS, KeyKind.CLUSTER),
            **dict.fromkeys(_POLICY_KEYS, KeyKind.POLICY),
            **dict.fromkeys(("cluster_token_file", "curve_file", *cls.derived), KeyKind.DERIVED),
            **dict.fromkeys(cls.model_fields, KeyKind.OWN),
        }

    @property
    def extra(self) -> dict[str, Any]:
        """The settings of the process that the file gives."""
        return self.model_extra or {}

    @model_validator(mode="after")
    def _only_accepted_keys(self) -> Self:
        kinds = self.key_kinds()
        accepted = [key for key, kind in kinds.items() if kind in ACCEPTED]
        faults = []
        for key in self.extra:
            if key not in kinds:
                faults.append(Fault(key, unknown("key", key, accepted)))
            elif key not in accepted:
                faults.append(Fault(key, _REFUSALS[kinds[key]].format(policy=key.removesuffix("_parameters"))))
        _raise_if_any(faults)
        return self


def _raise_if_any(faults: Iterable[Fault]) -> None:
    """One error for pydantic, with a line for each fault; `describe` adds the places."""
    if lines := [f"{fault.key}: {fault.text}" for fault in faults]:
        raise ValueError("\n".join(lines))


class LauncherSection(BaseModel):
    """Time limits of `polyphase up` for its processes, in seconds."""

    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="forbid")

    # Until a process is healthy; None: 300, and more for an instance, see `plan.start_s_of`.
    start_s: float | None = Field(None, gt=0)
    hang_s: float = Field(6.0, ge=0)  # a process without a healthy answer for so long is killed and restarted; 0: never


class GatewaySection(Section):
    settings = GatewaySettings
    derived = (
        *("gateway_id", "served_model_name", "max_model_len", "schedulers", "predictors", "predictors_beside"),
        *("process", "own_port", "shared_table"),
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
        named = [self.extra.get("kv_codec")]
        classes = self.extra.get("slo")
        if isinstance(classes, dict):
            named += [each.get("lossy_kv") for each in classes.values() if isinstance(each, dict)]
        return any(codec in named for codec in Codec if codec.lossy)


class SchedulerSection(Section):
    settings = SchedulerSettings
    derived = (
        *("scheduler_id", "http_host", "http_port", "rpc_address", "monitor_url", "broadcast_address"),
        *("predictor_urls",),
    )

    count: int = Field(1, gt=0, le=16)

    @property
    def names(self) -> tuple[str, ...]:
        return _numbered("scheduler", self.count)


class MonitorSection(Section):
    settings = MonitorSettings
    derived = (
        *("monitor_id", "http_host", "http_port", "advertise_url", "heartbeat_address", "broadcast_address"),
        *("policies", "expected_instances", "scrape"),
    )


class PredictorSection(Section):
    """The length predictors, all alike: `count` of them on the control host, or one beside each instance.
    `extra`: PredictorSettings.
    """

    settings = PredictorSettings
    derived = ("host", "port", "rpc_address")

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
    settings = PlannerSettings
    derived = ("http_host", "http_port", "monitor_url", "broadcast_address")


class DashboardSection(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="forbid")

    enabled: bool = True
    port: int = Field(8501, gt=0, lt=65536)
    login: bool = False  # with those keys of `gateway.api_keys_file` that have a role
    env: dict[str, str] = Field({}, repr=False)


class InstanceSection(Section):
    """One instance, or `count` identical ones named id-0, id-1, … `extra`: WorkerSettings."""

    settings = WorkerSettings
    derived = (
        *("instance_id", "rpc_port", "http_port", "kv_port", "monitor_url", "heartbeat_address"),
        *("broadcast_address", "emulated_links", "lossy_kv"),
    )

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
        _raise_if_any(fault for rule in RULES for fault in rule(self))
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


def instance_names_are_unique(cluster: Cluster) -> Iterator[Fault]:
    seen: set[str] = set()
    for index, entry in enumerate(cluster.instances):
        if repeated := [name for name in entry.ids if name in seen]:
            yield Fault(f"instances.{index}.id", f"another instance already has the name {repeated[0]!r}")
        seen.update(entry.ids)


def instance_names_are_not_of_predictors(cluster: Cluster) -> Iterator[Fault]:
    for index, entry in enumerate(cluster.instances if cluster.predictor.beside else ()):
        if reserved := [name for name in entry.ids if name.startswith(PREDICTOR_BESIDE)]:
            text = f"{reserved[0]!r} is reserved for predictors beside instances: choose another"
            yield Fault(f"instances.{index}.id", text)


def instances_are_on_known_hosts(cluster: Cluster) -> Iterator[Fault]:
    for index, entry in enumerate(cluster.instances):
        if entry.host and entry.host not in cluster.hosts:
            yield Fault(f"instances.{index}.host", unknown("host", entry.host, cluster.hosts))


def instances_on_nodes_have_a_network(cluster: Cluster) -> Iterator[Fault]:
    for index, entry in enumerate(cluster.instances):
        if entry.extra.get("node") and cluster.network is None:
            yield Fault(f"instances.{index}.node", "the file has no `network`")


def control_is_one_of_the_hosts(cluster: Cluster) -> Iterator[Fault]:
    if cluster.hosts and cluster.control not in cluster.hosts:
        similar, known = meant(cluster.control, list(cluster.hosts)), ", ".join(cluster.hosts)
        yield Fault("control", f"must name the control plane's host, one of `hosts` ({known}){similar}")
    if cluster.control and not cluster.hosts:
        yield Fault("control", f"{cluster.control!r} is not a host, since the file has no `hosts`")


def curve_keys_are_a_pair(cluster: Cluster) -> Iterator[Fault]:
    for given, missing in (("curve_public", "curve_secret"), ("curve_secret", "curve_public")):
        if getattr(cluster, given) and not getattr(cluster, missing):
            yield Fault(given, f"{missing} is missing; `polyphase keys curve` creates both")


def cluster_token_is_usable(cluster: Cluster) -> Iterator[Fault]:
    try:
        if token := cluster.cluster_token.get_secret_value():
            checked(token, "cluster_token")
    except InvalidRequest as error:
        key, _, text = error.message.partition(": ")
        yield Fault(key, text)


def model_is_a_possible_path(cluster: Cluster) -> Iterator[Fault]:
    if any(len(os.fsencode(part)) > _NAME_BYTES for part in Path(cluster.model).parts):
        yield Fault("model", f"a name of a file or folder has at most {_NAME_BYTES} bytes")


# Each rule yields faults with the full key, such as `instances.0.id`.
RULES: tuple[Callable[[Cluster], Iterator[Fault]], ...] = (
    instance_names_are_unique,
    instance_names_are_not_of_predictors,
    instances_are_on_known_hosts,
    instances_on_nodes_have_a_network,
    control_is_one_of_the_hosts,
    curve_keys_are_a_pair,
    cluster_token_is_usable,
    model_is_a_possible_path,
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
