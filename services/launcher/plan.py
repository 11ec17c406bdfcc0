"""From a cluster file to the processes of one host: programs, environments, ports, health checks and time limits."""

import functools
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from gateway.settings import GatewaySettings
from predictor.settings import PredictorSettings
from services.cluster_monitor.settings import MonitorSettings, ScrapeTarget
from services.global_scheduler.settings import SchedulerSettings
from services.launcher import cluster_keys, ports
from services.launcher.addresses import LEASE_S, Addresses, Endpoint, gateway_settings, on_hosts, targets_of
from services.launcher.child_process import Limits
from services.launcher.cluster_file import LOCAL, Cluster
from services.launcher.cluster_sections import InstanceSection
from services.launcher.devices import Assignment, assign
from services.launcher.model_source import PROJECT
from services.launcher.ports import PortUse
from services.launcher.spec import Plan, ProcessSpec, child_environment, forkable
from services.planner.settings import PlannerSettings
from services.worker.settings import WorkerSettings
from shared.cost.catalogue import Catalogue
from shared.cost.kinds import HOP_LATENCY_S
from shared.cost.network import INSIDE_EFFICIENCY, Link, LinkEntry
from shared.domain.instance import rank_names
from shared.errors import InvalidRequest, PolyphaseError
from shared.files.faults import describe
from shared.files.places import Places
from shared.model.weights import weights_of
from shared.runtime.settings import ServiceSettings

READ_BYTES_S = 200e6  # weights from a slow or shared disk
CAPTURE_S = 300.0  # off CPUs: compiling the model, and capturing its graphs
FETCH_S = 1800.0  # in all, for a model of unknown size, which is fetched first

Settings = TypeVar("Settings", bound=ServiceSettings)
_UNSET = "POLYPHASE_NOT_FROM_THE_ENVIRONMENT_"  # settings come from the cluster file alone


def make_plan(cluster: Cluster, data_dir: Path, host_name: str = "", where: str = "cluster file") -> Plan:
    """What `host_name` runs. Raises InvalidRequest that names the key at fault."""
    here = _own_host(cluster, host_name)
    at, devices = on_hosts(cluster), assign(cluster, here)
    processes = _Planner(cluster, data_dir, where, at, devices).processes(here)
    if not processes:
        raise InvalidRequest(f"{cluster.places(where).file}: the file assigns no process to host {here!r}")
    runs_control = here == (cluster.control or LOCAL)
    plan = Plan(
        model=cluster.served_model_name or cluster.model,
        processes=tuple(processes),
        instance_ids=tuple(spec.name for spec in processes if isinstance(spec.settings, WorkerSettings)),
        api_url=at.api.url,
        gateway_urls=_urls(at.gateways),
        monitor_url=at.monitor_urls,
        scheduler_urls=_urls(at.schedulers),
        predictor_url=at.predictor_url,
        planner_url=at.planner_url,
        dashboard_url=at.dashboard.url if runs_control and cluster.dashboard.enabled else "",
        runs_control=runs_control,
        api_keys=bool(cluster.gateway.extra.get("api_keys_file")),
        devices=devices,
        one_process=cluster.one_process,
    )
    ports.check_distinct(plan.port_uses)
    return plan


def processes_at(cluster: Cluster, data_dir: Path, where: str, at: Addresses) -> list[ProcessSpec]:
    """The processes of all hosts at these addresses, where another system chooses hosts and devices.

    Raises InvalidRequest that names the key at fault.
    """
    if cluster.one_process:
        raise InvalidRequest(cluster.places(where).tell("one_process", "it is for `polyphase up`: leave it out here"))
    return _Planner(cluster, data_dir, where, at, Assignment()).processes(None)


def settings_of(kind: type[Settings], where: Places | str, at: str, values: dict[str, Any]) -> Settings:
    """A process's settings, from the cluster file alone. Raises InvalidRequest that names `where` and the key."""
    try:
        return kind(_env_prefix=_UNSET, **values)
    except ValidationError as error:
        raise InvalidRequest(describe(where, error, at, kind)) from error


def start_s_of(settings: WorkerSettings) -> float:
    """How long the start of an instance may take: 300 s, the time to read its weights at 200 MB/s, and 300 s more for
    an engine that captures graphs.
    """
    if settings.engine == "emulated":
        return Limits().start_s
    weights = _weights(settings.source.model)
    if weights is None:
        return FETCH_S
    captures = settings.accelerator != "cpu" and not settings.engine_args.get("enforce_eager")
    return Limits().start_s + weights.stored / READ_BYTES_S + (CAPTURE_S if captures else 0.0)


