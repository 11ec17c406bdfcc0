"""What one attempt holds on instances: KV staged by its prefill, and fetches of it that decode instances have begun."""

import asyncio
from types import TracebackType
from typing import Self

from gateway.job import Job
from shared.domain.route import InstanceRef
from shared.errors import PolyphaseError
from shared.runtime.logs import get_log
from shared.wire.messages import PrefetchRequest, PrefillStarted, ReleaseRequest
from shared.wire.methods import PREFETCH, RELEASE
from shared.wire.rpc_clients import RpcClients

log = get_log(__name__)


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

    def prefetch(self, started: PrefillStarted) -> None:
        """Have the decode instance fetch while the prefill goes on; what fails or is late only costs the overlap."""
        self._holders.add(started.decode.rpc)
        self._fetches.append(asyncio.get_running_loop().create_task(self._prefetch(started)))

    def ended_on(self, decode: InstanceRef) -> None:
        """A decode has ended there, and what had been fetched for it with it.

        The prefill instance is told all the same: that the KV was pulled, it heard by a connection that may be broken.
        """
        self._holders.discard(decode.rpc)

    async def _prefetch(self, started: PrefillStarted) -> None:
        client = self._clients.to(started.decode.rpc)
        try:
            request = PrefetchRequest(started.handle, keep_s=self._job.left_s)
            await client.call(PREFETCH, request, timeout_s=self._job.left_s)
        except asyncio.CancelledError:
            return  # by us, at the end of the attempt
        except PolyphaseError as error:
            log.info("prefetch failed", transfer_id=self._transfer_id, error=error.message)
