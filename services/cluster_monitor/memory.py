"""What a restarted monitor remembers: instances of the database, until each shows that it lives."""

from dataclasses import dataclass

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from shared.domain.instance import InstanceInfo, InstanceState, Role
from shared.runtime.logs import get_log
from shared.store.reading import read_instances

log = get_log(__name__)
_COUNTED = frozenset(state.value for state in InstanceState)


@dataclass(frozen=True, slots=True)
class Known:
    """An instance of the monitor's former life, and its role then."""

    info: InstanceInfo
    role: Role


class Memory:
    """Instances of the monitor's former life. The heartbeat of one brings it back without a registration."""

    def __init__(self) -> None:
        self._living: dict[str, Known] = {}
        self.loaded = False

    @property
    def empty(self) -> bool:
        """Whether all who are remembered came back, as far as known."""
        return self.loaded and not self._living

    async def load(self, engine: AsyncEngine) -> list[Known]:
        """Read them from the database; gives back those that were dead already. Raises Unavailable."""
        dead = []
        for row in await read_instances(engine):
            if row["state"] not in _COUNTED:  # it left, or somebody had it forgotten
                continue
            try:
                known = Known(msgspec.json.decode(row["info"], type=InstanceInfo), Role(row["role"]))
            except (msgspec.MsgspecError, ValueError) as error:  # written by another version
                log.warning("instance row not understood", instance_id=row["instance_id"], error=str(error))
                continue
            if row["state"] == InstanceState.DEAD.value:
                dead.append(known)
            else:
                self._living[known.info.instance_id] = known
        self.loaded = True
        return dead

    def take(self, instance_id: str, generation: int) -> InstanceInfo | None:
        """The remembered instance of that very process, once."""
        known = self._living.get(instance_id)
        if known is None or known.info.generation != generation:
            return None
        return self._living.pop(instance_id).info

    def give_up(self) -> list[Known]:
        """Those who never came back."""
        lost = list(self._living.values())
        self._living.clear()
        return lost

    def drop(self, instance_id: str) -> None:
        """It has registered by itself."""
        self._living.pop(instance_id, None)
