"""The pod of a group: its container with probes and an orderly stop, its volumes, and the node that it needs.

The tables name accelerators as Kubernetes does: the resource that a device plugin counts, and the labels of nodes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.launcher.child_process import Limits
from services.launcher.cluster_file import Cluster
from services.launcher.render.groups import (
    DATA,
    DATABASE_URL,
    GATEWAY,
    KEYED,
    KEYS,
    KEYS_FILE,
    MODELS,
    Group,
    Manifest,
    checksum,
    labels,
    selector,
)
from services.launcher.render.options import RenderOptions, Resources
from services.worker.settings import WorkerSettings
from shared.cost.catalogue import Catalogue
from shared.errors import InvalidRequest, PolyphaseError

USER = 10001  # of the project's images
MODEL_CLAIM, SHARED = "models", "shared-memory"
_UNLOADED_S = 5  # until all kube-proxies stop sending requests to a gateway that ends
_CLEAN_UP_S = 30
_USUAL = {
    "gateway": Resources(requests={"cpu": "1", "memory": "2Gi"}),
    "predictor": Resources(requests={"cpu": "500m", "memory": "2Gi"}),
    "dashboard": Resources(requests={"cpu": "100m", "memory": "512Mi"}),
}
_SMALL = Resources(requests={"cpu": "250m", "memory": "512Mi"})
_RESOURCES = {
    "NVIDIA": "nvidia.com/gpu",
    "AMD": "amd.com/gpu",
    "Huawei": "huawei.com/Ascend910",
    "Google": "google.com/tpu",
    "AWS": "aws.amazon.com/neuron",
    "Intel": "habana.ai/gaudi",
}
_CPUS = frozenset({"cpu", "Xeon-8480", "EPYC-9654"})
_NVIDIA = "nvidia.com/gpu.product"  # as NVIDIA's feature discovery writes it
_PRODUCTS = {
    "P40": "Tesla-P40",
    "RTX-2080-Ti": "NVIDIA-GeForce-RTX-2080-Ti",
    "RTX-3080": "NVIDIA-GeForce-RTX-3080",
    "RTX-3090": "NVIDIA-GeForce-RTX-3090",
    "RTX-4080": "NVIDIA-GeForce-RTX-4080",
    "RTX-5080": "NVIDIA-GeForce-RTX-5080",
    "RTX-6000-Ada": "NVIDIA-RTX-6000-Ada-Generation",
    "L20": "NVIDIA-L20",
    "L40": "NVIDIA-L40",
    "A800-PCIe-80": "NVIDIA-A800-80GB-PCIe",
    "A800-SXM-80": "NVIDIA-A800-SXM4-80GB",
    "H800-SXM": "NVIDIA-H800",
    "GH200-96": "NVIDIA-GH200-480GB",
    "GH200-144": "NVIDIA-GH200-144G-HBM3e",
    "GB200": "NVIDIA-GB200",
    "T4": "Tesla-T4",
    "V100-PCIe-16": "Tesla-V100-PCIE-16GB",
    "V100-SXM2-16": "Tesla-V100-SXM2-16GB",
    "V100-SXM2-32": "Tesla-V100-SXM2-32GB",
    "A10": "NVIDIA-A10",
    "A10G": "NVIDIA-A10G",
    "A30": "NVIDIA-A30",
    "A40": "NVIDIA-A40",
    "A100-PCIe-40": "NVIDIA-A100-PCIE-40GB",
    "A100-PCIe-80": "NVIDIA-A100-80GB-PCIe",
    "A100-SXM-40": "NVIDIA-A100-SXM4-40GB",
    "A100-SXM-80": "NVIDIA-A100-SXM4-80GB",
    "RTX-A5000": "NVIDIA-RTX-A5000",
    "RTX-A6000": "NVIDIA-RTX-A6000",
    "RTX-3090-Ti": "NVIDIA-GeForce-RTX-3090-Ti",
    "RTX-4090": "NVIDIA-GeForce-RTX-4090",
    "RTX-5090": "NVIDIA-GeForce-RTX-5090",
    "L4": "NVIDIA-L4",
    "L40S": "NVIDIA-L40S",
    "RTX-PRO-6000-Server": "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",
    "H100-PCIe": "NVIDIA-H100-PCIe",
    "H100-NVL": "NVIDIA-H100-NVL",
    "H100-SXM": "NVIDIA-H100-80GB-HBM3",
    "H20": "NVIDIA-H20",
    "H200-SXM": "NVIDIA-H200",
    "B200-SXM": "NVIDIA-B200",
    "B300-SXM": "NVIDIA-B300-SXM6-AC",
}
_LABELS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    **{name: {_NVIDIA: (product,)} for name, product in _PRODUCTS.items()},
    "MI210": {"amd.com/gpu.product-name": ("AMD_Instinct_MI210",)},
    "MI250": {"amd.com/gpu.product-name": ("AMD_Instinct_MI250", "AMD_Instinct_MI250X")},
    "MI300X": {"amd.com/gpu.product-name": ("AMD_Instinct_MI300X", "AMD_Instinct_MI300X_OAM")},
    "MI325X": {"amd.com/gpu.product-name": ("AMD_Instinct_MI325X", "AMD_Instinct_MI325_OAM")},
    "MI300A": {"amd.com/gpu.product-name": ("AMD_Instinct_MI300A",)},
    "MI350X": {"amd.com/gpu.product-name": ("AMD_Instinct_MI350X",)},
    "MI355X": {"amd.com/gpu.product-name": ("AMD_Instinct_MI355X",)},
    "Ascend-910B": {"accelerator": ("huawei-Ascend910",)},
    "Ascend-910B4": {"accelerator": ("huawei-Ascend910",)},
    "TPU-v5e": {"cloud.google.com/gke-tpu-accelerator": ("tpu-v5-lite-podslice",)},
}


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices that a pod of an instance requests."""

    vendor: str
    resource: str
    count: int
    labels: Mapping[str, tuple[str, ...]]  # of the node: label → acceptable values


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
    labels = options.selectors.get(settings.accelerator, _LABELS.get(known.name, {}))
    return Devices(known.vendor, _RESOURCES[known.vendor], settings.ranks, labels)


