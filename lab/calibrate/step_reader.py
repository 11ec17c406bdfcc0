"""Reads what the workers recorded of their engines' steps."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from shared.sim.measured import LiveInstance
from shared.wire.clients.http import WorkerAdmin
from shared.wire.messages import StepRecord

_A_PAGE = 10_000


class StepReader:
    """Steps of all instances since `skip`. Read often enough: a worker keeps its last 8,192."""

    def __init__(self, instances: Sequence[LiveInstance]) -> None:
        self._http = {one.info.instance_id: one.info.http for one in instances}
        self._next: dict[str, int] = {}
        self.steps: defaultdict[str, list[StepRecord]] = defaultdict(list)
        self.lost = 0  # steps that were forgotten before they were read

    async def skip(self) -> None:
        """Forget what there is so far."""
        await asyncio.gather(*(self._skip_one(name, url) for name, url in self._http.items()))

    async def read(self) -> dict[str, list[StepRecord]]:
        """The steps since the last call, by instance; they are also added to `steps`."""
        pages = await asyncio.gather(*(self._read_one(name, url) for name, url in self._http.items()))
        return dict(pages)

    async def _skip_one(self, name: str, url: str) -> None:
        async with WorkerAdmin(url) as worker:
            self._next[name] = (await worker.steps(limit=1)).next

    async def _read_one(self, name: str, url: str) -> tuple[str, list[StepRecord]]:
        async with WorkerAdmin(url) as worker:
            page = await worker.steps(self._next.get(name, 0), _A_PAGE)
        self._next[name] = page.next
        self.lost += page.lost
        self.steps[name] += page.steps
        return name, list(page.steps)
