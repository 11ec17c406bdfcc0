"""The cluster file: one YAML file that defines the processes of all hosts. Errors name file, line and key.

The section of a process accepts its own keys, which are the fields of its class in `cluster_sections`, and the settings
of the process that neither the launcher derives nor the whole cluster shares. To add a key that

- one process reads: add it to the settings class of the process. The section accepts the setting without a change here.
- the file does not have, because the launcher computes the setting: add it to the settings class and to `derived` of
  the section's class, and compute it in `plan.py`.
- has one value for all processes: add it to the settings classes, to `CLUSTER_KEYS` in `cluster_sections` and to the
  fields of `Cluster`, from which `plan.py` takes it.
- only the launcher reads: add a field to the class of the section, or to `Cluster` if it is at the top of the file.

A rule for one section is a validator of its class. A rule that concerns several sections, or the top of the file, is a
function in `RULES`.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, ValidationError, model_validator

from services.launcher.cluster_sections import (
    PREDICTOR_BESIDE,
    DashboardSection,
    GatewaySection,
    InstanceSection,
    LauncherSection,
    MonitorSection,
    PlannerSection,
    PredictorSection,
    SchedulerSection,
)
from services.launcher.model_source import resolve_model, resolve_path, shipped_or_own
from shared.cost.network import NetworkEntry
from shared.domain.numbers import infinite_in
from shared.errors import InvalidRequest
from shared.files.faults import Fault, describe, meant, unknown
from shared.files.places import Places
from shared.files.yaml_file import read_document
from shared.model.adapters import LoraSection
from shared.runtime.keys import checked
from shared.runtime.settings import PEER_SILENCE_S, Tracing

LOCAL = "local"  # the name of the only host of a file without `hosts`
CLUSTERS = Path(__file__).parent / "clusters"
_NAME_BYTES = 255  # as file systems allow


class Cluster(BaseModel):
    """The content of a cluster file."""

    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="forbid", protected_namespaces=())

    name: str
    model: str  # a folder or a Hugging Face name
    trust_remote_code: bool = False  # gateways, instances and predictors may run code of the model's repository
    mixed_precision: bool = False  # an answer may be computed at several precisions (`weights` of instances)
    served_model_name: str = ""
    max_model_len: int = Field(2048, gt=0)
    lora: LoraSection = LoraSection()
    database_url: str = Field("", repr=False)  # default: SQLite in the data folder
    curve_public: str = ""
    curve_secret: str = Field("", repr=False)
    cluster_token: SecretStr = SecretStr("")  # default: created at the first start
    ports: int = Field(18100, gt=1023, lt=65536)  # the first of the suite's own ports
    hosts: dict[str, str] = {}  # name → address, if the cluster has several hosts
    control: str = ""  # the host of all processes but the instances
    monitors: int = Field(1, ge=1, le=3)  # all but one are standbys
    one_process: bool = False  # the gateway, the scheduler and the monitor are one process, of a small cluster

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

    _places: Places | None = PrivateAttr(None)  # lines of the keys; None: the cluster is not from a file

    @model_validator(mode="before")
    @classmethod
    def _apply_defaults(cls, data: Any) -> Any:
        return with_defaults(data)

    @model_validator(mode="after")
    def _follows_rules(self) -> Self:
        faults = [fault for rule in RULES for fault in rule(self)]
        if faults:
            raise ValueError("\n".join(f"{fault.key}: {fault.text}" for fault in faults))
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


def with_defaults(data: Any) -> Any:
    """The content of a file, with its `instance_defaults` merged into each of its `instances`."""
    if not isinstance(data, dict) or not isinstance(data.get("instances"), list):
        return data
    defaults = data.get("instance_defaults")
    if not isinstance(defaults, dict):
        return data
    merged = [{**defaults, **entry} if isinstance(entry, dict) else entry for entry in data["instances"]]
    return {**data, "instances": merged}


def instance_names_are_unique(cluster: Cluster) -> Iterator[Fault]:
    seen: set[str] = set()
    for index, entry in enumerate(cluster.instances):
        names = dict.fromkeys((*entry.names, *entry.ids))
        if repeated := [name for name in names if name in seen]:
            yield Fault(f"instances.{index}.id", f"another instance already has the name {repeated[0]!r}")
        seen.update(names)


def instance_names_are_not_of_predictors(cluster: Cluster) -> Iterator[Fault]:
    if not cluster.predictor.beside:
        return
    for index, entry in enumerate(cluster.instances):
        if reserved := [name for name in entry.ids if name.startswith(PREDICTOR_BESIDE)]:
            text = f"{reserved[0]!r} is reserved for predictors beside instances: choose another"
            yield Fault(f"instances.{index}.id", text)


def instances_are_on_known_hosts(cluster: Cluster) -> Iterator[Fault]:
    for index, entry in enumerate(cluster.instances):
        if entry.host and entry.host not in cluster.hosts:
            yield Fault(f"instances.{index}.host", unknown("host", entry.host, cluster.hosts))


def instances_on_nodes_have_a_network(cluster: Cluster) -> Iterator[Fault]:
    if cluster.network is not None:
        return
    for index, entry in enumerate(cluster.instances):
        if entry.extra.get("node"):
            yield Fault(f"instances.{index}.node", "the file has no `network`")


def control_is_one_of_the_hosts(cluster: Cluster) -> Iterator[Fault]:
    control, hosts = cluster.control, cluster.hosts
    if hosts and control not in hosts:
        known = ", ".join(hosts)
        text = f"must name the control plane's host, one of `hosts` ({known}){meant(control, list(hosts))}"
        yield Fault("control", text)
    if control and not hosts:
        yield Fault("control", f"{control!r} is not a host, since the file has no `hosts`")


def one_process_has_one_of_each(cluster: Cluster) -> Iterator[Fault]:
    if not cluster.one_process:
        return
    counts = {
        "monitors": cluster.monitors,
        "scheduler.count": cluster.scheduler.count,
        "gateway.processes": cluster.gateway.processes,
    }
    for key, count in counts.items():
        if count > 1:
            yield Fault(key, f"with `one_process` there is one, got {count}: leave out one of the two keys")
    if not cluster.gateway.enabled:
        yield Fault("gateway.enabled", "`one_process` needs a gateway")
    sections = {"gateway": cluster.gateway, "scheduler": cluster.scheduler, "monitor": cluster.monitor}
    silences = {name: section.extra.get("peer_silence_s", PEER_SILENCE_S) for name, section in sections.items()}
    for name, silence in silences.items():
        if silence != silences["gateway"]:
            yield Fault(f"{name}.peer_silence_s", "with `one_process` it must be the gateway's: they share sockets")


def curve_keys_are_a_pair(cluster: Cluster) -> Iterator[Fault]:
    if cluster.curve_public and not cluster.curve_secret:
        yield Fault("curve_public", "curve_secret is missing; `polyphase keys curve` creates both")
    if cluster.curve_secret and not cluster.curve_public:
        yield Fault("curve_secret", "curve_public is missing; `polyphase keys curve` creates both")


def cluster_token_is_usable(cluster: Cluster) -> Iterator[Fault]:
    token = cluster.cluster_token.get_secret_value()
    if not token:
        return
    try:
        checked(token, "cluster_token")
    except InvalidRequest as error:
        key, _, text = error.message.partition(": ")
        yield Fault(key, text)


def model_is_a_possible_path(cluster: Cluster) -> Iterator[Fault]:
    if any(len(os.fsencode(part)) > _NAME_BYTES for part in Path(cluster.model).parts):
        yield Fault("model", f"a name of a file or folder has at most {_NAME_BYTES} bytes")


def adapters_can_be_served(cluster: Cluster) -> Iterator[Fault]:
    for key, text in cluster.lora.faults(cluster.served_model_name or cluster.model):
        yield Fault(f"lora.{key}", text)


# Each rule yields faults with the full key, such as `instances.0.id`. `Cluster` applies them.
RULES: tuple[Callable[[Cluster], Iterator[Fault]], ...] = (
    instance_names_are_unique,
    instance_names_are_not_of_predictors,
    instances_are_on_known_hosts,
    instances_on_nodes_have_a_network,
    control_is_one_of_the_hosts,
    one_process_has_one_of_each,
    curve_keys_are_a_pair,
    cluster_token_is_usable,
    model_is_a_possible_path,
    adapters_can_be_served,
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
    return _with_paths_from(file.parent, cluster).from_places(places)


def _with_paths_from(folder: Path, cluster: Cluster) -> Cluster:
    """The cluster with the paths of its model, adapters and predictor's checkpoint, which are relative to its file."""
    changes: dict[str, Any] = {"model": resolve_model(cluster.model, folder)}
    checkpoint = cluster.predictor.extra.get("checkpoint")
    if isinstance(checkpoint, str) and checkpoint:
        found = resolve_path(Path(checkpoint), folder)
        changes["predictor"] = cluster.predictor.model_copy(update={"checkpoint": str(found)})
    if adapters := cluster.lora.adapters:
        found_at = {name: str(resolve_path(Path(each), folder)) for name, each in adapters.items()}
        changes["lora"] = cluster.lora.model_copy(update={"adapters": found_at})
    if any(isinstance(entry.extra.get("weights"), str) for entry in cluster.instances):
        changes["instances"] = tuple(_with_weights_from(folder, entry) for entry in cluster.instances)
    return cluster.model_copy(update=changes)


def _with_weights_from(folder: Path, entry: InstanceSection) -> InstanceSection:
    weights = entry.extra.get("weights")
    if not isinstance(weights, str) or not weights:
        return entry
    return entry.model_copy(update={"weights": resolve_model(weights, folder)})
