"""A gateway's reporter as a process of its own, to be killed: `python gateway_process.py SCHEDULER… -- JOB…`."""

import asyncio
import sys

from prometheus_client import CollectorRegistry

from gateway import reports
from gateway.metrics import GatewayMetrics
from shared.domain.job import Phase
from shared.wire.clients.scheduler import SchedulerClient
from shared.wire.rpc_client import RpcClients
from shared.wire.sockets import Sockets
from tests.services.global_scheduler.gateways import make_job

reports.REFRESH_S = 0.2


async def main(addresses: list[str], job_ids: list[str]) -> None:
    with RpcClients(Sockets()) as clients:
        schedulers = SchedulerClient(clients, addresses)
        reporter = reports.Reporter(schedulers, GatewayMetrics("demo", CollectorRegistry()))
        while not all(clients.to(address).connected for address in addresses):
            await asyncio.sleep(0.01)
        for job_id in job_ids:
            job = make_job(job_id)
            job.placed(await schedulers.place(job.view(), timeout_s=5))
            job.phase = Phase.DECODE
            reporter.report(job)
        while True:
            await reporter.flush()
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    at = sys.argv.index("--")
    asyncio.run(main(sys.argv[1:at], sys.argv[at + 1 :]))