def pod_template(cluster: Cluster, options: RenderOptions, group: Group, where: str) -> Manifest:
    """The `template` of a workload."""
    devices = None
    if group.worker is not None:
        devices = devices_of(group.worker, options, f"{where}: instances.{group.name}")
    config = {key: group.environment[key] for key in sorted(group.environment)}
    return {
        "metadata": {
            "labels": labels(group),
            "annotations": {"polyphase/config": checksum(config)},  # a change replaces the pods
        },
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,  # their variables could begin with POLYPHASE_
            "terminationGracePeriodSeconds": _grace_s(group),
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
            **({"initContainers": [_migration(options, group)]} if group.uses_database else {}),
            "containers": [_container(cluster, options, group, devices)],
            "volumes": _volumes(options, group, devices),
        },
    }


def _container(cluster: Cluster, options: RenderOptions, group: Group, devices: Devices | None) -> Manifest:
    stop = {"preStop": {"exec": {"command": ["sleep", str(_UNLOADED_S)]}}} if group.component == GATEWAY else {}
    return {
        "name": group.component,
        "image": image_of(options, devices),
        "command": list(group.command),
        "workingDir": DATA,
        "envFrom": [{"configMapRef": {"name": config_name(group)}}],
        "env": [
            *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in group.fields.items()),
            *(_secret(options, name, key) for name, key in sorted(group.secrets.items())),
            *({"name": name, "value": value} for name, value in sorted(group.environment.items()) if "$(" in value),
        ],
        "ports": [{"name": name, "containerPort": port} for name, port in group.ports.items()],
        **_probes(cluster, options, group),
        **({"lifecycle": stop} if stop else {}),
        "resources": _resources(options, group, devices),
        "securityContext": locked(),
        "volumeMounts": _mounts(group, devices),
    }


def image_of(options: RenderOptions, devices: Devices | None) -> str:
    """The image with the engine for that vendor's accelerators, if there is a special one."""
    return options.images.get(devices.vendor, options.image) if devices is not None else options.image


def config_name(group: Group) -> str:
    """The name of the group's ConfigMap."""
    return f"{group.name}-environment"


