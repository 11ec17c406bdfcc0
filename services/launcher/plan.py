"""From a cluster file to the processes of one host: programs, environments, ports, health checks."""

import functools
import json
import sys
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from gateway.settings import GatewaySettings
from predictor.settings import PredictorSettings
from services.cluster_monitor.settings import MonitorSettings, ScrapeTarget
from services.global_scheduler.settings import SchedulerSettings
from services.launcher import cluster_keys, ports
from services.launcher.addresses import (
    LEASE_S,
    Addresses,
    PredictorAt,
    gateway_ports,
    gateway_settings,
    monitor_names,
    monitor_ports,
    scheduler_port,
    targets_of,
)
from services.launcher.child_process import Limits
from services.launcher.cluster_file import LOCAL, Cluster, InstanceSection
from services.launcher.devices import assign
from services.launcher.model_source import PROJECT
from services.launcher.ports import PortUse
from services.launcher.spec import Plan, ProcessSpec, child_environment, forkable
from services.planner.settings import PlannerSettings
from services.worker.settings import WorkerSettings
from shared.cost.catalogue import Catalogue
from shared.cost.kinds import HOP_LATENCY_S
from shared.cost.network import INSIDE_EFFICIENCY, Link, LinkEntry
from shared.errors import InvalidRequest, PolyphaseError
from shared.files.faults import describe
from shared.files.places import Places
from shared.model.weights import Weights, weights_of
from shared.runtime.settings import ServiceSettings

# MERGED start_time.py
# How long an instance's start may take, by the size of its model.


READ_BYTES_S = 200e6  # weights from a slow or shared disk
CAPTURE_S = 300.0  # off CPUs: compiling the model, and capturing its graphs
FETCH_S = 1800.0  # in all, where the model's size is not known, since it has to be fetched first


def start_s_of(settings: WorkerSettings) -> float:
    """300 s, and what it takes to read the weights at 200 MB/s, and 300 s for graphs where an engine captures some."""
    if settings.engine == "emulated":
        return Limits().start_s
    weights = _weights(settings.model)
    if weights is None:
        return FETCH_S
    captures = settings.accelerator != "cpu" and not settings.engine_args.get("enforce_eager")
    return Limits().start_s + weights.stored / READ_BYTES_S + (CAPTURE_S if captures else 0.0)


@functools.cache
def _weights(model: str) -> Weights | None:
    """Read once for all instances."""
    return weights_of(model)


# MERGED links.py
# What joins emulated instances that stand on nodes: each gets the paths by which KV comes to it.


def links_between(cluster: Cluster, where: str) -> dict[str, dict[str, LinkEntry]]:
    """By instance, then by the instance that KV comes from; nothing for those on no node.

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
            name: {peer: LinkEntry.of(network.path(other, node)) for peer, other in nodes.items() if peer != name}
            for name, node in nodes.items()
        }
    except PolyphaseError as error:
        raise type(error)(cluster.places(where).tell("network", error.message.removeprefix("network: "))) from error


# MERGED dashboard_program.py
# The dashboard's command line.


def dashboard_command(port: int) -> tuple[str, ...]:
    """Streamlit without its questions, on loopback."""
    return (
        sys.executable,
        "-P",
        "-m",
        "streamlit",
        "run",
        str(PROJECT / "dashboard" / "app.py"),
        "--server.port",
        str(port),
        "--server.address",
        "127.0.0.1",
        "--server.headless",
        "true",
        "--browser.gatherUsageStats",
        "false",
    )


Settings = TypeVar("Settings", bound=ServiceSettings)
_UNSET = "POLYPHASE_NOT_FROM_THE_ENVIRONMENT_"  # settings come from the cluster file alone


def make_plan(cluster: Cluster, data_dir: Path, host_name: str = "", where: str = "cluster file") -> Plan:
    """What `host_name` runs. Raises InvalidRequest that names the key at fault."""
    return _Planner(cluster, data_dir, host_name, where).plan()


def settings_of(kind: type[Settings], where: Places | str, at: str, values: dict[str, Any]) -> Settings:
    """A process's settings, from the cluster file alone. Raises InvalidRequest that names `where` and the key."""
    try:
        return kind(_env_prefix=_UNSET, **values)
    except ValidationError as error:
        raise InvalidRequest(describe(where, error, at, kind)) from error


