"""Who may talk to whom: the suite to itself, clients to gateways, Prometheus to metrics; nobody else."""

from collections.abc import Sequence

from services.launcher.render.groups import GATEWAY, Group
from services.launcher.render.objects import SUITE, Manifest, manifest
from services.launcher.render.options import RenderOptions


def policies(options: RenderOptions, groups: Sequence[Group]) -> list[Manifest]:
    """Of what comes in; what goes out is free."""
    ours = {"matchLabels": {"app.kubernetes.io/part-of": SUITE}}
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": options.monitoring_namespace}}}
    inside: Manifest = {"podSelector": ours, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": ours}]}]}
    if options.monitors:
        inside["ingress"].append({"from": [monitoring], "ports": [{"port": "http"}]})
    found = [manifest("networking.k8s.io/v1", "NetworkPolicy", SUITE, options.namespace, {"spec": inside})]
    if any(group.component == GATEWAY for group in groups):
        clients = {
            "podSelector": {"matchLabels": {"app.kubernetes.io/name": GATEWAY}},
            "policyTypes": ["Ingress"],
            "ingress": [{"ports": [{"port": "http"}]}],
        }
        found.append(manifest("networking.k8s.io/v1", "NetworkPolicy", GATEWAY, options.namespace, {"spec": clients}))
    return found
