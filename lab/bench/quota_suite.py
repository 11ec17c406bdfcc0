"""A suite of real engines on this machine's cores, each held to a share of one: unlike instances without a GPU."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
from rich.console import Console

from lab.bench.cpu_quota import CpuGroup, cpu_quota
from lab.bench.random_llama import LlamaShape, make_llama
from lab.demo.run import on_free_ports
from services.launcher.cluster_file import Cluster
from services.launcher.model_source import PROJECT
from services.launcher.up import RunningSuite, running_suite
from shared.domain.instance import InstanceInfo
from shared.errors import Unavailable

FLIP_S = 60.0  # a drain may take so long


@dataclass(frozen=True, slots=True)
class QuotaSuite:
    """The running suite; groups and process ids by instance."""

    running: RunningSuite
    groups: Mapping[str, CpuGroup]
    pids: Mapping[str, int]

    async def instances(self) -> list[InstanceInfo]:
        """As the monitor knows them, with the rates that they have learned."""
        found = await self.running.suite.instances()
        return [msgspec.convert(entry["info"], InstanceInfo) for entry in found.values()]

    def check(self) -> None:
        """Raises Unavailable when an instance was started again meanwhile, and so without its quota."""
        for name, pid in self.pids.items():
            if self.running.suite.state.pid(name) != pid:
                raise Unavailable(f"the instance {name} was started again, without its quota: nothing to compare")


Kind = TypeVar("Kind", bound=QuotaSuite)


@asynccontextmanager
async def running_under_quotas(
    kind: type[Kind],
    folder: Path,
    console: Console,
    shape: LlamaShape,
    cores: Mapping[str, float],
    cluster_of: Callable[[Path], dict[str, Any]],
) -> AsyncIterator[Kind]:
    """The suite of the cluster file that `cluster_of` makes of a model's folder, its instances under their quotas.

    Raises Unavailable where this machine allows none.
    """
    with ExitStack() as stack:
        groups = {name: stack.enter_context(cpu_quota(name, share)) for name, share in cores.items()}
        model = make_llama(folder / "model", shape, PROJECT / "models" / "demo")
        cluster = on_free_ports(Cluster.model_validate(cluster_of(model)))
        async with running_suite(cluster, folder / "data", console) as running:
            pids = {name: running.suite.state.pid(name) for name in groups}
            for name, pid in pids.items():
                groups[name].add(pid)
            yield kind(running, MappingProxyType(groups), MappingProxyType(pids))


def cluster_file(
    name: str, model: Path, instances: Sequence[Mapping[str, str]], max_model_len: int, **defaults: int
) -> dict[str, Any]:
    """A cluster file of vLLM instances on one thread each. defaults: more of `instance_defaults`."""
    return {
        "name": f"bench {name}",
        "model": str(model),
        "served_model_name": name,
        "max_model_len": max_model_len,
        "gateway": {"dtype": "float32", "max_queued_jobs": 4096, "job_timeout_s": 900.0},
        "predictor": {"enabled": False},
        "planner": {"enabled": False},
        "dashboard": {"enabled": False},
        "instance_defaults": {"engine": "vllm", "accelerator": "cpu", "dtype": "float32", "threads": 1, **defaults},
        "instances": list(instances),
    }
