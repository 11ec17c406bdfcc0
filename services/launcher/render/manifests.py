"""`polyphase render kubernetes`: all objects of a cluster file in the order of their dependencies, written as YAML."""

import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from services.launcher.cluster_file import Cluster, load_cluster
from services.launcher.render.groups import GATEWAY, KEYS_FILE, POSTGRES, STATELESS, SUITE, Group, Manifest, groups_of
from services.launcher.render.options import RenderOptions
from services.launcher.render.pods import FOLDERS, pod_template
from services.launcher.render.variables import Variable
from shared.errors import InvalidRequest

render_app = typer.Typer(no_args_is_help=True, help="Render manifests for orchestrators from a cluster file.")
_HEAD = "# Made by `polyphase render kubernetes`; change the cluster file, not this.\n"
_HOW = {
    "curve-public": "curve_public, curve_secret: `polyphase keys curve` creates a pair",
    "curve-secret": "curve_public, curve_secret: `polyphase keys curve` creates a pair",
    "cluster-token": "cluster_token: `polyphase keys token` creates one",
    "database-url": "database_url: postgresql://USER:PASSWORD@HOST/NAME, or --with-postgres",
    "keys.yaml": "gateway.api_keys_file: `polyphase keys add NAME --file keys.yaml` creates one",
}
_API_VERSIONS = {
    **dict.fromkeys(("ConfigMap", "Secret", "Service"), "v1"),
    **dict.fromkeys(("StatefulSet", "Deployment"), "apps/v1"),
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
    "ServiceMonitor": "monitoring.coreos.com/v1",
}
METRICS = "polyphase/metrics"  # the label of Services whose pods Prometheus scrapes
_PASSWORD = "postgres-password"


@dataclass(frozen=True, slots=True)
class Rendered:
    """The objects by file, and the keys that the Secret must have."""

    files: Mapping[str, list[Manifest]]
    secret_keys: list[str]

    @property
    def objects(self) -> list[Manifest]:
        return [each for several in self.files.values() for each in several]


def render(cluster: Cluster, options: RenderOptions, where: str, *, with_secrets: bool = False) -> Rendered:
    """Render a cluster file; with_secrets: including a Secret with keys and passwords in clear text.

    Raises InvalidRequest that names `where` and the key at fault.
    """
    groups = groups_of(cluster, options, where)
    namespace: Manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": options.namespace}}
    files: dict[str, list[Manifest]] = {"00-namespace": [namespace]}
    if with_secrets:
        files["10-secret"] = [secret(cluster, options, groups, secrets.token_urlsafe(24), where)]
    if options.postgres.enabled:
        files["20-postgres"] = postgres(options)
    files["30-services"] = services(options, groups)
    if options.network_policies:
        files["40-network"] = network_policies(options, groups)
    if options.monitors:
        files["50-metrics"] = [service_monitor(options)]
    for group in groups:
        own = [config(options, group), workload(cluster, options, group, where), disruption_budget(options, group)]
        files[f"60-{group.name}"] = own
    return Rendered(files, secret_keys(options, groups))


def as_text(objects: list[Manifest]) -> str:
    """A stream of YAML documents."""
    return _HEAD + "".join(f"---\n{yaml.dump(each, Dumper=_Plain, sort_keys=False, width=110)}" for each in objects)


