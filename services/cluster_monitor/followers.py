"""Who goes by which revision of the policies, as each instance and scheduler said last."""

import time
from dataclasses import dataclass, replace
from typing import Any

from services.cluster_monitor.registry import Registry
from shared.domain.policies import PolicySet

SILENT_S = 10.0  # a scheduler that tells nothing for so long is gone


@dataclass(frozen=True, slots=True)
class _Heard:
    revision: int
    trouble: str
    heard_mono: float
    behind_mono: float | None = None  # since when it goes by an older revision than the one in force


class Followers:
    """Instances tell it with their heartbeats, schedulers over HTTP."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._schedulers: dict[str, _Heard] = {}
        self._instances: dict[str, float] = {}  # since when each goes by older ones than those in force

    def hear(self, scheduler_id: str, revision: int, trouble: str) -> None:
        """A scheduler goes by that revision; `trouble`: why not by a newer one that it heard of."""
        before = self._schedulers.get(scheduler_id)
        since = before.behind_mono if before is not None else None
        self._schedulers[scheduler_id] = _Heard(revision, trouble, time.monotonic(), since)
        self._drop_silent()

    def behind(self, policies: PolicySet) -> dict[str, tuple[str, float]]:
        """Of each living scheduler its trouble, and for how many seconds it has not gone by these policies."""
        self._drop_silent()
        now, found = time.monotonic(), {}
        for name, one in self._schedulers.items():
            since = None if one.revision >= policies.revision else one.behind_mono or now
            self._schedulers[name] = replace(one, behind_mono=since)
            found[name] = one.trouble, now - since if since is not None else 0.0
        return found

    def instances_behind(self, policies: PolicySet) -> dict[str, float]:
        """Of each instance that goes by older policies than these: for how many seconds it has."""
        now, before = time.monotonic(), self._instances
        self._instances = {
            one.instance_id: before.get(one.instance_id, now)
            for one in self._registry.all()
            if one.alive and one.policies_revision < policies.revision
        }
        return {name: now - since for name, since in self._instances.items()}

    def describe(self, policies: PolicySet) -> list[dict[str, Any]]:
        """All living ones, and whether they follow these."""
        self._drop_silent()
        told = [("scheduler", name, one.revision, one.trouble) for name, one in sorted(self._schedulers.items())]
        for record in sorted(self._registry.all(), key=lambda one: one.instance_id):
            if record.alive:
                told.append(("instance", record.instance_id, record.policies_revision, record.policies_trouble))
        return [
            {
                "process": process,
                "name": name,
                "revision": revision,
                "follows": revision == policies.revision and not trouble,
                "trouble": trouble,
            }
            for process, name, revision, trouble in told
        ]

    def _drop_silent(self) -> None:
        since = time.monotonic() - SILENT_S
        self._schedulers = {name: one for name, one in self._schedulers.items() if one.heard_mono > since}
