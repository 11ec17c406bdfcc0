"""The LoRA adapters that were loaded while the cluster serves, which the monitor owns, and who has them.

A load goes to all ready instances before any gateway knows the adapter. After an unload, or when a name gets other
weights, instances keep the former adapter until no gateway accepts requests for it and none of their requests has it.
Instances that start later, or were not ready, are brought to the same adapters by `reconcile`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import anyio
import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from services.cluster_monitor.lease import LeaderTerm
from services.cluster_monitor.policy_book import KEEP_S
from services.cluster_monitor.registry import Record, Registry
from services.cluster_monitor.settings import MonitorSettings
from shared.domain.adapters import DIGEST_CHARS, AdapterSet, LoadedAdapter, is_version, version_key
from shared.domain.instance import InstanceState
from shared.errors import (
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    PolyphaseError,
    Standby,
    Unavailable,
    from_code,
)
from shared.runtime.logs import get_log
from shared.store.reading import KeptRow, read_adapters
from shared.store.tables import adapters as table
from shared.store.write_behind import Row, WriteBehind
from shared.wire.api.monitor import AdapterFollower, AdapterRow, AdaptersInForce
from shared.wire.messages import (
    LOAD_ADAPTER,
    UNLOAD_ADAPTER,
    AdaptersRequest,
    Heartbeat,
    LoadAdapterRequest,
    LoadRequest,
    UnloadAdapterRequest,
    UnloadRequest,
)

log = get_log(__name__)
RECONCILE_S = 0.5  # between two looks at what instances lack
INSTANCE_S = 60.0  # for an instance to load an adapter
SILENT_S = 10.0  # a gateway that requests nothing for so long is gone
AGAIN_S = 10.0  # after an instance could not load an adapter
_SHOWN_S = 2.0  # for the heartbeat that shows it
_UNDO_S = 5.0
_LOOK_S = 0.5
_CLUSTER = "cluster"  # the key of the only row
_UNKNOWN = "the database has not answered since the monitor's start, so what was loaded before is not known"
_OFF = "adapters are loaded while serving only with `lora: {allow_runtime_updating: true}` in the cluster file"
_REACHED = (InstanceState.READY, InstanceState.DRAINING)


@dataclass(frozen=True, slots=True)
class _Gateway:
    revision: int
    in_use: tuple[str, ...]
    seen_mono: float


@dataclass(frozen=True, slots=True)
class _Trouble:
    """Why an instance could not load an adapter, and when to let it try again."""

    text: str
    again_mono: float


class AdapterBook:
    """Calls `on_change` with what changed, and who changed it. One change runs at a time."""

    def __init__(
        self,
        settings: MonitorSettings,
        registry: Registry,
        store: WriteBehind,
        term: LeaderTerm,
        on_change: Callable[[str, str], None],
    ) -> None:
        self._lora = settings.lora
        self._served = settings.served_model_name
        self._linger_s = settings.adapter_linger_s
        self._registry = registry
        self._store = store
        self._term = term
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._set = AdapterSet()
        self._row: Row | None = None
        self._recalled = asyncio.Event()
        self._changing = asyncio.Lock()
        self._changed = asyncio.Event()  # set, and replaced, whenever the set or a gateway's revision changes
        self._changed_mono = self._loop.time()  # of the set
        self._gateways: dict[str, _Gateway] = {}
        self._trouble: dict[tuple[str, str], _Trouble] = {}  # by instance and key

    async def recall(self, engine: AsyncEngine) -> None:
        """Take over what the database has. Raises Unavailable."""
        row = await read_adapters(engine)
        former = _decoded(row) if row is not None else None
        if former is None or not self._lora.allow_runtime_updating:
            if former is not None and former.adapters:
                log.warning("adapters that were loaded at run time are not served", why=_OFF)
            self._set = AdapterSet(_next(row.revision if row is not None else 0))
        else:
            kept = tuple(each for each in former.adapters if not self._taken(each.name))
            for each in set(former.adapters) - set(kept):
                log.warning("the cluster file has this name now; the loaded adapter is not served", name=each.name)
            same = kept == former.adapters
            self._set = former if same else AdapterSet(_next(former.revision), kept)
            self._row = _row(self._set, row.who if row is not None else "")
        self._recalled.set()
        self._notify()

    async def load(self, request: LoadRequest) -> AdapterSet:
        """Have all ready instances and all gateways serve the adapter. Raises as `MonitorClient.load_adapter` says;
        nothing has changed then.
        """
        async with self._change():
            self._check(request)
            records = [one for one in self._registry.all() if one.info.loads_adapters and one.state in _REACHED]
            if all(one.state is not InstanceState.READY for one in records):
                raise Unavailable(f"adapter {request.name}: no instance that could load it is ready")
            digest = await self._load_on_all(records, request)
            adapter = LoadedAdapter(request.name, request.path, digest, request.who, time.time())
            former = self._set.get(request.name)
            if former is None or (former.key, former.path) != (adapter.key, adapter.path):
                others = tuple(each for each in self._set.adapters if each is not former)
                try:
                    await self._put_in_force((*others, adapter), request.who)
                except BaseException:
                    await self._undo(records, adapter.key)
                    raise
                self._on_change(f"adapter {request.name} loaded from {request.path}", request.who)
        await self._until_followed()
        return self._set

    async def unload(self, request: UnloadRequest) -> AdapterSet:
        """Have no gateway accept requests for it any more. Raises NotFound; InvalidRequest for one of the file."""
        async with self._change():
            if request.name in self._lora.adapters:
                raise InvalidRequest(_of_file(request.name))
            if (known := self._set.get(request.name)) is None:
                raise NotFound(f"The lora adapter '{request.name}' cannot be found.")
            await self._put_in_force(tuple(each for each in self._set.adapters if each is not known), request.who)
            self._on_change(f"adapter {request.name} unloaded", request.who)
        await self._until_followed()
        return self._set

    async def follow(self, request: AdaptersRequest) -> AdapterSet:
        """See `AdaptersRequest`. A gateway that calls with a revision serves the adapters of that revision."""
        if not self._recalled.is_set():
            raise Unavailable(_UNKNOWN)
        self._note(request)
        try:
            async with asyncio.timeout(request.wait_s):
                while request.revision == self._set.revision:
                    await self._changed.wait()
        except TimeoutError:
            self._note(request)
        self._term.check()
        return self._set

    async def reconcile(self) -> None:
        """Have instances load what they lack, and forget what is unloaded and not in use."""
        if self._changing.locked() or not self._recalled.is_set():
            return
        async with self._changing:
            try:
                self._term.check()
            except Standby:
                return
            records = [one for one in self._registry.all() if one.info.loads_adapters and one.state in _REACHED]
            await asyncio.gather(*(self._bring_up_to_date(one) for one in records))

    def keep_again(self) -> None:
        """Write the row again, in case the database was removed."""
        if self._row is not None and not self._changing.locked():
            self._store.put(table, dict(self._row))

    def describe(self) -> AdaptersInForce:
        """`GET /adapters`."""
        self._drop_silent()
        alive = [one for one in self._registry.all() if one.alive]
        revision, rows = self._set.revision, []
        for each in self._set.adapters:
            serving = sorted(one.instance_id for one in alive if each.key in one.info.adapters)
            trouble = {name: why.text for (name, key), why in self._trouble.items() if key == each.key}
            rows.append(AdapterRow(each.name, each.path, each.digest, each.who, each.since_s, serving, trouble))
        gateways = [
            AdapterFollower(name, one.revision, one.revision == revision, one.in_use)
            for name, one in sorted(self._gateways.items())
        ]
        return AdaptersInForce(revision, "" if self._recalled.is_set() else _UNKNOWN, rows, gateways)

    @asynccontextmanager
    async def _change(self) -> AsyncIterator[None]:
        """The turn of one change. Raises InvalidRequest where none is allowed, Unavailable where none is possible."""
        if not self._lora.allow_runtime_updating:
            raise InvalidRequest(_OFF)
        try:
            async with asyncio.timeout(INSTANCE_S):
                await self._changing.acquire()
        except TimeoutError as error:
            raise Unavailable("nothing is changed: an instance is loading another adapter") from error
        try:
            await self._until_recalled()
            yield
        finally:
            self._changing.release()

    def _taken(self, name: str) -> bool:
        return name in self._lora.adapters or name == self._served

    def _check(self, request: LoadRequest) -> None:
        """The sentences are vLLM's where it has one. Raises InvalidRequest."""
        name = request.name
        if name == self._served:
            raise InvalidRequest(f"The lora adapter '{name}' conflicts with a served base model.")
        known = name in self._lora.adapters or self._set.get(name) is not None
        if known and not request.in_place:
            raise InvalidRequest(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                "'load_inplace' to True."
            )
        if name in self._lora.adapters:
            raise InvalidRequest(_of_file(name))
        if is_version(name):
            raise InvalidRequest(f"adapter {name}: a name must not end in @ and {DIGEST_CHARS} hexadecimal digits")
        if not request.path.startswith("/"):
            raise InvalidRequest(
                f"adapter {name}: the path must be absolute, of a folder on the instances' hosts, got {request.path!r}"
            )
        held = len(self._lora.adapters) + len(self._set.adapters)
        if not known and held >= self._lora.room:
            raise InvalidRequest(
                f"adapter {name}: {held} adapters are loaded, and `lora.max_adapters` allows {self._lora.room}: unload "
                "one, or raise it"
            )

    async def _load_on_all(self, records: list[Record], request: LoadRequest) -> str:
        """The digest of the adapter, once all have it; where one fails, those that have loaded it forget it again."""
        self._term.check()
        calls = (self._load_on(one, request.name, request.path) for one in records)
        answers = [*zip(records, await asyncio.gather(*calls, return_exceptions=True), strict=True)]
        digests = [(one, answer) for one, answer in answers if isinstance(answer, str)]
        failures = [answer for _, answer in answers if isinstance(answer, BaseException)]
        if not failures and len({digest for _, digest in digests}) > 1:
            found = ", ".join(f"{one.instance_id} {digest}" for one, digest in digests)
            failures = [Conflict(f"adapter {request.name}: hosts have other files at {request.path}: digests {found}")]
        if failures:
            for one, digest in digests:
                await self._undo([one], version_key(request.name, digest))
            raise failures[0]
        return digests[0][1]

    async def _load_on(self, record: Record, name: str, path: str, digest: str = "") -> str:
        """The digest, once a heartbeat of the instance shows the adapter. Raises errors that name the instance."""
        try:
            request = LoadAdapterRequest(name, path, digest, self._term.epoch)
            found = (await record.client.call(LOAD_ADAPTER, request, timeout_s=INSTANCE_S)).digest
            key = version_key(name, found)

            def shows(beat: Heartbeat) -> bool:
                return key in (beat.adapters or ())

            try:
                if key not in record.info.adapters:
                    await record.next_heartbeat(shows, _SHOWN_S)
            except TimeoutError as error:
                raise DeadlineExceeded(f"no heartbeat within {_SHOWN_S:g} s shows the adapter {name}") from error
        except PolyphaseError as error:
            raise from_code(error.code, f"{record.instance_id}: {error.message}") from error
        return found

    async def _undo(self, records: Iterable[Record], key: str) -> None:
        """Have instances forget an adapter at once, unless requests may have it. Where this fails, `reconcile` does it
        later.
        """
        if key in self._set.keys or any(key in one.in_use for one in self._gateways.values()):
            return
        with anyio.move_on_after(_UNDO_S, shield=True):
            for record in records:
                await self._unload_on(record, key)

    async def _unload_on(self, record: Record, key: str) -> None:
        try:
            request = UnloadAdapterRequest(key, self._term.epoch)
            await record.client.call(UNLOAD_ADAPTER, request, timeout_s=_UNDO_S)
        except PolyphaseError as error:
            log.warning("an adapter stays loaded", instance_id=record.instance_id, key=key, why=error.message)

    async def _bring_up_to_date(self, record: Record) -> None:
        now_mono = self._loop.time()
        for each in self._set.adapters:
            at = record.instance_id, each.key
            if each.key in record.info.adapters:
                self._trouble.pop(at, None)
                continue
            before = self._trouble.get(at)
            if before is not None and now_mono < before.again_mono:
                continue
            try:
                await self._load_on(record, each.name, each.path, each.digest)
            except PolyphaseError as error:
                self._trouble[at] = _Trouble(error.message, self._loop.time() + AGAIN_S)
                if before is None or before.text != error.message:
                    log.error("an instance lacks an adapter", name=each.name, why=error.message)
                    self._on_change(f"adapter {each.name} is not served by all: {error.message}", "")
        surplus = [key for key in record.info.adapters if is_version(key) and self._forgettable(key)]
        for key in surplus:
            await self._unload_on(record, key)

    def _forgettable(self, key: str) -> bool:
        """Whether no request can have the adapter any more.

        After a change, and after the monitor's start, gateways get time to report; a request that was accepted before
        an unload may not be a job yet.
        """
        if key in self._set.keys or self._loop.time() - self._changed_mono < self._linger_s:
            return False
        return self._followed and all(key not in one.in_use for one in self._gateways.values())

    @property
    def _followed(self) -> bool:
        """Whether all living gateways serve exactly the adapters in force."""
        self._drop_silent()
        return all(one.revision == self._set.revision for one in self._gateways.values())

    async def _until_followed(self) -> None:
        """Wait for the gateways; one that is silent is dropped after `SILENT_S`, and follows when it returns. Raises
        DeadlineExceeded.
        """
        until_mono = self._loop.time() + 2 * SILENT_S
        while not self._followed:
            if self._loop.time() > until_mono:
                behind = ", ".join(name for name, one in self._gateways.items() if one.revision != self._set.revision)
                raise DeadlineExceeded(f"the change is in force, and these gateways do not follow it: {behind}")
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._changed.wait()

    def _note(self, request: AdaptersRequest) -> None:
        known = self._gateways.get(request.gateway_id)
        self._gateways[request.gateway_id] = _Gateway(request.revision, request.in_use, self._loop.time())
        if known is None or known.revision != request.revision:
            self._notify()

    def _drop_silent(self) -> None:
        since_mono = self._loop.time() - SILENT_S
        self._gateways = {name: one for name, one in self._gateways.items() if one.seen_mono > since_mono}

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until_recalled(self) -> None:
        try:
            async with asyncio.timeout(KEEP_S):
                await self._recalled.wait()
        except TimeoutError as error:
            raise Unavailable(f"nothing is changed: {_UNKNOWN}") from error

    async def _put_in_force(self, adapters: tuple[LoadedAdapter, ...], who: str) -> None:
        """When this returns the database has the change. Raises Unavailable; nothing has changed then."""
        now = AdapterSet(_next(self._set.revision), adapters)
        row = _row(now, who)
        self._term.check()
        try:
            await self._store.written(table, row, KEEP_S)
            self._term.check()
        except BaseException as error:
            # The row may still be written, or was written without an answer: write what holds over it.
            self._store.put(table, dict(self._row or _row(self._set, who)))
            if isinstance(error, Unavailable) and not isinstance(error, Standby):
                raise Unavailable(f"nothing is changed: {error.message}") from error
            raise
        self._set, self._row, self._changed_mono = now, row, self._loop.time()
        log.info("adapters in force", revision=now.revision, who=who, adapters=sorted(each.key for each in adapters))
        self._notify()


def _of_file(name: str) -> str:
    return f"The lora adapter '{name}' is in the cluster file: change it there, and restart the suite."


def _next(revision: int) -> int:
    """Unix milliseconds, so that it rises even after the database was lost."""
    return max(revision + 1, int(time.time() * 1000))


def _row(adapters: AdapterSet, who: str) -> Row:
    return {
        "cluster": _CLUSTER,
        "revision": adapters.revision,
        "changed_s": time.time(),
        "who": who,
        "content": msgspec.json.encode(adapters).decode(),
    }


def _decoded(row: KeptRow) -> AdapterSet | None:
    try:
        return msgspec.json.decode(row.content, type=AdapterSet)
    except msgspec.MsgspecError as error:  # written by another version
        log.error("the adapters in the database were not understood; none is served", error=str(error))
        return None
