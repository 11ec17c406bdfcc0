"""From a cluster file to groups of identical pods.

`in_pods` gives each process the DNS name of its pod and the ports of its group; the processes themselves come from
`plan.processes_at`, as they do for `polyphase up`. What remains is what pods need besides: which variables are secret,
which differ between the pods of a group, and the paths of files and programs in the images.
"""

import hashlib
import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from services.launcher.addresses import SERVICES, Addresses, Endpoint, on_hosts
from services.launcher.cluster_file import Cluster
from services.launcher.model_source import PROJECT
from services.launcher.plan import processes_at
from services.launcher.ports import check_distinct
from services.launcher.render.options import RenderOptions
from services.launcher.spec import OURS, ProcessSpec
from services.worker.settings import WorkerSettings
from shared.errors import InvalidRequest
from shared.runtime.settings import ServiceSettings
from shared.secrecy import SECRET_NAME, SHARED_SECRET, USER_IN_URL

Manifest = dict[str, Any]
SUITE = "polyphase"
METRICS = "polyphase/metrics"  # the label of Services whose pods Prometheus scrapes
GATEWAY, WORKER, POSTGRES = "gateway", "worker", "postgres"
KEYED = frozenset({GATEWAY, "dashboard"})  # components that check API keys
GATEWAY_PODS = "gateway-pods"  # the headless Service under which each gateway has a name of its own
STATELESS = frozenset({"planner", "dashboard"})  # reached by a Service's name, whichever pod answers
APP, MODELS, DATA, KEYS = "/app", "/models", "/data", "/etc/polyphase"  # folders in the images
KEYS_FILE = f"{KEYS}/keys.yaml"  # the gateway's API keys, from the Secret
SECRETS_OF_ALL = ("curve_public", "curve_secret", "database_url")  # settings that pods cannot do without
DATABASE_URL = "_DATABASE_URL"
_OWN_URL = "postgresql://polyphase@postgres/polyphase"  # the password is in PGPASSWORD
_ANY = "0.0.0.0"  # pods listen on all addresses
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?")  # leaves room for the suffix that a StatefulSet adds
_NAMES = ("INSTANCE_ID", "SCHEDULER_ID", "GATEWAY_ID", "MONITOR_ID")  # the name of the pod
# Left out of the environment: the names above, and secrets that are files on one host and keys of the Secret here.
_TOKEN, _TOKEN_FILE = "_CLUSTER_TOKEN", "_CLUSTER_TOKEN_FILE"
_LEFT_OUT = (*_NAMES, _TOKEN, _TOKEN_FILE, "_CURVE_FILE")
_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"  # set by the plan where all engines are emulated
# Variables of other programs that hold no secret; every other one goes into the Secret. A name that ends like that of a
# secret, and a value with a URL's user information, are secret whatever stands here.
_PLAIN_BEGINNINGS = ("CUDA_", "FI_", "GLOO_", "KMP_", "NCCL_", "NIXL_", "OMP_", "TRITON_", "UCX_", "VLLM_")
_PLAIN = {
    "ASCEND_RT_VISIBLE_DEVICES",
    "ASCEND_VISIBLE_DEVICES",
    "HABANA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
    "HF_ENDPOINT",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "HOME",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "PATH",
    "PYTHONUNBUFFERED",
    "TZ",
    "ALL_PROXY",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "NO_PROXY",
    "all_proxy",
    "https_proxy",
    "http_proxy",
    "no_proxy",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_PROTOCOL",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_SERVICE_NAME",
    "OTEL_TRACES_SAMPLER",
    "OTEL_TRACES_SAMPLER_ARG",
}


@dataclass(frozen=True, slots=True)
class Group:
    """Processes that one workload runs, each in a pod of its own."""

    name: str
    component: str
    replicas: int
    command: tuple[str, ...]
    health: str  # paths
    ready: str
    ports: dict[str, int]  # name → number; the first is "http"
    settings: ServiceSettings | None  # of the first process
    environment: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)  # variable → key of the Secret
    fields: dict[str, str] = field(default_factory=dict)  # variable → field of the pod
    secret_values: dict[str, str] = field(default_factory=dict)  # key of the Secret → value in the cluster file

    @property
    def uses_database(self) -> bool:
        return any(name.endswith(DATABASE_URL) for name in (*self.secrets, *self.environment))

    @property
    def worker(self) -> WorkerSettings | None:
        """The settings of its instances; None for processes of the control plane."""
        return self.settings if isinstance(self.settings, WorkerSettings) else None

    @property
    def service(self) -> str:
        """The Service that governs its pods."""
        return GATEWAY_PODS if self.component == GATEWAY else self.component


