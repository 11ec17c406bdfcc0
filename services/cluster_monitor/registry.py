"""The instances of the cluster: who may join, what state each is in, who is gone."""

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
from sqlalchemy.ext.asyncio import AsyncEngine

from services.cluster_monitor.settings import MonitorSettings
from shared.domain.instance import Compatibility, InstanceInfo, InstanceLoad, InstanceState, InstanceView, Role
from shared.errors import Conflict, Incompatible, InvalidRequest, NotFound
from shared.runtime.logs import get_log
from shared.runtime.wire_version import WireVersions
from shared.store.reading import read_instances
from shared.wire.messages import Heartbeat
from shared.wire.rpc_client import RpcClient
from shared.wire.sockets import Sockets

# MERGED record.py
# What the monitor knows of one instance at the moment.


UNDER_WAY_S = 0.5  # of a heartbeat, at most


@dataclass(slots=True)
class Record:
    """One registered instance. `…_mono` are readings of the loop's clock, `…_s` unix seconds."""

    info: InstanceInfo
    role: Role
    client: RpcClient
    registered_s: float
    registered_mono: float
    state: InstanceState = InstanceState.STARTING
    state_since_s: float = 0.0
    load: InstanceLoad = field(default_factory=InstanceLoad)
    told_load: InstanceLoad | None = None  # that was broadcast last, and when
    told_mono: float = 0.0
    draining: bool = False
    resumed_mono: float = -math.inf  # when it was resumed, unless it drains again
    policies_revision: int = 0  # that its engine goes by, as it said last
    policies_trouble: str = ""
    connected_once: bool = False
    heard_mono: float | None = None
    arrival: str = "registered"  # or "restarted" or "returned": how it came to be known
    operation: str = ""  # the flip, drain or resume under way
    death: str = ""
    died_mono: float = 0.0
    waiters: list[tuple[Callable[[Heartbeat], bool], asyncio.Future[None]]] = field(default_factory=list)

    @property
    def instance_id(self) -> str:
        """Short for `info.instance_id`."""
        return self.info.instance_id

    @property
    def alive(self) -> bool:
        """Not dead; perhaps silent."""
        return self.state is not InstanceState.DEAD

    def view(self) -> InstanceView:
        """As policies see it."""
        return InstanceView(self.info, self.role, self.state, self.load)

    def describe(self) -> dict[str, Any]:
        """As JSON for people and dashboards."""
        return {
            "instance_id": self.instance_id,
            "role": self.role.value,
            "state": self.state.value,
            "state_since_s": self.state_since_s,
            "registered_s": self.registered_s,
            "operation": self.operation,
            "death": self.death,
            "connected": self.client.connected,
            "info": msgspec.to_builtins(self.info),
            "load": self.load.by_name(),
        }

    def heard(self, beat: Heartbeat, now_mono: float) -> bool:
        """Take a heartbeat in and wake those who wait for one like it. Whether it has other rates, or steps."""
        info = self.info
        self.heard_mono = now_mono
        self.connected_once = self.connected_once or self.client.connected
        self.role = beat.role
        # A heartbeat comes over a socket of its own: one from before the resume may come after it.
        self.draining = beat.draining and now_mono - self.resumed_mono >= UNDER_WAY_S
        self.load = beat.load
        self.policies_revision, self.policies_trouble = beat.policies_revision, beat.policies_trouble
        if beat.rates is not None and beat.rates != self.info.rates:
            self.info = msgspec.structs.replace(self.info, rates=beat.rates)
        if beat.chunk_size not in (0, self.info.chunk_size):
            self.info = msgspec.structs.replace(self.info, chunk_size=beat.chunk_size)
        for accepts, future in tuple(self.waiters):
            if not future.done() and accepts(beat):
                future.set_result(None)
        return info is not self.info

    async def next_heartbeat(self, accepts: Callable[[Heartbeat], bool], timeout_s: float) -> None:
        """Wait for a heartbeat that `accepts` likes. Raises TimeoutError."""
        entry = (accepts, asyncio.get_running_loop().create_future())
        self.waiters.append(entry)
        try:
            async with asyncio.timeout(timeout_s):
                await entry[1]
        finally:
            self.waiters.remove(entry)


# MERGED handshake.py
# Whether an instance fits the cluster, and if not, exactly why.


def check(newcomer: InstanceInfo, members: Sequence[InstanceInfo], fingerprint: str = "") -> None:
    """Let `newcomer` in or raise Incompatible with each field that differs and both values.

    Model fingerprint and KV geometry must agree with every member, the engine's version with members of the same
    engine, and wire versions must be compatible, see `shared.runtime.wire_version`. dtype, block size, tensor and
    pipeline parallelism and context length may differ.
    With no members anything goes, but for a `fingerprint` that the settings pin.
    """
    if fingerprint and newcomer.compatibility.fingerprint != fingerprint:
        found = newcomer.compatibility.fingerprint
        raise Incompatible(
            f"{newcomer.instance_id} does not fit this cluster: fingerprint is {found!r}, "
            f"the settings pin {fingerprint!r}"
        )
    alike = {member.compatibility: member for member in members}
    for member in alike.values():
        if differences := _differences(newcomer, member):
            raise Incompatible(
                f"{newcomer.instance_id} does not fit this cluster: {'; '.join(differences)} "
                f"(as {member.instance_id} has it)"
            )


