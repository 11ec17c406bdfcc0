"""All objects of a cluster file, in the order in which they are needed, and how they are written."""

import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
import yaml

from services.launcher.cluster_file import Cluster, load_cluster
from services.launcher.render.groups import (
    GATEWAY,
    KEYS_FILE,
    METRICS,
    STATELESS,
    SUITE,
    Group,
    Manifest,
    groups_of,
    manifest,
    selector,
)
from services.launcher.render.options import RenderOptions
from services.launcher.render.pods import MODEL_CLAIM, config_name, extra_environment, pod_template
from shared.errors import InvalidRequest

# MERGED configuration.py
# ConfigMaps of what anybody may read, and the Secret of the rest.


_HOW = {
    "curve-public": "curve_public, curve_secret: `polyphase keys curve` makes a pair",
    "curve-secret": "curve_public, curve_secret: `polyphase keys curve` makes a pair",
    "cluster-token": "cluster_token: `polyphase keys token` makes one",
    "database-url": "database_url: postgresql://USER:PASSWORD@HOST/NAME, or --with-postgres",
    "keys.yaml": "gateway.api_keys_file: `polyphase keys add NAME --file keys.yaml` makes one",
}


def config(options: RenderOptions, group: Group) -> Manifest:
    """The environment of a group's pods, but for secrets."""
    plain = {key: value for key, value in group.environment.items() if "$(" not in value}
    data = {**extra_environment(), **plain}
    body = {"data": {key: data[key] for key in sorted(data)}}
    return manifest("v1", "ConfigMap", config_name(group), options.namespace, body)


def secret_keys(options: RenderOptions, groups: Sequence[Group]) -> list[str]:
    """What the Secret has to hold."""
    keys = {key for group in groups for key in group.secrets.values()}
    own = {"postgres-password"} if options.postgres.enabled else set()
    return sorted(keys | own | {KEYS_FILE.rpartition("/")[2]})


def secret(cluster: Cluster, options: RenderOptions, groups: Sequence[Group], password: str, where: str) -> Manifest:
    """In clear: whoever asks for it looks after it. Raises InvalidRequest that names all that the file lacks."""
    said = _values(groups, where)
    said["database-url"] = cluster.database_url
    said["cluster-token"] = cluster.cluster_token.get_secret_value()
    said["postgres-password"] = password
    file = cluster.gateway.extra.get("api_keys_file")
    try:
        said["keys.yaml"] = Path(file).read_text() if file else ""
    except OSError as error:
        raise InvalidRequest(f"{where}: gateway.api_keys_file: {error}") from error
    keys = secret_keys(options, groups)
    if missing := [key for key in keys if not said.get(key)]:
        lines = dict.fromkeys(f"{where}: the Secret needs {_HOW.get(key, key)}" for key in missing)
        raise InvalidRequest("\n".join(lines))
    if "database-url" in keys and not said["database-url"].startswith("postgres"):
        raise InvalidRequest(f"{where}: database_url: pods share no file: it has to be postgresql://…")
    body = {"type": "Opaque", "stringData": {key: said[key] for key in keys}}
    return manifest("v1", "Secret", options.secret, options.namespace, body)


def _values(groups: Sequence[Group], where: str) -> dict[str, str]:
    """What the file says of secrets. Raises InvalidRequest for a key of two values."""
    found: dict[str, str] = {}
    for group in groups:
        for key, value in group.secret_values.items():
            if found.setdefault(key, value) != value:
                raise InvalidRequest(
                    f"{where}: {group.name}: {key} differs from another group's, and the Secret has one {key} for all"
                )
    return found


# MERGED monitors.py
# For Prometheus' operator: every service of ours, each pod as a target.


def service_monitor(options: RenderOptions) -> Manifest:
    """One for all: they have the same path and name of the port."""
    spec = {
        "selector": {"matchLabels": {METRICS: "true"}},
        "endpoints": [{"port": "http", "path": "/metrics", "interval": "10s"}],
        "targetLabels": ["app.kubernetes.io/part-of"],
        "podTargetLabels": ["app.kubernetes.io/name", "app.kubernetes.io/instance"],
    }
    return manifest(
        "monitoring.coreos.com/v1", "ServiceMonitor", SUITE, options.namespace, {"spec": spec}, options.monitor_labels
    )


# MERGED network.py
# Who may talk to whom: the suite to itself, clients to gateways, Prometheus to metrics; nobody else.


def network_policies(options: RenderOptions, groups: Sequence[Group]) -> list[Manifest]:
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


# MERGED services.py
# Names by which pods are found.


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


# MERGED storage.py
# Volumes that outlive pods, and a database on one, for trying out.


_NAME = "postgres"
_LABELS = {"app.kubernetes.io/name": _NAME, "app.kubernetes.io/instance": _NAME}
_USER = 999  # of the official image


def claim(name: str, size: str, storage_class: str) -> Manifest:
    """A template of a StatefulSet."""
    spec: Manifest = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}
    if storage_class:
        spec["storageClassName"] = storage_class
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}


