"""The global schedulers as a gateway sees them: any one that answers will do."""

from shared.domain.route import Route
from shared.errors import PeerLost, PolyphaseError
from shared.wire.messages import JobReports, PlaceRequest
from shared.wire.methods import PLACE, REPORT
from shared.wire.rpc_client import RpcClient, RpcClients

PLACE_S = 2.0


class Schedulers:
    """Prefers the first that is connected; the others are its spares."""

    def __init__(self, clients: RpcClients, addresses: tuple[str, ...]) -> None:
        self._clients = [clients.to(address) for address in addresses]

    @property
    def connected(self) -> bool:
        """Whether any is there."""
        return any(client.connected for client in self._clients)

    async def place(self, request: PlaceRequest) -> Route:
        """A route. Raises PeerLost when no scheduler answers, or the scheduler's own error."""
        error: PolyphaseError = PeerLost("no scheduler is configured")
        for client in self._ordered():
            try:
                return await client.call(PLACE, request, timeout_s=PLACE_S)
            except PeerLost as lost:
                error = lost
        raise error

    def report(self, reports: JobReports) -> bool:
        """Hand reports to one scheduler; False when none is connected."""
        for client in self._ordered():
            if client.connected:
                client.notify(REPORT, reports)
                return True
        return False

    def _ordered(self) -> list[RpcClient]:
        return sorted(self._clients, key=lambda client: not client.connected)
