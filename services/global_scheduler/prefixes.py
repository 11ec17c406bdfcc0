"""Follows the prefix caches of instances, so that placement knows which prompts each of them holds."""

import asyncio

from services.global_scheduler.placer import Placer
from shared.domain.instance import ClusterView, InstanceInfo
from shared.domain.prompt import PrefixDelta
from shared.errors import PeerLost, PolyphaseError
from shared.runtime.logs import get_log
from shared.wire.messages import PREFIXES, PrefixesRequest
from shared.wire.rpc_client import RpcClients

log = get_log(__name__)
RETRY_S = 1.0
CALL_S = 86_400.0  # the longest call; then another one follows


class PrefixWatch:
    """Keeps one streaming call to each instance of the broadcast.

    Without a call, and once a change in it was lost, nothing is known of the instance's prefix cache.
    """

    def __init__(self, clients: RpcClients, placer: Placer) -> None:
        self._clients = clients
        self._placer = placer
        self._tasks: dict[str, tuple[int, asyncio.Task[None]]] = {}  # generation and call, by instance

    @property
    def calls(self) -> int:
        """Instances that are followed."""
        return len(self._tasks)

    def update(self, view: ClusterView, *, wanted: bool) -> None:
        """Follow the instances of a broadcast and no others; none while no policy needs it."""
        there = {one.info.instance_id: one.info for one in view.instances} if wanted else {}
        for instance_id, (generation, task) in list(self._tasks.items()):
            if instance_id not in there or there[instance_id].generation != generation or task.done():
                task.cancel()
                del self._tasks[instance_id]
                self._placer.forget_prefixes(instance_id)
        for instance_id, info in there.items():
            if instance_id not in self._tasks:
                task = asyncio.get_running_loop().create_task(self._follow(info), name=f"prefixes of {instance_id}")
                task.add_done_callback(_ended)
                self._tasks[instance_id] = info.generation, task

    async def close(self) -> None:
        tasks = [task for _, task in self._tasks.values()]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, info: InstanceInfo) -> None:
        logged = ""

        def apply(delta: PrefixDelta) -> None:
            expected = self._follows(info) and delta.generation == info.generation
            if not expected or not self._placer.apply_prefixes(info.instance_id, delta):
                raise PeerLost("a change of the instance's prefix cache was lost")

        while True:
            try:
                client = self._clients.to(info.rpc)
                await client.call(PREFIXES, PrefixesRequest(), timeout_s=CALL_S, on_item=apply)
            except PolyphaseError as error:
                if logged != error.message:  # the call is tried again every second
                    logged = error.message
                    log.info("the prefix cache is not known", instance_id=info.instance_id, reason=logged)
            if self._follows(info):
                self._placer.forget_prefixes(info.instance_id)
            await asyncio.sleep(RETRY_S)

    def _follows(self, info: InstanceInfo) -> bool:
        known = self._tasks.get(info.instance_id)
        return known is not None and known[0] == info.generation


def _ended(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error(
            "a prefix cache is not followed; the next broadcast begins again", task=task.get_name(), exc_info=error
        )
