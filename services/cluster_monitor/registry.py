"""The instances of the cluster: which may join, what state each is in, which are gone.

An instance registers over HTTP and then sends heartbeats. Three facts determine its state: whether the RPC connection
to it stands, when its last heartbeat came, and whether it drains. DEAD is the end of a record; the instance comes back
with a new one.
"""

import asyncio
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import msgspec
import zmq
from sqlalchemy.ext.asyncio import AsyncEngine

from services.cluster_monitor.settings import MonitorSettings
from shared.domain.instance import Compatibility, InstanceInfo, InstanceLoad, InstanceState, InstanceView, Role
from shared.errors import Conflict, Incompatible, InvalidRequest, NotConnected, NotFound
from shared.runtime.logs import get_log
from shared.runtime.wire_version import WireVersions
from shared.store.reading import read_instances
from shared.wire.api import EventKind
from shared.wire.api.monitor import InstanceRow, LoadByName
from shared.wire.messages import Heartbeat
from shared.wire.rpc_client import RpcClient
from shared.wire.sockets import Sockets

log = get_log(__name__)
UNDER_WAY_S = 0.5  # the longest that a heartbeat may be under way
MAX_DEAD = 1_000  # dead instances that are counted; beyond that the oldest are forgotten


@dataclass(slots=True, kw_only=True)
class Record:
    """What the monitor knows of one registered instance. `…_mono` are times of the loop's clock, `…_s` unix seconds."""

    info: InstanceInfo
    role: Role
    connection: RpcClient | None  # None: it died before this monitor was started, which never connected to it
    registered_s: float
    registered_mono: float
    state: InstanceState = InstanceState.STARTING
    state_since_s: float = 0.0
    load: InstanceLoad = field(default_factory=InstanceLoad)
    sent_load: InstanceLoad | None = None  # the load that was broadcast last, and when
    sent_mono: float = 0.0
    draining: bool = False
    resumed_mono: float = -math.inf  # when it was resumed, unless it drains again
    policies_revision: int = 0  # of the policies that its engine follows
    policies_trouble: str = ""
    connected_once: bool = False
    heard_mono: float | None = None
    arrival: EventKind = EventKind.REGISTERED  # or RESTARTED, or RETURNED
    operation: str = ""  # the flip, drain or resume under way
    death: str = ""
    died_mono: float = 0.0
    waiters: list[tuple[Callable[[Heartbeat], bool], asyncio.Future[None]]] = field(default_factory=list)

    @property
    def instance_id(self) -> str:
        return self.info.instance_id

    @property
    def alive(self) -> bool:
        """Not dead; perhaps unresponsive."""
        return self.state is not InstanceState.DEAD

    @property
    def client(self) -> RpcClient:
        """For calls of the instance. Raises NotConnected where the monitor never connected to it."""
        if self.connection is None:
            raise NotConnected(f"{self.instance_id} is dead: {self.death}")
        return self.connection

    @property
    def connected(self) -> bool:
        """Whether the connection stands."""
        return self.connection is not None and self.connection.connected

    def disconnect(self) -> None:
        if self.connection is not None:
            self.connection.close()

    def view(self) -> InstanceView:
        return InstanceView(self.info, self.role, self.state, self.load)

    def row(self) -> InstanceRow:
        """The record as HTTP answers have it."""
        return InstanceRow(
            instance_id=self.instance_id,
            role=self.role,
            state=self.state,
            state_since_s=self.state_since_s,
            registered_s=self.registered_s,
            operation=self.operation,
            death=self.death,
            connected=self.connected,
            info=self.info,
            load=LoadByName.from_load(self.load),
        )

    def apply(self, beat: Heartbeat, now_mono: float) -> bool:
        """Apply a heartbeat and wake the tasks that wait for one like it. Returns whether it changes `info`."""
        info = self.info
        self.heard_mono = now_mono
        self.connected_once = self.connected_once or self.connected
        self.role = beat.role
        # A heartbeat comes over a socket of its own: one from before the resume may come after it.
        self.draining = beat.draining and now_mono - self.resumed_mono >= UNDER_WAY_S
        self.load = beat.load
        self.policies_revision, self.policies_trouble = beat.policies_revision, beat.policies_trouble
        if beat.rates is not None and beat.rates != self.info.rates:
            self.info = msgspec.structs.replace(self.info, rates=beat.rates)
        if beat.adapters not in (None, self.info.adapters):
            self.info = msgspec.structs.replace(self.info, adapters=beat.adapters)
        if beat.chunk_size not in (0, self.info.chunk_size):
            self.info = msgspec.structs.replace(self.info, chunk_size=beat.chunk_size)
        for accepts, future in tuple(self.waiters):
            if not future.done() and accepts(beat):
                future.set_result(None)
        return info is not self.info

    async def next_heartbeat(self, accepts: Callable[[Heartbeat], bool], timeout_s: float) -> None:
        """Wait for a heartbeat that `accepts` returns true for. Raises TimeoutError."""
        entry = (accepts, asyncio.get_running_loop().create_future())
        self.waiters.append(entry)
        try:
            async with asyncio.timeout(timeout_s):
                await entry[1]
        finally:
            self.waiters.remove(entry)


