"""Several monitors: their names and their ports."""

from services.launcher import ports
from services.launcher.cluster_file import Cluster

LEASE_S = 1.0  # so that who stands by has taken over within two seconds: see services.cluster_monitor.lease


def monitor_names(cluster: Cluster) -> tuple[str, ...]:
    """The processes; the first that finds the lease free acts, whichever it is."""
    count = cluster.monitors
    return ("monitor",) if count == 1 else tuple(f"monitor-{index}" for index in range(count))


def monitor_ports(cluster: Cluster) -> tuple[int, ...]:
    """The first port of each, as an offset: HTTP, then heartbeats, then broadcasts."""
    return (ports.MONITOR, *(ports.STANDBYS + 3 * index for index in range(cluster.monitors - 1)))
