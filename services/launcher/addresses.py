"""The addresses of a suite's processes, derived from the cluster file: where each listens and how others reach it.

`on_hosts` gives the addresses for `polyphase up`; `render.groups.in_pods` gives those of the same processes as pods.
The module also writes the scrape targets for Prometheus, which are addresses of the processes of one host.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from gateway.auth import load_keys
from gateway.settings import GatewaySettings
from gateway.table import make_table
from predictor.settings import PredictorSettings
from services.cluster_monitor.settings import MonitorSettings, ScrapeTarget
from services.global_scheduler.settings import SchedulerSettings
from services.launcher import ports
from services.launcher.cluster_file import Cluster
from services.launcher.cluster_sections import GatewaySection
from services.launcher.spec import Plan, ProcessSpec
from services.planner.settings import PlannerSettings
from services.worker.settings import WorkerSettings

LOOPBACK = "127.0.0.1"
LEASE_S = 1.0  # a standby monitor takes over within two seconds: see services.cluster_monitor.lease
GATEWAY_TABLE = "gateways.table"  # in the data folder, created at each start of the suite
TARGETS_FILE = "prometheus.json"
SERVICES: dict[type[object], str] = {
    GatewaySettings: "gateway",
    SchedulerSettings: "scheduler",
    MonitorSettings: "monitor",
    PredictorSettings: "predictor",
    PlannerSettings: "planner",
    WorkerSettings: "worker",
}
_MIN_RECORD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one process listens, and the host name or address by which other processes reach it.

    port: of its HTTP server. Its other ports are neighbours of that one and are given as distances from it.
    """

    name: str
    listen: str
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def zmq(self, distance: int) -> str:
        """The ZeroMQ address to which other processes connect."""
        return f"tcp://{self.host}:{self.port + distance}"

    def bound(self, distance: int) -> str:
        """The ZeroMQ address that the process itself binds."""
        return f"tcp://{self.listen}:{self.port + distance}"


@dataclass(frozen=True, slots=True)
class Addresses:
    """The endpoints of all processes of a cluster file, on whatever host they run.

    api: of all gateway processes together. beside: the predictors next to instances, by instance.
    """

    monitors: tuple[Endpoint, ...]
    schedulers: tuple[Endpoint, ...]
    api: Endpoint
    gateways: tuple[Endpoint, ...]
    predictors: tuple[Endpoint, ...]
    planner: Endpoint | None
    dashboard: Endpoint
    instances: Mapping[str, Endpoint]
    beside: Mapping[str, Endpoint] = field(default_factory=dict)

    @property
    def all_predictors(self) -> tuple[Endpoint, ...]:
        return (*self.predictors, *self.beside.values())

    @property
    def monitor_urls(self) -> str:
        """All monitors in one string, as `shared.wire.addresses` reads them."""
        return ",".join(each.url for each in self.monitors)

    @property
    def heartbeats(self) -> str:
        return ",".join(each.zmq(1) for each in self.monitors)

    @property
    def broadcasts(self) -> str:
        return ",".join(each.zmq(2) for each in self.monitors)

    @property
    def predictor_url(self) -> str:
        """The URL of the first predictor; empty without one."""
        return next((each.url for each in self.all_predictors), "")

    @property
    def planner_url(self) -> str:
        """Empty without a planner."""
        return self.planner.url if self.planner is not None else ""