class _Planner:
    """Knows the addresses of everything in the file."""

    def __init__(self, cluster: Cluster, data_dir: Path, host_name: str, where: str) -> None:
        self._cluster = cluster
        self._where = cluster.places(where)
        self._data_dir = data_dir
        self._here = _own_host(cluster, host_name)
        self._at = Addresses(cluster)
        self._database = cluster.database_url or f"sqlite:///{(data_dir / 'polyphase.db').resolve()}"
        imitated = all(entry.extra.get("engine") == "emulated" for entry in cluster.instances)
        self._env = child_environment(cluster.model, imitated)
        self._links = links_between(cluster, where)
        self._devices = assign(cluster, self._here)
        self._curve: dict[str, Any] = {"curve_file": cluster_keys.curve_key_file(data_dir)}
        if cluster.curve_public:
            self._curve = {"curve_public": cluster.curve_public, "curve_secret": cluster.curve_secret}
        self._traced = {**self._curve, "tracing": cluster.tracing}  # of those that a request passes

    def plan(self) -> Plan:
        c, instances = self._cluster, self._instances()
        runs_control = self._here == (c.control or LOCAL)
        processes = [*(self._control_plane() if runs_control else ()), *instances, *self._beside(self._here)]
        with_dashboard = runs_control and c.dashboard.enabled
        if with_dashboard:
            processes.append(self._dashboard())
        if not processes:
            raise InvalidRequest(f"{self._where.file}: nothing is to run on host {self._here!r}")
        plan = Plan(
            model=c.served_model_name or c.model,
            processes=tuple(processes),
            instance_ids=tuple(spec.name for spec in instances),
            api_url=self._at.api_url,
            gateway_urls=self._at.gateway_urls,
            monitor_url=self._at.monitor_urls,
            scheduler_urls=self._at.scheduler_urls,
            predictor_url=self._at.predictor_url,
            planner_url=self._at.planner_url,
            dashboard_url=f"http://127.0.0.1:{c.dashboard.port}" if with_dashboard else "",
            runs_control=runs_control,
            api_keys=bool(c.gateway.extra.get("api_keys_file")),
            devices=self._devices,
        )
        ports.check_distinct(plan.port_uses)
        return plan

    def _control_plane(self) -> list[ProcessSpec]:
        c = self._cluster
        specs = [self._scheduler(*each) for each in enumerate(c.scheduler.names)]
        specs += [self._gateway(*each) for each in enumerate(c.gateway.names)]
        specs += [self._predictor(each) for each in self._at.predictors if not each.beside]
        if c.planner.enabled:
            specs.append(self._planner())
        scrape = targets_of([*specs, *self._beside()])
        return [*(self._monitor(*each, scrape) for each in enumerate(monitor_names(c))), *specs]

    def _beside(self, host: str | None = None) -> list[ProcessSpec]:
        """The predictors beside the instances of a host, or of all hosts."""
        default = self._cluster.control or LOCAL
        return [
            self._predictor(each)
            for each in self._at.predictors
            if each.entry is not None and host in (None, each.entry.host or default)
        ]

    def _monitor(self, index: int, name: str, scrape: tuple[ScrapeTarget, ...]) -> ProcessSpec:
        offset = monitor_ports(self._cluster)[index]
        port = self._at.base + offset
        values = {
            "monitor_id": name,
            "lease_s": LEASE_S if self._cluster.monitors > 1 else 0.0,
            "http_host": self._at.control,
            "http_port": port,
            "database_url": self._database,
            "heartbeat_address": self._at.zmq(offset + 1),
            "broadcast_address": self._at.zmq(offset + 2),
            "policies": self._cluster.policies,
            "scrape": scrape,
            "expected_instances": self._cluster.expected_instances,
            **self._curve,
        }
        settings = self._settings(MonitorSettings, "monitor", self._cluster.monitor.extra, values)
        uses = (port, port + 1, port + 2)
        env = self._cluster.monitor.env
        return self._process(name, "services.cluster_monitor", settings, self._at.control, port, uses, env)

    def _scheduler(self, index: int, name: str) -> ProcessSpec:
        c, offset = self._cluster, scheduler_port(index)
        port = self._at.base + offset
        values = {
            "scheduler_id": f"scheduler-{index}",
            "http_host": self._at.control,
            "http_port": port,
            "rpc_address": self._at.zmq(offset + 1),
            "broadcast_address": self._at.zmqs(2),
            "monitor_url": self._at.monitor_urls,
            "predictor_urls": tuple(each.url for each in self._at.predictors),
            "database_url": self._database,
            **self._traced,
        }
        settings = self._settings(SchedulerSettings, "scheduler", c.scheduler.extra, values)
        uses = (port, port + 1)
        return self._process(name, "services.global_scheduler", settings, self._at.control, port, uses, c.scheduler.env)

    def _gateway(self, index: int, name: str) -> ProcessSpec:
        c = self._cluster
        addresses = tuple(self._at.zmq(scheduler_port(i) + 1) for i in range(c.scheduler.count))
        values = {
            "host": self._at.gateway_host,
            "port": c.gateway.port,
            "schedulers": addresses,
            "model": c.model,
            "served_model_name": c.served_model_name,
            "max_model_len": c.max_model_len,
            "predictors": tuple(each.rpc_address for each in self._at.predictors if not each.beside),
            "predictors_beside": {each.beside: each.rpc_address for each in self._at.predictors if each.beside},
            **self._traced,
        }
        extra = gateway_settings(c.gateway, index, self._at.base, self._data_dir)
        settings = self._settings(GatewaySettings, "gateway", extra, values)
        own = gateway_ports(c.gateway, self._at.base)[index]
        uses = tuple(dict.fromkeys((c.gateway.port, own) if index == 0 else (own,)))  # the first speaks for all
        return self._process(name, "gateway", settings, self._at.gateway_host, own, uses, c.gateway.env)

    def _predictor(self, at: PredictorAt) -> ProcessSpec:
        section = self._cluster.predictor
        values = {
            "host": at.host,
            "port": at.port,
            "rpc_address": at.rpc_address,
            "model": self._cluster.model,
            **({"device": "cpu"} if at.beside else {}),  # the accelerators of that host are the engines'
            **self._curve,
        }
        settings = self._settings(PredictorSettings, "predictor", section.extra, values)
        uses = (at.port, at.port + 1)
        return self._process(at.name, "predictor", settings, at.host, at.port, uses, section.env)

    def _planner(self) -> ProcessSpec:
        port, section = self._at.base + ports.PLANNER, self._cluster.planner
        values = {
            "http_host": self._at.control,
            "http_port": port,
            "monitor_url": self._at.monitor_urls,
            "broadcast_address": self._at.zmqs(2),
            "database_url": self._database,
            **self._curve,
        }
        settings = self._settings(PlannerSettings, "planner", section.extra, values)
        return self._process("planner", "services.planner", settings, self._at.control, port, (port,), section.env)

    def _dashboard(self) -> ProcessSpec:
        c, port = self._cluster, self._cluster.dashboard.port
        env = {
            "POLYPHASE_DASHBOARD_MONITOR_URL": self._at.monitor_urls,
            "POLYPHASE_DASHBOARD_SCHEDULER_URL": self._at.http(scheduler_port(0)),
            "POLYPHASE_DASHBOARD_GATEWAY_URL": self._at.api_url,
            "POLYPHASE_DASHBOARD_GATEWAY_URLS": json.dumps(self._at.gateway_urls),
            "POLYPHASE_DASHBOARD_PREDICTOR_URL": self._at.predictor_url,
            "POLYPHASE_DASHBOARD_PLANNER_URL": self._at.planner_url,
            "POLYPHASE_DASHBOARD_CLUSTER_TOKEN_FILE": str(cluster_keys.token_file(self._data_dir)),
        }
        if c.dashboard.login:
            env["POLYPHASE_DASHBOARD_API_KEYS_FILE"] = str(c.gateway.extra.get("api_keys_file") or "")
        health = f"http://127.0.0.1:{port}/_stcore/health"
        uses = (PortUse("dashboard", "127.0.0.1", port),)
        env = {**self._env, **env, **c.dashboard.env}
        return ProcessSpec("dashboard", dashboard_command(port), env, health, uses, start_s=c.launcher.start_s or 0.0)

    def _instances(self) -> list[ProcessSpec]:
        """Ports follow from the whole file, so that every host comes to the same ones."""
        entries = [(entry, name) for entry in self._cluster.instances for name in entry.ids]
        ranks = [ports.ranks_of(entry.extra) for entry, _ in entries]
        firsts = ports.instance_ports(self._at.base, ranks)
        default = self._cluster.control or LOCAL
        # Those of other hosts, too: what is wrong with one is told on each.
        specs = [self._instance(*one, *at) for one, *at in zip(entries, firsts, ranks, strict=True)]
        return [
            spec
            for spec, (entry, _) in zip(specs, entries, strict=True)
            if (entry.host or default) == self._here and entry.enabled
        ]

    def _instance(self, entry: InstanceSection, name: str, first: int, ranks: int) -> ProcessSpec:
        host = self._at.host_of(entry)
        values = {
            "instance_id": name,
            "role": entry.role,
            "model": self._cluster.model,
            "served_model_name": self._cluster.served_model_name,
            "host": host,
            "rpc_port": first,
            "http_port": first + 1,
            "kv_port": first + 2,
            "max_model_len": self._cluster.max_model_len,
            "monitor_url": self._at.monitor_urls,
            "heartbeat_address": self._at.zmqs(1),
            "broadcast_address": self._at.zmqs(2),
            "lossy_kv": self._cluster.gateway.lossy_kv,
            "emulated_links": self._links.get(name, {}),
            **self._traced,
        }
        extra = self._with_parser(entry.extra)
        settings = self._settings(WorkerSettings, f"instances.{entry.id}", extra, values)
        uses = tuple(range(first, first + 2 + ranks))
        env = {**self._devices.env.get(name, {}), **entry.env}
        return self._process(name, "services.worker", settings, host, first + 1, uses, env)

    def _with_parser(self, extra: dict[str, Any]) -> dict[str, Any]:
        """With the gateway's reasoning parser, unless the instance names its own: where structured output begins is
        the engine's to find, and what part of an answer is reasoning the gateway's.
        """
        options, own = self._cluster.gateway.extra.get("vllm_args"), extra.get("engine_args", {})
        if extra.get("engine", "vllm") != "vllm" or not isinstance(options, dict) or not isinstance(own, dict):
            return extra
        named = {str(name).replace("-", "_"): value for name, value in options.items()}
        parsers = {name: named[name] for name in ("reasoning_parser", "reasoning_parser_plugin") if named.get(name)}
        return {**extra, "engine_args": {**parsers, **own}} if parsers else extra

    def _settings(self, kind: type[Settings], at: str, extra: dict[str, Any], values: dict[str, Any]) -> Settings:
        asks = kind is not GatewaySettings  # what it changes it changes over ZeroMQ, and its own callers have API keys
        secret = {"cluster_token_file": cluster_keys.token_file(self._data_dir)} if asks else {}
        return settings_of(kind, self._where, at, {**secret, **values, **extra})

    def _process(
        self,
        name: str,
        module: str,
        settings: ServiceSettings,
        host: str,
        http: int,
        uses: tuple[int, ...],
        env: dict[str, str],
    ) -> ProcessSpec:
        return ProcessSpec(
            name,
            (sys.executable, "-P", "-m", module),
            {**self._env, **settings.to_environment(), **env},
            f"http://{self._at.reached(host)}:{http}/health",
            tuple(PortUse(name, host, port) for port in uses),
            module if not env and forkable(settings) else "",
            settings,
            self._cluster.launcher.start_s or (start_s_of(settings) if isinstance(settings, WorkerSettings) else 0.0),
            may_be_late=isinstance(settings, WorkerSettings),
            role=settings.role if isinstance(settings, WorkerSettings) and len(self._cluster.hosts) < 2 else "",
        )


def _own_host(cluster: Cluster, name: str) -> str:
    known = list(cluster.hosts) or [LOCAL]
    found = known[0] if not name and len(known) == 1 else name
    if found not in known:
        raise InvalidRequest(f"--host-name must say which of the file's hosts this is: {', '.join(known)}")
    return found
