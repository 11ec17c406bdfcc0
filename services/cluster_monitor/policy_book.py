"""The policies in force, which the monitor owns: those of the cluster file, but for kinds that people changed."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec
from sqlalchemy.ext.asyncio import AsyncEngine

from services.cluster_monitor.registry import Registry
from shared.domain.policies import KINDS, PolicySet
from shared.domain.route import PolicySpec
from shared.errors import InvalidRequest, Unavailable
from shared.policy import registry
from shared.policy.registry import in_words
from shared.runtime.logs import get_log
from shared.store.reading import KeptRow, read_policies
from shared.store.tables import policies as table
from shared.store.write_behind import Row, WriteBehind
from shared.wire.api.monitor import PoliciesInForce, PolicyChange, PolicyChoice, PolicyFollower

log = get_log(__name__)
KEEP_S = 3.0  # for the database to answer after a start, and to write a change
FILE = "the cluster file"
SILENT_S = 10.0  # a scheduler that reports nothing for so long is gone
_CLUSTER = "cluster"  # the key of the only row
_UNKNOWN = "the database has not answered since the monitor's start, so what was changed before is not known"


class Changed(msgspec.Struct, frozen=True):
    """A policy that was chosen in place of the file's; `since_s` is unix time."""

    policy: PolicySpec
    who: str
    since_s: float


class Kept(msgspec.Struct, frozen=True):
    """What the database keeps: the policies in force, and the kinds that differ from the file."""

    policies: PolicySet
    changed: dict[str, Changed] = {}


class PolicyBook:
    """Calls `on_change` with what changed, and who changed it.

    Until the database has answered once (`recall`) the file's policies hold, as revision 0: processes that follow
    another revision keep it, and nothing can be changed.
    """

    def __init__(self, file: PolicySet, store: WriteBehind, on_change: Callable[[str, str], None]) -> None:
        self._file = file
        self._store = store
        self._on_change = on_change
        self._kept = Kept(msgspec.structs.replace(file, revision=0))
        self._row = _row(self._kept, FILE)
        self._recalled = asyncio.Event()
        self._changing = asyncio.Lock()

    @property
    def policies(self) -> PolicySet:
        return self._kept.policies

    async def recall(self, engine: AsyncEngine) -> None:
        """Take over the changes that the database has. Raises Unavailable."""
        row = await read_policies(engine)
        former = _decoded(row) if row is not None else None
        changed = {kind: one for kind, one in (former or self._kept).changed.items() if _still_known(kind, one)}
        for kind, one in changed.items():
            log.info("policy differs from the file's", kind=kind, policy=in_words(one.policy), who=one.who)
        now = Kept(self._policies_with(changed, row.revision if row is not None else 0), changed)
        self._recalled.set()
        if row is not None and former is not None and now.policies == former.policies:
            self._kept, self._row = now, msgspec.structs.asdict(row)
            return
        now = Kept(_next(now.policies), changed)
        self._put_in_force(now, _row(now, FILE), now.policies if former is None else former.policies)
        self._store.put(table, self._row)

    async def change(self, wanted: Mapping[str, PolicySpec | None], who: str) -> None:
        """Change all of these kinds, or none; None: back to the file's policy.

        When this returns the database has the change, so it outlives a restart. Raises InvalidRequest that names the
        kind and the choices, Unavailable when the database does not write it; nothing has changed then.
        """
        for kind, spec in wanted.items():
            _check(kind, spec)
        async with self._changing:
            await self._until_recalled()
            changed = self._changed_by(wanted, who)
            if changed == self._kept.changed:
                return
            now = Kept(_next(self._policies_with(changed, self.policies.revision)), changed)
            row = _row(now, who)
            await self._write(row)
            self._put_in_force(now, row, self.policies)

    def keep_again(self) -> None:
        """Write the row again, in case the database was removed."""
        if self._recalled.is_set() and not self._changing.locked():
            self._store.put(table, dict(self._row))

    def describe(self, followers: "Followers") -> PoliciesInForce:
        """`GET /policies`."""
        return PoliciesInForce(
            revision=self.policies.revision,
            trouble="" if self._recalled.is_set() else _UNKNOWN,
            policies={kind: self._choice(kind) for kind in KINDS},
            choices=registry.choices(),
            followers=followers.describe(self.policies),
        )

    def _choice(self, kind: str) -> PolicyChoice:
        spec, changed = self.policies.spec(kind), self._kept.changed.get(kind)
        return PolicyChoice(
            name=spec.name,
            parameters=spec.parameters,
            file=self._file.spec(kind),
            changed=PolicyChange(changed.who, changed.since_s) if changed is not None else None,
        )

    async def _until_recalled(self) -> None:
        try:
            async with asyncio.timeout(KEEP_S):
                await self._recalled.wait()
        except TimeoutError as error:
            raise Unavailable(f"nothing is changed: {_UNKNOWN}") from error

    def _changed_by(self, wanted: Mapping[str, PolicySpec | None], who: str) -> dict[str, Changed]:
        found = dict(self._kept.changed)
        for kind, spec in wanted.items():
            before = found.pop(kind, None)
            if spec is not None:
                same = before is not None and before.policy == spec
                found[kind] = before if before is not None and same else Changed(spec, who, time.time())
        return found

    def _policies_with(self, changed: Mapping[str, Changed], revision: int) -> PolicySet:
        return msgspec.structs.replace(
            self._file, revision=revision, **{kind: one.policy for kind, one in changed.items()}
        )

    async def _write(self, row: Row) -> None:
        try:
            await self._store.written(table, row, KEEP_S)
        except BaseException as error:
            # The row may still be written, or was written without an answer: write what holds over it.
            self._store.put(table, dict(self._row))
            if isinstance(error, Unavailable):
                raise Unavailable(f"nothing is changed: {error.message}") from error
            raise

    def _put_in_force(self, kept: Kept, row: Row, before: PolicySet) -> None:
        self._kept, self._row = kept, row
        after = kept.policies
        text = ", ".join(
            f"{kind}: {in_words(before.spec(kind))} → {in_words(after.spec(kind))}"
            for kind in KINDS
            if before.spec(kind) != after.spec(kind)
        )
        log.info("policies in force", revision=after.revision, who=row["who"], changed=text)
        self._on_change(text, row["who"])


