"""From a cluster file to groups of identical pods.

`in_pods` gives each process the DNS name of its pod and the ports of its group; the processes themselves come from
`plan.processes_at`, as they do for `polyphase up`. What remains is what pods need besides: the variables of each group,
and the paths of files and programs in the images.
"""

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from services.launcher.addresses import SERVICES, Addresses, Endpoint, on_hosts
from services.launcher.cluster_file import Cluster
from services.launcher.model_source import PROJECT
from services.launcher.plan import processes_at
from services.launcher.ports import check_distinct
from services.launcher.render.options import RenderOptions
from services.launcher.render.variables import Variable, classify
from services.launcher.spec import OURS, ProcessSpec
from services.worker.settings import WorkerSettings
from shared.errors import InvalidRequest
from shared.runtime.settings import ServiceSettings

Manifest = dict[str, Any]
SUITE = "polyphase"
GATEWAY, WORKER, POSTGRES = "gateway", "worker", "postgres"
GATEWAY_PODS = "gateway-pods"  # the headless Service under which each gateway has a name of its own
STATELESS = frozenset({"planner", "dashboard"})  # reached by a Service's name, whichever pod answers
APP, MODELS, DATA, KEYS = "/app", "/models", "/data", "/etc/polyphase"  # folders in the images
KEYS_FILE = f"{KEYS}/keys.yaml"  # the gateway's API keys, from the Secret
DATABASE_URL = "_DATABASE_URL"
_OWN_DATABASE = "postgresql://polyphase@postgres/polyphase"  # the password is in PGPASSWORD
_ANY = "0.0.0.0"  # pods listen on all addresses
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?")  # leaves room for the suffix that a StatefulSet adds
# Left out of the environment: the name of the pod, and secrets that are files on one host and keys of the Secret here.
_NAMES = ("INSTANCE_ID", "SCHEDULER_ID", "GATEWAY_ID", "MONITOR_ID")
_TOKEN, _TOKEN_FILE = "_CLUSTER_TOKEN", "_CLUSTER_TOKEN_FILE"
_LEFT_OUT = (*_NAMES, _TOKEN, _TOKEN_FILE, "_CURVE_FILE")
_SECRET_SETTINGS = ("curve_public", "curve_secret", "database_url")  # which pods cannot do without
_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"  # set by the plan where all engines are emulated


@dataclass(frozen=True, slots=True)
class Group:
    """Processes that one workload runs, each in a pod of its own."""

    name: str
    component: str
    replicas: int
    command: tuple[str, ...]
    health: str  # paths
    ready: str
    ports: Mapping[str, int]  # name → number; the first is "http"
    settings: ServiceSettings | None  # of the first process
    variables: Mapping[str, Variable]

    @property
    def environment(self) -> dict[str, str]:
        """The variables that are neither secret nor a field of the pod, in order of their names."""
        return {name: each.value for name, each in sorted(self.variables.items()) if each.is_plain}

    @property
    def database_variable(self) -> str:
        """The variable with the URL of the database; empty for processes that use none."""
        return next((name for name in self.variables if name.endswith(DATABASE_URL)), "")

    @property
    def worker(self) -> WorkerSettings | None:
        """The settings of its instances; None for processes of the control plane."""
        return self.settings if isinstance(self.settings, WorkerSettings) else None

    @property
    def selector(self) -> dict[str, str]:
        """The labels that select the pods of this group and no others."""
        return {"app.kubernetes.io/name": self.component, "app.kubernetes.io/instance": self.name}

    @property
    def config_name(self) -> str:
        return f"{self.name}-environment"

    @property
    def service(self) -> str:
        """The Service that governs its pods."""
        return GATEWAY_PODS if self.component == GATEWAY else self.component

    @property
    def drain_s(self) -> int:
        """The longest that its processes may take to end their work."""
        drains = [float(value) for name, value in self.environment.items() if name.endswith("_DRAIN_S")]
        return math.ceil(max(drains, default=0.0))


