"""The environment of a pod: what the plan says, what the file adds, what is secret, what is each pod's own."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from services.launcher.cluster_file import Cluster
from services.launcher.render.options import RenderOptions
from services.launcher.spec import OURS, ProcessSpec
from services.worker.settings import WorkerSettings
from shared.secrecy import SECRET_NAME, SHARED_SECRET, USER_IN_URL

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
