"""Proxies between the processes of a plan: found from its ports, put in place by the environments of its processes.

A process's own addresses stay as they are; only whom it connects to is answered by a proxy. Addresses of ZeroMQ and KV
are swapped at the moment of connecting (`inject/sitecustomize.py`), so that those which travel in messages are covered;
HTTP addresses are swapped in the environment.
"""

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from random import Random

from lab.chaos.framing import Framing, RawSplitter
from lab.chaos.kv_framing import KvSplitter
from lab.chaos.proxy import Proxy
from lab.chaos.zmtp import ZmtpSplitter
from services.launcher.spec import Plan, ProcessSpec

_SERVICES = {
    "gateway": "gateway",
    "services.cluster_monitor": "monitor",
    "services.global_scheduler": "scheduler",
    "services.worker": "worker",
    "services.planner": "planner",
    "predictor": "predictor",
}
_PORTS = {  # what a service's ports are for, in the order of the plan
    "gateway": ("http",),
    "monitor": ("http", "heartbeats", "broadcasts"),
    "scheduler": ("http", "rpc"),
    "worker": ("rpc", "http", "kv"),
    "planner": ("http",),
    "predictor": ("http",),
}
_TALK = {  # who connects to whom, and to what
    ("gateway", "scheduler"): ("rpc",),
    ("gateway", "worker"): ("rpc",),
    ("monitor", "worker"): ("rpc",),
    ("worker", "monitor"): ("http", "heartbeats", "broadcasts"),
    ("worker", "worker"): ("kv",),
    ("scheduler", "monitor"): ("http", "broadcasts"),
    ("planner", "monitor"): ("http", "broadcasts"),
    ("worker", "predictor"): ("http",),
    ("scheduler", "predictor"): ("http",),
}
ALL_LINKS = frozenset(purpose for purposes in _TALK.values() for purpose in purposes)
_FRAMINGS: dict[str, Framing] = {"http": RawSplitter, "tcp": ZmtpSplitter, "kv": KvSplitter}  # by scheme
_KV_TRANSPORT = "POLYPHASE_WORKER_KV_TRANSPORT"


@dataclass(frozen=True, slots=True)
class Port:
    """A port that a process of the plan listens on."""

    process: str
    service: str
    purpose: str  # "http", "rpc", "kv", "heartbeats", "broadcasts"
    host: str
    port: int
    scheme: str = "tcp"  # how it is spoken to: "http", "tcp" (ZeroMQ), "kv"


@dataclass(frozen=True, slots=True)
class Wire:
    """The way from one process to a port of another."""

    source: str
    port: Port
    proxy: Proxy

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.source} → {self.port.process} ({self.port.purpose})"


class Wires:
    """All ways between the processes of a plan."""

    def __init__(self, wires: Iterable[Wire]) -> None:
        self.all = tuple(wires)

    def between(self, source: str = "", target: str = "", purpose: str = "") -> tuple[Wire, ...]:
        """Those from `source` to `target` for that purpose; an empty word is any. Raises LookupError if none."""
        found = tuple(
            wire
            for wire in self.all
            if source in ("", wire.source) and target in ("", wire.port.process) and purpose in ("", wire.port.purpose)
        )
        if not found:
            raise LookupError(f"no link from {source or 'any'} to {target or 'any'} ({purpose or 'any'})")
        return found

    def touching(self, process: str) -> tuple[Wire, ...]:
        """Every way to or from a process."""
        return tuple(wire for wire in self.all if process in (wire.source, wire.port.process))

    def heal(self) -> None:
        """All of them as they should be."""
        for wire in self.all:
            wire.proxy.heal()


def service_of(spec: ProcessSpec) -> str:
    """What a process of the plan is."""
    return _SERVICES.get(spec.argv[-1], "other")


def ports_of(plan: Plan) -> tuple[Port, ...]:
    """Every port that somebody of the plan listens on."""
    found = []
    for spec in plan.processes:
        service = service_of(spec)
        purposes = _PORTS.get(service, ())
        for number, use in enumerate(spec.ports):
            purpose = purposes[min(number, len(purposes) - 1)]  # one KV port a rank
            found.append(Port(spec.name, service, purpose, use.host, use.port, _scheme(spec, purpose)))
    return tuple(found)


def _scheme(spec: ProcessSpec, purpose: str) -> str:
    if purpose == "kv" and spec.env.get(_KV_TRANSPORT, "tcp") == "tcp":
        return "kv"
    return "http" if purpose == "http" else "tcp"


@asynccontextmanager
async def wired(plan: Plan, rng: Random, purposes: frozenset[str] = ALL_LINKS) -> AsyncIterator[tuple[Plan, Wires]]:
    """The plan with a proxy on every way of those purposes, for the block's length."""
    async with AsyncExitStack() as stack:
        ports, wires, specs = ports_of(plan), [], []
        for spec in plan.processes:
            mine = []
            for port in _reached_by(spec, ports, purposes):
                proxy = Proxy((port.host, port.port), Random(rng.getrandbits(64)), _FRAMINGS[port.scheme])
                mine.append(Wire(spec.name, port, await stack.enter_async_context(proxy)))
            wires += mine
            specs.append(replace(spec, env=_by_proxies(spec.env, mine)))
        yield replace(plan, processes=tuple(specs)), Wires(wires)


def _reached_by(spec: ProcessSpec, ports: Iterable[Port], purposes: frozenset[str]) -> list[Port]:
    return [
        port
        for port in ports
        if port.process != spec.name
        and port.purpose in purposes
        and port.purpose in _TALK.get((service_of(spec), port.service), ())
    ]


def _by_proxies(env: dict[str, str], wires: list[Wire]) -> dict[str, str]:
    links = {}
    for wire in wires:
        port, proxied = wire.port, f"{wire.port.host}:{wire.proxy.port}"
        direct = f"{port.host}:{port.port}"
        if port.purpose == "http":
            env = {key: value.replace(f"http://{direct}", f"http://{proxied}") for key, value in env.items()}
        else:
            links[f"{port.scheme}://{direct}"] = f"{port.scheme}://{proxied}"
    return {**env, "CHAOS_LINKS": json.dumps(links)}