_weights = functools.cache(weights_of)  # read once for all instances


def links_between(cluster: Cluster, where: str) -> dict[str, dict[str, LinkEntry]]:
    """The network paths between emulated instances that are placed on nodes: by receiver, then by sender.

    Raises InvalidRequest or NotFound that name `where`.
    """
    if cluster.network is None:
        return {}
    placed = [entry for entry in cluster.instances if entry.extra.get("node")]
    emulated = [entry for entry in placed if entry.extra.get("engine") == "emulated"]
    if not emulated:
        return {}
    nodes = {name: str(entry.extra["node"]) for entry in emulated for name in entry.ids}
    catalogue = Catalogue.built_in()
    try:
        inside = {
            str(entry.extra["node"]): Link(
                catalogue.get(str(entry.extra.get("accelerator", ""))).links.scale_up, HOP_LATENCY_S, INSIDE_EFFICIENCY
            )
            for entry in placed
        }
        network = cluster.network.network(sorted(inside), inside)
        return {
            name: {peer: LinkEntry.from_link(network.path(at, node)) for peer, at in nodes.items() if peer != name}
            for name, node in nodes.items()
        }
    except PolyphaseError as error:
        raise type(error)(cluster.places(where).tell("network", error.message.removeprefix("network: "))) from error


def dashboard_command(port: int, host: str = "127.0.0.1") -> tuple[str, ...]:
    """The command line that starts Streamlit without its questions."""
    app = str(PROJECT / "dashboard" / "app.py")
    return (
        *(sys.executable, "-P", "-m", "streamlit", "run", app),
        *("--server.port", str(port)),
        *("--server.address", host),
        *("--server.headless", "true"),
        *("--browser.gatherUsageStats", "false"),
    )


