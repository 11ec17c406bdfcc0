"""A suite whose control plane runs on this host and whose instances run on Ray."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

from services.launcher.cluster_file import Cluster
from services.launcher.cluster_sections import InstanceSection
from services.launcher.elsewhere import Elsewhere, Running
from services.launcher.keeper import Changed
from services.launcher.on_ray.connection import connected, placed_at
from services.launcher.on_ray.instances import placing
from services.launcher.on_ray.needs import Needs, needs_of
from services.launcher.spec import Plan, ProcessSpec
from services.worker.settings import WorkerSettings

TOKEN = "POLYPHASE_WORKER_CLUSTER_TOKEN"


@contextmanager
def on_ray(cluster: Cluster, address: str) -> Iterator[Cluster]:
    """The file as it is to be planned, while this process is connected to Ray. Raises InvalidRequest, Unavailable."""
    with connected(address) as here:
        yield placed_at(cluster, here)


def divide(cluster: Cluster, plan: Plan) -> tuple[Plan, Running]:
    """The plan without the instances, and who runs those. Raises InvalidRequest for needs that Ray cannot meet."""
    specs = [spec for spec in plan.processes if isinstance(spec.settings, WorkerSettings)]
    needs = {spec.name: _needs(cluster, spec) for spec in specs}

    @asynccontextmanager
    async def running(changed: Changed) -> AsyncIterator[Elsewhere]:
        async with placing([(*_settled(cluster, spec), needs[spec.name]) for spec in specs], changed) as instances:
            yield instances

    return replace(plan, processes=tuple(spec for spec in plan.processes if spec not in specs)), running


def _needs(cluster: Cluster, spec: ProcessSpec) -> Needs:
    assert isinstance(spec.settings, WorkerSettings)
    return needs_of(_entry(cluster, spec), spec.settings, cluster.instances)


def _settled(cluster: Cluster, spec: ProcessSpec) -> tuple[WorkerSettings, dict[str, str]]:
    """Settings and further variables of a process on another node, which lacks the files of this one."""
    assert isinstance(spec.settings, WorkerSettings)
    settings = spec.settings.model_copy(update={"cluster_token_file": None})
    return settings, {**_entry(cluster, spec).env, TOKEN: spec.settings.token()}


def _entry(cluster: Cluster, spec: ProcessSpec) -> InstanceSection:
    return next(each for each in cluster.instances if spec.name in each.ids)
