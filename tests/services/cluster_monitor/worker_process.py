"""A fake worker as a process of its own, to be killed: `python worker_process.py ID RPC HEARTBEATS MONITOR`."""

import asyncio
import sys

from shared.domain.instance import Role
from shared.wire.clients.monitor import MonitorClient
from tests.services.fake_worker import fake_worker, make_info


async def main(instance_id: str, rpc: str, heartbeats: str, monitor_url: str) -> None:
    async with (
        MonitorClient(monitor_url) as monitor,
        fake_worker(make_info(instance_id, rpc), Role.DECODE, heartbeats, monitor),
    ):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
