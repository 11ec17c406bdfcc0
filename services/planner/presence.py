"""Who of the cluster is at work, who is lost and who has come, as the monitor's broadcasts tell it."""

import time

from shared.domain.instance import ClusterView, InstanceState, InstanceView

SILENT_S = 0.4  # an instance that does not answer counts as lost after so long: the monitor itself may have stood still
LOST_KEPT = 64
_AT_WORK = (InstanceState.READY, InstanceState.DRAINING)


class Presence:
    """loss_s: an instance must be gone for so long before it counts as lost. Times that are told are unix seconds."""

    def __init__(self, loss_s: float) -> None:
        self._loss_s = loss_s
        self._at_work: dict[str, InstanceView] | None = None  # and those who are away, as they were last seen
        self._away: dict[str, float] = {}  # since when, of those that do not count as lost yet
        self._there: frozenset[str] = frozenset()  # whom the monitor counts, at work or not
        self._states: tuple[tuple[str, object, object], ...] = ()
        self.changed_s = time.monotonic()  # of anybody's state or role
        self.lost: tuple[InstanceView, ...] = ()  # as they were last seen, the newest last

    def heard(self, view: ClusterView) -> list[str]:
        """A broadcast; who has come to work since the one before."""
        states = tuple((one.instance_id, one.state, one.role) for one in view.instances)
        if states != self._states:
            self._states, self.changed_s = states, time.monotonic()
        self._there = frozenset(one.instance_id for one in view.instances)
        here = {one.instance_id: one for one in view.instances if one.state in _AT_WORK}
        before, self._at_work = self._at_work, {**(self._at_work or {}), **here}
        for name in self._at_work.keys() - here.keys():
            self._away.setdefault(name, time.time())
        for name in self._away.keys() & here.keys():
            del self._away[name]
        self.lost = tuple(one for one in self.lost if one.instance_id not in here)
        if before is None:
            return []
        return sorted(name for name, one in here.items() if name not in before or _life(before[name]) != _life(one))

    def gone(self) -> dict[str, float]:
        """Who counts as lost from now on, and since when it is away; each is told once."""
        now_s, found = time.time(), {}
        for name, since_s in self._away.items():
            patience_s = max(self._loss_s, SILENT_S) if name in self._there else self._loss_s
            if now_s - since_s >= patience_s:
                found[name] = since_s
        for name in found:
            del self._away[name]
            assert self._at_work is not None
            last = self._at_work.pop(name)
            if last.state is not InstanceState.DRAINING:  # that one has left in good order
                self.lost = (*self.lost, last)[-LOST_KEPT:]
        return found


def _life(view: InstanceView) -> int:
    return view.info.generation
