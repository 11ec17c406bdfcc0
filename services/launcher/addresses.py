"""Where the processes of the control plane are found, as it follows from the cluster file."""

from services.launcher import ports
from services.launcher.cluster_file import Cluster
from services.launcher.gateways import own_ports
from services.launcher.monitors import monitor_ports


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
    def predictor_ports(self) -> tuple[int, ...]:
        """The offset of each predictor."""
        return tuple(ports.PREDICTORS + 2 * index for index in range(len(self._cluster.predictor.names)))

    @property
    def predictor_url(self) -> str:
        """The first one's, for those who look at one."""
        return self.http(ports.PREDICTORS) if self._cluster.predictor.enabled else ""

    @property
    def planner_url(self) -> str:
        """Empty without one."""
        return self.http(ports.PLANNER) if self._cluster.planner.enabled else ""


def scheduler_port(index: int) -> int:
    """The offset of a scheduler."""
    return ports.SCHEDULERS + 2 * index
