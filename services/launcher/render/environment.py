"""The environment of a pod: what the plan says, what the file adds, what is secret, what is each pod's own."""

import re
from collections.abc import Mapping

from services.launcher.cluster_file import Cluster
from services.launcher.render.options import RenderOptions
from services.launcher.spec import OURS, ProcessSpec
from services.worker.settings import WorkerSettings

SECRETS_OF_ALL = ("curve_public", "curve_secret", "database_url")  # between pods there is no way without
DATABASE_URL = "_DATABASE_URL"
_OWN_URL = "postgresql://polyphase@postgres/polyphase"  # the password is in PGPASSWORD
_SECRET = re.compile(r"(SECRET|TOKEN|PASSWORD|API_KEY|CURVE_PUBLIC|DATABASE_URL)$")
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


def apart(environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """What anybody may read; the Secret's keys of what nobody may; and by those keys the values."""
    plain, keys, values = {}, {}, {}
    for name, value in environment.items():
        if _SECRET.search(name):
            key = re.sub(r"^POLYPHASE_[A-Z]+_", "", name).lower().replace("_", "-")
            keys[name], values[key] = key, value
        else:
            plain[name] = value
    return plain, keys, values


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
