"""Clients of the global schedulers: placement and reports over RPC, the status table over HTTP."""

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from zlib import crc32

from shared.domain.adapters import AdapterSet
from shared.domain.job import JobView
from shared.domain.route import Route
from shared.errors import DeadlineExceeded, PeerLost, PolyphaseError, Unavailable
from shared.runtime.logs import get_log
from shared.timeline import RequestTimeline
from shared.wire.api.scheduler import FollowedPolicies, Predictions, RequestPage, RequestRow
from shared.wire.clients.http import JsonClient
from shared.wire.clients.monitor import FOLLOW_S, LOAD_S
from shared.wire.messages import (
    ADAPTERS,
    LOAD,
    PLACE,
    REPORT,
    UNLOAD,
    AdaptersRequest,
    JobReport,
    JobReports,
    LoadRequest,
    Method,
    PlaceRequest,
    Refused,
    Request,
    UnloadRequest,
)
from shared.wire.rpc_client import NearClient, RpcClient, RpcClients

log = get_log(__name__)
SEARCH_S = 5.0
JOBS_KEPT = 100_000  # whose scheduler is remembered; the oldest are forgotten


class SchedulerClient:
    """Calls the connected schedulers in turn, others only when none is connected; for a session always the same.

    A job stays with the scheduler that placed it first: later placements and all reports go there, because it counts
    the job's work until it receives the end. Only when that scheduler is gone does another one take over.
    """

    def __init__(self, clients: RpcClients, addresses: Sequence[str], gateway_id: str = "") -> None:
        if not addresses:
            raise Unavailable("no scheduler address is configured")
        self._clients = clients
        self._addresses = tuple(addresses)
        self._turn = 0
        self._gateway_id = gateway_id
        self._origin = uuid.uuid4().hex
        self._home: OrderedDict[str, str] = OrderedDict()  # job id -> address
        for address in addresses:
            self._client(address)  # connect now, not at the first request

    @property
    def connected(self) -> bool:
        return any(self._client(address).connected for address in self._addresses)

    @property
    def several(self) -> bool:
        """Whether there are several schedulers, each of which learns of the others' placements only later."""
        return len(self._addresses) > 1

    async def place(
        self, job: JobView, *, exclude: tuple[str, ...] = (), timeout_s: float, trace: str = "", to: str = ""
    ) -> Route:
        """A route for `job`. to: as in PlaceRequest. Raises Unavailable, InvalidRequest, PeerLost, DeadlineExceeded."""
        lost: PeerLost | None = None
        for client in self._in_order(self._home.get(job.job_id) or self._first_for(job)):
            try:
                route = await client.call(PLACE, PlaceRequest(job, exclude, trace, to), timeout_s=timeout_s)
            except PeerLost as error:
                lost = error
            except DeadlineExceeded:
                self._home.pop(job.job_id, None)  # it hangs: the next attempt goes to another scheduler
                if job.session:
                    at = self._addresses.index(client.address) + 1
                    self._settle(job.job_id, self._addresses[at % len(self._addresses)])
                raise
            else:
                self._settle(job.job_id, client.address)
                return route
        assert lost is not None
        raise lost

    async def adapters(self, request: AdaptersRequest) -> AdapterSet:
        """The cluster's adapters that were loaded at run time, from the monitor. Raises Unavailable, PeerLost, …"""
        return await self._of_monitor(ADAPTERS, request, request.wait_s + 2 * FOLLOW_S)

    async def load(self, request: LoadRequest) -> AdapterSet:
        """As `MonitorClient.load_adapter`."""
        return await self._of_monitor(LOAD, request, LOAD_S + FOLLOW_S)

    async def unload(self, request: UnloadRequest) -> AdapterSet:
        """As `MonitorClient.unload_adapter`."""
        return await self._of_monitor(UNLOAD, request, LOAD_S + FOLLOW_S)

    async def _of_monitor(
        self, method: Method[Request, AdapterSet, None], request: Request, timeout_s: float
    ) -> AdapterSet:
        """The monitor's answer, through a scheduler. A call that was sent is not repeated."""
        return await self._in_order(self._next())[0].call(method, request, timeout_s=timeout_s)

    async def report(self, reports: list[JobReport], *, timeout_s: float) -> list[JobReport]:
        """Send reports, each to its job's scheduler; returns those that were not accepted. Repeating is safe."""
        return await self._hand_over(self._by_home(reports), timeout_s)

    async def refresh(self, open_jobs: list[JobReport], *, timeout_s: float) -> None:
        """Send each scheduler the reports of its open jobs; without any, an empty message: the gateway is alive."""
        by_home = self._by_home(open_jobs)
        for address in self._addresses:
            if self._client(address).connected:
                by_home.setdefault(address, [])
        await self._hand_over(by_home, timeout_s)

    async def refused(self, counts: list[Refused], *, timeout_s: float) -> bool:
        """Report refused requests to one scheduler; returns whether one accepted it. Repeating is safe."""
        message = JobReports([], self._origin, self._gateway_id, counts)
        for client in self._in_order(self._next()):
            try:
                await client.call(REPORT, message, timeout_s=timeout_s)
            except PolyphaseError:
                continue
            return True
        return False

    async def leave(self, *, timeout_s: float) -> None:
        """Report to all connected schedulers that this gateway stops; others find out by its silence."""
        there = [client for client in map(self._client, self._addresses) if client.connected]
        message = JobReports([], self._origin, self._gateway_id, leaving=True)
        calls = (client.call(REPORT, message, timeout_s=timeout_s) for client in there)
        for client, error in zip(there, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(error, BaseException):
                log.info("a leave was not received", scheduler=client.address, reason=str(error))

    def _by_home(self, reports: list[JobReport]) -> dict[str, list[JobReport]]:
        gathered: dict[str, list[JobReport]] = {}
        turn = self._next()
        for report in reports:
            gathered.setdefault(self._home.get(report.job_id, turn), []).append(report)
        return gathered

    async def _hand_over(self, by_home: dict[str, list[JobReport]], timeout_s: float) -> list[JobReport]:
        # In parallel: a scheduler that hangs must not delay the reports to others.
        left = await asyncio.gather(*(self._report_to(home, some, timeout_s) for home, some in by_home.items()))
        return [report for some in left for report in some]

    async def _report_to(self, home: str, reports: list[JobReport], timeout_s: float) -> list[JobReport]:
        for client in self._in_order(home):
            try:
                await client.call(REPORT, JobReports(reports, self._origin, self._gateway_id), timeout_s=timeout_s)
            except PeerLost:
                continue
            except PolyphaseError as error:  # it hangs and may have accepted them; it is gone once its connection ends
                log.warning("reports not accepted", scheduler=client.address, count=len(reports), reason=error.message)
                return reports
            for report in reports:
                if report.phase.final:
                    self._home.pop(report.job_id, None)
                else:
                    self._settle(report.job_id, client.address)
            return []
        return reports

    def _settle(self, job_id: str, address: str) -> None:
        self._home[job_id] = address
        self._home.move_to_end(job_id)
        if len(self._home) > JOBS_KEPT:
            self._home.popitem(last=False)

    def _first_for(self, job: JobView) -> str:
        """All turns of a session go to one scheduler, which remembers where the last one was computed."""
        if not job.session:
            return self._next()
        return self._addresses[crc32(job.session.encode()) % len(self._addresses)]

    def _next(self) -> str:
        """The address whose turn it is, among the connected ones if there are any."""
        self._turn += 1
        start = self._turn % len(self._addresses)
        ordered = (*self._addresses[start:], *self._addresses[:start])
        return next((a for a in ordered if self._client(a).connected), ordered[0])

    def _client(self, address: str) -> RpcClient | NearClient:
        return self._clients.near(address) or self._clients.to(address)

    def _in_order(self, first: str) -> list[RpcClient | NearClient]:
        at = self._addresses.index(first)
        ordered = [self._client(a) for a in (*self._addresses[at:], *self._addresses[:at])]
        return [c for c in ordered if c.connected] or ordered


class SchedulerAdmin(JsonClient):
    """The HTTP API of one scheduler."""

    async def requests(self, *, phase: str = "", limit: int = 100) -> list[RequestRow]:
        """The newest rows of the status table."""
        return await self.get("/requests", list[RequestRow], phase=phase, limit=limit)

    async def search(self, **filters: str | float | None) -> RequestPage:
        """Requests of all schedulers in the database. filters: the parameters of `GET /requests/search`."""
        return await self.get("/requests/search", RequestPage, timeout_s=SEARCH_S, **filters)

    async def request(self, job_id: str) -> RequestRow:
        """One row. Raises NotFound."""
        return await self.get(f"/requests/{job_id}", RequestRow)

    async def timeline(self, job_id: str) -> RequestTimeline:
        """The course of a request so far. Raises NotFound."""
        return await self.get(f"/requests/{job_id}/timeline", RequestTimeline)

    async def predictions(self) -> Predictions:
        """How true the estimates of its last placements were."""
        return await self.get("/predictions", Predictions)

    async def policies(self) -> FollowedPolicies:
        """The policies that it follows."""
        return await self.get("/policies", FollowedPolicies)