_RELEASE = re.compile(r"(\d{1,6})\.(\d{1,6})(?!\d)")


def check(
    newcomer: InstanceInfo, members: Sequence[InstanceInfo], fingerprint: str = "", *, mixed_precision: bool = False
) -> None:
    """Raises Incompatible, naming each field that differs and both values, where `newcomer` does not fit the members.

    Model fingerprint, adapters of one name, KV geometry and components must agree with every member, and wire versions
    must be compatible (`shared.runtime.wire_version`). Of one engine, adjacent releases may serve together, so that a
    cluster can be upgraded one instance at a time; without components to compare, versions must be equal. dtype, block
    size, tensor and pipeline parallelism and context length may differ, and with `mixed_precision` the precision of the
    weights. `fingerprint`: the one that the settings pin, if any.
    """
    if fingerprint and newcomer.compatibility.fingerprint != fingerprint:
        found = newcomer.compatibility.fingerprint
        raise Incompatible(
            f"{newcomer.instance_id} does not fit this cluster: fingerprint is {found!r}, "
            f"the settings pin {fingerprint!r}"
        )
    one_of_each = {(member.compatibility, member.precision): member for member in members}
    for member in one_of_each.values():
        if differences := _differences(newcomer, member):
            raise Incompatible(
                f"{newcomer.instance_id} does not fit this cluster: {'; '.join(differences)} "
                f"(as {member.instance_id} has it)"
            )
        if newcomer.precision != member.precision and not mixed_precision:
            raise Incompatible(
                f"{newcomer.instance_id} does not fit this cluster: its precision is {newcomer.precision!r}, the "
                f"cluster has {member.precision!r} (as {member.instance_id} has it; '' is the model's own): with "
                "`mixed_precision: true` at the top of the cluster file a request may be computed at both"
            )
    for member in members if newcomer.adapters else ():
        for name, digest in newcomer.adapters.items():
            if (theirs := member.adapters.get(name, digest)) != digest:
                raise Incompatible(
                    f"{newcomer.instance_id} does not fit this cluster: adapter {name} is {digest!r}, the cluster has "
                    f"{theirs!r} (as {member.instance_id} has it)"
                )


def _differences(newcomer: InstanceInfo, member: InstanceInfo) -> list[str]:
    ours, theirs = newcomer.compatibility, member.compatibility
    pairs: list[tuple[str, object, object]] = [
        ("fingerprint", ours.fingerprint, theirs.fingerprint),
        ("geometry.layers", ours.geometry.layers, theirs.geometry.layers),
        ("geometry.kv_heads", ours.geometry.kv_heads, theirs.geometry.kv_heads),
        ("geometry.head_dim", ours.geometry.head_dim, theirs.geometry.head_dim),
    ]
    kept, theirs_kept = ours.geometry.components, theirs.geometry.components
    several = len(kept) > 1 or len(theirs_kept) > 1
    # Emulated engines have no KV and name no components; those of an older release have one.
    if (kept and theirs_kept) or (several and ours.engine == theirs.engine):
        both = zip_longest(kept, theirs_kept)
        pairs += [("geometry.components", str(mine or None), str(its or None)) for mine, its in both]
    alike = kept and theirs_kept and _adjacent(ours.engine_version, theirs.engine_version)
    if ours.engine == theirs.engine and not alike:  # engines may mix where the model agrees
        pairs.append(("engine_version", ours.engine_version, theirs.engine_version))
    if not _wire(ours).speaks_with(_wire(theirs)):
        pairs += [
            ("wire_version", ours.wire_version, theirs.wire_version),
            ("min_wire_version", ours.min_wire_version, theirs.min_wire_version),
        ]
    return [f"{name} is {mine!r}, the cluster has {its!r}" for name, mine, its in pairs if mine != its]


def _adjacent(ours: str, theirs: str) -> bool:
    """Whether two versions are of the same minor release or of neighbouring ones. False for other forms of text."""
    found = [_RELEASE.match(version) for version in (ours, theirs)]
    if found[0] is None or found[1] is None:
        return False
    (major, minor), (its_major, its_minor) = (tuple(map(int, each.groups())) for each in found if each is not None)
    return major == its_major and abs(minor - its_minor) <= 1


