"""From the plan of a cluster file to groups of pods that are alike.

The plan is the one that `polyphase up` makes for a single machine. There every port belongs to one process, so an
address in any process's environment says whom it means, and becomes the name by which that one is found here.
"""

import hashlib
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.launcher.cluster_file import Cluster
from services.launcher.model_source import PROJECT
from services.launcher.plan import make_plan
from services.launcher.render.options import RenderOptions
from services.launcher.spec import OURS, ProcessSpec
from services.worker.settings import WorkerSettings
from shared.errors import InvalidRequest
from shared.runtime.settings import ServiceSettings
from shared.secrecy import SECRET_NAME, SHARED_SECRET, USER_IN_URL

# MERGED environment.py
# The environment of a pod: what the plan says, what the file adds, what is secret, what is each pod's own.


SECRETS_OF_ALL = ("curve_public", "curve_secret", "database_url")  # between pods there is no way without
DATABASE_URL = "_DATABASE_URL"
_OWN_URL = "postgresql://polyphase@postgres/polyphase"  # the password is in PGPASSWORD
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
_NAMES = ("INSTANCE_ID", "SCHEDULER_ID", "GATEWAY_ID", "MONITOR_ID")  # a pod goes by its own name
_HOSTS = ("host", "http_host")
_TOKEN, _TOKEN_FILE = "_CLUSTER_TOKEN", "_CLUSTER_TOKEN_FILE"  # on one machine in a file, here in the Secret
_CURVE_FILE = "_CURVE_FILE"  # of one machine; here the pair of the Secret
_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"  # the plan sets it where nobody computes


def given(cluster: Cluster, spec: ProcessSpec) -> dict[str, str]:
    """What the file adds to a process's environment by `env`."""
    if isinstance(spec.settings, WorkerSettings):
        return next(entry.env for entry in cluster.instances if spec.name in entry.ids)
    module = spec.argv[-1] if spec.settings is not None else spec.name
    env: dict[str, str] = getattr(cluster, module.rpartition(".")[2].rpartition("_")[2]).env
    return env


def derived(cluster: Cluster, spec: ProcessSpec) -> dict[str, str]:
    """What the plan gives it, but for its name and the rest of this machine's own environment."""
    said = given(cluster, spec)
    ours = {key: value for key, value in spec.env.items() if key.startswith(OURS) and key not in said}
    long = {_LONG: "1"} if all(entry.extra.get("engine") == "emulated" for entry in cluster.instances) else {}
    left_out = (*_NAMES, _TOKEN, _TOKEN_FILE, _CURVE_FILE)
    return {key: value for key, value in (ours | long).items() if not key.endswith(left_out)}


def secrets_of(spec: ProcessSpec) -> dict[str, str]:
    """What every process of its kind gets from the Secret, whether the file says it or not: variable → key."""
    found = {}
    if spec.settings is not None:
        prefix, known = str(spec.settings.model_config.get("env_prefix")), type(spec.settings).model_fields
        found = {f"{prefix}{key.upper()}": key.replace("_", "-") for key in SECRETS_OF_ALL if key in known}
    asks = {name.removesuffix("_FILE") for name in spec.env if name.endswith((_TOKEN, _TOKEN_FILE))}
    return {**found, **dict.fromkeys(sorted(asks), "cluster-token")}


