"""The cluster file: one YAML file that says what runs where. Strict: errors name the file, the line and the key."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, ValidationError, model_validator

from services.launcher.cluster_sections import (
    DashboardSection,
    GatewaySection,
    InstanceSection,
    LauncherSection,
    MonitorSection,
    PlannerSection,
    PredictorSection,
    SchedulerSection,
    with_defaults,
)
from services.launcher.model_source import resolve_model, resolve_path, shipped_or_own
from shared.cost.network import NetworkEntry
from shared.domain.numbers import infinite_in
from shared.errors import InvalidRequest
from shared.files.faults import describe, meant, unknown
from shared.files.places import Places
from shared.files.yaml_file import read_document
from shared.runtime.keys import checked
from shared.runtime.settings import Tracing

LOCAL = "local"
CLUSTERS = Path(__file__).parent / "clusters"


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
    cluster_token: SecretStr = SecretStr("")  # default: made at the first start, kept in the data folder
    ports: int = Field(18100, gt=1023, lt=65536)  # the first of the suite's own ports
    hosts: dict[str, str] = {}  # name → address, where there is more than this machine
    control: str = ""  # the host of everything but the instances
    monitors: int = Field(1, ge=1, le=3)  # all but one stand by, and one of them takes over

    network: NetworkEntry | None = None  # between the `node`s of instances: for emulated engines and the simulator
    tracing: Tracing | None = None  # of gateways, schedulers and instances, unless their sections say else
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
        """What is wrong with them: the key, and what is."""
        seen: set[str] = set()
        for index, entry in enumerate(self.instances):
            at = f"instances.{index}"
            if twice := [name for name in entry.ids if name in seen]:
                yield f"{at}.id: another instance has the name {twice[0]!r} already"
            seen |= set(entry.ids)
            if self.predictor.beside and (taken := [name for name in entry.ids if name.startswith("predictor-")]):
                yield f"{at}.id: {taken[0]!r} is kept for the predictors that stand beside instances, choose another"
            if entry.host and entry.host not in self.hosts:
                yield f"{at}.host: {unknown('host', entry.host, self.hosts)}"
            if entry.extra.get("node") and self.network is None:
                yield f"{at}.node: the file has no `network`"

    def _of_hosts(self) -> Iterator[str]:
        if self.hosts and self.control not in self.hosts:
            near, known = meant(self.control, list(self.hosts)), ", ".join(self.hosts)
            yield f"control: must name the control plane's host, one of `hosts` ({known}){near}"
        if not self.hosts and self.control:
            yield f"control: there are no `hosts`, of which {self.control!r} could be one"
        if bool(self.curve_public) != bool(self.curve_secret):
            there, other = sorted(("curve_public", "curve_secret"), key=lambda key: not getattr(self, key))
            yield f"{there}: {other} is missing; `polyphase keys curve` makes both"
        if token := self.cluster_token.get_secret_value():
            try:
                checked(token, "cluster_token")
            except InvalidRequest as error:
                yield error.message

    def from_places(self, places: Places) -> Self:
        """The same, read from there: what is found wrong with it later is told with its line."""
        known = self.model_copy()
        known._places = places
        return known

    def places(self, otherwise: str = "cluster file") -> Places:
        """Where its keys stand; of one that is from no file only its name."""
        return self._places or Places(otherwise)

    @property
    def instance_ids(self) -> tuple[str, ...]:
        """All of them, in the order of the file."""
        return tuple(name for entry in self.instances for name in entry.ids)

    @property
    def expected_instances(self) -> dict[str, str]:
        """Those that are to run, on whatever host, with the roles that they begin in."""
        return {name: str(entry.role) for entry in self.instances if entry.enabled for name in entry.ids}


def load_cluster(file: Path) -> Cluster:
    """Read a cluster file; a bare name means one of those shipped. Raises InvalidRequest."""
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
