"""The ready instances of one role, and what was assigned to them since the broadcast."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from shared.domain.instance import InstanceLoad, InstanceView

_by_id = attrgetter("info.instance_id")


@dataclass(frozen=True, slots=True)
class Assignment:
    """Work given to an instance at `time_s` (unix seconds), perhaps not yet in the instance's load."""

    instance_id: str
    time_s: float
    prefill_tokens: int = 0  # prompt tokens that it has to compute
    decode_tokens: int = 0  # prompt tokens that a decode job brings; 0 when it is no decode job
    heavy: bool = False


class ReadySet:
    """Ready instances of one role, by id. Booked work shows in the loads of `views`."""

    __slots__ = ("_at", "_views")

    def __init__(self, views: Iterable[InstanceView]) -> None:
        self._views = sorted(views, key=_by_id)
        self._at = {view.info.instance_id: at for at, view in enumerate(self._views)}

    def __len__(self) -> int:
        return len(self._views)

    @property
    def views(self) -> Sequence[InstanceView]:
        """All of them, by id."""
        return self._views

    def get(self, instance_id: str) -> InstanceView | None:
        """The instance of that id, if it is one of them."""
        at = self._at.get(instance_id)
        return None if at is None else self._views[at]

    def copy(self) -> "ReadySet":
        """The same instances; what is booked on one copy does not show in the other."""
        twin = object.__new__(ReadySet)
        twin._at, twin._views = self._at, self._views.copy()
        return twin

    def book(self, assignment: Assignment) -> InstanceView | None:
        """Count work on its instance and give back the instance as it is now; None for unknown ids."""
        at = self._at.get(assignment.instance_id)
        if at is None:
            return None
        view = self._views[at]
        load = _with(view.load, assignment, max(1, view.info.block_size))
        raised = self._views[at] = InstanceView(view.info, view.role, view.state, load)
        return raised


def _with(load: InstanceLoad, more: Assignment, block_size: int) -> InstanceLoad:
    decodes = more.decode_tokens > 0
    return InstanceLoad(
        time_s=load.time_s,
        queued_prefill=load.queued_prefill + (more.prefill_tokens > 0),
        queued_prefill_tokens=load.queued_prefill_tokens + more.prefill_tokens,
        running=load.running,
        waiting=load.waiting,
        decoding=load.decoding + decodes,
        heavy_decodes=load.heavy_decodes + (decodes and more.heavy),
        context_tokens=load.context_tokens + more.decode_tokens,
        free_blocks=max(0, load.free_blocks - -(-more.decode_tokens // block_size)),
        staged_bytes=load.staged_bytes,
        inflight=load.inflight,
    )
