"""Two real engines of unlike speed on one machine, and the systems that `bench mixed` compares on them."""

from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from rich.console import Console

from lab.bench.cpu_quota import CpuGroup, Throttled, cpu_quota
from lab.bench.random_llama import LlamaShape, make_llama
from lab.demo.run import on_free_ports
from services.launcher.cluster_file import Cluster
from services.launcher.model_source import PROJECT
from services.launcher.up import RunningSuite, running_suite
from shared.domain.instance import InstanceInfo, Role
from shared.domain.route import PolicySpec
from shared.errors import Unavailable
from shared.policy import registry
from shared.policy.placement import Policies

FAST, SLOW = "fast", "slow"
CORES = MappingProxyType({FAST: 0.90, SLOW: 0.32})  # 2.8 : 1, and the rest of two cores for everything else
# 48 million parameters: a prompt token takes some ms, and what the services add is small beside it.
SHAPE = LlamaShape(4096, 640, 1728, 10, 10, 5, 4096)
MAX_MODEL_LEN, CHUNK, SEATS = 2048, 256, 32
KV_BYTES, STAGING_BYTES = 1 << 30, 256 << 20
FLIP_S = 60.0
Roles = Mapping[str, Role]
Speeds = Mapping[str, float]  # requests a second, by instance
COUPLED: Roles = MappingProxyType({FAST: Role.DECODE, SLOW: Role.DECODE})
SLOW_PREFILLS: Roles = MappingProxyType({FAST: Role.DECODE, SLOW: Role.PREFILL})
FAST_PREFILLS: Roles = MappingProxyType({FAST: Role.PREFILL, SLOW: Role.DECODE})
WHO = "polyphase bench mixed"
_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class System:
    """Roles and policies. words: what it is, for people. by_speed: requests go in turn, by the instances' speeds."""

    label: str
    words: str
    roles: Roles
    names: Mapping[str, str] = field(default_factory=lambda: _NONE)
    by_speed: bool = False

    def specs(self, speeds: Speeds) -> dict[str, PolicySpec]:
        """The policies by kind."""
        found = {kind: PolicySpec(name) for kind, name in self.names.items()}
        if self.by_speed:
            routes = [["", name, round(speeds[name], 6)] for name in self.roles]
            found["placement"] = PolicySpec("plan", {"routes": routes})
        return found

    def policies(self, speeds: Speeds) -> Policies:
        """The same functions, for the simulator."""
        given = self.specs(speeds)
        return Policies(*(registry.make(kind, given[kind]) for kind in ("placement", "split", "dispatch")))


def _named(placement: str, split: str, dispatch: str = "power_of_two") -> Mapping[str, str]:
    return MappingProxyType({"placement": placement, "split": split, "dispatch": dispatch})


DATA_PARALLEL = System(
    "data_parallel", "each computes whole requests, in turn by speed", COUPLED, _named("plan", "none"), by_speed=True
)
LOW_HIGH = System(
    "low_high", "the slow one prefills, the fast one decodes", SLOW_PREFILLS, _named("least_load", "full")
)
HIGH_LOW = System(
    "high_low", "the fast one prefills, the slow one decodes", FAST_PREFILLS, _named("least_load", "full")
)
CRONUS = System("cronus", "slow prefills a part", SLOW_PREFILLS, _named("least_load", "cronus"))
ADAPTIVE = System("adaptive", "the default policies", SLOW_PREFILLS, _named("adaptive", "adaptive", "adaptive"))
LEAST_LOAD = System("data_parallel_least_load", "the same, by measured backlog", COUPLED, _named("least_load", "none"))
SYSTEMS = (DATA_PARALLEL, LOW_HIGH, HIGH_LOW, CRONUS, ADAPTIVE, LEAST_LOAD)


@dataclass(frozen=True, slots=True)
class Pair:
    """The running pair."""

    running: RunningSuite
    groups: Mapping[str, CpuGroup]
    pids: Mapping[str, int]

    async def become(self, system: System, speeds: Speeds) -> None:
        """Take a system's roles and policies once nobody has work. Raises DeadlineExceeded and the monitor's errors."""
        suite = self.running.suite
        await suite.wait_idle()
        found = await suite.instances()
        async with suite.monitor() as monitor:
            for name, role in system.roles.items():
                if found[name]["role"] != role.value:
                    await monitor.flip(name, drain_timeout_s=FLIP_S, force=True, who=WHO)
        await suite.set_policies(system.specs(speeds), WHO)

    async def instances(self) -> list[InstanceInfo]:
        """As the monitor knows them, with the rates that they have learned."""
        found = await self.running.suite.instances()
        return [msgspec.convert(entry["info"], InstanceInfo) for entry in found.values()]

    def throttled(self) -> dict[str, Throttled]:
        """So far, by instance. Raises Unavailable when one was started again meanwhile, and so without its quota."""
        for name, pid in self.pids.items():
            if self.running.suite.state.pid(name) != pid:
                raise Unavailable(f"the instance {name} was started again, without its quota: nothing to compare")
        return {name: group.throttled() for name, group in self.groups.items()}


@asynccontextmanager
async def running_pair(folder: Path, console: Console) -> AsyncIterator[Pair]:
    """The suite with both engines under their quotas. Raises Unavailable where this machine allows no quotas."""
    with ExitStack() as stack:
        groups = {name: stack.enter_context(cpu_quota(name, cores)) for name, cores in CORES.items()}
        model = make_llama(folder / "model", SHAPE, PROJECT / "models" / "demo")
        cluster = on_free_ports(Cluster.model_validate(cluster_of(model)))
        async with running_suite(cluster, folder / "data", console) as running:
            pids = {name: running.suite.state.pid(name) for name in groups}
            for name, pid in pids.items():
                groups[name].add(pid)
            yield Pair(running, MappingProxyType(groups), MappingProxyType(pids))


def cluster_of(model: Path) -> dict[str, Any]:
    """The cluster file."""
    return {
        "name": "bench mixed",
        "model": str(model),
        "served_model_name": "mixed",
        "max_model_len": MAX_MODEL_LEN,
        "gateway": {"dtype": "float32", "max_queued_jobs": 4096, "job_timeout_s": 900.0},
        "predictor": {"enabled": False},
        "dashboard": {"enabled": False},
        "instance_defaults": {
            "engine": "vllm",
            "accelerator": "cpu",
            "dtype": "float32",
            "kv_cache_bytes": KV_BYTES,
            "staging_bytes": STAGING_BYTES,
            "chunk_size": CHUNK,
            "max_seqs": SEATS,
            "threads": 1,
        },
        "instances": [{"id": FAST, "role": Role.DECODE.value}, {"id": SLOW, "role": Role.PREFILL.value}],
    }