def locked() -> Manifest:
    """The security context: privileges that no container needs are dropped."""
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def _migration(options: RenderOptions, group: Group) -> Manifest:
    """An init container that upgrades the database's schema; the first pod does it while the others wait."""
    url = next(name for name in (*group.secrets, *group.environment) if name.endswith(DATABASE_URL))
    sources = {"POLYPHASE_DATABASE_URL": url, "PGPASSWORD": "PGPASSWORD"}
    env: list[Manifest] = []
    for name, source in sources.items():
        if source in group.secrets:
            env.append(_secret(options, name, group.secrets[source]))
        elif source in group.environment:
            env.append({"name": name, "value": group.environment[source]})
    return {
        "name": "migrate",
        "image": options.image,
        "command": ["polyphase", "migrate", "--wait", "120"],
        "workingDir": DATA,
        "env": env,
        "resources": _SMALL.model_dump(exclude_defaults=True),
        "securityContext": locked(),
        "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}, {"name": "data", "mountPath": DATA}],
    }


def _secret(options: RenderOptions, name: str, key: str) -> Manifest:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": options.secret, "key": key}}}


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


def _grace_s(group: Group) -> int:
    """Longer than the drain of the process, since a killed process cuts answers."""
    drain_s = next((float(value) for key, value in group.environment.items() if key.endswith("_DRAIN_S")), 0.0)
    return math.ceil(drain_s) + _UNLOADED_S + _CLEAN_UP_S


def _resources(options: RenderOptions, group: Group, devices: Devices | None) -> Manifest:
    """Requests and limits; Kubernetes requires accelerators in both."""
    usual = _USUAL.get(group.component, _SMALL)
    if (worker := group.worker) is not None and worker.engine == "vllm":
        host_bytes = worker.inbox_bytes + (worker.staging_bytes or 1 << 30)
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
            "labelSelector": {"matchLabels": selector(group)},
        }
        return {"topologySpreadConstraints": [spread]} if group.replicas > 1 else {}
    wanted = [{"key": key, "operator": "In", "values": list(values)} for key, values in devices.labels.items()]
    found: dict[str, Any] = {
        "tolerations": [{"key": devices.resource, "operator": "Exists", "effect": "NoSchedule"}],
        **({"runtimeClassName": options.runtime_class} if options.runtime_class else {}),
    }
    if wanted:
        terms = {"nodeSelectorTerms": [{"matchExpressions": wanted}]}
        found["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    return found


def _mounts(group: Group, devices: Devices | None) -> list[Manifest]:
    found: list[Manifest] = [{"name": "scratch", "mountPath": "/tmp"}, {"name": "data", "mountPath": DATA}]
    if group.component in ("gateway", "predictor", "worker"):
        found.append({"name": MODEL_CLAIM, "mountPath": MODELS})
    if group.worker is not None and (devices is not None or group.worker.ranks > 1):
        found.append({"name": SHARED, "mountPath": "/dev/shm"})
    if group.component in KEYED:
        found.append({"name": "keys", "mountPath": KEYS, "readOnly": True})
    return found


def _volumes(options: RenderOptions, group: Group, devices: Devices | None) -> list[Manifest]:
    """The volumes, except for claims of each pod."""
    found: list[Manifest] = [{"name": "scratch", "emptyDir": {}}, {"name": "data", "emptyDir": {}}]
    mounted = {mount["name"] for mount in _mounts(group, devices)}
    if MODEL_CLAIM in mounted:
        if options.models.claim:
            claim = {"claimName": options.models.claim}
            found.append({"name": MODEL_CLAIM, "persistentVolumeClaim": claim})
        elif group.worker is None:
            found.append({"name": MODEL_CLAIM, "emptyDir": {}})  # a tokenizer, not weights
    if SHARED in mounted:
        found.append({"name": SHARED, "emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory}})
    if group.component in KEYED:
        name = KEYS_FILE.rpartition("/")[2]
        items = [{"key": name, "path": name}]
        found.append({"name": "keys", "secret": {"secretName": options.secret, "items": items}})
    return found


def extra_environment() -> Mapping[str, str]:
    """Folders for programs that write to a home folder, which is read-only in pods."""
    return {
        "HOME": "/tmp",
        "HF_HOME": f"{MODELS}/huggingface",
        "VLLM_CACHE_ROOT": f"{MODELS}/vllm",
        "NUMBA_CACHE_DIR": "/tmp/numba",
    }
