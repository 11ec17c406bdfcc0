"""What instances tell of their prefix caches, into the index that placement looks at."""

import asyncio
from typing import Protocol

from shared.domain.instance import ClusterView, InstanceInfo
from shared.domain.prefix import PrefixDelta
from shared.errors import PeerLost, PolyphaseError
from shared.runtime.logs import get_log
from shared.wire.messages import PrefixesRequest
from shared.wire.methods import PREFIXES
from shared.wire.rpc_clients import RpcClients

log = get_log(__name__)
RETRY_S = 1.0
CALL_S = 86_400.0  # then it begins anew


class PrefixSink(Protocol):
    """Who wants to know."""

    def tell(self, instance_id: str, delta: PrefixDelta) -> bool:
        """Take what an instance tells; False when something before it was lost."""
        ...

    def forget(self, instance_id: str) -> None:
        """Know nothing of that instance."""
        ...


class PrefixWatch:
    """One call to each instance of the broadcast, which lasts as long as both do.

    While there is none, or once something in it was lost, nothing is known of that instance.
    """

    def __init__(self, clients: RpcClients, prefixes: PrefixSink) -> None:
        self._clients = clients
        self._prefixes = prefixes
        self._tasks: dict[str, tuple[int, asyncio.Task[None]]] = {}  # generation and call, by instance

    @property
    def calls(self) -> int:
        """Instances that are asked."""
        return len(self._tasks)

    def update(self, view: ClusterView, *, wanted: bool) -> None:
        """Ask those of a broadcast and nobody else; nobody at all while no policy wants to know."""
        there = {one.info.instance_id: one.info for one in view.instances} if wanted else {}
        for instance_id, (generation, task) in list(self._tasks.items()):
            if instance_id not in there or there[instance_id].generation != generation or task.done():
                task.cancel()
                del self._tasks[instance_id]
                self._prefixes.forget(instance_id)
        for instance_id, info in there.items():
            if instance_id not in self._tasks:
                task = asyncio.get_running_loop().create_task(self._follow(info), name=f"prefixes of {instance_id}")
                task.add_done_callback(_ended)
                self._tasks[instance_id] = info.generation, task

    async def close(self) -> None:
        """Ask nobody."""
        tasks = [task for _, task in self._tasks.values()]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, info: InstanceInfo) -> None:
        said = ""

        def take(delta: PrefixDelta) -> None:
            ours = self._asks(info) and delta.generation == info.generation
            if not ours or not self._prefixes.tell(info.instance_id, delta):
                raise PeerLost("something that the instance told of its prefix cache was lost")

        while True:
            try:
                client = self._clients.to(info.rpc)
                await client.call(PREFIXES, PrefixesRequest(), timeout_s=CALL_S, on_item=take)
            except PolyphaseError as error:
                if said != error.message:  # once a second, one line
                    said = error.message
                    log.info("prefixes are not told", instance_id=info.instance_id, reason=said)
            if self._asks(info):
                self._prefixes.forget(info.instance_id)
            await asyncio.sleep(RETRY_S)

    def _asks(self, info: InstanceInfo) -> bool:
        known = self._tasks.get(info.instance_id)
        return known is not None and known[0] == info.generation


def _ended(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("prefixes are told no more; the next broadcast asks again", task=task.get_name(), exc_info=error)
