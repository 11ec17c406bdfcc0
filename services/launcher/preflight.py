"""Checks before anything starts: all faults at once, each with the file, the key and what to do."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from ipaddress import ip_address
from os.path import exists, isdir, isfile  # of a name that is too long they are False, where those of `Path` raise
from pathlib import Path
from typing import Any

import zmq

from gateway.auth import LOOPBACK, load_keys
from gateway.settings import GatewaySettings
from services.cluster_monitor.settings import MonitorSettings
from services.global_scheduler.settings import SchedulerSettings
from services.launcher.cluster_file import Cluster
from services.launcher.devices import VISIBLE, catalogue
from services.launcher.fork_client import NAME as FORK_SERVER
from services.launcher.model_source import fault_of
from services.launcher.spec import Plan, ProcessSpec
from services.worker.settings import MARGIN_BYTES, WorkerSettings
from shared.cost.library import bundled_geometry
from shared.errors import InvalidRequest, PolyphaseError
from shared.files.faults import Fault, meant
from shared.model.adapters import require_files
from shared.model.source import FILE_FORMATS, ModelSource, cached_config, read_config
from shared.model.support import config_of, fault_of_division, fault_of_stored_kv, faults_of_model, text_config
from shared.model.weights import weights_of
from shared.policy import registry
from shared.policy.registry import from_file
from shared.store.database import parse_url, refused_file

_FILES = frozenset({"chat_template", "tool_parser_plugin", "reasoning_parser_plugin"})  # of vllm_args
Faults = Iterator[Fault]


def preflight(cluster: Cluster, plan: Plan, where: str, *, places_instances: bool = True) -> None:
    """Raises InvalidRequest with all faults of the processes of this host, one a line.

    places_instances: whether this launcher, and not Ray, chooses the devices of instances.
    """
    found = [*_of_suite(cluster, plan), *_of_hosts(cluster)]
    if places_instances:
        found += [*plan.devices.faults, *_of_memory(cluster, plan)]
    entries = {name: f"instances.{entry.id}" for entry in cluster.instances for name in entry.ids}
    for spec in plan.processes:
        match spec.settings:
            case GatewaySettings() as settings:
                found += _of_gateway(settings)
            case SchedulerSettings() as settings:
                found += _of_scheduler(settings)
            case MonitorSettings() as settings:
                found += _of_monitor(settings)
            case WorkerSettings() as settings:
                found += _of_instance(entries[spec.name], settings, spec.env)
    if found:
        places = cluster.places(where)
        lines = dict.fromkeys(places.tell(fault.key, fault.text) for fault in found)  # many are alike
        raise InvalidRequest("\n".join(lines))


def _of_suite(cluster: Cluster, plan: Plan) -> Faults:
    engines = [spec.settings for spec in plan.processes if isinstance(spec.settings, WorkerSettings)]
    vllm = [each for each in engines if each.engine == "vllm"]
    if fault := fault_of(cluster.model, weights=any(each.load_format in FILE_FORMATS for each in vllm)):
        yield Fault("model", fault)
    elif faults := list(_of_source(cluster, plan)):
        yield from faults
    elif vllm:
        for fault in faults_of_model(_config(cluster.model)):
            yield Fault("model", fault)
    if vllm:
        for name, folder in cluster.lora.adapters.items():
            try:
                require_files(name, Path(folder))
            except InvalidRequest as error:
                yield Fault(f"lora.adapters.{name}", error.message)
    if cluster.dashboard.login and not cluster.gateway.extra.get("api_keys_file"):
        yield Fault("dashboard.login", "a login needs API keys: set `gateway: {api_keys_file: keys.yaml}`")
    for name, count in Counter((FORK_SERVER, *(spec.name for spec in plan.started))).items():
        if count > 1:
            yield Fault("instances", f"{name!r} is the name of another process of the suite: choose another id")
    if cluster.curve_public:
        try:
            fits = zmq.curve_public(cluster.curve_secret.encode()).decode() == cluster.curve_public
        except (ValueError, zmq.ZMQError):
            fits = False
        if not fits:
            yield Fault("curve_public, curve_secret", "they are not a pair: `polyphase keys curve` creates one")


def _of_source(cluster: Cluster, plan: Plan) -> Faults:
    """Whether each process that loads the model may: a name on the hub with its token, and code of the model's own.

    The config.json of a name is downloaded; without a connection it may be in the cache.
    """
    for source in dict.fromkeys(_source_of(spec) for spec in plan.processes if _loads_model(spec)):
        quantised = source.model != cluster.model
        if quantised and source.folder is not None:
            continue  # checked with its instance
        try:
            read_config(source, trust_remote_code=cluster.trust_remote_code)
        except PolyphaseError as error:
            yield Fault("instances", f"weights: {error.message}") if quantised else Fault("model", error.message)


def _loads_model(spec: ProcessSpec) -> bool:
    settings = spec.settings
    return isinstance(settings, GatewaySettings) or (isinstance(settings, WorkerSettings) and settings.engine == "vllm")


def _source_of(spec: ProcessSpec) -> ModelSource:
    """The source as the process will see it, with its own environment."""
    assert isinstance(spec.settings, GatewaySettings | WorkerSettings)
    source = spec.settings.source
    token, endpoint = spec.env.get("HF_TOKEN", ""), spec.env.get("HF_ENDPOINT", "")
    return replace(source, token=source.token or token, endpoint=endpoint, weights_cache="")


def _of_hosts(cluster: Cluster) -> Faults:
    """Requirements of several hosts, which `polyphase simulate` does not have."""
    for name, address in cluster.hosts.items():
        try:
            ip_address(address)
        except ValueError:
            text = f"{address!r} is not an IP address: write the address by which the other hosts reach this one"
            yield Fault(f"hosts.{name}", text)
    if len(cluster.hosts) > 1 and not cluster.curve_public:
        yield Fault("hosts", "several hosts need curve_public and curve_secret: `polyphase keys curve` creates them")
    if len(cluster.hosts) > 1 and not cluster.cluster_token.get_secret_value():
        yield Fault("hosts", "several hosts need cluster_token: `polyphase keys token` creates one")


def _of_gateway(settings: GatewaySettings) -> Faults:
    file = settings.api_keys_file
    for name, value in settings.vllm_args.items():
        if name.replace("-", "_") in _FILES and isinstance(value, str) and _names_no_file(value):
            yield Fault(f"gateway.vllm_args.{name}", f"there is no file {value}")
    make = f"`polyphase keys add NAME --file {file or 'keys.yaml'}` creates one"
    try:
        keys = load_keys(file) if file else ()
    except PolyphaseError as error:
        yield Fault("gateway.api_keys_file", f"{error.message}; {make}")
        return
    if keys or settings.host in LOOPBACK:
        return
    if file:
        yield Fault("gateway.api_keys_file", f"{file} has no key, and the gateway listens on {settings.host}: {make}")
    else:
        yield Fault(
            "gateway.host", f"listening on {settings.host} needs API keys: {make}, then `api_keys_file: keys.yaml`"
        )


def _names_no_file(value: str) -> bool:
    """Whether a value that may be a path or a template is neither; vLLM distinguishes them by these letters."""
    return value != "" and not any(letter in value for letter in "{}\n") and not isfile(value)


def _of_scheduler(settings: SchedulerSettings) -> Faults:
    yield from _of_database(settings.database_url)


def _of_monitor(settings: MonitorSettings) -> Faults:
    yield from _of_database(settings.database_url)
    for kind, entry in settings.policies.items():
        try:
            from_file({kind: entry})
        except InvalidRequest as error:
            key, _, text = error.message.partition(": ")
            yield Fault(f"policies.{key}", text + _meant(kind, entry))


def _meant(kind: str, entry: object) -> str:
    """A suggestion of the policy, or the kind of policy, that was probably meant."""
    if kind not in registry.KINDS:
        return meant(kind, list(registry.KINDS)).removesuffix(".")
    name = entry.get("name") if isinstance(entry, dict) else entry
    known = registry.KINDS[kind]
    return "" if str(name) in known else meant(str(name), list(known)).removesuffix(".")


def _of_instance(at: str, settings: WorkerSettings, env: dict[str, str]) -> Faults:
    if settings.rates_file and not isfile(settings.rates_file):
        yield Fault(
            f"{at}.rates_file", f"there is no file {settings.rates_file}: `polyphase calibrate live` writes one"
        )
    if settings.engine == "emulated":
        yield from _of_emulated(at, settings)
        return
    if settings.kv_transport == "nixl" and find_spec("nixl") is None:
        yield Fault(f"{at}.kv_transport", "NIXL is not installed: `pip install 'polyphase[nixl]'`, or choose tcp")
    if settings.weights and (fault := fault_of(settings.weights, weights=settings.load_format in FILE_FORMATS)):
        yield Fault(f"{at}.weights", fault)
        return
    config = _config(settings.source.model)
    degree, stages = settings.tensor_parallel, settings.pipeline_parallel
    stored = str(settings.engine_args.get("kv_cache_dtype", "auto"))
    if fault := fault_of_stored_kv(config, stored, settings.dtype):
        yield Fault(f"{at}.engine_args", fault)
    if fault := fault_of_division(config, degree):
        yield Fault(f"{at}.tensor_parallel", fault)
    layers, held = text_config(config).get("num_hidden_layers"), settings.pipeline_layers
    if isinstance(layers, int) and layers < stages:
        yield Fault(f"{at}.pipeline_parallel", f"{stages} stages cannot share the {layers} layers of the model")
    elif isinstance(layers, int) and held and sum(held) != layers:
        yield Fault(f"{at}.pipeline_layers", f"must add up to the {layers} layers of the model, got {sum(held)}")
    for variable in VISIBLE:
        visible = env.get(variable, "")
        if visible and settings.accelerator != "cpu" and len(visible.split(",")) < settings.ranks:
            key = "tensor_parallel" if stages == 1 else "pipeline_parallel"
            yield Fault(f"{at}.{key}", f"{settings.ranks} accelerators are needed, but {variable} is {visible!r}")


def _of_memory(cluster: Cluster, plan: Plan) -> Faults:
    """Devices whose memory is too small for the weights and the KV of their instances."""
    settings = {spec.name: spec.settings for spec in plan.processes if isinstance(spec.settings, WorkerSettings)}
    kinds = {(each.source.model, each.dtype) for each in settings.values()}
    sizes = {kind: weights_of(*kind) for kind in kinds}
    entries = {name: entry.id for entry in cluster.instances for name in entry.ids}
    for device, names in plan.devices.users.items():
        users = [settings[name] for name in names if name in settings]
        if not users:
            continue
        try:
            kind = catalogue().get(users[-1].accelerator)
        except PolyphaseError:
            continue
        needed = 0
        for each in users:
            known = sizes[each.source.model, each.dtype]
            # Experts may be divided among data-parallel ranks: the instance itself finds what a rank loads of them.
            needed += each.device_bytes(known.loaded if known is not None and each.data_parallel == 1 else 0)
        least = needed - MARGIN_BYTES * len(users)  # the memory of activations and graphs is unknown
        if least > kind.memory_bytes and not any(users[-1].stage_accelerators):
            of = f" of {', '.join(names)}" if len(names) > 1 else ""
            yield Fault(
                f"instances.{entries[names[-1]]}.kv_cache_bytes",
                f"weights and KV{of} need {least / 2**30:.1f} GiB on device {device.name}, and {kind.name} has "
                f"{kind.memory_bytes / 2**30:.1f}: lower kv_cache_bytes, or raise tensor_parallel",
            )


def _of_emulated(at: str, settings: WorkerSettings) -> Faults:
    try:
        catalogue().get(settings.accelerator)
    except PolyphaseError as error:
        yield Fault(f"{at}.accelerator", error.message)
    try:
        if not exists(settings.emulated_model):
            bundled_geometry(settings.emulated_model)
    except PolyphaseError as error:
        yield Fault(f"{at}.emulated_model", error.message)


def _config(model: str) -> Mapping[str, Any]:
    """The config.json of a folder, or of a name on the hub, where `_of_source` has put it into the cache."""
    return config_of(model) if Path(model).is_absolute() else cached_config(model)


def _of_database(url: str) -> Faults:
    try:
        parsed = parse_url(url)
    except PolyphaseError as error:
        yield Fault("database_url", error.message)
        return
    if not parsed.drivername.startswith("sqlite") or parsed.database in (None, "", ":memory:"):
        return
    file = Path(str(parsed.database)).absolute()
    there = file if exists(file) else next(parent for parent in file.parents if exists(parent))
    if there != file and not isdir(there):
        yield Fault("database_url", f"{there} is not a folder, so {file} cannot be created: choose another path")
    elif isdir(file) or not os.access(there, os.W_OK):
        yield Fault("database_url", f"{there} is not writable: choose another path, or change its permissions")
    elif there == file and (refused := refused_file(file)):
        yield Fault("database_url", refused)
