"""Where the processes of the control plane are found, as it follows from the cluster file."""

from dataclasses import dataclass

from services.launcher import ports
from services.launcher.cluster_file import Cluster
from services.launcher.cluster_sections import InstanceSection
from services.launcher.gateways import own_ports
from services.launcher.monitors import monitor_ports


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
        return tuple(f"http://{host}:{port}" for port in own_ports(self._cluster.gateway, self.base))

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
