"""What joins emulated instances that stand on nodes: each gets the paths by which KV comes to it."""

from services.launcher.cluster_file import Cluster
from shared.cost.catalogue import Catalogue
from shared.cost.kinds import HOP_LATENCY_S
from shared.cost.network import INSIDE_EFFICIENCY, Link, LinkEntry
from shared.errors import PolyphaseError


def links_between(cluster: Cluster, where: str) -> dict[str, dict[str, LinkEntry]]:
    """By instance, then by the instance that KV comes from; nothing for those on no node.

    Raises InvalidRequest or NotFound that name `where`.
    """
    if cluster.network is None:
        return {}
    placed = [entry for entry in cluster.instances if entry.extra.get("node")]
    emulated = [entry for entry in placed if entry.extra.get("engine") == "emulated"]
    if not emulated:
        return {}
    nodes = {name: str(entry.extra["node"]) for entry in emulated for name in entry.ids}
    catalogue = Catalogue.built_in()
    try:
        inside = {
            str(entry.extra["node"]): Link(
                catalogue.get(str(entry.extra.get("accelerator", ""))).links.scale_up, HOP_LATENCY_S, INSIDE_EFFICIENCY
            )
            for entry in placed
        }
        network = cluster.network.network(sorted(inside), inside)
        return {
            name: {peer: LinkEntry.of(network.path(other, node)) for peer, other in nodes.items() if peer != name}
            for name, node in nodes.items()
        }
    except PolyphaseError as error:
        raise type(error)(cluster.places(where).tell("network", error.message.removeprefix("network: "))) from error