def _check(kind: str, spec: PolicySpec | None) -> None:
    if kind not in KINDS:
        raise InvalidRequest(f"no kind of policy {kind!r}; known: {', '.join(KINDS)}")
    if spec is not None:
        try:
            registry.make(kind, spec)
            msgspec.msgpack.encode(spec)
        except InvalidRequest as error:
            raise InvalidRequest(f"{kind}: {error.message}") from error
        except (OverflowError, UnicodeEncodeError) as error:  # an int of more than 64 bits, a lone surrogate
            raise InvalidRequest(f"{kind}: {spec.name}: a parameter cannot be sent: {error}") from error


def _next(policies: PolicySet) -> PolicySet:
    """With the next revision: unix milliseconds, so that it rises even after the database was lost."""
    return msgspec.structs.replace(policies, revision=max(policies.revision + 1, int(time.time() * 1000)))


def _row(kept: Kept, who: str) -> Row:
    return {
        "cluster": _CLUSTER,
        "revision": kept.policies.revision,
        "changed_s": time.time(),
        "who": who,
        "content": msgspec.json.encode(kept).decode(),
    }


def _decoded(row: KeptRow) -> Kept | None:
    try:
        return msgspec.json.decode(row.content, type=Kept)
    except msgspec.MsgspecError as error:  # written by another version
        log.error("the policies in the database were not understood; those of the file hold", error=str(error))
        return None


def _still_known(kind: str, changed: Changed) -> bool:
    try:
        _check(kind, changed.policy)
    except InvalidRequest as error:
        log.error("a policy in the database is unknown; that of the file holds", who=changed.who, error=error.message)
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Scheduler:
    revision: int
    trouble: str
    reported_mono: float
    behind_mono: float | None = None  # since when it follows an older revision than the one in force


class Followers:
    """Which revision of the policies each process follows: instances say so with heartbeats, schedulers over HTTP."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._schedulers: dict[str, _Scheduler] = {}
        self._instances: dict[str, float] = {}  # since when each follows an older revision than the one in force

    def update(self, scheduler_id: str, revision: int, trouble: str) -> None:
        """A scheduler follows this revision; `trouble`: why it does not follow a newer one."""
        before = self._schedulers.get(scheduler_id)
        since = before.behind_mono if before is not None else None
        self._schedulers[scheduler_id] = _Scheduler(revision, trouble, time.monotonic(), since)
        self._drop_silent()

    def behind(self, policies: PolicySet) -> dict[str, tuple[str, float]]:
        """For each living scheduler its trouble, and for how many seconds it has not followed these policies."""
        self._drop_silent()
        now, found = time.monotonic(), {}
        for name, one in self._schedulers.items():
            since = None if one.revision >= policies.revision else one.behind_mono or now
            self._schedulers[name] = replace(one, behind_mono=since)
            found[name] = one.trouble, now - since if since is not None else 0.0
        return found

    def instances_behind(self, policies: PolicySet) -> dict[str, float]:
        """The instances that follow older policies than these, and for how many seconds."""
        now, before = time.monotonic(), self._instances
        self._instances = {
            one.instance_id: before.get(one.instance_id, now)
            for one in self._registry.all()
            if one.alive and one.policies_revision < policies.revision
        }
        return {name: now - since for name, since in self._instances.items()}

    def describe(self, policies: PolicySet) -> list[PolicyFollower]:
        """All living schedulers and instances, and whether they follow these policies."""
        self._drop_silent()
        found = [
            ("scheduler", name, scheduler.revision, scheduler.trouble)
            for name, scheduler in sorted(self._schedulers.items())
        ]
        for record in sorted(self._registry.all(), key=lambda record: record.instance_id):
            if record.alive:
                found.append(("instance", record.instance_id, record.policies_revision, record.policies_trouble))
        return [
            PolicyFollower(process, name, revision, revision == policies.revision and not trouble, trouble)
            for process, name, revision, trouble in found
        ]

    def _drop_silent(self) -> None:
        since = time.monotonic() - SILENT_S
        self._schedulers = {name: known for name, known in self._schedulers.items() if known.reported_mono > since}
