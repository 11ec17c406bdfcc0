"""The pod of a group: its container with probes and an orderly stop, its volumes, and the node that it needs.

`accelerators.yaml` names accelerators as Kubernetes does: the resource of a device plugin, the labels of nodes.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.launcher.child_process import Limits
from services.launcher.cluster_file import Cluster
from services.launcher.render.groups import DATA, GATEWAY, KEYS, KEYS_FILE, MODELS, SUITE, Group, Manifest
from services.launcher.render.options import RenderOptions, Resources
from services.worker.settings import DISK_QUEUE_BYTES, WorkerSettings
from shared.cost.catalogue import Catalogue
from shared.errors import InvalidRequest, PolyphaseError
from shared.files.yaml_file import read_yaml

USER = 10001  # of the project's images
ACCELERATORS = Path(__file__).with_name("accelerators.yaml")
# Folders for programs that write to a home folder, which is read-only in pods.
FOLDERS = {
    "HOME": "/tmp",
    "HF_HOME": f"{MODELS}/huggingface",
    "VLLM_CACHE_ROOT": f"{MODELS}/vllm",
    "NUMBA_CACHE_DIR": "/tmp/numba",
}
_UNLOADED_S = 5  # until all kube-proxies stop sending requests to a gateway that ends
_CLEAN_UP_S = 30
_USUAL = {
    "gateway": Resources(requests={"cpu": "1", "memory": "2Gi"}),
    "predictor": Resources(requests={"cpu": "500m", "memory": "2Gi"}),
    "dashboard": Resources(requests={"cpu": "100m", "memory": "512Mi"}),
}
_SMALL = Resources(requests={"cpu": "250m", "memory": "512Mi"})
_CPUS = frozenset({"cpu", "Xeon-8480", "EPYC-9654"})
# Privileges that no container needs are dropped.
_LOCKED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
_SCRATCH = [{"name": "scratch", "mountPath": "/tmp"}, {"name": "data", "mountPath": DATA}]


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices that a pod of an instance requests."""

    vendor: str
    resource: str
    count: int
    labels: Mapping[str, list[str] | tuple[str, ...]]  # of the node: label → acceptable values


def devices_of(settings: WorkerSettings, options: RenderOptions, at: str) -> Devices | None:
    """None for emulated engines and CPUs. Raises InvalidRequest that names the key below `at`."""
    names = {settings.accelerator, *settings.stage_accelerators}
    if settings.engine == "emulated" or names <= _CPUS:
        return None
    if len(names) > 1:
        kinds = ", ".join(sorted(names))
        raise InvalidRequest(f"{at}.stage_accelerators: a pod runs on one node, which does not have all of {kinds}")
    try:
        known = Catalogue.built_in().get(settings.accelerator)
    except PolyphaseError as error:
        raise InvalidRequest(f"{at}.accelerator: {error.message}") from error
    names_of = read_yaml(ACCELERATORS)
    labels = options.selectors.get(settings.accelerator, names_of["labels"].get(known.name, {}))
    return Devices(known.vendor, names_of["resources"][known.vendor], settings.ranks, labels)


def pod_template(cluster: Cluster, options: RenderOptions, group: Group, where: str) -> Manifest:
    devices = None
    if group.worker is not None:
        devices = devices_of(group.worker, options, f"{where}: instances.{group.name}")
    checksum = hashlib.sha256(json.dumps(group.environment, sort_keys=True).encode()).hexdigest()[:16]
    return {
        "metadata": {
            "labels": {"app.kubernetes.io/part-of": SUITE, **group.selector},
            "annotations": {"polyphase/config": checksum},  # a change replaces the pods
        },
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,  # their variables could begin with POLYPHASE_
            "terminationGracePeriodSeconds": group.drain_s + _UNLOADED_S + _CLEAN_UP_S,  # a killed process cuts answers
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **_node(options, group, devices),
            **({"imagePullSecrets": [{"name": name} for name in options.pull_secrets]} if options.pull_secrets else {}),
            **({"initContainers": [_migration(options, group)]} if group.database_variable else {}),
            "containers": [_container(cluster, options, group, devices)],
            "volumes": _volumes(options, group, devices),
        },
    }


def _container(cluster: Cluster, options: RenderOptions, group: Group, devices: Devices | None) -> Manifest:
    stop = {"preStop": {"exec": {"command": ["sleep", str(_UNLOADED_S)]}}} if group.component == GATEWAY else {}
    return {
        "name": group.component,
        "image": options.images.get(devices.vendor, options.image) if devices is not None else options.image,
        "command": list(group.command),
        "workingDir": DATA,
        "envFrom": [{"configMapRef": {"name": group.config_name}}],
        "env": _env(options, group),
        "ports": [{"name": name, "containerPort": port} for name, port in group.ports.items()],
        **_probes(cluster, options, group),
        **({"lifecycle": stop} if stop else {}),
        "resources": _resources(options, group, devices),
        "securityContext": _LOCKED,
        "volumeMounts": _mounts(group, devices),
    }


def _env(options: RenderOptions, group: Group) -> list[Manifest]:
    """The variables that a ConfigMap cannot hold: fields of the pod, secrets, and values that refer to other ones."""
    variables = sorted(group.variables.items())
    found = [(name, each) for name, each in group.variables.items() if each.field]
    found += [(name, each) for name, each in variables if each.secret]
    found += [(name, each) for name, each in variables if "$(" in each.value and each.is_plain]
    return [each.entry(name, options.secret) for name, each in found]