def write(rendered: Rendered, folder: Path) -> list[Path]:
    """Write one file per group; the Secret's file is readable only by its owner. Files of earlier runs are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("[0-9][0-9]-*.yaml"):
        if old.read_text().startswith(_HEAD):
            old.unlink()
    written = []
    for name, objects in rendered.files.items():
        file = folder / f"{name}.yaml"
        file.touch(mode=0o600 if "secret" in name else 0o644)
        file.write_text(as_text(objects))
        written.append(file)
    return written


class _Plain(yaml.SafeDumper):
    """YAML without anchors, for readability."""

    def ignore_aliases(self, data: object) -> bool:
        return True


@render_app.callback()
def render_group() -> None:
    """Render manifests for orchestrators from a cluster file."""


@render_app.command("kubernetes")
def kubernetes_command(
    file: Annotated[Path, typer.Argument(help="A cluster file, or the name of a shipped one.")],
    out: Annotated[str, typer.Option(help="A folder for the files; -: standard output.")] = "-",
    namespace: Annotated[str, typer.Option(help="Namespace. Default: polyphase.")] = "",
    image: Annotated[str, typer.Option(help="Image of pods without accelerators. Default: polyphase:cpu.")] = "",
    gpu_image: Annotated[str, typer.Option(help="Image of instances on NVIDIA GPUs. Default: polyphase:gpu.")] = "",
    model: Annotated[
        str, typer.Option(help="The model as pods find it, if the file names a folder of this machine.")
    ] = "",
    options: Annotated[
        Path | None, typer.Option(help="A YAML file with further options: see docs/kubernetes.md.")
    ] = None,
    with_postgres: Annotated[
        bool, typer.Option("--with-postgres", help="Add a PostgreSQL database in one pod, for trials.")
    ] = False,
    with_secrets: Annotated[bool, typer.Option("--with-secrets", help="Add a Secret with keys in CLEAR TEXT.")] = False,
) -> None:
    """Render the Kubernetes manifests of a cluster file: workloads, Services, network policies, metrics."""
    given = {"namespace": namespace, "image": image, "model": model}
    overrides: dict[str, object] = {key: value for key, value in given.items() if value}
    if gpu_image:
        overrides["images"] = {"NVIDIA": gpu_image}
    chosen = RenderOptions.read(options, **overrides)
    if with_postgres:
        chosen = chosen.model_copy(update={"postgres": chosen.postgres.model_copy(update={"enabled": True})})
    rendered = render(load_cluster(file), chosen, str(file), with_secrets=with_secrets)
    if out == "-":
        print(as_text(rendered.objects), end="")
    else:
        for written in write(rendered, Path(out)):
            print(written)
    if not with_secrets:
        print(_how(rendered, chosen), file=sys.stderr)


def _how(rendered: Rendered, options: RenderOptions) -> str:
    """How to create the Secret that the manifests refer to."""
    words = [f"  --from-file={key}" if "." in key else f"  --from-literal={key}=…" for key in rendered.secret_keys]
    make = f"kubectl -n {options.namespace} create secret generic {options.secret}"
    return "Secrets are not rendered. Create the Secret first (docs/kubernetes.md):\n" + " \\\n".join([make, *words])


def manifest(
    options: RenderOptions, kind: str, name: str, body: Mapping[str, Any], labels: Mapping[str, str] | None = None
) -> Manifest:
    """One object of the namespace."""
    labels = {"app.kubernetes.io/part-of": SUITE, **(labels or {})}
    metadata = {"name": name, "namespace": options.namespace, "labels": labels}
    return {"apiVersion": _API_VERSIONS[kind], "kind": kind, "metadata": metadata, **body}


def config(options: RenderOptions, group: Group) -> Manifest:
    """The ConfigMap with the environment of a group's pods, without secrets."""
    data = {**FOLDERS, **{key: value for key, value in group.environment.items() if "$(" not in value}}
    body = {"data": dict(sorted(data.items()))}
    return manifest(options, "ConfigMap", group.config_name, body)


def secret_keys(options: RenderOptions, groups: Sequence[Group]) -> list[str]:
    """The keys that the Secret must have."""
    keys = {each.secret for group in groups for each in group.variables.values()} - {""}
    own = {_PASSWORD} if options.postgres.enabled else set()
    return sorted(keys | own | {Path(KEYS_FILE).name})


def secret(cluster: Cluster, options: RenderOptions, groups: Sequence[Group], password: str, where: str) -> Manifest:
    """The Secret in clear text. Raises InvalidRequest that names all values which the file lacks."""
    values = _values(groups, where)
    values["database-url"] = cluster.database_url
    values["cluster-token"] = cluster.cluster_token.get_secret_value()
    values[_PASSWORD] = password
    file = cluster.gateway.extra.get("api_keys_file")
    try:
        values["keys.yaml"] = Path(file).read_text() if file else ""
    except OSError as error:
        raise InvalidRequest(f"{where}: gateway.api_keys_file: {error}") from error
    keys = secret_keys(options, groups)
    if missing := [key for key in keys if not values.get(key)]:
        lines = dict.fromkeys(f"{where}: the Secret needs {_HOW.get(key, key)}" for key in missing)
        raise InvalidRequest("\n".join(lines))
    if "database-url" in keys and not values["database-url"].startswith("postgres"):
        raise InvalidRequest(f"{where}: database_url: pods share no files: it must be postgresql://…")
    body = {"type": "Opaque", "stringData": {key: values[key] for key in keys}}
    return manifest(options, "Secret", options.secret, body)


def _values(groups: Sequence[Group], where: str) -> dict[str, str]:
    """The secrets in the cluster file by key. Raises InvalidRequest for a key with two values."""
    found: dict[str, str] = {}
    for group in groups:
        for each in group.variables.values():
            if each.secret and each.value and found.setdefault(each.secret, each.value) != each.value:
                key = each.secret
                raise InvalidRequest(
                    f"{where}: {group.name}: {key} differs from another group's, and the Secret has one {key} for all"
                )
    return found