def groups_of(cluster: Cluster, options: RenderOptions, where: str) -> tuple[Group, ...]:
    """The groups in the order of the plan. Raises InvalidRequest that names `where` and the key."""
    if cluster.predictor.beside:
        raise InvalidRequest(f"{where}: predictor.beside: pods have no predictor beside an instance: leave it out")
    for entry in cluster.instances:
        if entry.data_parallel > 1:
            raise InvalidRequest(
                f"{where}: instances.{entry.id}.data_parallel: the ranks of an instance are on one host, and each pod "
                "is a host of its own: write several instances (`count`)"
            )
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
    model = options.model or _image_path(cluster.model)
    if not options.model and model == cluster.model and Path(model).is_absolute():
        raise InvalidRequest(
            f"{where}: model: {model} is a folder of this machine: name it as pods find it (--model /models/NAME, a "
            "folder of the model volume), or write its Hugging Face name"
        )
    adapters = {name: _image_path(folder) for name, folder in cluster.lora.adapters.items()}
    for name, folder in adapters.items():
        if not folder.startswith((f"{APP}/", f"{MODELS}/")):
            raise InvalidRequest(
                f"{where}: lora.adapters.{name}: {folder} is a folder of this machine: name it as pods find it "
                f"({MODELS}/NAME, a folder of the model volume)"
            )
    lora = cluster.lora.model_copy(update={"adapters": adapters})
    for entry in cluster.instances:
        weights = entry.extra.get("weights", "")
        if (
            isinstance(weights, str)
            and Path(weights).is_absolute()
            and not weights.startswith((f"{APP}/", f"{MODELS}/"))
        ):
            raise InvalidRequest(
                f"{where}: instances.{entry.id}.weights: {weights} is a folder of this machine: name it as pods find "
                f"it ({MODELS}/NAME, a folder of the model volume), or write its Hugging Face name"
            )
    gateway = cluster.gateway.model_copy(update={"host": "", "processes": 1, "api_keys_file": KEYS_FILE})
    dashboard = cluster.dashboard.model_copy(update={"login": True})  # people of other machines reach it
    return cluster.model_copy(update={"gateway": gateway, "dashboard": dashboard, "model": model, "lora": lora})


def _component(spec: ProcessSpec) -> str:
    return SERVICES.get(type(spec.settings), spec.name)


def _image_path(text: str) -> str:
    return text.replace(str(PROJECT), APP)


def _group(cluster: Cluster, options: RenderOptions, where: str, name: str, specs: Sequence[ProcessSpec]) -> Group:
    first, component = specs[0], _component(specs[0])
    check_distinct(first.ports)
    health = urlsplit(first.health_url)
    numbers = sorted((use.port for use in first.ports), key=lambda port: port != health.port)
    return Group(
        name=name,
        component=component,
        replicas=cluster.gateway.processes if component == GATEWAY else len(specs),
        command=tuple("python3" if word == sys.executable else _image_path(word) for word in first.argv),
        health=health.path,
        ready="/ready" if first.settings is not None else health.path,
        ports={"http" if port == health.port else f"tcp-{port}": port for port in numbers},
        settings=first.settings,
        variables=_variables(cluster, options, where, name, specs),
    )


def _variables(
    cluster: Cluster, options: RenderOptions, where: str, group: str, specs: Sequence[ProcessSpec]
) -> dict[str, Variable]:
    """The variables of a group. The cluster file takes precedence over the values of the renderer."""
    first, component = specs[0], _component(specs[0])
    environments = {spec.name: _environment(cluster, spec, where) for spec in specs}
    _require_alike(environments, where)
    given = {key: classify(key, value, group, options.plain) for key, value in environments[first.name].items()}
    for key, secret in _secrets_of(first).items():
        given[key] = replace(given.get(key, Variable()), secret=secret)
    if component == "dashboard" and cluster.gateway.processes > 1:  # it adds up the figures of each gateway
        urls = [f"http://{GATEWAY}-{i}.{GATEWAY_PODS}:{cluster.gateway.port}" for i in range(cluster.gateway.processes)]
        given["POLYPHASE_DASHBOARD_GATEWAY_URLS"] = Variable(json.dumps(urls))
    if options.postgres.enabled and (urls := [key for key in given if key.endswith(DATABASE_URL)]):
        given |= {**dict.fromkeys(urls, Variable(_OWN_DATABASE)), "PGPASSWORD": Variable(secret="postgres-password")}
    own = _own_variables(first, component, len(specs), options)
    return {**own, **given, **{key: each for key, each in own.items() if each.field}}


