"""The cluster over time: the monitor's deltas, and the state that a follower derives from them."""

import msgspec

from shared.domain.instance import ClusterView, InstanceLoad, InstanceState, InstanceView, Role
from shared.domain.policies import PolicySet


class ClusterDelta(msgspec.Struct, frozen=True, array_like=True):
    """The changes since the delta with the previous `sequence`; `time_s` is unix seconds.

    whole: it replaces the state, whatever came before. changed: instances that are new or have changed rates, adapters,
    role or state. loads: of other instances, by id. gone: instances that have left. policies: None when unchanged.
    """

    sequence: int
    time_s: float
    whole: bool = False
    changed: tuple[InstanceView, ...] = ()
    loads: dict[str, InstanceLoad] = {}
    gone: tuple[str, ...] = ()
    policies: PolicySet | None = None

    @classmethod
    def from_view(cls, view: ClusterView) -> "ClusterDelta":
        """A whole view as a delta."""
        return cls(view.sequence, view.time_s, True, view.instances, policies=view.policies)


class ClusterState:
    """The state after a sequence of deltas. Before the first whole delta it is not `known`."""

    def __init__(self) -> None:
        self.known = False
        self.sequence = 0
        self.policies = PolicySet()
        self._time_s = 0.0
        self._views: dict[str, InstanceView] = {}
        self._view: ClusterView | None = None

    def __len__(self) -> int:
        return len(self._views)

    def get(self, instance_id: str) -> InstanceView | None:
        return self._views.get(instance_id)

    def apply(self, delta: ClusterDelta) -> bool:
        """Apply a delta. Returns False, and changes nothing, when a delta before it is missing."""
        if not delta.whole and (not self.known or delta.sequence != self.sequence + 1):
            return False
        if delta.whole:
            self.known = True
            self._views = {}
        self.sequence, self._time_s, self._view = delta.sequence, delta.time_s, None
        if delta.policies is not None:
            self.policies = delta.policies
        views = self._views
        for instance_id in delta.gone:
            views.pop(instance_id, None)
        for view in delta.changed:
            views[view.info.instance_id] = view
        for instance_id, load in delta.loads.items():
            known = views.get(instance_id)
            if known is not None:
                views[instance_id] = InstanceView(known.info, known.role, known.state, load)
        return True

    def moved(self, delta: ClusterDelta) -> bool:
        """Whether a delta that is not applied yet adds or removes an instance, or changes a role, state or
        adapter.
        """
        return delta.whole or bool(self.moving(delta))

    def moving(self, delta: ClusterDelta) -> dict[str, InstanceView | None]:
        """The instances that a delta which is not applied yet, and not whole, adds or removes, or whose role, state or
        adapters it changes: by id their views before it, None for new ones.
        """
        found = {instance_id: self._views.get(instance_id) for instance_id in delta.gone}
        for view in delta.changed:
            if self._moved(view):
                found[view.info.instance_id] = self._views.get(view.info.instance_id)
        return found

    def view(self) -> ClusterView:
        """The current view; built on demand, O(instances)."""
        if self._view is None:
            self._view = ClusterView(self.sequence, self._time_s, tuple(self._views.values()), self.policies)
        return self._view

    def _moved(self, view: InstanceView) -> bool:
        known = self._views.get(view.info.instance_id)
        return known is None or _standing(known) != _standing(view)


def _standing(view: InstanceView) -> tuple[int, Role, InstanceState, dict[str, str]]:
    return view.info.generation, view.role, view.state, view.info.adapters
