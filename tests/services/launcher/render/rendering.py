"""Clusters to render, and the parts of their manifests."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from services.launcher.cluster_file import Cluster, load_cluster
from services.launcher.render.manifests import Rendered, render
from services.launcher.render.options import RenderOptions

PUBLIC, SECRET, TOKEN = "p" * 40, "s" * 40, "the-cluster-token-itself"
UNLIKE: dict[str, Any] = {
    **yaml.safe_load((Path(__file__).parent / "unlike.yaml").read_text()),
    "curve_public": PUBLIC,
    "curve_secret": SECRET,
    "cluster_token": TOKEN,
}


def unlike(**changes: Any) -> Cluster:
    return Cluster.model_validate({**UNLIKE, **changes})


def shipped(name: str) -> Cluster:
    return load_cluster(Path(name))


@functools.cache
def _unlike() -> Rendered:
    return render(unlike(), RenderOptions(), "file.yaml")


def rendered(cluster: Cluster | None = None, *, with_secrets: bool = False, **options: Any) -> Rendered:
    """The manifests of a cluster, by default of `unlike()`; do not change them."""
    if cluster is None and not with_secrets and not options:
        return _unlike()
    return render(cluster or unlike(), RenderOptions(**options), "file.yaml", with_secrets=with_secrets)


def of_kind(objects: Rendered, *kinds: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in objects.objects if each["kind"] in kinds}


def workloads(objects: Rendered) -> dict[str, dict[str, Any]]:
    return of_kind(objects, "StatefulSet", "Deployment")


def pod(objects: Rendered, name: str) -> dict[str, Any]:
    found: dict[str, Any] = workloads(objects)[name]["spec"]["template"]["spec"]
    return found


def container(objects: Rendered, name: str) -> dict[str, Any]:
    found: dict[str, Any] = pod(objects, name)["containers"][0]
    return found


def environment(objects: Rendered, name: str, ordinal: int = 0, secret: str = SECRET) -> dict[str, str]:
    """The environment of the process in that pod."""
    box = container(objects, name)
    found: dict[str, str] = {}
    for source in box["envFrom"]:
        found |= of_kind(objects, "ConfigMap")[source["configMapRef"]["name"]]["data"]
    for each in box["env"]:
        if "value" in each:
            found[each["name"]] = re.sub(r"\$\((\w+)\)", lambda other: found[other[1]], each["value"])
            continue
        source = each["valueFrom"]
        if "secretKeyRef" in source:
            found[each["name"]] = secret
        else:
            pod_says = {"metadata.name": f"{name}-{ordinal}", "status.podIP": "10.1.2.3"}
            found[each["name"]] = pod_says[source["fieldRef"]["fieldPath"]]
    return found


def hosts(objects: Rendered) -> dict[str, set[int]]:
    """Each host name within the namespace, and the ports that answer there."""
    found: dict[str, set[int]] = {}
    pods = list(_pods(objects))
    for service in of_kind(objects, "Service").values():
        name, spec = service["metadata"]["name"], service["spec"]
        ports = {port["port"]: port["targetPort"] for port in spec["ports"]}
        for pod_name, labels, listening, governed_by in pods:
            if not spec["selector"].items() <= labels.items():
                continue
            if spec.get("clusterIP") == "None":
                if governed_by == name:
                    found[f"{pod_name}.{name}"] = set(listening.values())
            else:
                open_ports = {port for port, target in ports.items() if listening[target] == port}
                found.setdefault(name, set()).update(open_ports)
    return found


def _pods(objects: Rendered) -> Iterator[tuple[str, dict[str, str], dict[str, int], str]]:
    for name, each in workloads(objects).items():
        template = each["spec"]["template"]
        listening = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
        for index in range(each["spec"]["replicas"]):
            yield f"{name}-{index}", template["metadata"]["labels"], listening, each["spec"].get("serviceName", "")


def read(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))