def _wire(compatibility: Compatibility) -> WireVersions:
    return WireVersions(compatibility.wire_version, compatibility.min_wire_version or compatibility.wire_version)


OnChange = Callable[[Record, InstanceState], None]
OnGone = Callable[[Record, EventKind, str], None]


class Registry:
    """Records by instance id.

    While a record lives, its state is set by `_move` only, which calls the `on_change` callbacks. A record that leaves
    or is replaced by a new process ends without them (`_retire`).
    """

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
        """Call back with a record that is no longer counted, how it went (LEFT or FORGOTTEN), and why."""
        self._on_gone.append(callback)

    def on_renewed(self, callback: Callable[[Record], None]) -> None:
        """Call back with a record whose process has registered again with a changed `info`."""
        self._on_renewed.append(callback)

    def all(self) -> Iterable[Record]:
        """Every record, dead ones included."""
        return self._records.values()

    def get(self, instance_id: str) -> Record:
        """Raises NotFound."""
        record = self._records.get(instance_id)
        if record is None:
            raise NotFound(f"no instance {instance_id!r}")
        return record

    def ranks(self, instance_id: str) -> list[Record]:
        """The records of an instance, in order: its own, or those of all its data-parallel ranks, whether the whole or
        one of them is named. Raises NotFound.
        """
        named = self._records.get(instance_id)
        whole = instance_id if named is None else named.info.rank_of
        found = [each for each in self._records.values() if each.info.rank_of == whole] if whole else []
        if named is None and not found:
            raise NotFound(f"no instance {instance_id!r}")
        return sorted(found, key=lambda each: (len(each.instance_id), each.instance_id)) or [self.get(instance_id)]

    def find(self, instance_id: str) -> Record | None:
        return self._records.get(instance_id)

    def ready(self, role: Role) -> list[Record]:
        """Instances of that role that get new work."""
        return [r for r in self._records.values() if r.role is role and r.state is InstanceState.READY]

    def register(self, info: InstanceInfo, role: Role, *, remembered: bool = False) -> Record:
        """Let an instance in; repeating the call changes nothing. `remembered`: the monitor knew it before its restart.

        Raises Incompatible when it does not fit, Conflict when a newer or another live process holds its id.
        """
        known = self._records.get(info.instance_id)
        if known is not None:
            _check_identity(info, known)
        members = [r.info for r in self._records.values() if r.alive and r.instance_id != info.instance_id]
        check(info, members, self._settings.fingerprint, mixed_precision=self._settings.mixed_precision)
        if known is not None and known.alive and _same_process(info, known.info):
            if info != known.info:  # measured rates may have changed
                known.info = info
                for callback in self._on_renewed:
                    callback(known)
            return known
        return self._admit(info, role, known, remembered)

    def remember_dead(self, info: InstanceInfo, role: Role, death: str, *, news: bool) -> None:
        """Count an instance that the monitor knew before its restart, unless it is here. `news`: its death is new."""
        if info.instance_id in self._records:
            return
        now_s, now_mono = time.time(), self._loop.time()
        record = Record(
            info=info,
            role=role,
            connection=None,
            registered_s=now_s,
            registered_mono=now_mono,
            state=InstanceState.DEAD,
            state_since_s=now_s,
            death=death,
            died_mono=now_mono,
        )
        self._records[info.instance_id] = record
        if news:
            self._changed(record, InstanceState.STARTING)

    def forget(self, instance_id: str, why: str) -> None:
        """Stop counting a dead instance, or all ranks of one. Raises NotFound, or Conflict while it lives."""
        records = [self._records[instance_id]] if instance_id in self._records else self.ranks(instance_id)
        if living := [each for each in records if each.alive]:
            name, state = living[0].instance_id, living[0].state.value
            raise Conflict(f"{name} is {state}; only dead instances can be forgotten")
        for record in records:
            self._drop(record, EventKind.FORGOTTEN, why)

    def leave(self, instance_id: str, generation: int) -> None:
        """An instance stops in good order. Raises NotFound, or Conflict for another process of the instance."""
        record = self.get(instance_id)
        if record.info.generation != generation:
            raise Conflict(f"{instance_id} is of generation {record.info.generation}, not {generation}")
        if record.alive:
            self._retire(record, "left")
        self._drop(record, EventKind.LEFT, "it was stopped")

    def settle(self, record: Record) -> None:
        """Derive the state of a record from the facts known about it."""
        if record.alive and self._records.get(record.instance_id) is record:
            self._move(record, self._state_of(record))

    def tick(self, period_s: float) -> float:
        """Look for silence, for connections that never came, and for dead records to drop.

        Returns when to look again, by the loop's clock: in `period_s` while an instance starts.
        """
        now = self._loop.time()
        again = now + self._settings.silence_s
        dead = [record for record in self._records.values() if not record.alive]
        for record in sorted(dead, key=lambda one: one.died_mono)[: max(0, len(dead) - MAX_DEAD)]:
            self._drop(record, EventKind.FORGOTTEN, f"more than {MAX_DEAD} are dead")
        for record in list(self._records.values()):
            if not record.alive:
                continue
            record.connected_once = record.connected_once or record.connected
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
        for record in self._records.values():
            record.disconnect()

    def _drop(self, record: Record, how: EventKind, why: str) -> None:
        del self._records[record.instance_id]
        for callback in self._on_gone:
            callback(record, how, why)

    def _admit(self, info: InstanceInfo, role: Role, known: Record | None, remembered: bool) -> Record:
        try:
            client = RpcClient(self._sockets, info.rpc)
        except zmq.ZMQError as error:
            raise InvalidRequest(f"rpc address {info.rpc!r}: {error}") from error
        if known is not None:
            self._retire(known, "replaced")
        now_s = time.time()
        record = Record(
            info=info,
            role=role,
            connection=client,
            registered_s=now_s,
            registered_mono=self._loop.time(),
            state_since_s=now_s,
            arrival=_arrival(info, known, remembered),
        )
        client.on_lost(lambda: self._lost(record))
        self._records[info.instance_id] = record
        log.info("instance registered", instance_id=info.instance_id, role=role.value, rpc=info.rpc)
        self._changed(record, InstanceState.STARTING)
        return record

    def _lost(self, record: Record) -> None:
        if self._records.get(record.instance_id) is record and record.alive:
            self._bury(record, "connection lost")

    def _bury(self, record: Record, why: str) -> None:
        record.death = why
        record.died_mono = self._loop.time()
        self._move(record, InstanceState.DEAD)
        self._loop.call_soon(record.disconnect)  # not inside the client's own callback

    def _retire(self, record: Record, why: str) -> None:
        record.death = why
        record.state = InstanceState.DEAD
        self._loop.call_soon(record.disconnect)

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
        self._changed(record, before)

    def _changed(self, record: Record, before: InstanceState) -> None:
        for callback in self._on_change:
            callback(record, before)