def _migration(options: RenderOptions, group: Group) -> Manifest:
    """An init container that upgrades the database's schema; the first pod does it while the others wait."""
    sources = {"POLYPHASE_DATABASE_URL": group.database_variable, "PGPASSWORD": "PGPASSWORD"}
    return {
        "name": "migrate",
        "image": options.image,
        "command": ["polyphase", "migrate", "--wait", "120"],
        "workingDir": DATA,
        "env": [
            group.variables[source].entry(name, options.secret)
            for name, source in sources.items()
            if source in group.variables
        ],
        "resources": _SMALL.model_dump(exclude_defaults=True),
        "securityContext": _LOCKED,
        "volumeMounts": list(_SCRATCH),
    }


def _probes(cluster: Cluster, options: RenderOptions, group: Group) -> Manifest:
    """Startup: the process answers. Readiness: it accepts work. Liveness: a process that hangs is killed."""

    def get(path: str, **times: int) -> Manifest:
        return {"httpGet": {"path": path, "port": "http"}, **times}

    start_s = (
        options.worker_start_s if group.worker is not None else math.ceil(cluster.launcher.start_s or Limits().start_s)
    )
    started = get(group.health, periodSeconds=2, timeoutSeconds=2, failureThreshold=math.ceil(start_s / 2))
    ready = get(group.ready, periodSeconds=2, timeoutSeconds=2, failureThreshold=2)
    probes = {"startupProbe": started, "readinessProbe": ready}
    if hang_s := cluster.launcher.hang_s:
        timeout = max(1, round(hang_s / 3))
        alive = get(group.health, periodSeconds=timeout, timeoutSeconds=timeout, failureThreshold=3)
        probes["livenessProbe"] = alive
    return probes


def _resources(options: RenderOptions, group: Group, devices: Devices | None) -> Manifest:
    """Requests and limits; Kubernetes requires accelerators in both."""
    usual = _USUAL.get(group.component, _SMALL)
    if (worker := group.worker) is not None and worker.engine == "vllm":
        host_bytes = worker.inbox_bytes + (worker.staging_bytes or 1 << 30) + worker.host_kv_bytes
        host_bytes += DISK_QUEUE_BYTES if worker.disk_kv_bytes else 0
        kv_bytes = 0 if devices is not None else worker.kv_cache_bytes
        memory = f"{math.ceil((host_bytes + kv_bytes) * worker.ranks / 2**30) + 4}Gi"
        usual = Resources(requests={"cpu": str(worker.threads * worker.ranks), "memory": memory})
    given = options.resources.get(group.name, options.resources.get(group.component, Resources()))
    counted = {devices.resource: str(devices.count)} if devices is not None else {}
    requests, limits = {**usual.requests, **given.requests, **counted}, {**given.limits, **counted}
    return {"requests": requests, **({"limits": limits} if limits else {})}


def _node(options: RenderOptions, group: Group, devices: Devices | None) -> Manifest:
    """The affinity to nodes with these accelerators; other pods of a group are spread over nodes."""
    if devices is None:
        spread = {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": group.selector},
        }
        return {"topologySpreadConstraints": [spread]} if group.replicas > 1 else {}
    expressions = [{"key": key, "operator": "In", "values": list(values)} for key, values in devices.labels.items()]
    found: dict[str, Any] = {
        "tolerations": [{"key": devices.resource, "operator": "Exists", "effect": "NoSchedule"}],
        **({"runtimeClassName": options.runtime_class} if options.runtime_class else {}),
    }
    if expressions:
        terms = {"nodeSelectorTerms": [{"matchExpressions": expressions}]}
        found["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    return found


def _mounts(group: Group, devices: Devices | None) -> list[Manifest]:
    found: list[Manifest] = list(_SCRATCH)
    if group.component in ("gateway", "predictor", "worker"):
        found.append({"name": "models", "mountPath": MODELS})
    if group.worker is not None and (devices is not None or group.worker.ranks > 1):
        found.append({"name": "shared-memory", "mountPath": "/dev/shm"})
    if group.worker is not None and group.worker.disk_kv_folder:
        found.append({"name": "kv", "mountPath": group.worker.disk_kv_folder})
    if group.component in ("gateway", "dashboard"):  # they check API keys
        found.append({"name": "keys", "mountPath": KEYS, "readOnly": True})
    return found


def _volumes(options: RenderOptions, group: Group, devices: Devices | None) -> list[Manifest]:
    """The volumes, except for claims of each pod."""
    keys, worker = Path(KEYS_FILE).name, group.worker
    disk_bytes = worker.disk_kv_bytes * worker.ranks if worker is not None else 0
    volumes: dict[str, Manifest] = {
        "scratch": {"emptyDir": {}},
        "data": {"emptyDir": {}},
        "models": {"emptyDir": {}},  # a tokenizer, not weights
        "shared-memory": {"emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory}},
        "kv": {"emptyDir": {"sizeLimit": f"{math.ceil(disk_bytes / 2**30) + 1}Gi"}},
        "keys": {"secret": {"secretName": options.secret, "items": [{"key": keys, "path": keys}]}},
    }
    if options.models.claim:
        volumes["models"] = {"persistentVolumeClaim": {"claimName": options.models.claim}}
    elif group.worker is not None:
        del volumes["models"]  # each pod has a claim of its own
    mounted = [mount["name"] for mount in _mounts(group, devices)]
    return [{"name": name, **volumes[name]} for name in mounted if name in volumes]