def postgres(options: RenderOptions) -> list[Manifest]:
    """One pod and its Service: no replica, no backup."""
    said = options.postgres
    security = {
        "runAsNonRoot": True,
        "runAsUser": _USER,
        "runAsGroup": _USER,
        "fsGroup": _USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    pod = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 60,
        "securityContext": security,
        "containers": [_server(options)],
    }
    spec = {
        "serviceName": _NAME,
        "replicas": 1,
        "selector": {"matchLabels": _LABELS},
        "template": {"metadata": {"labels": {"app.kubernetes.io/part-of": SUITE, **_LABELS}}, "spec": pod},
        "volumeClaimTemplates": [claim("data", said.size, said.storage_class)],
    }
    port = {"name": "postgres", "port": 5432}
    service = {"spec": {"clusterIP": "None", "selector": _LABELS, "ports": [port]}}
    return [
        manifest("v1", "Service", _NAME, options.namespace, service),
        manifest("apps/v1", "StatefulSet", _NAME, options.namespace, {"spec": spec}),
    ]


def _server(options: RenderOptions) -> Manifest:
    ready = {"exec": {"command": ["pg_isready", "-U", "polyphase"]}, "periodSeconds": 2}
    return {
        "name": _NAME,
        "image": options.postgres.image,
        "env": [
            {"name": "POSTGRES_USER", "value": "polyphase"},
            {"name": "PGDATA", "value": "/var/lib/postgresql/data/pgdata"},
            {
                "name": "POSTGRES_PASSWORD",
                "valueFrom": {"secretKeyRef": {"name": options.secret, "key": "postgres-password"}},
            },
        ],
        "ports": [{"name": "postgres", "containerPort": 5432}],
        "startupProbe": {**ready, "failureThreshold": 60},
        "readinessProbe": ready,
        "livenessProbe": {**ready, "periodSeconds": 10, "timeoutSeconds": 5},
        "resources": {"requests": {"cpu": "250m", "memory": "512Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "data", "mountPath": "/var/lib/postgresql/data"}],
    }


# MERGED workloads.py
# What keeps pods running: StatefulSets where each has a name of its own, else Deployments; how many may be away.


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


def disruption_budget(options: RenderOptions, group: Group) -> Manifest:
    """Of each group one pod at a time may be moved to another node."""
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": selector(group)}}
    return manifest("policy/v1", "PodDisruptionBudget", group.name, options.namespace, {"spec": spec})


_HEAD = "# Made by `polyphase render kubernetes`; change the cluster file, not this.\n"


@dataclass(frozen=True, slots=True)
class Rendered:
    """Objects by the file that they go into, and the keys that the Secret has to hold."""

    files: Mapping[str, list[Manifest]]
    secret_keys: list[str]

    @property
    def objects(self) -> list[Manifest]:
        """All of them, in order."""
        return [each for several in self.files.values() for each in several]


def render(cluster: Cluster, options: RenderOptions, where: str, *, with_secrets: bool = False) -> Rendered:
    """Raises InvalidRequest that names `where` and the key at fault.

    with_secrets: keys and passwords in clear, from the cluster file.
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
    """A file each; the Secret's is readable by its owner only. What was rendered there before and is no more goes."""
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
    """Without anchors, which people read badly."""

    def ignore_aliases(self, data: object) -> bool:
        return True


# MERGED command.py
# `polyphase render kubernetes`.


render_app = typer.Typer(no_args_is_help=True, help="Manifests for orchestrators, from a cluster file.")


@render_app.callback()
def render_group() -> None:
    """Manifests for orchestrators, from a cluster file."""


@render_app.command("kubernetes")
def kubernetes_command(
    file: Annotated[Path, typer.Argument(help="A cluster file, or the name of one that is shipped.")],
    out: Annotated[str, typer.Option(help="A folder for a file each; -: all of them to standard output.")] = "-",
    namespace: Annotated[str, typer.Option(help="Default: polyphase.")] = "",
    image: Annotated[str, typer.Option(help="Of everything without an accelerator; default: polyphase:cpu.")] = "",
    gpu_image: Annotated[str, typer.Option(help="Of instances on NVIDIA GPUs; default: polyphase:gpu.")] = "",
    model: Annotated[str, typer.Option(help="As pods find it, where the file names a folder of this machine.")] = "",
    options: Annotated[Path | None, typer.Option(help="A YAML file of all options: see docs/kubernetes.md.")] = None,
    with_postgres: Annotated[bool, typer.Option("--with-postgres", help="A database of one pod, to try out.")] = False,
    with_secrets: Annotated[bool, typer.Option("--with-secrets", help="A Secret too: keys in CLEAR.")] = False,
) -> None:
    """Manifests that run what a cluster file says: StatefulSets, Services, probes, drains, budgets, metrics."""
    given = {"namespace": namespace, "image": image, "model": model}
    said: dict[str, object] = {key: value for key, value in given.items() if value}
    if gpu_image:
        said["images"] = {"NVIDIA": gpu_image}
    chosen = RenderOptions.read(options, **said)
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
    """How the Secret is made that the manifests name."""
    words = [f"  --from-file={key}" if "." in key else f"  --from-literal={key}=…" for key in rendered.secret_keys]
    make = f"kubectl -n {options.namespace} create secret generic {options.secret}"
    return "Keys are not rendered. Make their Secret first (docs/kubernetes.md):\n" + " \\\n".join([make, *words])
