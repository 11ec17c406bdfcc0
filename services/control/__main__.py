"""`python -m services.control`: gateway, scheduler and monitor in one process.

Each of the three is what it is in a process of its own, with its addresses, settings and metrics. They share the event
loop, so that work of one does not wake another process, and the gateway calls the scheduler without a socket.
"""

from shared.runtime.signals import end_at_sigterm

end_at_sigterm()  # before the imports, which take seconds

import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.app import run
from gateway.settings import GatewaySettings
from services.cluster_monitor.app import create_app as create_monitor
from services.cluster_monitor.settings import MonitorSettings
from services.global_scheduler.app import create_app as create_scheduler
from services.global_scheduler.settings import SchedulerSettings
from shared.runtime.http import serving
from shared.runtime.logs import configure_logs
from shared.wire.sockets import Sockets, open_sockets


def main() -> None:
    """Run the three until SIGTERM; the gateway ends first, and its last reports are accepted."""
    settings = GatewaySettings.load()
    configure_logs("control", settings.log_level)
    run(settings, beside=_others(settings, SchedulerSettings.load(), MonitorSettings.load()))


@asynccontextmanager
async def _others(
    gateway: GatewaySettings, scheduler: SchedulerSettings, monitor: MonitorSettings
) -> AsyncIterator[Sockets]:
    near = {gateway.schedulers[0]: scheduler.rpc_address, scheduler.broadcast_address: monitor.broadcast_address}
    async with (
        open_sockets(gateway, near) as sockets,
        serving(create_monitor(monitor, sockets), monitor.http_host, monitor.http_port),
        serving(create_scheduler(scheduler, sockets), scheduler.http_host, scheduler.http_port),
    ):
        yield sockets


if __name__ == "__main__":
    main()
