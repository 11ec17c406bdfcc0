"""The sections of the cluster file, one class each. How to add a key: see `cluster_file`.

A validator raises ValueError with one line for each fault, `key: text`; `load_cluster` adds file and line.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gateway.settings import GatewaySettings
from predictor.settings import PredictorSettings
from services.cluster_monitor.settings import MonitorSettings
from services.global_scheduler.settings import SchedulerSettings
from services.planner.settings import PlannerSettings
from services.worker.settings import WorkerSettings
from shared.domain.instance import Role, rank_names
from shared.domain.kv import Codec
from shared.domain.policies import KINDS
from shared.files.faults import unknown
from shared.runtime.settings import ServiceSettings

# Settings that no section accepts, besides the `derived` of its class.
CLUSTER_KEYS = frozenset(
    {"model", "lora", "mixed_precision", "trust_remote_code", "database_url"}
    | {"cluster_token", "curve_public", "curve_secret"}
)  # of `Cluster`
POLICY_KEYS = frozenset(KINDS) | {f"{kind}_parameters" for kind in KINDS}  # of `Cluster.policies`
KEY_FILES = frozenset({"cluster_token_file", "curve_file"})  # in the data folder, written by the launcher

PREDICTOR_BESIDE = "predictor-"  # begins the names of predictors beside instances


class Section(BaseModel):
    """The section of a process that is configured by a settings class.

    A key that is a field of the section is for the launcher. Any other key must be a setting of the process: pydantic
    keeps it in `extra`, and the settings class validates its value when `plan` creates the settings.
    """

    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="allow")
    settings: ClassVar[type[ServiceSettings]] = ServiceSettings
    derived: ClassVar[tuple[str, ...]] = ()  # settings that the launcher computes

    enabled: bool = True
    env: dict[str, str] = Field({}, repr=False)  # further environment of the process

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if missing := sorted(set(cls.derived) - set(cls.settings.model_fields)):
            raise TypeError(f"{cls.__name__}.derived: {cls.settings.__name__} has no {', '.join(missing)}")

    @classmethod
    def accepted_keys(cls) -> frozenset[str]:
        """The fields of the section, and the settings that only the section gives."""
        settings = frozenset(cls.settings.model_fields).difference(cls.derived, KEY_FILES, CLUSTER_KEYS, POLICY_KEYS)
        return settings.union(cls.model_fields)

    @classmethod
    def refusal(cls, key: str) -> str:
        """Why the section does not accept this key, and what to do; for a key that is not in `accepted_keys`."""
        if key in cls.derived or key in KEY_FILES:
            return "it is derived from the rest of the file: leave it out"
        if key in CLUSTER_KEYS:
            return "it belongs to the whole cluster: write it at the top of the file"
        if key in POLICY_KEYS:
            policy = key.removesuffix("_parameters")
            return f"it belongs to the whole cluster: write `policies: {{{policy}: …}}` at the top"
        return unknown("key", key, cls.accepted_keys())

    @property
    def extra(self) -> dict[str, Any]:
        """The settings of the process that the file gives."""
        return self.model_extra or {}

    @model_validator(mode="after")
    def _only_accepted_keys(self) -> Self:
        accepted = self.accepted_keys()
        refused = [key for key in self.extra if key not in accepted]
        if refused:
            raise ValueError("\n".join(f"{key}: {self.refusal(key)}" for key in refused))
        return self


class GatewaySection(Section):
    settings = GatewaySettings
    derived = (
        "gateway_id",
        "max_model_len",
        "own_port",
        "predictors",
        "predictors_beside",
        "process",
        "schedulers",
        "served_model_name",
        "shared_table",
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
        "broadcast_address",
        "http_host",
        "http_port",
        "monitor_url",
        "predictor_urls",
        "rpc_address",
        "scheduler_id",
    )

    count: int = Field(1, gt=0, le=16)

    @property
    def names(self) -> tuple[str, ...]:
        return _numbered("scheduler", self.count)


class MonitorSection(Section):
    settings = MonitorSettings
    derived = (
        "advertise_url",
        "broadcast_address",
        "expected_instances",
        "heartbeat_address",
        "http_host",
        "http_port",
        "monitor_id",
        "policies",
        "scrape",
        "served_model_name",
    )


class PredictorSection(Section):
    """The length predictors, all alike: `count` of them on the control host, or one beside each instance."""

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
    derived = ("broadcast_address", "http_host", "http_port", "monitor_url")


class InstanceSection(Section):
    """One instance, or `count` identical ones named id-0, id-1, … With data parallelism each of them has ranks, which
    are processes of their own: id.0, id.1, …
    """

    settings = WorkerSettings
    derived = (
        "broadcast_address",
        "data_parallel_port",
        "data_parallel_rank",
        "emulated_links",
        "heartbeat_address",
        "http_port",
        "instance_id",
        "kv_port",
        "lossy_kv",
        "monitor_url",
        "rank_of",
        "rpc_port",
    )

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    role: Role
    host: str = ""  # a name of `hosts`; default: the control host
    count: int = Field(1, gt=0, le=1024)
    data_parallel: int = Field(1, gt=0, le=64)
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
    def names(self) -> tuple[str, ...]:
        return _numbered(self.id, self.count)

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of the processes: of each instance, or of its data-parallel ranks."""
        return tuple(rank for name in self.names for rank in rank_names(name, self.data_parallel))


class DashboardSection(BaseModel):
    """Not a `Section`: the dashboard has no settings class. `plan` writes Streamlit's arguments and environment."""

    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="forbid")

    enabled: bool = True
    port: int = Field(8501, gt=0, lt=65536)
    login: bool = False  # with those keys of `gateway.api_keys_file` that have a role
    env: dict[str, str] = Field({}, repr=False)


class LauncherSection(BaseModel):
    """Time limits of `polyphase up` for its processes, in seconds. Not a `Section`: it starts no process."""

    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="forbid")

    # Until a process is healthy; None: 300, and more for an instance, see `plan.start_s_of`.
    start_s: float | None = Field(None, gt=0)
    hang_s: float = Field(6.0, ge=0)  # a process without a healthy answer for so long is killed and restarted; 0: never


def _numbered(name: str, count: int) -> tuple[str, ...]:
    """The name itself for a single process; otherwise name-0, name-1, …"""
    if count == 1:
        return (name,)
    return tuple(f"{name}-{index}" for index in range(count))
