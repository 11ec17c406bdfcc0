"""Three real engines under CPU quotas that change while they run: what `bench learning` measures."""

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console

from lab.bench.engine_suite import SHAPE
from lab.bench.mixed_pair import CHUNK, SEATS, STAGING_BYTES
from lab.bench.quota_suite import FLIP_S, QuotaSuite, cluster_file, running_under_quotas
from shared.domain.instance import Role
from shared.domain.rates import StepRates
from shared.errors import Unavailable

FAST, SLOW, THIRD = "fast", "slow", "third"
CORES = MappingProxyType({FAST: 0.8, SLOW: 0.3, THIRD: 0.5})  # the rest of two cores is for everything else
EQUAL, HALF = 0.5, 0.25  # cores of each where they are alike, and of the one that is slowed down
MAX_MODEL_LEN = 1024
WHO = "polyphase bench learning"


@dataclass(frozen=True, slots=True)
class Trio(QuotaSuite):
    """The running suite."""

    async def turn_third(self) -> None:
        """Have the third instance decode, too, once nobody has work. Raises the monitor's errors."""
        suite = self.running.suite
        await suite.wait_idle()
        async with suite.monitor() as monitor:
            await monitor.flip(THIRD, drain_timeout_s=FLIP_S, force=True, who=WHO)

    async def rates(self) -> dict[str, StepRates]:
        """What they publish of their steps. Raises Unavailable for one that says nothing."""
        infos = await self.instances()
        silent = [info.instance_id for info in infos if info.rates.step is None]
        if silent:
            raise Unavailable(f"{', '.join(silent)}: no step times are told")
        return {info.instance_id: info.rates.step for info in infos if info.rates.step is not None}


def running_trio(folder: Path, console: Console) -> AbstractAsyncContextManager[Trio]:
    """The suite with its engines under their quotas. Raises Unavailable where this machine allows none."""
    return running_under_quotas(Trio, folder, console, SHAPE, CORES, cluster_of)


def cluster_of(model: Path) -> dict[str, Any]:
    """The cluster file. Two compute whole requests, and meet decodes and chunks beside them; the third prompts only."""
    roles = {FAST: Role.DECODE, SLOW: Role.DECODE, THIRD: Role.PREFILL}
    instances = [{"id": name, "role": role.value} for name, role in roles.items()]
    memory = {"kv_cache_bytes": 256 << 20, "staging_bytes": STAGING_BYTES}
    return cluster_file("learning", model, instances, MAX_MODEL_LEN, chunk_size=CHUNK, max_seqs=SEATS, **memory)