def _differences(newcomer: InstanceInfo, member: InstanceInfo) -> list[str]:
    ours, theirs = newcomer.compatibility, member.compatibility
    pairs: list[tuple[str, object, object]] = [
        ("fingerprint", ours.fingerprint, theirs.fingerprint),
        ("geometry.layers", ours.geometry.layers, theirs.geometry.layers),
        ("geometry.kv_heads", ours.geometry.kv_heads, theirs.geometry.kv_heads),
        ("geometry.head_dim", ours.geometry.head_dim, theirs.geometry.head_dim),
    ]
    if ours.engine == theirs.engine:  # engines may mix where the model agrees; versions of one engine may not
        pairs.append(("engine_version", ours.engine_version, theirs.engine_version))
    if not _wire(ours).speaks_with(_wire(theirs)):
        pairs += [
            ("wire_version", ours.wire_version, theirs.wire_version),
            ("min_wire_version", ours.min_wire_version, theirs.min_wire_version),
        ]
    return [f"{name} is {mine!r}, the cluster has {its!r}" for name, mine, its in pairs if mine != its]


def _wire(compatibility: Compatibility) -> WireVersions:
    return WireVersions(compatibility.wire_version, compatibility.min_wire_version or compatibility.wire_version)


log = get_log(__name__)
OnChange = Callable[[Record, InstanceState], None]
OnGone = Callable[[Record, str, str], None]
MAX_DEAD = 1_000  # dead ones count until they return or are forgotten; beyond so many the oldest are forgotten


