"""Where the processes of the control plane are found, as it follows from the cluster file."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
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
from services.launcher.cluster_file import Cluster, GatewaySection, InstanceSection
from services.launcher.spec import Plan, ProcessSpec
from services.planner.settings import PlannerSettings
from services.worker.settings import WorkerSettings

# MERGED gateways.py
# The gateway's processes: one alone on its port, or several that share it and count together in a table.


GATEWAY_TABLE = "gateways.table"  # in the data folder, made anew at each start of the suite
_LEAST_RECORD_BYTES = 1 << 16


def gateway_ports(section: GatewaySection, base: int) -> tuple[int, ...]:
    """Where each process is reached alone; that of the only one is everybody's."""
    if section.processes == 1:
        return (section.port,)
    return tuple(base + ports.GATEWAYS + index for index in range(section.processes))


def gateway_settings(section: GatewaySection, index: int, base: int, data_dir: Path) -> dict[str, Any]:
    """What the file says of the gateway, and what one of several processes has for itself."""
    if section.processes == 1:
        return section.extra
    several = {
        "gateway_id": section.names[index],
        "processes": section.processes,
        "process": index,
        "own_port": gateway_ports(section, base)[index],
        "shared_table": str(data_dir.resolve() / GATEWAY_TABLE),
    }
    return {**section.extra, **several, **_records(section, index)}


def make_shared_table(plan: Plan) -> None:
    """Before the first of several processes starts. Raises InvalidRequest."""
    for spec in plan.processes:
        settings = spec.settings
        if isinstance(settings, GatewaySettings) and settings.shared_table is not None:
            callers = len(load_keys(settings.api_keys_file)) if settings.api_keys_file else 1
            make_table(settings.shared_table, settings.processes, callers)
            return


