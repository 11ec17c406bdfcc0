"""What keeps pods running: StatefulSets where each has a name of its own, else Deployments; how many may be away."""

from services.launcher.cluster_file import Cluster
from services.launcher.render.groups import STATELESS, Group
from services.launcher.render.objects import Manifest, manifest, selector
from services.launcher.render.options import RenderOptions
from services.launcher.render.pods import MODEL_CLAIM, pod_template
from services.launcher.render.storage import claim


def workload(cluster: Cluster, options: RenderOptions, group: Group, where: str) -> Manifest:
    """Raises InvalidRequest for an instance that no pod can be."""
    spec: Manifest = {
        "replicas": group.replicas,
        "selector": {"matchLabels": selector(group)},
        "template": pod_template(cluster, options, group, where),
    }
    if group.component in STATELESS:
        body = {"strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}, **spec}
        return manifest("apps/v1", "Deployment", group.name, options.namespace, {"spec": body})
    # All start at once; of an update, one at a time, and each drains before it ends.
    body = {"serviceName": group.service, "podManagementPolicy": "Parallel", **spec}
    if group.worker is not None and not options.models.claim:
        volume = claim(MODEL_CLAIM, options.models.size, options.models.storage_class)
        body["volumeClaimTemplates"] = [volume]
    return manifest("apps/v1", "StatefulSet", group.name, options.namespace, {"spec": body})


def budget(options: RenderOptions, group: Group) -> Manifest:
    """Of each group one pod at a time may be moved to another node."""
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": selector(group)}}
    return manifest("policy/v1", "PodDisruptionBudget", group.name, options.namespace, {"spec": spec})