class Registry:
    """Records by id. Every change of a state goes through `settle` or `_bury` and is told to `on_change`."""

    def __init__(self, settings: MonitorSettings, sockets: Sockets) -> None:
        self._settings = settings
        self._sockets = sockets
        self._loop = asyncio.get_running_loop()
        self._records: dict[str, Record] = {}
        self._on_change: list[OnChange] = []
        self._on_gone: list[OnGone] = []
        self._on_renewed: list[Callable[[Record], None]] = []

    def on_change(self, callback: OnChange) -> None:
        """Call back with a record and its former state after each change."""
        self._on_change.append(callback)

    def on_gone(self, callback: OnGone) -> None:
        """Call back with a record that is no longer counted, how it went ("left" or "forgotten"), and why."""
        self._on_gone.append(callback)

    def on_renewed(self, callback: Callable[[Record], None]) -> None:
        """Call back with a record whose process has registered once more, with other facts."""
        self._on_renewed.append(callback)

    def all(self) -> Iterable[Record]:
        """Every record, dead ones included."""
        return self._records.values()

    def get(self, instance_id: str) -> Record:
        """The record of that id. Raises NotFound."""
        record = self._records.get(instance_id)
        if record is None:
            raise NotFound(f"no instance {instance_id!r}")
        return record

    def find(self, instance_id: str) -> Record | None:
        """The record of that id, if any."""
        return self._records.get(instance_id)

    def ready(self, role: Role) -> list[Record]:
        """Instances of that role that get new work."""
        return [r for r in self._records.values() if r.role is role and r.state is InstanceState.READY]

    def register(self, info: InstanceInfo, role: Role, *, remembered: bool = False) -> Record:
        """Let an instance in; repeating it changes nothing. `remembered`: a former life of this monitor knew it.

        Raises Incompatible when it does not fit, Conflict when a newer or another live process holds its id.
        """
        known = self._records.get(info.instance_id)
        if known is not None:
            _check_identity(info, known)
        members = [r.info for r in self._records.values() if r.alive and r.instance_id != info.instance_id]
        check(info, members, self._settings.fingerprint)
        if known is not None and known.alive and _same_process(info, known.info):
            if info != known.info:  # measured rates may have changed
                known.info = info
                for callback in self._on_renewed:
                    callback(known)
            return known
        return self._admit(info, role, known, remembered)

    def remember_dead(self, info: InstanceInfo, role: Role, death: str, *, news: bool) -> None:
        """Count an instance that a former life of this monitor knew, unless it is here. `news`: nobody was told."""
        if info.instance_id in self._records:
            return
        client = RpcClient(self._sockets, info.rpc)
        client.close()
        now_s = time.time()
        record = Record(info, role, client, now_s, self._loop.time(), InstanceState.DEAD, now_s, death=death)
        record.died_mono = self._loop.time()
        self._records[info.instance_id] = record
        if news:
            self._tell(record, InstanceState.STARTING)

    def forget(self, instance_id: str, why: str) -> None:
        """Count a dead instance no longer. Raises NotFound, or Conflict while it lives."""
        record = self.get(instance_id)
        if record.alive:
            raise Conflict(f"{instance_id} is {record.state.value}; only dead instances can be forgotten")
        self._drop(record, "forgotten", why)

    def leave(self, instance_id: str, generation: int) -> None:
        """An instance stops in good order: nobody misses it. Raises NotFound, or Conflict for another process of it."""
        record = self.get(instance_id)
        if record.info.generation != generation:
            raise Conflict(f"{instance_id} is of generation {record.info.generation}, not {generation}")
        if record.alive:
            record.death = "left"
            record.state = InstanceState.DEAD
            self._loop.call_soon(record.client.close)
        self._drop(record, "left", "it was stopped")

    def settle(self, record: Record) -> None:
        """Work out the state of a record from what is known of it."""
        if record.alive and self._records.get(record.instance_id) is record:
            self._move(record, self._state_of(record))

    def tick(self, period_s: float) -> float:
        """Look for silence, for connections that never came, and for dead records to drop.

        Gives back by when it has to look again, by the loop's clock: in `period_s` while somebody starts.
        """
        now = self._loop.time()
        again = now + self._settings.silence_s
        self._bound_dead()
        for record in list(self._records.values()):
            if not record.alive:
                continue
            record.connected_once = record.connected_once or record.client.connected
            if not record.connected_once and now - record.registered_mono > self._settings.connect_timeout_s:
                self._bury(record, f"no connection to {record.info.rpc}")
                continue
            self.settle(record)
            if record.state is InstanceState.STARTING:
                again = min(again, now + period_s)
            elif record.state is not InstanceState.UNRESPONSIVE and record.heard_mono is not None:
                again = min(again, record.heard_mono + self._settings.silence_s)
        return again

    def close(self) -> None:
        """Close all connections."""
        for record in self._records.values():
            record.client.close()

    def _bound_dead(self) -> None:
        dead = [record for record in self._records.values() if not record.alive]
        for record in sorted(dead, key=lambda one: one.died_mono)[: max(0, len(dead) - MAX_DEAD)]:
            self._drop(record, "forgotten", f"more than {MAX_DEAD} are dead")

    def _drop(self, record: Record, how: str, why: str) -> None:
        del self._records[record.instance_id]
        for callback in self._on_gone:
            callback(record, how, why)

    def _admit(self, info: InstanceInfo, role: Role, known: Record | None, remembered: bool) -> Record:
        try:
            client = RpcClient(self._sockets, info.rpc)
        except zmq.ZMQError as error:
            raise InvalidRequest(f"rpc address {info.rpc!r}: {error}") from error
        if known is not None:
            known.state = InstanceState.DEAD
            known.client.close()
        now_s = time.time()
        record = Record(info, role, client, now_s, self._loop.time(), state_since_s=now_s)
        if known is not None or remembered:
            same = remembered or (known is not None and known.info.generation == info.generation)
            record.arrival = "returned" if same else "restarted"
        client.on_lost(lambda: self._lost(record))
        self._records[info.instance_id] = record
        log.info("instance registered", instance_id=info.instance_id, role=role.value, rpc=info.rpc)
        self._tell(record, InstanceState.STARTING)
        return record

    def _lost(self, record: Record) -> None:
        if self._records.get(record.instance_id) is record and record.alive:
            self._bury(record, "connection lost")

    def _bury(self, record: Record, why: str) -> None:
        record.death = why
        record.died_mono = self._loop.time()
        self._move(record, InstanceState.DEAD)
        # Not inside the client's own callback.
        self._loop.call_soon(record.client.close)

    def _state_of(self, record: Record) -> InstanceState:
        if record.heard_mono is None or not record.connected_once:
            return InstanceState.STARTING
        if self._loop.time() - record.heard_mono > self._settings.silence_s:
            return InstanceState.UNRESPONSIVE
        if record.draining or record.operation in ("drain", "flip"):
            return InstanceState.DRAINING
        return InstanceState.READY

    def _move(self, record: Record, state: InstanceState) -> None:
        before = record.state
        if state is before:
            return
        record.state = state
        record.state_since_s = time.time()
        level = log.warning if state in (InstanceState.DEAD, InstanceState.UNRESPONSIVE) else log.info
        level(
            "instance changed",
            instance_id=record.instance_id,
            role=record.role.value,
            before=before.value,
            state=state.value,
            why=record.death,
        )
        self._tell(record, before)

    def _tell(self, record: Record, before: InstanceState) -> None:
        for callback in self._on_change:
            callback(record, before)


def _same_process(info: InstanceInfo, known: InstanceInfo) -> bool:
    return info.generation == known.generation and info.rpc == known.rpc


def _check_identity(info: InstanceInfo, known: Record) -> None:
    """A newer generation takes over, an older one is refused while the newer lives, and so is a live process's id.

    Generations are times of start: where a clock went back, a process is older than its dead predecessor.
    """
    if known.alive and info.generation < known.info.generation:
        raise Conflict(
            f"{info.instance_id}: generation {info.generation} is older than {known.info.generation}, "
            "which has registered already"
        )
    silent = known.state in (InstanceState.DEAD, InstanceState.UNRESPONSIVE)
    if not silent and known.info.rpc != info.rpc:
        raise Conflict(f"{info.instance_id} is {known.state.value} at {known.info.rpc}, not at {info.rpc}")


# MERGED memory.py
# What a restarted monitor remembers: instances of the database, until each shows that it lives.

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
