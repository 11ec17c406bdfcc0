"""Two real engines of unlike speed on one machine, and the systems that `bench mixed` compares on them."""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console

from lab.bench.cpu_quota import Throttled
from lab.bench.quota_suite import FLIP_S, QuotaSuite, cluster_file, running_under_quotas
from lab.bench.random_llama import LlamaShape
from shared.domain.instance import Role
from shared.domain.route import PolicySpec
from shared.policy import registry
from shared.policy.placement import Policies

FAST, SLOW = "fast", "slow"
CORES = MappingProxyType({FAST: 0.90, SLOW: 0.32})  # 2.8 : 1, and the rest of two cores for everything else
# 48 million parameters: a prompt token takes some ms, and what the services add is small beside it.
SHAPE = LlamaShape(4096, 640, 1728, 10, 10, 5, 4096)
MAX_MODEL_LEN, CHUNK, SEATS = 2048, 256, 32
KV_BYTES, STAGING_BYTES = 1 << 30, 256 << 20
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
BALANCED = System("balanced", "slow prefills a part", SLOW_PREFILLS, _named("least_load", "balanced"))
ADAPTIVE = System("adaptive", "the default policies", SLOW_PREFILLS, _named("adaptive", "adaptive", "adaptive"))
LEAST_LOAD = System("data_parallel_least_load", "the same, by measured backlog", COUPLED, _named("least_load", "none"))
SYSTEMS = (DATA_PARALLEL, LOW_HIGH, HIGH_LOW, BALANCED, ADAPTIVE, LEAST_LOAD)


@dataclass(frozen=True, slots=True)
class Pair(QuotaSuite):
    """The running pair."""

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

    def throttled(self) -> dict[str, Throttled]:
        """So far, by instance. Raises Unavailable when one was started again meanwhile, and so without its quota."""
        self.check()
        return {name: group.throttled() for name, group in self.groups.items()}


def running_pair(folder: Path, console: Console) -> AbstractAsyncContextManager[Pair]:
    """The suite with both engines under their quotas. Raises Unavailable where this machine allows no quotas."""
    return running_under_quotas(Pair, folder, console, SHAPE, CORES, cluster_of)


def cluster_of(model: Path) -> dict[str, Any]:
    """The cluster file."""
    instances = ({"id": FAST, "role": Role.DECODE.value}, {"id": SLOW, "role": Role.PREFILL.value})
    memory = {"kv_cache_bytes": KV_BYTES, "staging_bytes": STAGING_BYTES}
    return cluster_file("mixed", model, instances, MAX_MODEL_LEN, chunk_size=CHUNK, max_seqs=SEATS, **memory)
