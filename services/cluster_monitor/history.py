"""What the database keeps of instances: the registry, and a sample of every load."""

import time
from typing import Any

import msgspec

from services.cluster_monitor.record import Record
from services.cluster_monitor.registry import Registry
from shared.store.tables import instances, loads
from shared.store.write_behind import WriteBehind


class History:
    """Writes instances when they change and loads once a second."""

    def __init__(self, registry: Registry, store: WriteBehind) -> None:
        self._registry = registry
        self._store = store
        registry.on_change(lambda record, _: self._write(record, record.state.value))
        registry.on_gone(lambda record, how, _: self._write(record, how))

    def sample(self) -> None:
        """Queue one load of every live instance."""
        now = time.time()
        for record in self._registry.all():
            if record.alive:
                self._store.put(loads, _load_row(record, now))

    def _write(self, record: Record, state: str) -> None:
        self._store.put(
            instances,
            {
                "instance_id": record.instance_id,
                "generation": record.info.generation,
                "role": record.role.value,
                "state": state,
                "registered_s": record.registered_s,
                "updated_s": time.time(),
                "info": msgspec.json.encode(record.info).decode(),
            },
        )


def _load_row(record: Record, now: float) -> dict[str, Any]:
    load = record.load
    return {
        "instance_id": record.instance_id,
        "time_s": now,
        "role": record.role.value,
        "state": record.state.value,
        "queued_prefill": load.queued_prefill,
        "queued_prefill_tokens": load.queued_prefill_tokens,
        "running": load.running,
        "waiting": load.waiting,
        "decoding": load.decoding,
        "heavy_decodes": load.heavy_decodes,
        "context_tokens": load.context_tokens,
        "free_blocks": load.free_blocks,
        "staged_bytes": load.staged_bytes,
        "inflight": load.inflight,
    }
