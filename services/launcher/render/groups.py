"""From the plan of a cluster file to groups of pods that are alike.

The plan is the one that `polyphase up` makes for a single machine. There every port belongs to one process, so an
address in any process's environment says whom it means, and becomes the name by which that one is found here.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.launcher.cluster_file import Cluster
from services.launcher.plan import make_plan
from services.launcher.render.environment import DATABASE_URL, apart, at_own_postgres, derived, given, own, secrets_of
from services.launcher.render.image_paths import DATA, KEYS, command_of, from_here, require_there
from services.launcher.render.options import RenderOptions
from services.launcher.spec import ProcessSpec
from services.worker.settings import WorkerSettings
from shared.errors import InvalidRequest
from shared.runtime.settings import ServiceSettings

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