def _records(section: GatewaySection, index: int) -> dict[str, Any]:
    """A file for each, since one process alone writes one; together they have no more bytes than one would have."""
    named = section.extra.get("record_lengths")
    if not named:
        return {}
    whole, file = section.extra.get("record_bytes"), Path(named)
    most = whole if isinstance(whole, int) else GatewaySettings.model_fields["record_bytes"].default
    each = max(_LEAST_RECORD_BYTES, most // section.processes)
    return {"record_lengths": str(file.with_name(f"{file.stem}-{index}{file.suffix}")), "record_bytes": each}


# MERGED monitors.py
# Several monitors: their names and their ports.


LEASE_S = 1.0  # so that who stands by has taken over within two seconds: see services.cluster_monitor.lease


def monitor_names(cluster: Cluster) -> tuple[str, ...]:
    """The processes; the first that finds the lease free acts, whichever it is."""
    count = cluster.monitors
    return ("monitor",) if count == 1 else tuple(f"monitor-{index}" for index in range(count))


def monitor_ports(cluster: Cluster) -> tuple[int, ...]:
    """The first port of each, as an offset: HTTP, then heartbeats, then broadcasts."""
    return (ports.MONITOR, *(ports.STANDBYS + 3 * index for index in range(cluster.monitors - 1)))


@dataclass(frozen=True, slots=True)
class PredictorAt:
    """Where a predictor is found. beside: the instance that it serves, and that one's section; empty: any."""

    name: str
    host: str
    port: int
    beside: str = ""
    entry: InstanceSection | None = None

    @property
    def url(self) -> str:
        """Of its HTTP side."""
        return f"http://{self.host}:{self.port}"

    @property
    def rpc_address(self) -> str:
        """Where gateways find it."""
        return f"tcp://{self.host}:{self.port + 1}"


class Addresses:
    """URLs for HTTP, addresses for ZeroMQ. An offset is a port's distance from the first of the suite's own."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.control = cluster.hosts.get(cluster.control, "127.0.0.1")  # the host of the control plane
        self.base = cluster.ports

    def http(self, offset: int) -> str:
        """The URL of a process."""
        return f"http://{self.control}:{self.base + offset}"

    def zmq(self, offset: int) -> str:
        """An address of a process."""
        return f"tcp://{self.control}:{self.base + offset}"

    def zmqs(self, number: int) -> str:
        """Of all monitors, the port so many behind their first."""
        return ",".join(self.zmq(offset + number) for offset in monitor_ports(self._cluster))

    def reached(self, host: str) -> str:
        """Where to find one that listens on `host`."""
        return self.control if host in ("0.0.0.0", "::") else host

    @property
    def gateway_host(self) -> str:
        """What gateways listen on."""
        return self._cluster.gateway.host or self.control

    @property
    def api_url(self) -> str:
        """Of all gateways together."""
        return f"http://{self.reached(self.gateway_host)}:{self._cluster.gateway.port}"

    @property
    def gateway_urls(self) -> tuple[str, ...]:
        """Of each gateway."""
        host = self.reached(self.gateway_host)
        return tuple(f"http://{host}:{port}" for port in gateway_ports(self._cluster.gateway, self.base))

    @property
    def scheduler_urls(self) -> tuple[str, ...]:
        """Of each scheduler."""
        return tuple(self.http(scheduler_port(index)) for index in range(self._cluster.scheduler.count))

    @property
    def monitor_urls(self) -> str:
        """Of all monitors, as `shared.wire.addresses` reads them."""
        return ",".join(self.http(offset) for offset in monitor_ports(self._cluster))

    @property
    def predictors(self) -> tuple[PredictorAt, ...]:
        """Of all hosts: those on the control host, or those beside instances."""
        section = self._cluster.predictor
        if not section.enabled or not section.beside:
            first = self.base + ports.PREDICTORS
            return tuple(PredictorAt(name, self.control, first + 2 * index) for index, name in enumerate(section.names))
        entries = [(entry, name) for entry in self._cluster.instances for name in entry.ids]
        firsts = ports.beside_ports(self.base, [ports.ranks_of(entry.extra) for entry, _ in entries])
        return tuple(
            PredictorAt(section.name_beside(name), self.host_of(entry), port, name, entry)
            for (entry, name), port in zip(entries, firsts, strict=True)
            if entry.enabled
        )

    def host_of(self, entry: InstanceSection) -> str:
        """The address of an instance's host."""
        return self._cluster.hosts.get(entry.host or self._cluster.control, "127.0.0.1")

    @property
    def predictor_url(self) -> str:
        """The first one's, for those who look at one."""
        return next((each.url for each in self.predictors), "")

    @property
    def planner_url(self) -> str:
        """Empty without one."""
        return self.http(ports.PLANNER) if self._cluster.planner.enabled else ""


def scheduler_port(index: int) -> int:
    """The offset of a scheduler."""
    return ports.SCHEDULERS + 2 * index


# MERGED targets.py
# Whom Prometheus is to scrape of what this host runs: for the monitor to tell, and as a file.


TARGETS_FILE = "prometheus.json"
SERVICES: dict[type[object], str] = {
    GatewaySettings: "gateway",
    SchedulerSettings: "scheduler",
    MonitorSettings: "monitor",
    PredictorSettings: "predictor",
    PlannerSettings: "planner",
    WorkerSettings: "worker",
}


def targets_of(processes: Iterable[ProcessSpec]) -> tuple[ScrapeTarget, ...]:
    """Each process that has metrics, under its own port."""
    return tuple(
        ScrapeTarget(service=service, process=one.name, url=one.health_url.removesuffix("/health"))
        for one in processes
        if (service := SERVICES.get(type(one.settings)))
    )


def write_targets(data_dir: Path, processes: Iterable[ProcessSpec]) -> None:
    """The file for Prometheus' `file_sd_configs`, replaced in one step; labels as the monitor gives them."""
    groups = [_group(each) for each in targets_of(processes)]
    fresh = data_dir / f"{TARGETS_FILE}.{os.getpid()}"
    fresh.write_bytes(msgspec.json.format(msgspec.json.encode(groups), indent=1))
    fresh.replace(data_dir / TARGETS_FILE)


def remove_targets(data_dir: Path) -> None:
    """The suite is over: nobody is to miss it."""
    (data_dir / TARGETS_FILE).unlink(missing_ok=True)


def _group(each: ScrapeTarget) -> dict[str, Any]:
    instance = {"instance_id": each.process} if each.service == "worker" else {}
    labels = {"service": each.service, "process": each.process, **instance}
    return {"targets": [urlsplit(each.url).netloc], "labels": labels}
