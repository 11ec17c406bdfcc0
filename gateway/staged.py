"""What one attempt holds on instances: KV staged by its prefill, fetches of it that decode instances have begun, and
the place that one of them keeps for it.
"""

import asyncio
from types import TracebackType
from typing import Self

from gateway.job import Job
from shared.domain.route import InstanceRef
from shared.errors import PolyphaseError
from shared.policy.assignment import Assignment, promise_of
from shared.runtime.logs import get_log
from shared.wire.messages import (
    EXPECT,
    PREFETCH,
    RELEASE,
    ExpectRequest,
    PrefetchRequest,
    PrefillStarted,
    ReleaseRequest,
)
from shared.wire.rpc_client import RpcClient, RpcClients

log = get_log(__name__)
ANNOUNCE_S = 2.0  # for the connection to a decode instance that is new to this gateway


class StagedKv:
    """Entered before the prefill is called. At the end all is released but what `ended_on` says is gone.

    That holds for every end, also where the prefill's reply and its cancellation cross: the id is the gateway's own.
    """

    def __init__(self, clients: RpcClients, job: Job, prefill: InstanceRef) -> None:
        self._clients = clients
        self._job = job
        self._transfer_id = job.transfer_id
        self._prefill = prefill
        self._holders = {prefill.rpc}
        self._fetches: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for address in self._holders:
            self._clients.to(address).notify(RELEASE, ReleaseRequest([self._transfer_id]))
        for fetch in self._fetches:
            fetch.cancel()
        if self._fetches:
            await asyncio.gather(*self._fetches)

    def announce(self, decode: InstanceRef, bound: Assignment) -> None:
        """Tell the decode instance what will come to it, so that its load shows that to all schedulers."""
        self._holders.add(decode.rpc)
        request = ExpectRequest(self._transfer_id, promise_of(bound), keep_s=self._job.left_s)
        client = self._clients.to(decode.rpc)
        if client.connected:
            client.notify(EXPECT, request)
        else:  # a notification would be lost
            self._fetches.append(asyncio.get_running_loop().create_task(self._announce(client, request)))

    def prefetch(self, started: PrefillStarted) -> None:
        """Have the decode instance fetch while the prefill goes on; what fails or is late only costs the overlap."""
        self._holders.add(started.decode.rpc)
        self._fetches.append(asyncio.get_running_loop().create_task(self._prefetch(started)))

    def ended_on(self, decode: InstanceRef) -> None:
        """A decode has ended there, and what had been fetched for it with it.

        The prefill instance is told all the same: that the KV was pulled, it heard by a connection that may be broken.
        """
        self._holders.discard(decode.rpc)

    async def _announce(self, client: RpcClient, request: ExpectRequest) -> None:
        try:
            await client.call(EXPECT, request, timeout_s=ANNOUNCE_S)
        except asyncio.CancelledError:
            return  # by us, at the end of the attempt
        except PolyphaseError as error:
            log.info("a decode is not announced", transfer_id=self._transfer_id, error=error.message)

    async def _prefetch(self, started: PrefillStarted) -> None:
        client = self._clients.to(started.decode.rpc)
        try:
            request = PrefetchRequest(started.handle, keep_s=self._job.left_s)
            await client.call(PREFETCH, request, timeout_s=self._job.left_s)
        except asyncio.CancelledError:
            return  # by us, at the end of the attempt
        except PolyphaseError as error:
            log.info("prefetch failed", transfer_id=self._transfer_id, error=error.message)