def apart(
    environment: Mapping[str, str], group: str, plain: Collection[str] = ()
) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """The plain variables; the Secret's key of each other variable; and by those keys the values.

    plain: further names of variables without secrets. A variable whose name says that it is a secret has one key for
    all groups, such as `hf-token`; any other has a key of its group's own.
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
    if name.startswith(OURS):  # a setting: its name is known, its value may be a mapping of anything
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


def own(
    spec: ProcessSpec, component: str, replicas: int, options: RenderOptions
) -> tuple[dict[str, str], dict[str, str]]:
    """Where it listens, how it is called and how long it may take to end: values, and fields of its pod.

    Values hold unless the file says otherwise. Those with `$(…)` name another variable.
    """
    if spec.settings is None:
        return {}, {}
    prefix, known = str(spec.settings.model_config.get("env_prefix")), type(spec.settings).model_fields
    values = {f"{prefix}{key.upper()}": "0.0.0.0" for key in _HOSTS if key in known}
    fields = {f"{prefix}{key}": "metadata.name" for key in _NAMES if key.lower() in known}
    if "advertise_url" in known:  # one of several tells others by it where to find it
        http = next(use.port for use in spec.ports)
        values[f"{prefix}ADVERTISE_URL"] = f"http://$({prefix}MONITOR_ID).{component}:{http}"
    if component == "gateway":
        values[f"{prefix}DRAIN_S"] = str(options.gateway_drain_s)
    if isinstance(spec.settings, WorkerSettings):
        values[f"{prefix}DRAIN_S"] = str(options.worker_drain_s)
        fields[f"{prefix}ADVERTISE_HOST"] = "status.podIP"
        if replicas == 1:  # its pod is called NAME-0
            del fields[f"{prefix}INSTANCE_ID"]
            values[f"{prefix}INSTANCE_ID"] = spec.name
    return values, fields


def at_own_postgres(secrets: Mapping[str, str], values: dict[str, str]) -> dict[str, str]:
    """The secrets of a process that uses the database which is rendered too; its address goes into `values`."""
    urls = [name for name in secrets if name.endswith(DATABASE_URL)]
    if not urls:
        return dict(secrets)
    values |= dict.fromkeys(urls, _OWN_URL)
    return {name: key for name, key in secrets.items() if name not in urls} | {"PGPASSWORD": "postgres-password"}


# MERGED image_paths.py
# Files and programs of this machine, as the project's images have them.


APP, MODELS, DATA, KEYS = "/app", "/models", "/data", "/etc/polyphase"
_THERE = (APP, MODELS, DATA, KEYS)


def from_here(text: str) -> str:
    """The same with the project's folder where images have it."""
    return text.replace(str(PROJECT), APP)


def require_there(text: str, at: str) -> None:
    """Raises InvalidRequest, which begins with `at`, for a path that no pod has."""
    if text.startswith("/") and not text.startswith(tuple(f"{folder}/" for folder in _THERE)):
        raise InvalidRequest(f"{at}: {text} is on this machine only: put it into the image or below {MODELS}")


def command_of(argv: Sequence[str]) -> tuple[str, ...]:
    """The program, listening on every address of its pod."""
    listening = {sys.executable: "python3", "127.0.0.1": "0.0.0.0"}
    return tuple(listening.get(word, from_here(word)) for word in argv)


GATEWAY, WORKER, POSTGRES = "gateway", "worker", "postgres"
KEYED = frozenset({GATEWAY, "dashboard"})  # those that ask for API keys
GATEWAY_PODS = "gateway-pods"  # the Service by which each gateway is found alone
STATELESS = frozenset({"planner", "dashboard"})  # found by a Service's name, whichever pod answers
KEYS_FILE = f"{KEYS}/keys.yaml"  # the gateway's API keys, from the Secret
_ADDRESS = re.compile(r"127\.0\.0\.1:(\d+)")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?")  # room for what a StatefulSet adds


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
    settings: ServiceSettings | None  # of the first
    environment: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)  # variable → key of the Secret
    fields: dict[str, str] = field(default_factory=dict)  # variable → field of the pod
    secret_values: dict[str, str] = field(default_factory=dict)  # key of the Secret → what the file says

    @property
    def uses_database(self) -> bool:
        """Whether its processes read or write the database."""
        return any(name.endswith(DATABASE_URL) for name in (*self.secrets, *self.environment))

    @property
    def worker(self) -> WorkerSettings | None:
        """The settings of its instances, if it is one of those."""
        return self.settings if isinstance(self.settings, WorkerSettings) else None

    @property
    def service(self) -> str:
        """The Service by which its pods are found, each by its own name where they are not all the same."""
        return GATEWAY_PODS if self.component == GATEWAY else self.component


