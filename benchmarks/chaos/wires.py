"""The links between the processes of a suite, with a proxy on each of them.

Which links a suite has follows from the ports of its plan. A process's own addresses stay as they are; a proxy answers
for the addresses that the process connects to. ZeroMQ and KV addresses are replaced when a process connects
(`inject/sitecustomize.py`), because some of them travel in messages; HTTP addresses are replaced in the environment of
the processes.
"""

import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from random import Random

from benchmarks.chaos.proxy import KvSplitter, Proxy, Splitter, ZmtpSplitter
from services.launcher.spec import Plan, ProcessSpec

_SERVICES = {
    "gateway": "gateway",
    "services.cluster_monitor": "monitor",
    "services.global_scheduler": "scheduler",
    "services.worker": "worker",
    "services.planner": "planner",
    "predictor": "predictor",
}
_PORTS = {  # the purposes of a service's ports, in the order of the plan
    "gateway": ("http",),
    "monitor": ("http", "heartbeats", "broadcasts"),
    "scheduler": ("http", "rpc"),
    "worker": ("rpc", "http", "kv"),
    "planner": ("http",),
    "predictor": ("http",),
}
_LINKS = {  # (client, server) → purposes of the connections
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
ALL_LINKS = frozenset(purpose for purposes in _LINKS.values() for purpose in purposes)
_SPLITTERS: dict[str, Callable[[], Splitter]] = {"http": Splitter, "tcp": ZmtpSplitter, "kv": KvSplitter}  # by scheme


@dataclass(frozen=True, slots=True)
class Port:
    process: str
    service: str
    purpose: str  # "http", "rpc", "kv", "heartbeats", "broadcasts"
    host: str
    port: int
    scheme: str = "tcp"  # the protocol: "http", "tcp" (ZeroMQ), "kv"

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Wire:
    source: str
    port: Port
    proxy: Proxy

    @property
    def name(self) -> str:
        return f"{self.source} → {self.port.process} ({self.port.purpose})"


class Wires:
    def __init__(self, wires: Iterable[Wire]) -> None:
        self.all = tuple(wires)

    def between(self, source: str = "", target: str = "", *purposes: str) -> tuple[Wire, ...]:
        """Links from `source` to `target` for these purposes; "" and no purpose match any. Raises LookupError."""
        found = tuple(
            wire
            for wire in self.all
            if source in ("", wire.source)
            and target in ("", wire.port.process)
            and (not purposes or wire.port.purpose in purposes)
        )
        if not found:
            raise LookupError(f"no link from {source or 'any'} to {target or 'any'} ({purposes or 'any'})")
        return found

    def touching(self, process: str) -> tuple[Wire, ...]:
        return tuple(wire for wire in self.all if process in (wire.source, wire.port.process))


def service_of(spec: ProcessSpec) -> str:
    """The service of a process of the plan, such as "gateway" or "worker"; "other" for the dashboard."""
    return _SERVICES.get(spec.argv[-1], "other")


def ports_of(plan: Plan) -> tuple[Port, ...]:
    found = []
    for spec in plan.processes:
        service = service_of(spec)
        purposes = _PORTS.get(service, ())
        for number, use in enumerate(spec.ports):
            purpose = purposes[min(number, len(purposes) - 1)]  # an instance has one KV port per rank
            scheme = purpose if purpose in ("kv", "http") else "tcp"
            found.append(Port(spec.name, service, purpose, use.host, use.port, scheme))
    return tuple(found)


@asynccontextmanager
async def wired(plan: Plan, rng: Random, purposes: frozenset[str] = ALL_LINKS) -> AsyncIterator[tuple[Plan, Wires]]:
    """The plan with a proxy on each link of these purposes, for the block's length."""
    async with AsyncExitStack() as stack:
        ports, wires, specs = ports_of(plan), list[Wire](), []
        for spec in plan.processes:
            env, links = spec.env, {}
            for port in ports:
                linked = _LINKS.get((service_of(spec), port.service), ())
                if port.process == spec.name or port.purpose not in purposes or port.purpose not in linked:
                    continue
                proxy = Proxy(port.address, Random(rng.getrandbits(64)), _SPLITTERS[port.scheme])
                wires.append(Wire(spec.name, port, await stack.enter_async_context(proxy)))
                proxied = replace(port, port=proxy.port).url
                if port.purpose == "http":
                    env = {key: value.replace(port.url, proxied) for key, value in env.items()}
                else:
                    links[port.url] = proxied
            specs.append(replace(spec, env={**env, "CHAOS_LINKS": json.dumps(links)}))
        yield replace(plan, processes=tuple(specs)), Wires(wires)