def groups_of(cluster: Cluster, options: RenderOptions, where: str) -> tuple[Group, ...]:
    """The groups in the order of the plan. Raises InvalidRequest that names `where` and the key."""
    if cluster.predictor.beside:
        raise InvalidRequest(f"{where}: predictor.beside: pods have no predictor beside an instance: leave it out")
    in_images = _in_images(cluster, options, where)
    members: dict[str, list[ProcessSpec]] = {}
    entries = {name: entry.id for entry in cluster.instances for name in entry.ids}
    for spec in processes_at(in_images, Path(DATA), where, in_pods(in_images)):
        component = _component(spec)
        name = entries[spec.name] if component == WORKER else component
        if not _LABEL.fullmatch(name):
            raise InvalidRequest(f"{where}: instances: id {name!r}: Kubernetes allows at most 52 of a-z, 0-9 and -")
        group = members.setdefault(name, [])
        if name in (WORKER, POSTGRES, GATEWAY_PODS) or (group and _component(group[0]) != component):
            raise InvalidRequest(f"{where}: instances: {name!r} is the name of another part of the suite")
        group.append(spec)
    return tuple(_group(cluster, options, where, name, specs) for name, specs in members.items())


def in_pods(cluster: Cluster) -> Addresses:
    """Each process under the DNS name of its pod; all pods of a group listen on the ports of the first."""
    at = on_hosts(cluster)

    def pods(group: str, component: str, endpoints: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
        return tuple(
            Endpoint(each.name, _ANY, f"{group}-{index}.{component}", endpoints[0].port)
            for index, each in enumerate(endpoints)
        )

    def behind_service(each: Endpoint) -> Endpoint:
        return replace(each, listen=_ANY, host=each.name)

    workers = [pods(entry.id, WORKER, [at.instances[name] for name in entry.ids]) for entry in cluster.instances]
    return Addresses(
        monitors=pods("monitor", "monitor", at.monitors),
        schedulers=pods("scheduler", "scheduler", at.schedulers),
        api=behind_service(at.api),
        gateways=tuple(map(behind_service, at.gateways)),
        predictors=pods("predictor", "predictor", at.predictors),
        planner=behind_service(at.planner) if at.planner is not None else None,
        dashboard=behind_service(at.dashboard),
        instances={each.name: each for several in workers for each in several},
    )


def _in_images(cluster: Cluster, options: RenderOptions, where: str) -> Cluster:
    """The cluster file with paths as pods find them, a login at the dashboard, and one gateway in place of all."""
    model = options.model or cluster.model.replace(str(PROJECT), APP)
    if not options.model and model == cluster.model and Path(model).is_absolute():
        raise InvalidRequest(
            f"{where}: model: {model} is a folder of this machine: name it as pods find it (--model /models/NAME, a "
            "folder of the model volume), or write its Hugging Face name"
        )
    gateway = cluster.gateway.model_copy(update={"host": "", "processes": 1, "api_keys_file": KEYS_FILE})
    dashboard = cluster.dashboard.model_copy(update={"login": True})  # people of other machines reach it
    return cluster.model_copy(update={"gateway": gateway, "dashboard": dashboard, "model": model})


def _component(spec: ProcessSpec) -> str:
    return SERVICES.get(type(spec.settings), spec.name)


def _group(cluster: Cluster, options: RenderOptions, where: str, name: str, specs: Sequence[ProcessSpec]) -> Group:
    first, component = specs[0], _component(specs[0])
    check_distinct(first.ports)
    found = {spec.name: _environment(cluster, spec, where) for spec in specs}
    _require_alike(found, where)
    plain, secrets, values = split_secrets(found[first.name], name, options.plain)
    secrets |= secrets_of(first)
    own, fields = own_variables(first, component, len(specs), options)
    if options.postgres.enabled:
        secrets = _at_own_postgres(secrets, own)
    http = int(first.health_url.rpartition(":")[2].partition("/")[0])
    health = "/" + first.health_url.split("/", 3)[3]
    numbers = sorted((use.port for use in first.ports), key=lambda port: port != http)
    gateways = {}
    if component == "dashboard" and cluster.gateway.processes > 1:  # it adds up the figures of each gateway
        urls = [f"http://{GATEWAY}-{i}.{GATEWAY_PODS}:{cluster.gateway.port}" for i in range(cluster.gateway.processes)]
        gateways = {"POLYPHASE_DASHBOARD_GATEWAY_URLS": json.dumps(urls)}
    return Group(
        name=name,
        component=component,
        replicas=cluster.gateway.processes if component == GATEWAY else len(specs),
        command=tuple("python3" if word == sys.executable else _in_image(word) for word in first.argv),
        health=health,
        ready="/ready" if first.settings is not None else health,
        ports={"http" if port == http else f"tcp-{port}": port for port in numbers},
        settings=first.settings,
        environment={**own, **plain, **gateways},
        secrets=secrets,
        fields=fields,
        secret_values=values,
    )


def _in_image(text: str) -> str:
    return text.replace(str(PROJECT), APP)


def _environment(cluster: Cluster, spec: ProcessSpec, where: str) -> dict[str, str]:
    """Our variables of a process as pods need them, without those that differ between pods, plus the file's `env`."""
    added = env_of_file(cluster, spec)
    found = {key: _in_image(value) for key, value in spec.env.items() if key.startswith(OURS) and key not in added}
    found = {key: value for key, value in found.items() if not key.endswith(_LEFT_OUT)}
    if all(entry.extra.get("engine") == "emulated" for entry in cluster.instances):
        found[_LONG] = "1"
    for key, value in found.items():
        if value.startswith("/") and not value.startswith((f"{APP}/", f"{MODELS}/", f"{DATA}/", f"{KEYS}/")):
            raise InvalidRequest(
                f"{where}: {spec.name}: {key}: {value} is on this machine only: put it into the image or below {MODELS}"
            )
    return {**found, **added}


def env_of_file(cluster: Cluster, spec: ProcessSpec) -> dict[str, str]:
    """The variables that the cluster file adds to a process by `env`."""
    if isinstance(spec.settings, WorkerSettings):
        return next(entry.env for entry in cluster.instances if spec.name in entry.ids)
    env: dict[str, str] = getattr(cluster, _component(spec)).env
    return env


def _require_alike(environments: Mapping[str, Mapping[str, str]], where: str) -> None:
    """Raises InvalidRequest that names what differs."""
    (first, common), *others = environments.items()
    for name, other in others:
        if keys := sorted(key for key in {**other, **common} if other.get(key) != common.get(key)):
            raise InvalidRequest(
                f"{where}: {name}: {', '.join(keys)} differs from that of {first}, and all pods of a StatefulSet have "
                "the same: make it an entry of its own (emulated instances: leave `node` out)"
            )


def secrets_of(spec: ProcessSpec) -> dict[str, str]:
    """The variables that a process gets from the Secret whether or not the file gives them: variable → key."""
    found = {}
    if spec.settings is not None:
        prefix, known = str(spec.settings.model_config.get("env_prefix")), type(spec.settings).model_fields
        found = {f"{prefix}{key.upper()}": key.replace("_", "-") for key in SECRETS_OF_ALL if key in known}
    tokens = {name.removesuffix("_FILE") for name in spec.env if name.endswith((_TOKEN, _TOKEN_FILE))}
    return {**found, **dict.fromkeys(sorted(tokens), "cluster-token")}


def _at_own_postgres(secrets: Mapping[str, str], own: dict[str, str]) -> dict[str, str]:
    """The secrets of a process that uses the rendered database; the database's URL goes into `own`."""
    urls = [name for name in secrets if name.endswith(DATABASE_URL)]
    if not urls:
        return dict(secrets)
    own |= dict.fromkeys(urls, _OWN_URL)
    return {name: key for name, key in secrets.items() if name not in urls} | {"PGPASSWORD": "postgres-password"}


def split_secrets(
    environment: Mapping[str, str], group: str, plain: Collection[str] = ()
) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """The plain variables; the Secret's key of each other variable; and by those keys the values.

    plain: further names of variables without secrets. A variable whose name marks it as a secret has one key for all
    groups, such as `hf-token`; any other has a key of its own group.
    """
    readable, keys, values = {}, {}, {}
    for name, value in environment.items():
        if _is_plain(name, value, plain):
            readable[name] = value
            continue
        key = re.sub(r"^POLYPHASE_[A-Z]+_", "", name).lower().replace("_", "-")
        keys[name] = key if SHARED_SECRET.search(name) else f"{group}-{key}"
        values[keys[name]] = value
    return readable, keys, values


def _is_plain(name: str, value: str, plain: Collection[str]) -> bool:
    if USER_IN_URL.search(value):
        return False
    if name in plain:
        return True
    if SHARED_SECRET.search(name) or (SECRET_NAME.search(name) and not name.startswith(OURS)):
        return False
    if name.startswith(OURS):  # the name of a setting is known, but its value may be a mapping of anything
        return not any(SECRET_NAME.search(key) and text for key, text in _texts(value))
    return name in _PLAIN or name.startswith(_PLAIN_BEGINNINGS)


def _texts(value: str) -> Iterator[tuple[str, str]]:
    """Key and text of every text within a value that is JSON."""
    try:
        waiting: list[tuple[str, Any]] = [("", json.loads(value))]
    except ValueError:
        return
    while waiting:
        key, part = waiting.pop()
        if isinstance(part, dict):
            waiting += part.items()
        elif isinstance(part, list):
            waiting += [(key, each) for each in part]
        elif isinstance(part, str):
            yield key, part


def own_variables(
    spec: ProcessSpec, component: str, replicas: int, options: RenderOptions
) -> tuple[dict[str, str], dict[str, str]]:
    """What each pod has for itself: its name, its address, its time to end. Values, and fields of the pod.

    The cluster file takes precedence over the values. A value with `$(…)` refers to another variable.
    """
    if spec.settings is None:
        return {}, {}
    prefix, known = str(spec.settings.model_config.get("env_prefix")), type(spec.settings).model_fields
    values: dict[str, str] = {}
    fields = {f"{prefix}{key}": "metadata.name" for key in _NAMES if key.lower() in known}
    if "advertise_url" in known:  # the address under which the other monitors reach this one
        http = next(use.port for use in spec.ports)
        values[f"{prefix}ADVERTISE_URL"] = f"http://$({prefix}MONITOR_ID).{component}:{http}"
    if component == GATEWAY:
        values[f"{prefix}DRAIN_S"] = str(options.gateway_drain_s)
    if isinstance(spec.settings, WorkerSettings):
        values[f"{prefix}DRAIN_S"] = str(options.worker_drain_s)
        fields[f"{prefix}ADVERTISE_HOST"] = "status.podIP"
        if replicas == 1:  # the pod is called NAME-0, the instance NAME
            del fields[f"{prefix}INSTANCE_ID"]
            values[f"{prefix}INSTANCE_ID"] = spec.name
    return values, fields


def manifest(
    api: str, kind: str, name: str, namespace: str, body: Mapping[str, Any], labels: Mapping[str, str] | None = None
) -> Manifest:
    """One object of a namespace."""
    metadata = {"name": name, "namespace": namespace, "labels": {"app.kubernetes.io/part-of": SUITE, **(labels or {})}}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **body}


def labels(group: Group) -> dict[str, str]:
    """The labels of a group's pods."""
    return {"app.kubernetes.io/part-of": SUITE, **selector(group)}


def selector(group: Group) -> dict[str, str]:
    """The labels that select the pods of this group and no others."""
    return {"app.kubernetes.io/name": group.component, "app.kubernetes.io/instance": group.name}


def checksum(config: Mapping[str, str]) -> str:
    """A digest that changes with any entry."""
    return hashlib.sha256(json.dumps(dict(config), sort_keys=True).encode()).hexdigest()[:16]