def groups_of(cluster: Cluster, options: RenderOptions, where: str) -> tuple[Group, ...]:
    """In the order of the plan. Raises InvalidRequest that names `where` and the key."""
    if cluster.predictor.beside:
        raise InvalidRequest(f"{where}: predictor.beside: pods have no predictor beside an instance: leave it out")
    plan = make_plan(_on_one_machine(cluster, options, where), Path(DATA), where=where)
    members = _members(cluster, plan.processes, where)
    book = _address_book(members)
    return tuple(_group(cluster, options, where, name, specs, book) for name, specs in members.items())


def _on_one_machine(cluster: Cluster, options: RenderOptions, where: str) -> Cluster:
    """The same cluster without hosts, as pods find its files, one gateway standing for all."""
    gateway = cluster.gateway.model_copy(update={"host": "", "processes": 1, "api_keys_file": KEYS_FILE})
    entries = tuple(entry.model_copy(update={"host": ""}) for entry in cluster.instances)
    dashboard = cluster.dashboard.model_copy(update={"login": True})  # others than this machine's people reach it
    changes = {"hosts": {}, "control": "", "gateway": gateway, "dashboard": dashboard, "instances": entries}
    return cluster.model_copy(update={**changes, "model": _model(cluster, options, where)})


def _model(cluster: Cluster, options: RenderOptions, where: str) -> str:
    model = options.model or from_here(cluster.model)
    if not options.model and model == cluster.model and Path(model).is_absolute():
        raise InvalidRequest(
            f"{where}: model: {model} is a folder of this machine: name it as pods find it (--model /models/NAME, a "
            "folder of the model volume), or write its Hugging Face name"
        )
    return model


def _members(cluster: Cluster, specs: Iterable[ProcessSpec], where: str) -> dict[str, list[ProcessSpec]]:
    entries = {name: entry.id for entry in cluster.instances for name in entry.ids}
    found: dict[str, list[ProcessSpec]] = {}
    for spec in specs:
        component = _component(spec)
        name = entries[spec.name] if component == WORKER else component
        if not _LABEL.fullmatch(name):
            raise InvalidRequest(f"{where}: instances: id {name!r}: Kubernetes wants at most 52 of a-z, 0-9 and -")
        alike = found.setdefault(name, [])
        if name in (WORKER, POSTGRES, GATEWAY_PODS) or (alike and _component(alike[0]) != component):
            raise InvalidRequest(f"{where}: instances: {name!r} is the name of another part of the suite")
        alike.append(spec)
    return found


def _component(spec: ProcessSpec) -> str:
    """By the module that it runs: `services.cluster_monitor` is the monitor."""
    if spec.settings is None:
        return spec.name
    return spec.argv[-1].rpartition(".")[2].rpartition("_")[2]


def _address_book(members: Mapping[str, Sequence[ProcessSpec]]) -> dict[int, str]:
    """Port of the plan → host:port here, where all of a group listen on the ports of its first."""
    book = {}
    for name, specs in members.items():
        component = _component(specs[0])
        for index, spec in enumerate(specs):
            host = component if component in (GATEWAY, *STATELESS) else f"{name}-{index}.{component}"
            for use, first in zip(spec.ports, specs[0].ports, strict=True):
                book[use.port] = f"{host}:{first.port}"
    return book