def _environment(cluster: Cluster, spec: ProcessSpec, where: str) -> dict[str, str]:
    """Our variables of a process as pods need them, without those that differ between pods, plus the file's `env`."""
    if isinstance(spec.settings, WorkerSettings):
        added = next(entry.env for entry in cluster.instances if spec.name in entry.ids)
    else:
        added = getattr(cluster, _component(spec)).env
    found = {
        key: _image_path(value)
        for key, value in spec.env.items()
        if key.startswith(OURS) and key not in added and not key.endswith(_LEFT_OUT)
    }
    if all(entry.extra.get("engine") == "emulated" for entry in cluster.instances):
        found[_LONG] = "1"
    own = {spec.settings.disk_kv_folder} if isinstance(spec.settings, WorkerSettings) else set()  # a volume of the pod
    for key, value in found.items():
        if (
            value.startswith("/")
            and value not in own
            and not value.startswith((f"{APP}/", f"{MODELS}/", f"{DATA}/", f"{KEYS}/"))
        ):
            raise InvalidRequest(
                f"{where}: {spec.name}: {key}: {value} is on this machine only: put it into the image or below {MODELS}"
            )
    return {**found, **added}


def _require_alike(environments: Mapping[str, Mapping[str, str]], where: str) -> None:
    """Raises InvalidRequest that names what differs."""
    (first, common), *others = environments.items()
    for name, other in others:
        if keys := sorted(key for key in {**other, **common} if other.get(key) != common.get(key)):
            raise InvalidRequest(
                f"{where}: {name}: {', '.join(keys)} differs from that of {first}, and all pods of a StatefulSet have "
                "the same: make it an entry of its own (emulated instances: leave `node` out)"
            )


def _secrets_of(spec: ProcessSpec) -> dict[str, str]:
    """The variables that a process gets from the Secret whether or not the file gives them: variable → key."""
    found = {}
    if spec.settings is not None:
        prefix, known = str(spec.settings.model_config.get("env_prefix")), type(spec.settings).model_fields
        found = {f"{prefix}{key.upper()}": key.replace("_", "-") for key in _SECRET_SETTINGS if key in known}
    tokens = {name.removesuffix("_FILE") for name in spec.env if name.endswith((_TOKEN, _TOKEN_FILE))}
    return {**found, **dict.fromkeys(sorted(tokens), "cluster-token")}


def _own_variables(spec: ProcessSpec, component: str, replicas: int, options: RenderOptions) -> dict[str, Variable]:
    """What each pod has for itself: its name, its address, its time to end."""
    if spec.settings is None:
        return {}
    prefix, known = str(spec.settings.model_config.get("env_prefix")), type(spec.settings).model_fields
    found = {f"{prefix}{key}": Variable(field="metadata.name") for key in _NAMES if key.lower() in known}
    if "advertise_url" in known:  # the address under which the other monitors reach this one
        http = next(use.port for use in spec.ports)
        found[f"{prefix}ADVERTISE_URL"] = Variable(f"http://$({prefix}MONITOR_ID).{component}:{http}")
    if component == GATEWAY:
        found[f"{prefix}DRAIN_S"] = Variable(str(options.gateway_drain_s))
    if isinstance(spec.settings, WorkerSettings):
        found[f"{prefix}DRAIN_S"] = Variable(str(options.worker_drain_s))
        found[f"{prefix}ADVERTISE_HOST"] = Variable(field="status.podIP")
        if replicas == 1:  # the pod is called NAME-0, the instance NAME
            found[f"{prefix}INSTANCE_ID"] = Variable(spec.name)
    return found
