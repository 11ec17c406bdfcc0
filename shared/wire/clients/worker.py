"""The HTTP API of one instance."""

from typing import Any

import msgspec

from shared.wire.clients.http import JsonClient
from shared.wire.steps import StepPage


class WorkerAdmin(JsonClient):
    """Typed calls to one worker. All raise errors of `shared.errors`."""

    async def instance(self) -> dict[str, Any]:
        """Who it is, what it does right now, and the settings of its speed."""
        answer: dict[str, Any] = await self.call("GET", "/instance")
        return answer

    async def steps(self, since: int = -1, limit: int = 10_000) -> StepPage:
        """The engine's steps from number `since` on; by default the newest ones."""
        answer = await self.call("GET", "/steps", params={"since": since, "limit": limit})
        return msgspec.convert(answer, StepPage)
