"""What a restarted monitor remembers: instances of the database, until each shows that it lives."""

from typing import Any

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from shared.domain.instance import InstanceInfo, InstanceState
from shared.runtime.logs import get_log
from shared.store.reading import read_instances

log = get_log(__name__)


class Memory:
    """Instances of the monitor's former life. The heartbeat of one brings it back without a registration."""

    def __init__(self) -> None:
        self._infos: dict[str, InstanceInfo] = {}
        self._rows: dict[str, dict[str, Any]] = {}
        self.loaded = False

    @property
    def empty(self) -> bool:
        """Whether all who are remembered came back, as far as known."""
        return self.loaded and not self._infos

    async def load(self, engine: AsyncEngine) -> None:
        """Read them from the database. Raises Unavailable."""
        for row in await read_instances(engine):
            if row["state"] == InstanceState.DEAD.value:
                continue
            try:
                info = msgspec.json.decode(row["info"], type=InstanceInfo)
            except msgspec.MsgspecError as error:  # written by another version
                log.warning("instance row not understood", instance_id=row["instance_id"], error=str(error))
                continue
            self._infos[info.instance_id] = info
            self._rows[info.instance_id] = row
        self.loaded = True

    def take(self, instance_id: str, generation: int) -> InstanceInfo | None:
        """The remembered instance of that very process, once."""
        info = self._infos.get(instance_id)
        if info is None or info.generation != generation:
            return None
        return self._infos.pop(instance_id)

    def give_up(self) -> list[dict[str, Any]]:
        """Forget those who never came back; gives their rows, marked as dead."""
        lost = [{**self._rows[name], "state": InstanceState.DEAD.value} for name in self._infos]
        self._infos.clear()
        return lost

    def drop(self, instance_id: str) -> None:
        """It has registered by itself."""
        self._infos.pop(instance_id, None)
