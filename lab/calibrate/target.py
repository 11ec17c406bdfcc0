"""The running suite that is measured: where its services are, and what its instances say of themselves."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from services.launcher import cluster_token
from services.launcher.suite import Suite, change_policies, until
from shared.domain.instance import InstanceInfo, InstanceState, Role
from shared.domain.job import Phase
from shared.domain.route import PolicySpec
from shared.errors import InvalidRequest, NotFound, Unavailable
from shared.sim.measured import LiveInstance
from shared.timeline import RequestTimeline
from shared.wire.clients.http import WorkerAdmin
from shared.wire.clients.monitor import MonitorClient
from shared.wire.clients.scheduler import SchedulerAdmin

WHO = "polyphase calibrate"
_RECORDS_S = 15.0
_ROWS = 10_000
_FINAL = {phase.value for phase in Phase if phase.final}


@dataclass(frozen=True, slots=True)
class Target:
    """Addresses of a suite. `schedulers` are for timelines and for changing the split while measuring.

    launcher_pid: of a suite on this machine, else 0. token: the cluster's secret.
    """

    api_url: str
    monitor_url: str
    schedulers: tuple[str, ...]
    model: str
    api_key: str = ""
    launcher_pid: int = 0
    token: str = ""

    @classmethod
    def local(cls, suite: Suite, api_key: str = "") -> "Target":
        """A suite of this machine."""
        state, token = suite.state, cluster_token.kept(suite.data_dir)
        where = state.api_url, state.monitor_url, state.scheduler_urls
        return cls(*where, state.model, api_key, state.launcher_pid, token)

    @property
    def api_address(self) -> tuple[str, int]:
        """Host and port of the API."""
        parts = urlsplit(self.api_url)
        return parts.hostname or "127.0.0.1", parts.port or 80

    async def instances(self) -> tuple[LiveInstance, ...]:
        """All instances that are ready. Raises NotFound when there is none of a role."""
        async with MonitorClient(self.monitor_url) as monitor:
            entries = await monitor.instances()
        ready = [entry for entry in entries if entry["state"] == InstanceState.READY.value]
        found = await asyncio.gather(*(_describe(entry["info"], entry["role"]) for entry in ready))
        for role in Role:
            if not any(one.role is role for one in found):
                raise NotFound(f"no {role.value} instance is ready")
        return tuple(found)

    async def timelines(self, request_ids: set[str]) -> dict[str, RequestTimeline]:
        """Timelines of these requests, once all are there. Raises DeadlineExceeded."""
        found: dict[str, RequestTimeline] = {}

        async def all_there() -> bool:
            for url in self.schedulers:
                async with SchedulerAdmin(url) as scheduler:
                    for row in await scheduler.requests(limit=_ROWS):
                        name = request_id_of(row["job_id"])
                        if name in request_ids and name not in found and row["phase"] in _FINAL:
                            found[name] = msgspec.convert(await scheduler.timeline(row["job_id"]), RequestTimeline)
            return request_ids <= found.keys()

        await until(all_there, _RECORDS_S, f"the timelines of {len(request_ids)} requests", 0.3)
        return found

    @asynccontextmanager
    async def policies(self, **names: str) -> AsyncIterator[None]:
        """Other policies, such as split="none", that all follow for the block's length; then those before."""
        wanted = {kind: PolicySpec(name) for kind, name in names.items()}
        async with MonitorClient(self.monitor_url, token=self.token) as monitor:
            before = await change_policies(monitor, wanted, WHO, len(self.schedulers))
            try:
                yield
            finally:
                await change_policies(monitor, _chosen(before), WHO, len(self.schedulers))


def find_target(data_dir: Path, api_url: str, monitor_url: str, schedulers: tuple[str, ...], api_key: str) -> Target:
    """The suite of `data_dir`, or the one at these addresses, of which all must be given. Raises NotFound."""
    if not (api_url or monitor_url or schedulers):
        return Target.local(Suite(data_dir), api_key)
    if not (api_url and monitor_url and schedulers):
        raise InvalidRequest("--api, --monitor and --scheduler: all three, or none to use --data-dir's suite")
    return Target(api_url, monitor_url, schedulers, "", api_key, token=cluster_token.of_environment())


def request_id_of(job_id: str) -> str:
    """The client's id, if it has no hyphens: of the completion ID vLLM makes cmpl-ID-0 and something random."""
    return job_id.split("-")[1] if job_id.count("-") > 1 else ""


def _chosen(described: Mapping[str, Any]) -> dict[str, PolicySpec | None]:
    """What the monitor said of policies, as a change to it; None where the file's held."""
    return {
        kind: PolicySpec(one["name"], one["parameters"]) if one["changed"] else None for kind, one in described.items()
    }


async def _describe(info: dict[str, object], role: str) -> LiveInstance:
    known = msgspec.convert(info, InstanceInfo)
    async with WorkerAdmin(known.http) as worker:
        said = await worker.instance()
    if "max_seqs" not in said:
        raise Unavailable(f"{known.instance_id} is of another version: it does not say how its engine is run")
    host = urlsplit(known.rpc).hostname or ""
    how = (int(said[key]) for key in ("threads", "max_seqs"))
    return LiveInstance(known, Role(role), host, *how)
