"""Whether clients are to be sent here: a gateway that hears of no scheduler can only have them wait."""

from gateway.edge import App, Receive, Scope, Send
from shared.runtime.http import say_state
from shared.wire.clients.scheduler import SchedulerClient


def ready_of(schedulers: SchedulerClient) -> App:
    """What answers `/ready`, as every service's does."""

    async def ready(_: Scope, __: Receive, send: Send) -> None:
        await say_state(send, "gateway", "" if schedulers.connected else "no scheduler is there")

    return ready