def on_hosts(cluster: Cluster) -> Addresses:
    """Every process under the address of its host and ports of its own, the same on whichever host this is computed."""
    control, base = cluster.hosts.get(cluster.control, LOOPBACK), cluster.ports
    gateway, monitors, predictor = cluster.gateway, cluster.monitors, cluster.predictor

    def at_control(name: str, offset: int) -> Endpoint:
        return Endpoint(name, control, control, base + offset)

    def at_gateway(name: str, port: int) -> Endpoint:
        listen = gateway.host or control
        return Endpoint(name, listen, control if listen in ("0.0.0.0", "::") else listen, port)

    monitor_ports = (ports.MONITOR, *(ports.STANDBYS + 3 * index for index in range(monitors - 1)))
    monitor_names = ("monitor",) if monitors == 1 else tuple(f"monitor-{index}" for index in range(monitors))
    gateway_ports = [base + ports.GATEWAYS + index for index in range(gateway.processes)]
    instances: dict[str, Endpoint] = {}
    next_port = base + ports.INSTANCES
    for entry in cluster.instances:
        host = cluster.hosts.get(entry.host or cluster.control, LOOPBACK)
        for name in entry.ids:
            instances[name] = Endpoint(name, host, host, next_port + 1)
            own = ports.of_instance(entry.data_parallel, entry.extra)
            next_port += own.stop - own.start
    beside = {}
    if predictor.enabled and predictor.beside:  # their ports follow those of all instances
        enabled = {name for entry in cluster.instances if entry.enabled for name in entry.ids}
        for index, (name, at) in enumerate(instances.items()):
            if name in enabled:
                beside[name] = replace(at, name=predictor.name_beside(name), port=next_port + 2 * index)
    return Addresses(
        monitors=tuple(map(at_control, monitor_names, monitor_ports)),
        schedulers=tuple(at_control(name, ports.SCHEDULERS + 2 * i) for i, name in enumerate(cluster.scheduler.names)),
        api=at_gateway("gateway", gateway.port),
        gateways=tuple(map(at_gateway, gateway.names, [gateway.port] if gateway.processes == 1 else gateway_ports)),
        predictors=tuple(at_control(name, ports.PREDICTORS + 2 * i) for i, name in enumerate(predictor.names)),
        planner=at_control("planner", ports.PLANNER) if cluster.planner.enabled else None,
        dashboard=Endpoint("dashboard", LOOPBACK, LOOPBACK, cluster.dashboard.port),
        instances=instances,
        beside=beside,
    )


def gateway_settings(section: GatewaySection, index: int, own_port: int, data_dir: Path) -> dict[str, Any]:
    """The file's settings of the gateway, plus what distinguishes one of several processes on the same port."""
    if section.processes == 1:
        return section.extra
    found = {
        **section.extra,
        "gateway_id": section.names[index],
        "processes": section.processes,
        "process": index,
        "own_port": own_port,
        "shared_table": str(data_dir.resolve() / GATEWAY_TABLE),
    }
    if named := section.extra.get("record_lengths"):
        # Each process writes a file of its own; together the files are as large as that of one process may become.
        total, file = section.extra.get("record_bytes"), Path(named)
        max_bytes = total if isinstance(total, int) else GatewaySettings.model_fields["record_bytes"].default
        found["record_lengths"] = str(file.with_name(f"{file.stem}-{index}{file.suffix}"))
        found["record_bytes"] = max(_MIN_RECORD_BYTES, max_bytes // section.processes)
    return found


def make_shared_table(plan: Plan) -> None:
    """Create the table in which several gateway processes count together. Raises InvalidRequest."""
    for spec in plan.processes:
        settings = spec.settings
        if isinstance(settings, GatewaySettings) and settings.shared_table is not None:
            callers = len(load_keys(settings.api_keys_file)) if settings.api_keys_file else 1
            make_table(settings.shared_table, settings.processes, callers)
            return


def targets_of(processes: Iterable[ProcessSpec]) -> tuple[ScrapeTarget, ...]:
    return tuple(
        ScrapeTarget(service=service, process=spec.name, url=spec.health_url.removesuffix("/health"))
        for spec in processes
        if (service := SERVICES.get(type(spec.settings)))
    )


def write_targets(data_dir: Path, processes: Iterable[ProcessSpec]) -> None:
    """Replace the file for Prometheus' `file_sd_configs` atomically; the labels are those that the monitor gives."""
    groups = [_target_group(each) for each in targets_of(processes)]
    fresh = data_dir / f"{TARGETS_FILE}.{os.getpid()}"
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(groups), indent=1))
    fresh.replace(data_dir / TARGETS_FILE)


def remove_targets(data_dir: Path) -> None:
    """Without the file Prometheus does not report the stopped processes as down."""
    (data_dir / TARGETS_FILE).unlink(missing_ok=True)


def _target_group(each: ScrapeTarget) -> dict[str, Any]:
    instance = {"instance_id": each.process} if each.service == "worker" else {}
    labels = {"service": each.service, "process": each.process, **instance}
    return {"targets": [urlsplit(each.url).netloc], "labels": labels}