def service_monitor(options: RenderOptions) -> Manifest:
    """The ServiceMonitor of all services, which have the same path and port name; each pod is a target."""
    spec = {
        "selector": {"matchLabels": {METRICS: "true"}},
        "endpoints": [{"port": "http", "path": "/metrics", "interval": "10s"}],
        "targetLabels": ["app.kubernetes.io/part-of"],
        "podTargetLabels": ["app.kubernetes.io/name", "app.kubernetes.io/instance"],
    }
    return manifest(options, "ServiceMonitor", SUITE, {"spec": spec}, options.monitor_labels)


def network_policies(options: RenderOptions, groups: Sequence[Group]) -> list[Manifest]:
    """Policies for incoming traffic: within the suite, from clients to gateways, from Prometheus to metrics."""
    ours = {"matchLabels": {"app.kubernetes.io/part-of": SUITE}}
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": options.monitoring_namespace}}}
    inside: Manifest = {"podSelector": ours, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": ours}]}]}
    if options.monitors:
        inside["ingress"].append({"from": [monitoring], "ports": [{"port": "http"}]})
    found = [manifest(options, "NetworkPolicy", SUITE, {"spec": inside})]
    if any(group.component == GATEWAY for group in groups):
        clients = {
            "podSelector": {"matchLabels": {"app.kubernetes.io/name": GATEWAY}},
            "policyTypes": ["Ingress"],
            "ingress": [{"ports": [{"port": "http"}]}],
        }
        found.append(manifest(options, "NetworkPolicy", GATEWAY, {"spec": clients}))
    return found


def services(options: RenderOptions, groups: Sequence[Group]) -> list[Manifest]:
    """One Service per component, headless where pods are reached by their own names; and one for clients of the API."""
    found, seen = [], set()
    for group in groups:
        if group.component not in seen:
            found.append(_service(options, group))
            seen.add(group.component)
        if group.component == GATEWAY:
            ports = [{"name": "http", "port": group.ports["http"], "targetPort": "http"}]
            spec = {"selector": {"app.kubernetes.io/name": GATEWAY}, "ports": ports}
            found.append(manifest(options, "Service", GATEWAY, {"spec": spec}))
    return found


def _service(options: RenderOptions, group: Group) -> Manifest:
    ports = [{"name": name, "port": port, "targetPort": name} for name, port in group.ports.items()]
    spec: Manifest = {"selector": {"app.kubernetes.io/name": group.component}}
    if group.worker is not None:  # their ports differ, and they advertise their addresses themselves
        ports = [{"name": "http", "port": 80, "targetPort": "http"}]
    if group.component not in STATELESS:
        # Pods that start or drain are reached, too: each by its own name.
        spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    scraped = {} if group.settings is None else {METRICS: "true"}
    return manifest(options, "Service", group.service, {"spec": {**spec, "ports": ports}}, scraped)


def claim(name: str, size: str, storage_class: str) -> Manifest:
    spec: Manifest = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}
    if storage_class:
        spec["storageClassName"] = storage_class
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}


def postgres(options: RenderOptions) -> list[Manifest]:
    """A database for trials: one pod and its Service, without replica or backup."""
    bodies = yaml.safe_load(Path(__file__).with_name("postgres.yaml").read_text())
    spec, chosen = bodies["StatefulSet"]["spec"], options.postgres
    (server,) = spec["template"]["spec"]["containers"]
    server["image"] = chosen.image
    server["env"].append(Variable(secret=_PASSWORD).entry("POSTGRES_PASSWORD", options.secret))
    spec["volumeClaimTemplates"] = [claim("data", chosen.size, chosen.storage_class)]
    return [
        manifest(options, "Service", POSTGRES, bodies["Service"]),
        manifest(options, "StatefulSet", POSTGRES, bodies["StatefulSet"]),
    ]


def workload(cluster: Cluster, options: RenderOptions, group: Group, where: str) -> Manifest:
    """A StatefulSet where pods have names of their own, else a Deployment. Raises InvalidRequest."""
    spec: Manifest = {
        "replicas": group.replicas,
        "selector": {"matchLabels": group.selector},
        "template": pod_template(cluster, options, group, where),
    }
    if group.component in STATELESS:
        body = {"strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}, **spec}
        return manifest(options, "Deployment", group.name, {"spec": body})
    # Pods start in parallel; an update replaces them one at a time, and each drains first.
    body = {"serviceName": group.service, "podManagementPolicy": "Parallel", **spec}
    if group.worker is not None and not options.models.claim:
        volume = claim("models", options.models.size, options.models.storage_class)
        body["volumeClaimTemplates"] = [volume]
    return manifest(options, "StatefulSet", group.name, {"spec": body})


def disruption_budget(options: RenderOptions, group: Group) -> Manifest:
    """Of each group one pod at a time may be evicted."""
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": group.selector}}
    return manifest(options, "PodDisruptionBudget", group.name, {"spec": spec})
