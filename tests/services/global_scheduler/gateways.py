"""What of a gateway talks to schedulers: its client and its reporter, with jobs that only change their phase."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from gateway.job import Job, JobSpec
from gateway.metrics import GatewayMetrics
from gateway.reports import Reporter
from shared.domain.job import Generation, Phase, Slo
from shared.wire.clients.scheduler import SchedulerClient
from shared.wire.rpc_client import RpcClients
from shared.wire.sockets import Sockets
from tests.services.control_plane import until


def make_job(job_id: str) -> Job:
    spec = JobSpec(job_id, [1] * 100, Generation(b"", time.time()), 50, True, False, Slo())
    return Job(spec, lambda _: None, "gateway-0", time.monotonic() + 600.0)


@dataclass
class Gateway:
    """One gateway's end of the reports."""

    schedulers: SchedulerClient
    reporter: Reporter
    clients: RpcClients
    jobs: dict[str, Job] = field(default_factory=dict)

    async def connected(self, *addresses: str) -> None:
        await until(lambda: all(self.clients.to(a).connected for a in addresses), "connected to all")

    async def begin(self, *job_ids: str) -> None:
        """Place jobs and report them in decode."""
        for job_id in job_ids:
            job = self.jobs[job_id] = make_job(job_id)
            job.placed(await self.schedulers.place(job.view(), timeout_s=5))
            for phase in (Phase.PREFILL, Phase.DECODE):
                job.phase = phase
                self.reporter.report(job)
        await self.reporter.flush()

    async def finish(self, *job_ids: str) -> None:
        for job_id in job_ids:
            job = self.jobs.pop(job_id)
            job.phase = Phase.COMPLETED
            self.reporter.report(job, "completed")
        await self.reporter.flush()


@contextmanager
def gateway(*addresses: str) -> Iterator[Gateway]:
    sockets = Sockets()
    try:
        with RpcClients(sockets) as clients:
            schedulers = SchedulerClient(clients, addresses)
            yield Gateway(schedulers, Reporter(schedulers, GatewayMetrics("demo", CollectorRegistry())), clients)
    finally:
        sockets.close()
