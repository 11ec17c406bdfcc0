"""Decode instances by how long a token of one more job would take there."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from random import Random

from shared.domain.instance import InstanceView
from shared.domain.rates import UNKNOWN_STEPS
from shared.policy.backlog import speed_class

TYPICAL_TOKENS = 1000  # context of the job that is imagined; it only has to be the same everywhere

Key = tuple[float, float, str]


def pressure_s(view: InstanceView) -> float:
    """Seconds of a decode step with one more job in it, and of its wait for a place spread over so many tokens."""
    info, load = view.info, view.load
    rates, seats = info.rates.step or UNKNOWN_STEPS, info.max_seqs or load.decoding + 1
    running = min(load.decoding + 1, seats)
    context = (load.context_tokens + TYPICAL_TOKENS) * running / (load.decoding + 1)
    step_s = rates.decode_s(running, context)
    waits = (load.decoding + 1 - running) / seats
    short = load.waiting_tokens + TYPICAL_TOKENS - load.free_blocks * info.block_size
    if short > 0:
        waits = max(waits, short / max(1.0, context))
    return step_s * (1.0 + waits)


class Pressures:
    """By class of speed, the least pressed first; ties break at random, once a broadcast."""

    def __init__(self, views: Iterable[InstanceView], rng: Random) -> None:
        self._keys: dict[str, Key] = {}
        self._class_of: dict[str, int] = {}
        self._order: dict[int, list[Key]] = {}
        for view in views:
            instance_id = view.info.instance_id
            key = self._keys[instance_id] = pressure_s(view), rng.random(), instance_id
            found = self._class_of[instance_id] = _class_of(view)
            self._order.setdefault(found, []).append(key)
        for keys in self._order.values():
            keys.sort()

    def classes(self) -> Iterable[Sequence[Key]]:
        """For each class of speed (pressure in seconds, tie-break, instance id), least first."""
        return self._order.values()

    def refresh(self, view: InstanceView, tie: float | None = None) -> None:
        """Take in a changed load, and perhaps rates; unknown instances are ignored. `tie`: another tie-break."""
        instance_id = view.info.instance_id
        key = self._keys.get(instance_id)
        if key is None:
            return
        keys = self._order[self._class_of[instance_id]]
        del keys[bisect_left(keys, key)]
        key = self._keys[instance_id] = pressure_s(view), key[1] if tie is None else tie, instance_id
        if tie is not None:  # its rates may be others
            found = self._class_of[instance_id] = _class_of(view)
            keys = self._order.setdefault(found, [])
        insort(keys, key)


def _class_of(view: InstanceView) -> int:
    return speed_class((view.info.rates.step or UNKNOWN_STEPS).decode_s(1, 0))