def _group(
    cluster: Cluster,
    options: RenderOptions,
    where: str,
    name: str,
    specs: Sequence[ProcessSpec],
    book: Mapping[int, str],
) -> Group:
    first, component = specs[0], _component(specs[0])
    found = {spec.name: _environment(cluster, spec, first, book, where) for spec in specs}
    _require_alike(found, where)
    plain, secrets, values = apart(found[first.name], name, options.plain)
    secrets |= secrets_of(first)
    more, fields = own(first, component, len(specs), options)
    if options.postgres.enabled:
        secrets = at_own_postgres(secrets, more)
    http = int(first.health_url.rpartition(":")[2].partition("/")[0])
    path = "/" + first.health_url.split("/", 3)[3]
    numbers = sorted((use.port for use in first.ports), key=lambda port: port != http)
    return Group(
        name=name,
        component=component,
        replicas=cluster.gateway.processes if component == GATEWAY else len(specs),
        command=command_of(first.argv),
        health=path,
        ready="/ready" if first.settings is not None else path,
        ports={"http" if port == http else f"tcp-{port}": port for port in numbers},
        settings=first.settings,
        environment={**more, **plain, **_gateways(cluster, component)},
        secrets=secrets,
        fields=fields,
        secret_values=values,
    )


def _gateways(cluster: Cluster, component: str) -> dict[str, str]:
    """For the dashboard, which adds up what each of several gateways says."""
    if component != "dashboard" or cluster.gateway.processes == 1:
        return {}
    pods = [f"{GATEWAY}-{index}.{GATEWAY_PODS}" for index in range(cluster.gateway.processes)]
    return {"POLYPHASE_DASHBOARD_GATEWAY_URLS": json.dumps([f"http://{pod}:{cluster.gateway.port}" for pod in pods])}


def _environment(
    cluster: Cluster, spec: ProcessSpec, first: ProcessSpec, book: Mapping[int, str], where: str
) -> dict[str, str]:
    """What the plan says, with addresses and paths as they are here, and without what each pod has of its own."""
    ports = {use.port: other.port for use, other in zip(spec.ports, first.ports, strict=True)}

    def there(found: re.Match[str]) -> str:
        port = int(found[1])
        return f"0.0.0.0:{ports[port]}" if port in ports else book.get(port, found[0])

    moved = {}
    for key, value in derived(cluster, spec).items():
        moved[key] = _ADDRESS.sub(there, from_here(value))
        require_there(moved[key], f"{where}: {spec.name}: {key}")
        if key.endswith("PORT") and value.isdigit():
            moved[key] = str(ports.get(int(value), value))
    return {**moved, **given(cluster, spec)}


def _require_alike(environments: Mapping[str, Mapping[str, str]], where: str) -> None:
    """Raises InvalidRequest that names what differs."""
    (first, common), *others = environments.items()
    for name, other in others:
        if keys := sorted(key for key in {**other, **common} if other.get(key) != common.get(key)):
            raise InvalidRequest(
                f"{where}: {name}: {', '.join(keys)} is not {first}'s, and the pods of a StatefulSet are alike: make "
                "it an entry of its own (emulated instances: leave `node` out)"
            )


# MERGED objects.py
# What all objects have: kind, name, labels.


Manifest = dict[str, Any]
SUITE = "polyphase"
METRICS = "polyphase/metrics"  # the label of Services that Prometheus goes by


def manifest(
    api: str, kind: str, name: str, namespace: str, body: Mapping[str, Any], labels: Mapping[str, str] | None = None
) -> Manifest:
    """One object of a namespace."""
    metadata = {"name": name, "namespace": namespace, "labels": {"app.kubernetes.io/part-of": SUITE, **(labels or {})}}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **body}


def labels(group: "Group") -> dict[str, str]:
    """Of the pods of a group."""
    return {"app.kubernetes.io/part-of": SUITE, **selector(group)}


def selector(group: "Group") -> dict[str, str]:
    """By which the pods of a group are found, and no others."""
    return {"app.kubernetes.io/name": group.component, "app.kubernetes.io/instance": group.name}


def checksum(config: Mapping[str, str]) -> str:
    """Another one when anything in it changes."""
    return hashlib.sha256(json.dumps(dict(config), sort_keys=True).encode()).hexdigest()[:16]
