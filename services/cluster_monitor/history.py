"""What the database keeps of instances and requests: the registry, samples of loads, and both in steps of time."""

import time
import uuid
from typing import Any

import msgspec

from services.cluster_monitor.record import Record
from services.cluster_monitor.registry import Registry
from shared.policy.load_history import LoadBook, Seen
from shared.policy.served import KEPT_S, Ended, Served, ServedBook, Slot
from shared.store.tables import instances, load_steps, loads, served
from shared.store.write_behind import WriteBehind

LOADS_S = 5.0  # samples that share a transaction
SERVED_S = 1.0  # between two looks at what was served
OPEN_EVERY = 10  # samples between two writes of the steps that are under way


class History:
    """Writes instances when they change, and what passes in steps, of which a few seconds may be lost with a process.

    A monitor's life has rows of its own, so that another one's in the same step add to them.
    """

    def __init__(self, registry: Registry, store: WriteBehind, served_s: float = KEPT_S) -> None:
        self._registry = registry
        self._store = store
        self._life = uuid.uuid4().hex[:12]
        self._loads = LoadBook()
        self._samples = 0
        self.served = ServedBook(served_s)
        registry.on_change(lambda record, _: self._write(record, record.state.value))
        registry.on_gone(lambda record, how, _: self._write(record, how))

    def ended(self, ended: Ended) -> None:
        """A request is over."""
        self.served.add(ended, time.time())

    def sample(self) -> None:
        """Queue one load of every live instance, and the steps that are over with it."""
        now = time.time()
        records = list(self._registry.all())
        for record in records:
            if record.alive:
                self._store.put(loads, _load_row(record, now), within_s=LOADS_S)
        self._keep(self._loads.sample((record.view() for record in records), now))
        self._samples += 1
        if self._samples % OPEN_EVERY == 0:
            self._keep(self._loads.open())

    def sample_served(self) -> None:
        """Queue the steps in which requests ended since the last time."""
        for slot, one in self.served.changed(time.time()):
            self._store.put(served, _served_row(slot, one, self._life), within_s=SERVED_S)

    def close(self) -> None:
        """Queue what is under way."""
        self._keep(self._loads.open())
        self.sample_served()

    def _keep(self, steps: list[Seen]) -> None:
        for seen in steps:
            self._store.put(load_steps, _step_row(seen, self._life), within_s=LOADS_S)

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


def _step_row(seen: Seen, life: str) -> dict[str, Any]:
    return {
        "step_s": seen.step_s,
        "time_s": seen.start_s,
        "life": life,
        "samples": seen.samples,
        "totals": msgspec.json.encode(seen.totals).decode(),
        "instances": msgspec.json.encode(seen.who).decode(),
        "figures": seen.means.tobytes(),
    }


def _served_row(slot: Slot, one: Served, life: str) -> dict[str, Any]:
    step_s, start_s, slo = slot
    return {
        "step_s": step_s,
        "time_s": start_s,
        "slo": slo,
        "life": life,
        "completed": one.completed,
        "failed": one.failed,
        "cancelled": one.cancelled,
        "refused": one.refused,
        "prompt_tokens": one.prompt_tokens,
        "output_tokens": one.output_tokens,
        "ttft_met": one.ttft_met,
        "tpot_met": one.tpot_met,
        "met": one.met,
        "ttft_target_s": one.ttft_target_s,
        "tpot_target_s": one.tpot_target_s,
        "itl_met": one.itl_met,
        "itl_target_s": one.itl_target_s,
        "content": msgspec.json.encode(msgspec.structs.replace(one, stages={})).decode(),
    }
