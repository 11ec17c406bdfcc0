"""The global schedulers: placement and reports over RPC, the status table over HTTP."""

from collections.abc import Sequence
from typing import Any

from shared.domain.job import JobView
from shared.domain.route import Route
from shared.errors import PeerLost, Unavailable
from shared.wire.clients.http import JsonClient
from shared.wire.messages import JobReport, JobReports, PlaceRequest
from shared.wire.methods import PLACE, REPORT
from shared.wire.rpc_client import RpcClient, RpcClients


class SchedulerClient:
    """Calls whichever scheduler is there: connected ones in turn, the others only when none is connected."""

    def __init__(self, clients: RpcClients, addresses: Sequence[str]) -> None:
        if not addresses:
            raise Unavailable("no scheduler address is configured")
        self._clients = clients
        self._addresses = tuple(addresses)
        self._turn = 0
        for address in addresses:
            clients.to(address)  # connect now, not at the first request

    @property
    def connected(self) -> bool:
        """Whether any scheduler is there."""
        return any(self._clients.to(address).connected for address in self._addresses)

    async def place(self, job: JobView, *, exclude: tuple[str, ...] = (), timeout_s: float) -> Route:
        """A route for `job`. Raises Busy, Unavailable, InvalidRequest, PeerLost, DeadlineExceeded."""
        lost: PeerLost | None = None
        for client in self._in_turn():
            try:
                return await client.call(PLACE, PlaceRequest(job, exclude), timeout_s=timeout_s)
            except PeerLost as error:
                lost = error
        assert lost is not None
        raise lost

    async def report(self, reports: list[JobReport], *, timeout_s: float) -> None:
        """Hand reports over. Raises PeerLost or DeadlineExceeded when none took them; repeating is safe."""
        lost: PeerLost | None = None
        for client in self._in_turn():
            try:
                return await client.call(REPORT, JobReports(reports), timeout_s=timeout_s)
            except PeerLost as error:
                lost = error
        assert lost is not None
        raise lost

    def _in_turn(self) -> list[RpcClient]:
        self._turn += 1
        start = self._turn % len(self._addresses)
        ordered = [self._clients.to(a) for a in (*self._addresses[start:], *self._addresses[:start])]
        return [c for c in ordered if c.connected] or ordered


class SchedulerAdmin(JsonClient):
    """The HTTP API of one scheduler."""

    async def requests(self, *, phase: str = "", limit: int = 100) -> list[dict[str, Any]]:
        """The newest rows of the status table."""
        params: dict[str, str | int] = {"limit": limit, **({"phase": phase} if phase else {})}
        answer: list[dict[str, Any]] = await self.call("GET", "/requests", params=params)
        return answer

    async def request(self, job_id: str) -> dict[str, Any]:
        """One row. Raises NotFound."""
        answer: dict[str, Any] = await self.call("GET", f"/requests/{job_id}")
        return answer

    async def timeline(self, job_id: str) -> dict[str, Any]:
        """The RequestTimeline of a finished job. Raises NotFound."""
        answer: dict[str, Any] = await self.call("GET", f"/requests/{job_id}/timeline")
        return answer

    async def policies(self) -> dict[str, Any]:
        """The policies in force and the choices there are."""
        answer: dict[str, Any] = await self.call("GET", "/policies")
        return answer

    async def set_policies(self, change: dict[str, Any]) -> dict[str, Any]:
        """Change some; `{"split": {"name": "fraction", "parameters": {"fraction": 0.5}}}`."""
        answer: dict[str, Any] = await self.call("PUT", "/policies", body=change)
        return answer