class _Planner:
    """Turns each section of a cluster file into processes, given the addresses of everything in the file."""

    def __init__(self, cluster: Cluster, data_dir: Path, where: str, at: Addresses, devices: Assignment) -> None:
        self._cluster = cluster
        self._where = cluster.places(where)
        self._data_dir = data_dir
        self._at = at
        self._database = cluster.database_url or f"sqlite:///{(data_dir / 'polyphase.db').resolve()}"
        all_emulated = all(entry.extra.get("engine") == "emulated" for entry in cluster.instances)
        self._env = child_environment(cluster.model, all_emulated)
        self._links = links_between(cluster, where)
        self._devices = devices
        self._curve: dict[str, Any] = {"curve_file": cluster_keys.curve_key_file(data_dir)}
        if cluster.curve_public:
            self._curve = {"curve_public": cluster.curve_public, "curve_secret": cluster.curve_secret}
        self._traced = {**self._curve, "tracing": cluster.tracing}  # for processes that a request passes

    def processes(self, host: str | None) -> list[ProcessSpec]:
        """The processes of one host, or of all (None). Settings of other hosts' instances are checked, too."""
        c, control = self._cluster, self._cluster.control or LOCAL
        entries = {name: entry for entry in c.instances for name in entry.ids}
        instances = {name: self._instance(entry, name) for name, entry in entries.items()}
        beside = {name: self._predictor(at, beside=True) for name, at in self._at.beside.items()}
        here = [name for name, entry in entries.items() if entry.enabled and host in (None, entry.host or control)]
        found = [instances[name] for name in here] + [beside[name] for name in here if name in beside]
        if host not in (None, control):
            return found
        specs = [self._scheduler(index, at) for index, at in enumerate(self._at.schedulers)]
        specs += [self._gateway(index, at) for index, at in enumerate(self._at.gateways)]
        specs += [self._predictor(at) for at in self._at.predictors]
        if self._at.planner is not None:
            specs.append(self._planner(self._at.planner))
        scrape = targets_of([*specs, *beside.values()])
        monitors = [self._monitor(at, scrape) for at in self._at.monitors]
        return [*monitors, *specs, *found, *([self._dashboard()] if c.dashboard.enabled else [])]

    def _monitor(self, at: Endpoint, scrape: tuple[ScrapeTarget, ...]) -> ProcessSpec:
        c = self._cluster
        values = {
            "monitor_id": at.name,
            "lease_s": LEASE_S if c.monitors > 1 else 0.0,
            "http_host": at.listen,
            "http_port": at.port,
            "database_url": self._database,
            "heartbeat_address": at.bound(1),
            "broadcast_address": at.bound(2),
            "policies": c.policies,
            "lora": c.lora,
            "served_model_name": c.served_model_name or c.model,
            "scrape": scrape,
            "expected_instances": c.expected_instances,
            "mixed_precision": c.mixed_precision,
            **self._curve,
        }
        settings = self._settings(MonitorSettings, "monitor", c.monitor.extra, values)
        return self._process(at, "services.cluster_monitor", settings, range(at.port, at.port + 3), c.monitor.env)

    def _scheduler(self, index: int, at: Endpoint) -> ProcessSpec:
        section = self._cluster.scheduler
        values = {
            "scheduler_id": f"scheduler-{index}",
            "http_host": at.listen,
            "http_port": at.port,
            "rpc_address": at.bound(1),
            "broadcast_address": self._at.broadcasts,
            "monitor_url": self._at.monitor_urls,
            "predictor_urls": _urls(self._at.all_predictors),
            "database_url": self._database,
            **self._traced,
        }
        settings = self._settings(SchedulerSettings, "scheduler", section.extra, values)
        return self._process(at, "services.global_scheduler", settings, (at.port, at.port + 1), section.env)

    def _gateway(self, index: int, at: Endpoint) -> ProcessSpec:
        c, api = self._cluster, self._at.api
        values = {
            "host": api.listen,
            "port": api.port,
            "schedulers": tuple(each.zmq(1) for each in self._at.schedulers),
            "model": c.model,
            "trust_remote_code": c.trust_remote_code,
            "served_model_name": c.served_model_name,
            "max_model_len": c.max_model_len,
            "lora": c.lora,
            "predictors": tuple(each.zmq(1) for each in self._at.predictors),
            "predictors_beside": {name: each.zmq(1) for name, each in self._at.beside.items()},
            **self._traced,
        }
        extra = gateway_settings(c.gateway, index, at.port, self._data_dir)
        settings = self._settings(GatewaySettings, "gateway", extra, values)
        uses = dict.fromkeys((api.port, at.port) if index == 0 else (at.port,))  # the shared port is listed once
        return self._process(at, "gateway", settings, uses, c.gateway.env)

    def _predictor(self, at: Endpoint, *, beside: bool = False) -> ProcessSpec:
        section = self._cluster.predictor
        values = {
            "host": at.listen,
            "port": at.port,
            "rpc_address": at.bound(1),
            "model": self._cluster.model,
            "trust_remote_code": self._cluster.trust_remote_code,
            **({"device": "cpu"} if beside else {}),  # the accelerators of that host belong to the engines
            **self._curve,
        }
        settings = self._settings(PredictorSettings, "predictor", section.extra, values)
        return self._process(at, "predictor", settings, (at.port, at.port + 1), section.env)

    def _planner(self, at: Endpoint) -> ProcessSpec:
        section = self._cluster.planner
        values = {
            "http_host": at.listen,
            "http_port": at.port,
            "monitor_url": self._at.monitor_urls,
            "broadcast_address": self._at.broadcasts,
            "database_url": self._database,
            **self._curve,
        }
        settings = self._settings(PlannerSettings, "planner", section.extra, values)
        return self._process(at, "services.planner", settings, (at.port,), section.env)

    def _dashboard(self) -> ProcessSpec:
        c, at = self._cluster, self._at.dashboard
        env = {
            "POLYPHASE_DASHBOARD_MONITOR_URL": self._at.monitor_urls,
            "POLYPHASE_DASHBOARD_SCHEDULER_URL": self._at.schedulers[0].url,
            "POLYPHASE_DASHBOARD_GATEWAY_URL": self._at.api.url,
            "POLYPHASE_DASHBOARD_GATEWAY_URLS": json.dumps(_urls(self._at.gateways)),
            "POLYPHASE_DASHBOARD_PREDICTOR_URL": self._at.predictor_url,
            "POLYPHASE_DASHBOARD_PLANNER_URL": self._at.planner_url,
            "POLYPHASE_DASHBOARD_CLUSTER_TOKEN_FILE": str(cluster_keys.token_file(self._data_dir)),
        }
        if c.dashboard.login:
            env["POLYPHASE_DASHBOARD_API_KEYS_FILE"] = str(c.gateway.extra.get("api_keys_file") or "")
        return ProcessSpec(
            at.name,
            dashboard_command(at.port, at.listen),
            {**self._env, **env, **c.dashboard.env},
            f"{at.url}/_stcore/health",
            (PortUse(at.name, at.listen, at.port),),
            start_s=c.launcher.start_s or 0.0,
        )

    def _instance(self, entry: InstanceSection, name: str) -> ProcessSpec:
        c, at = self._cluster, self._at.instances[name]
        values = {
            "instance_id": name,
            "role": entry.role,
            "model": c.model,
            "trust_remote_code": c.trust_remote_code,
            "served_model_name": c.served_model_name,
            "host": at.listen,
            "rpc_port": at.port - 1,
            "http_port": at.port,
            "kv_port": at.port + 1,
            "max_model_len": c.max_model_len,
            "lora": c.lora,
            "monitor_url": self._at.monitor_urls,
            "heartbeat_address": self._at.heartbeats,
            "broadcast_address": self._at.broadcasts,
            "lossy_kv": c.gateway.lossy_kv,
            "emulated_links": self._links.get(name, {}),
            **self._rank(entry, name),
            **self._traced,
        }
        extra = self._with_shared_options(entry.extra)
        settings = self._settings(WorkerSettings, f"instances.{entry.id}", extra, values)
        uses = (at.port + each for each in ports.of_instance(entry.data_parallel, entry.extra))
        env = {**self._devices.env.get(name, {}), **entry.env}
        return self._process(at, "services.worker", settings, uses, env)

    def _rank(self, entry: InstanceSection, name: str) -> dict[str, Any]:
        """Which data-parallel rank of its instance a process is, and where the ranks meet: at ports of the first."""
        for each in entry.names if entry.data_parallel > 1 else ():
            ranks = rank_names(each, entry.data_parallel)
            if name in ranks:
                meeting = self._at.instances[ranks[0]].port + 1 + ports.ranks_of(entry.extra)
                index = ranks.index(name)
                return {
                    "rank_of": each,
                    "data_parallel": len(ranks),
                    "data_parallel_rank": index,
                    "data_parallel_port": meeting,
                }
        return {}

    def _with_shared_options(self, extra: dict[str, Any]) -> dict[str, Any]:
        """The instance's settings with the gateway's options of reasoning and structured output, but for those that it
        has itself.

        The engine needs them to find where structured output begins and to end reasoning, the gateway to tell reasoning
        from the answer.
        """
        options, own = self._cluster.gateway.extra.get("vllm_args"), extra.get("engine_args", {})
        if extra.get("engine", "vllm") != "vllm" or not isinstance(options, dict) or not isinstance(own, dict):
            return extra
        shared = GatewaySettings.engine_args(options)
        return {**extra, "engine_args": {**shared, **own}} if shared else extra

    def _settings(self, kind: type[Settings], at: str, extra: dict[str, Any], values: dict[str, Any]) -> Settings:
        # The gateway changes things over ZeroMQ only, and its own callers have API keys.
        token = {} if kind is GatewaySettings else {"cluster_token_file": cluster_keys.token_file(self._data_dir)}
        return settings_of(kind, self._where, at, {**token, **values, **extra})

    def _process(
        self, at: Endpoint, module: str, settings: ServiceSettings, uses: Iterable[int], env: dict[str, str]
    ) -> ProcessSpec:
        worker = settings if isinstance(settings, WorkerSettings) else None
        return ProcessSpec(
            at.name,
            (sys.executable, "-P", "-m", module),
            {**self._env, **settings.to_environment(), **env},
            f"{at.url}/health",
            tuple(PortUse(at.name, at.listen, port) for port in uses),
            module if not env and forkable(settings) else "",
            settings,
            self._cluster.launcher.start_s or (start_s_of(worker) if worker is not None else 0.0),
            may_be_late=worker is not None,
            role=worker.role if worker is not None and len(self._cluster.hosts) < 2 else "",
        )


def _urls(endpoints: Iterable[Endpoint]) -> tuple[str, ...]:
    return tuple(each.url for each in endpoints)


def _own_host(cluster: Cluster, name: str) -> str:
    known = list(cluster.hosts) or [LOCAL]
    found = known[0] if not name and len(known) == 1 else name
    if found not in known:
        raise InvalidRequest(f"--host-name must be one of the file's hosts ({', '.join(known)}), got {found!r}")
    return found
