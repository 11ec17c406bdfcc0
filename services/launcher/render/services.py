"""Names by which pods are found."""

from collections.abc import Sequence

from services.launcher.render.groups import GATEWAY, STATELESS, Group
from services.launcher.render.objects import METRICS, Manifest, manifest
from services.launcher.render.options import RenderOptions


def services(options: RenderOptions, groups: Sequence[Group]) -> list[Manifest]:
    """One a component, headless where each pod is found by its own name; and one for the API's clients."""
    found, seen = [], set()
    for group in groups:
        if group.component not in seen:
            found.append(_service(options, group))
            seen.add(group.component)
        if group.component == GATEWAY:
            ports = [{"name": "http", "port": group.ports["http"], "targetPort": "http"}]
            spec = {"selector": {"app.kubernetes.io/name": GATEWAY}, "ports": ports}
            found.append(manifest("v1", "Service", GATEWAY, options.namespace, {"spec": spec}))
    return found


def _service(options: RenderOptions, group: Group) -> Manifest:
    ports = [{"name": name, "port": port, "targetPort": name} for name, port in group.ports.items()]
    spec: Manifest = {"selector": {"app.kubernetes.io/name": group.component}}
    if group.worker is not None:  # their ports differ; they say themselves where they are
        ports = [{"name": "http", "port": 80, "targetPort": "http"}]
    if group.component not in STATELESS:
        # Whoever starts or drains is talked to all the same: by its name, not instead of another.
        spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    scraped = {} if group.settings is None else {METRICS: "true"}
    return manifest("v1", "Service", group.service, options.namespace, {"spec": {**spec, "ports": ports}}, scraped)