def _arrival(info: InstanceInfo, known: Record | None, remembered: bool) -> EventKind:
    if remembered:
        return EventKind.RETURNED
    if known is None:
        return EventKind.REGISTERED
    if known.info.generation == info.generation:
        return EventKind.RETURNED
    return EventKind.RESTARTED


def _same_process(info: InstanceInfo, known: InstanceInfo) -> bool:
    return info.generation == known.generation and info.rpc == known.rpc


def _check_identity(info: InstanceInfo, known: Record) -> None:
    """Raises Conflict for an older generation while a newer one lives, and for another address of a live instance.

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


Known = tuple[InstanceInfo, Role]


class Memory:
    """Instances that the monitor knew before its restart. A heartbeat brings one back without a registration."""

    def __init__(self) -> None:
        self._living: dict[str, Known] = {}
        self.loaded = False

    @property
    def empty(self) -> bool:
        """Whether the database was read, and each living instance in it has come back or was given up."""
        return self.loaded and not self._living

    async def load(self, engine: AsyncEngine) -> list[Known]:
        """Read the database; returns the instances that were dead already. Raises Unavailable."""
        dead = []
        for row in await read_instances(engine):
            if row.state not in set(InstanceState):  # it left, or was forgotten
                continue
            try:
                info, role = msgspec.json.decode(row.info, type=InstanceInfo), Role(row.role)
            except (msgspec.MsgspecError, ValueError) as error:  # written by another version
                log.warning("instance row not understood", instance_id=row.instance_id, error=str(error))
                continue
            if row.state == InstanceState.DEAD:
                dead.append((info, role))
            else:
                self._living[info.instance_id] = info, role
        self.loaded = True
        return dead

    def pop(self, instance_id: str, generation: int) -> InstanceInfo | None:
        """The remembered instance, if this very process of it is remembered."""
        info, _ = self._living.get(instance_id, (None, None))
        if info is None or info.generation != generation:
            return None
        return self._living.pop(instance_id)[0]

    def give_up(self) -> list[Known]:
        """Forget the instances that never came back, and return them."""
        lost = list(self._living.values())
        self._living.clear()
        return lost

    def drop(self, instance_id: str) -> None:
        """The instance has registered by itself."""
        self._living.pop(instance_id, None)
