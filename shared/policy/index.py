"""The routing index: the ready instances of the cluster, in the order in which policies look at them.

`ClusterIndex` holds the ready instances of either role, and, built when first needed, the prefill instances by backlog
and the decode instances by pressure. Building it costs O(n log n); a decision then looks at a few entries, booking a
decision or applying a changed load costs O(log n), and an instance that comes, goes or changes its role moves a few
kilobytes of lists. `LoadTracker` keeps an index up to date over a stream of broadcasts. Everything here is free of
clocks and I/O: the caller passes times and random generators in.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from math import log
from operator import attrgetter, itemgetter
from random import Random
from statistics import median
from typing import Any, TypeVar, cast

from shared.domain.cluster import ClusterDelta, ClusterState
from shared.domain.instance import ClusterView, InstanceInfo, InstanceLoad, InstanceState, InstanceView, Role
from shared.domain.job import JobView
from shared.domain.rates import UNKNOWN_STEPS
from shared.errors import Unavailable
from shared.policy.aging import with_progress
from shared.policy.decode_admission import takes_tokens, with_job
from shared.policy.ledger import Assignment, WorkloadLedger, mark_of, promised_to
from shared.policy.papers.costs import ChunkedCost, PartialPrefillCost
from shared.policy.prefix_index import MAX_BLOCKS, PrefixIndex
from shared.policy.step_budget import TpotBudget

CLASS_WIDTH = 1.1  # instances whose speeds differ by less than this factor count as equally fast
UNKNOWN_S_PER_TOKEN = 1e-4  # of a prefill, where no rate was measured: 10,000 tokens a second
TYPICAL_TOKENS = 1000  # context of the hypothetical job in `pressure_s`; it only has to be the same for all instances

REACH_S = 0.03  # from a decision until the job shows in the load of its instance
FORGET_S = 1.0  # an assignment older than this is in every load, however far the clocks of the hosts differ
SHOWN_S = 2.0  # an instance lists a job that it accepted for this long, so that no broadcast with it is missed
STALE_S = 1.0  # without a broadcast for this long, the loads are stale
HOLD_S = 30.0  # with stale loads, an assignment counts until its job ends, or for this long
CLEAN_UP_S = 0.5  # between two searches for finished assignments and forgotten work
CACHED_S = 0.1  # values derived from the loads (`ClusterIndex.cached`) are kept for this long

InstanceIds = Collection[str]
Speed = Callable[[InstanceView], tuple[float, float]]
Key = tuple[float, float, str]
Made = TypeVar("Made")
_by_id = attrgetter("info.instance_id")
_LOG_WIDTH = log(CLASS_WIDTH)


def context_of(job: JobView, role: Role) -> int:
    """Tokens of context that an instance of that role must be able to hold for `job`."""
    return job.prompt_tokens + (job.max_tokens if role is Role.DECODE else 0)


def usable(view: InstanceView, context_tokens: int, exclude: InstanceIds) -> bool:
    """Whether the instance can hold so many tokens of context and is not excluded."""
    info = view.info
    return info.max_model_len >= context_tokens and not (exclude and info.instance_id in exclude)


def prefill_rate(view: InstanceView) -> tuple[float, float]:
    """Seconds per prompt token and per prompt on an instance that only prefills; (0, 0) when not measured.

    Source: Cronus eq. 2, k_p and b_p.
    """
    steps = view.info.rates.step
    return PartialPrefillCost.from_steps(steps, view.info.chunk_size) if steps is not None else (0.0, 0.0)


def chunked_rate(view: InstanceView) -> tuple[float, float]:
    """As `prefill_rate`, but beside the decodes that run on the instance: a step takes as long as they make it, and
    holds so many fewer prompt tokens.

    Source: Cronus eq. 3 at a prefill context of 0, over the tokens of a step that decodes leave.
    """
    steps, chunk, load = view.info.rates.step, view.info.chunk_size, view.load
    if steps is None:
        return 0.0, 0.0
    step_s = ChunkedCost.from_steps(steps, chunk).time_s(0.0, load.context_tokens)
    return step_s / max(1, chunk - load.decoding), 0.0


def queued_prefill_s(view: InstanceView, unknown_s_per_token: float = UNKNOWN_S_PER_TOKEN) -> float:
    """Seconds of prefill that are queued at a prefill instance."""
    load = view.load
    per_token_s, per_job_s = prefill_rate(view)
    return (per_token_s or unknown_s_per_token) * load.queued_prefill_tokens + per_job_s * load.queued_prefill


def pressure_s(view: InstanceView) -> float:
    """Seconds per token for one more job on a decode instance: a step with the job in it, and the job's wait for a seat
    or for KV memory, spread over its tokens.
    """
    info, load = view.info, view.load
    rates, seats = info.rates.step or UNKNOWN_STEPS, info.max_seqs or load.decoding + 1
    running = min(load.decoding + 1, seats)
    context, form = (load.context_tokens + TYPICAL_TOKENS) * running / (load.decoding + 1), rates.decode
    step_s = (form.fixed_s + form.sequence_s * running + form.context_s * context) / rates.gain
    waits = (load.decoding + 1 - running) / seats
    short = load.waiting_tokens + TYPICAL_TOKENS - load.free_blocks * info.block_size
    if short > 0:
        waits = max(waits, short / max(1.0, context))
    return step_s * (1.0 + waits)


@lru_cache(4096)  # most instances have one of a few speeds, and a logarithm costs time
def speed_class(per_token_s: float) -> int:
    """A number that is the same for speeds within about `CLASS_WIDTH` of each other."""
    return round(log(per_token_s) / _LOG_WIDTH)


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
        return self._views

    def get(self, instance_id: str) -> InstanceView | None:
        at = self._at.get(instance_id)
        return None if at is None else self._views[at]

    def put(self, view: InstanceView) -> bool:
        """Replace the view of an instance. Returns False, and does nothing, when the instance is not in the set."""
        at = self._at.get(view.info.instance_id)
        if at is not None:
            self._views[at] = view
        return at is not None

    def insert(self, view: InstanceView) -> None:
        """Add an instance that is not in the set."""
        at = bisect_left(self._views, view.info.instance_id, key=_by_id)
        self._views.insert(at, view)
        self._renumber(at)

    def remove(self, instance_id: str) -> bool:
        """Remove an instance. Returns False, and does nothing, when it is not in the set."""
        at = self._at.get(instance_id)
        if at is None:
            return False
        del self._views[at]
        self._renumber(at, instance_id)
        return True

    def _renumber(self, first: int, gone: str = "") -> None:
        known = self._at.copy()  # a copy of this set may share it
        known.pop(gone, None)
        for at in range(first, len(self._views)):
            known[self._views[at].info.instance_id] = at
        self._at = known

    def copy(self) -> "ReadySet":
        """The same instances; work that is booked on one copy does not show in the other."""
        twin = object.__new__(ReadySet)
        twin._at, twin._views = self._at, self._views.copy()
        return twin


class _SpeedClasses:
    """Instances by class of speed; within a class by a figure in seconds, the least first.

    Within a class the least figure is (nearly) the best for a prompt of any length, so that a decision looks at the
    first few instances of each class. Ties break at random, anew with each reported load: several schedulers must not
    all choose the same idle instance.
    """

    def __init__(self, entries: Iterable[tuple[int, Key]]) -> None:
        """entries: the class of speed and the key (figure in seconds, tie-break, instance id) of each instance."""
        self._keys: dict[str, Key] = {}
        self._class_of: dict[str, int] = {}
        self._infos: dict[str, InstanceInfo] = {}  # by which the classes were found
        self._order: dict[int, list[Key]] = {}
        for speed, key in entries:
            instance_id = key[2]
            self._keys[instance_id] = key
            self._class_of[instance_id] = speed
            self._order.setdefault(speed, []).append(key)
        for keys in self._order.values():
            keys.sort()

    def classes(self) -> Iterable[Sequence[Key]]:
        """The keys of each class of speed, in ascending order."""
        return self._order.values()

    def candidates(
        self, ready: ReadySet, context_tokens: int, exclude: InstanceIds, per_class: int = 1
    ) -> list[tuple[float, InstanceView]]:
        """The first usable instances of each class of speed, at most `per_class` of each, with their figures."""
        found = []
        for keys in self._order.values():
            left = per_class
            for seconds, _, instance_id in keys:
                view = ready.get(instance_id)
                if view is not None and usable(view, context_tokens, exclude):
                    found.append((seconds, view))
                    left -= 1
                    if not left:
                        break
        return found

    def _move(self, speed: int, key: Key) -> None:
        """Give an instance another class and key."""
        instance_id = key[2]
        known, before = self._class_of[instance_id], self._keys[instance_id]
        keys = self._order[known]
        del keys[bisect_left(keys, before)]
        if speed != known:
            self._class_of[instance_id] = speed
            keys = self._order.setdefault(speed, [])
        self._keys[instance_id] = key
        insort(keys, key)

    def _add(self, speed: int, key: Key) -> None:
        instance_id = key[2]
        self._keys[instance_id], self._class_of[instance_id] = key, speed
        insort(self._order.setdefault(speed, []), key)

    def _drop(self, instance_id: str) -> None:
        keys = self._order[self._class_of.pop(instance_id)]
        del keys[bisect_left(keys, self._keys.pop(instance_id))]
        self._infos.pop(instance_id, None)


class Backlog(_SpeedClasses):
    """Instances by speed and by the seconds of prefill that are queued at them.

    backlog = s * queued tokens + base * queued jobs, where `speed` gives (s, base) of an instance. An instance without
    a measured speed gets the median of the measured ones, or 1 s a token when none is measured: then backlogs are plain
    token counts. Source: Cronus eq. 2 for the form.
    """

    def __init__(self, views: Iterable[InstanceView], rng: Random, speed: Speed) -> None:
        self._speed = speed
        speeds = [(view, *speed(view)) for view in views]
        known = [per_token_s for _, per_token_s, _ in speeds if per_token_s > 0]
        self._unknown_s = median(known) if known else 1.0
        self._unmeasured = {view.info.instance_id for view, per_token_s, _ in speeds if not per_token_s > 0}
        self._rates: dict[str, tuple[float, float]] = {}
        super().__init__(self._entry(*one, rng.random()) for one in speeds)

    def _entry(self, view: InstanceView, per_token_s: float, per_job_s: float, tie: float) -> tuple[int, Key]:
        instance_id, load, per_token_s = view.info.instance_id, view.load, per_token_s or self._unknown_s
        self._rates[instance_id], self._infos[instance_id] = (per_token_s, per_job_s), view.info
        waits_s = per_token_s * load.queued_prefill_tokens + per_job_s * load.queued_prefill
        return speed_class(per_token_s), (waits_s, tie, instance_id)

    def soonest(
        self, ready: ReadySet, tokens: int, context_tokens: int, exclude: InstanceIds, per_class: int = 1
    ) -> list[tuple[float, InstanceView]]:
        """The `candidates`, by the seconds until they would have computed a prompt of so many tokens."""
        rates, found = self._rates, []
        for waits_s, view in self.candidates(ready, context_tokens, exclude, per_class):
            per_token_s, per_job_s = rates[view.info.instance_id]
            found.append((waits_s + (per_token_s * tokens + per_job_s), view))
        found.sort(key=itemgetter(0))
        return found

    def refresh(self, view: InstanceView, tie: float | None = None) -> bool:
        """Apply a changed load, and perhaps changed rates; unknown instances are ignored. `tie`: another tie-break.

        Returns False when the instance's speed has become measured or unmeasured: then the median that stands for
        unmeasured speeds is wrong, and the backlog has to be built again.
        """
        info = view.info
        instance_id = info.instance_id
        key = self._keys.get(instance_id)
        if key is None:
            return True
        if self._infos[instance_id] is info and self._speed is prefill_rate:  # which depends on nothing else
            (per_token_s, per_job_s), load = self._rates[instance_id], view.load
            waits_s = per_token_s * load.queued_prefill_tokens + per_job_s * load.queued_prefill
            self._move(self._class_of[instance_id], (waits_s, key[1] if tie is None else tie, instance_id))
            return True
        per_token_s, per_job_s = self._speed(view)
        if (per_token_s > 0) is (key[2] in self._unmeasured):
            return False
        self._move(*self._entry(view, per_token_s, per_job_s, key[1] if tie is None else tie))
        return True

    def insert(self, view: InstanceView, tie: float) -> bool:
        """Add an instance. Returns False, as `refresh` does, where the median would change that stands for unmeasured
        speeds.
        """
        per_token_s, per_job_s = self._speed(view)
        if self._unmeasured or not per_token_s > 0:
            return False
        self._add(*self._entry(view, per_token_s, per_job_s, tie))
        return True

    def remove(self, instance_id: str) -> bool:
        """Remove an instance. Returns False as `insert` does."""
        if self._unmeasured:
            return False
        self._drop(instance_id)
        del self._rates[instance_id]
        return True


class Pressures(_SpeedClasses):
    """Decode instances by speed and by `pressure_s`."""

    def __init__(self, views: Iterable[InstanceView], rng: Random) -> None:
        super().__init__((self._class(view), (pressure_s(view), rng.random(), view.info.instance_id)) for view in views)

    def refresh(self, view: InstanceView, tie: float | None = None) -> None:
        """Apply a changed load, and with another tie-break changed rates; unknown instances are ignored."""
        key = self._keys.get(view.info.instance_id)
        if key is not None:
            known = tie is None or self._infos.get(key[2]) is view.info
            speed = self._class_of[key[2]] if known else self._class(view)
            self._move(speed, (pressure_s(view), key[1] if tie is None else tie, key[2]))

    def insert(self, view: InstanceView, tie: float) -> None:
        self._add(self._class(view), (pressure_s(view), tie, view.info.instance_id))

    def remove(self, instance_id: str) -> None:
        self._drop(instance_id)

    def _class(self, view: InstanceView) -> int:
        self._infos[view.info.instance_id] = view.info
        return speed_class((view.info.rates.step or UNKNOWN_STEPS).token_s(1, 0))


class ClusterIndex:
    """The cluster by the last broadcast, indexed, plus the assignments that the broadcast cannot know yet.

    coupled: no instance has the prefill role, so each instance computes whole jobs, and placement chooses among the
    decode instances. turn: decisions booked so far, over all broadcasts, for round-robin. limited: steps keep to the
    TPOT targets of the streams in them. ledger: work of earlier placements. prefixes: what the instances have reported
    of their prefix caches. live: the state of the cluster where it is kept up to date beside this index; without it
    `view` does not change.
    """

    def __init__(
        self,
        view: ClusterView,
        pending: Iterable[Assignment] = (),
        *,
        rng: Random,
        turn: int = 0,
        ledger: WorkloadLedger | None = None,
        prefixes: PrefixIndex | None = None,
        live: ClusterState | None = None,
    ) -> None:
        self._view, self._live, self._rng = view, live, rng
        self.turn = turn
        self.limited = view.policies.step_budget.name == TpotBudget.name
        self.ledger = WorkloadLedger() if ledger is None else ledger
        self.prefixes = PrefixIndex() if prefixes is None else prefixes
        self._with_prefill = 0  # instances with the prefill role, ready or not
        prefills: list[InstanceView] = []
        decodes: list[InstanceView] = []
        for one in view.instances:
            if one.role is Role.PREFILL:
                self._with_prefill += 1
            if one.state is InstanceState.READY:
                (prefills if one.role is Role.PREFILL else decodes).append(one)
        self.coupled = self._with_prefill == 0
        self.prefill, self.decode = ReadySet(prefills), ReadySet(decodes)
        self._backlog: Backlog | None = None
        self._pressures: Pressures | None = None
        self._cached: dict[Hashable, Any] = {}
        self._lacking: dict[tuple[str, tuple[str, ...]], frozenset[str]] = {}
        self._of_others: dict[str | None, frozenset[str]] = {}
        for assignment in pending:
            self._apply(assignment)

    @property
    def view(self) -> ClusterView:
        """The cluster without booked work; O(instances)."""
        return self._view if self._live is None else self._live.view()

    @property
    def sequence(self) -> int:
        """Sequence number of the last broadcast."""
        return self._view.sequence if self._live is None else self._live.sequence

    @property
    def size(self) -> int:
        """Number of instances, ready or not."""
        return len(self._view.instances) if self._live is None else len(self._live)

    @property
    def placing(self) -> Role:
        return Role.DECODE if self.coupled else Role.PREFILL

    @property
    def candidates(self) -> ReadySet:
        """The instances among which placement chooses."""
        return self.decode if self.coupled else self.prefill

    @property
    def backlog(self) -> Backlog:
        """The candidates by queued prefill. Built when first needed: dispatchers do not need it."""
        if self._backlog is None:
            self._backlog = Backlog(self.candidates.views, self._rng, chunked_rate if self.coupled else prefill_rate)
        return self._backlog

    @property
    def pressures(self) -> Pressures:
        """The decode instances by pressure. Built when first needed."""
        if self._pressures is None:
            self._pressures = Pressures(self.decode.views, self._rng)
        return self._pressures

    def cached(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """The value of `make()`, computed once for each key until `forget_cached`. It must not depend on bookings."""
        found = self._cached.get(key)
        if found is None:
            found = self._cached[key] = make()
        return cast(Made, found)

    def forget_cached(self) -> None:
        self._cached = {}

    def lacking(self, job: JobView) -> frozenset[str]:
        """Ids of the instances that do not serve the job's LoRA adapter, or do not process all of its media. They are
        found once for each combination, until an instance comes, goes, or loads or unloads an adapter (`move`).
        """
        adapter, media = wanted = job.adapter, job.media
        found = self._lacking.get(wanted)
        if found is None:
            infos = (view.info for view in self.view.instances) if adapter or media else ()
            found = frozenset(
                info.instance_id
                for info in infos
                if (adapter and adapter not in info.adapters) or not set(media) <= set(info.media)
            )
            self._lacking[wanted] = found
        return found

    def unable(self, job: JobView) -> frozenset[str]:
        """Ids of the instances that must not compute the job: they lack its adapter or a processor of its media, or
        have another precision.
        """
        lacking = self.lacking(job)
        return lacking | self._of_other_precision(job.precision) if job.one_precision else lacking

    def _of_other_precision(self, precision: str | None) -> frozenset[str]:
        """Ids of the instances of another precision than this one. None: than that of the cluster's model, if an
        instance has it that can decode, else than that of most of those that can.
        """
        found = self._of_others.get(precision)
        if found is None:
            wanted = precision
            if wanted is None:
                counts = Counter(view.info.precision for view in self.decode.views)
                wanted = "" if "" in counts else max(sorted(counts), key=counts.__getitem__, default="")
            others = (view.instance_id for view in self.view.instances if view.info.precision != wanted)
            found = self._of_others[precision] = frozenset(others)
        return found

    def book(self, assignment: Assignment) -> None:
        """Count a decision, so that later decisions see it."""
        self.turn += 1
        self._apply(assignment)

    def renew(self, view: InstanceView, pending: Iterable[Assignment]) -> None:
        """Apply a reported load, and perhaps changed rates, of an instance with unchanged role and state. `pending` is
        counted on top of the load.
        """
        for assignment in pending:
            view = _with(view, assignment)
        if not (self.prefill.put(view) or self.decode.put(view)):
            return
        if self._backlog is not None and not self._backlog.refresh(view, self._rng.random()):
            self._backlog = None
        if self._pressures is not None:
            self._pressures.refresh(view, self._rng.random())

    def move(self, before: InstanceView | None, view: InstanceView | None, pending: Iterable[Assignment]) -> bool:
        """Apply an instance that comes (it was not there `before`), goes (`view` is None), or has another role, state
        or adapters. `pending` is counted on top of its load.

        Returns False where the cluster becomes coupled or ceases to be: the index has to be built again.
        """
        self._lacking, self._of_others = {}, {}
        self._with_prefill += _has_prefill_role(view) - _has_prefill_role(before)
        if self.coupled is not (self._with_prefill == 0):
            return False
        if before is not None:
            self._remove(before.info.instance_id)
        if view is not None and view.state is InstanceState.READY:
            for assignment in pending:
                view = _with(view, assignment)
            self._insert(view)
        return True

    def _insert(self, view: InstanceView) -> None:
        ready = self.prefill if view.role is Role.PREFILL else self.decode
        ready.insert(view)
        backlog = self._backlog if ready is self.candidates else None
        if backlog is not None and not backlog.insert(view, self._rng.random()):
            self._backlog = None
        if self._pressures is not None and ready is self.decode:
            self._pressures.insert(view, self._rng.random())

    def _remove(self, instance_id: str) -> None:
        ready = self.prefill
        if not ready.remove(instance_id):
            ready = self.decode
            if not ready.remove(instance_id):
                return
        if self._backlog is not None and ready is self.candidates and not self._backlog.remove(instance_id):
            self._backlog = None
        if self._pressures is not None and ready is self.decode:
            self._pressures.remove(instance_id)

    def for_dispatch(self) -> "ClusterIndex":
        """A copy for one more dispatcher: decode jobs that are booked on either do not show on the other.

        It costs the copy of one list, shares everything else, and is only for dispatch.
        """
        twin = copy(self)
        twin.decode = self.decode.copy()
        twin._backlog = twin._pressures = None
        return twin

    def _apply(self, assignment: Assignment) -> None:
        ready = self.candidates
        view = ready.get(assignment.instance_id)
        if view is None and not self.coupled:
            ready = self.decode
            view = ready.get(assignment.instance_id)
        if view is None:
            return
        view = _with(view, assignment)
        ready.put(view)
        if self._backlog is not None and ready is self.candidates:
            self._backlog.refresh(view)
        if self._pressures is not None:
            self._pressures.refresh(view)


def _has_prefill_role(view: InstanceView | None) -> bool:
    return view is not None and view.role is Role.PREFILL


def _with(view: InstanceView, more: Assignment) -> InstanceView:
    """The instance with an assignment counted in its load."""
    load, block_size = view.load, max(1, view.info.block_size)
    inbound_bytes = int(more.import_tokens * view.info.kv_bytes_per_token) if more.import_tokens else 0
    decodes = more.decode_tokens > 0
    staged_bytes = int(more.export_tokens * view.info.kv_bytes_per_token) if more.export_tokens else 0
    free_blocks, ahead = load.free_blocks, load.kv_ahead
    if decodes:
        takes = takes_tokens(view, more.decode_tokens, more.saved_tokens)
        free_blocks -= -(-takes // block_size)
        ahead = with_job(ahead, takes, more.answer_tokens, block_size, more.lead_steps)
    time_s, done = load.time_s, load.done_tokens
    if more.prefill_tokens and not more.coming:
        time_s, done = with_progress(view, more.time_s)
    booked = InstanceLoad(
        time_s=time_s,
        queued_prefill=load.queued_prefill + (more.prefill_tokens > 0),
        queued_prefill_tokens=load.queued_prefill_tokens + more.prefill_tokens,
        running=load.running,
        waiting=load.waiting,
        decoding=load.decoding + decodes,
        heavy_decodes=load.heavy_decodes + (decodes and more.heavy),
        context_tokens=load.context_tokens + more.decode_tokens,
        coming=load.coming + more.coming,
        coming_tokens=load.coming_tokens + (more.decode_tokens if more.coming else 0),
        waiting_tokens=load.waiting_tokens + max(0, -free_blocks) * block_size,
        free_blocks=max(0, free_blocks),
        staged_bytes=load.staged_bytes + staged_bytes,
        inbound_bytes=load.inbound_bytes + inbound_bytes,
        inflight=load.inflight,
        prefill_share=load.prefill_share,
        kv_ahead=ahead,
        busy_share=load.busy_share,
        done_tokens=done,
    )
    return InstanceView(view.info, view.role, view.state, booked)


class LoadTracker:
    """An index over a stream of broadcasts, with the own assignments that the loads cannot show yet. Times are unix
    seconds.

    Loads are up to 200 ms old when a decision uses them; without the assignments of that time on top, all its jobs
    would go to one instance. Assignments of other schedulers are in the loads themselves: jobs that have reached an
    instance, and decodes that are bound to it (`InstanceLoad.promised`). While no broadcast arrives, assignments count
    until their jobs end, or for `HOLD_S`: else they would add up without bound.

    `ledger` and `prefixes` live as long as the tracker; the caller adds each placement to the ledger, completes it when
    its job ends, and applies the instances' reports to `prefixes`. `moves` rises when an instance joins, leaves, or
    changes its role, state or adapters.
    """

    def __init__(self, prefix_blocks: int = MAX_BLOCKS) -> None:
        self.ledger = WorkloadLedger()
        self.prefixes = PrefixIndex(max_blocks=prefix_blocks)
        self.moves = 0
        self._state = ClusterState()
        self._index: ClusterIndex | None = None
        self._recent: dict[str, list[Assignment]] = {}  # by instance
        self._over: set[str] = set()  # ids of jobs that ended since the last broadcast
        self._rng = Random()
        self._now = self._updated_s = self._cleaned_s = self._cached_s = 0.0

    @property
    def current(self) -> ClusterIndex:
        """The index to decide on. Raises Unavailable before the first broadcast."""
        if self._index is None:
            raise Unavailable("no broadcast from the cluster monitor yet", retry_after_s=1.0)
        return self._index

    @property
    def known(self) -> bool:
        return self._state.known

    @property
    def view(self) -> ClusterView:
        """The cluster by the last broadcast, without own assignments; O(instances)."""
        return self._state.view()

    def stale_s(self, now: float) -> float:
        """The age of the last broadcast when it is older than `STALE_S`, else 0."""
        age_s = now - self._updated_s
        return age_s if self.known and age_s > STALE_S else 0.0

    def apply(self, delta: ClusterDelta, now: float, rng: Random) -> bool:
        """Apply a broadcast, with the assignments that its loads cannot show yet on top: O(log instances) a load.

        Returns False, and changes nothing, when a broadcast before it is missing.
        """
        moved = {} if delta.whole else self._state.moving(delta)
        if not self._state.apply(delta):
            return False
        self._rng, self._now, self._updated_s = rng, now, now
        self._over.clear()
        self.moves += delta.whole or bool(moved)
        if delta.whole or now - self._cleaned_s >= CLEAN_UP_S:
            self._cleaned_s = now
            self.ledger.settle(self._state.view(), now)
        if delta.whole or delta.policies is not None or not self._move(moved):
            for instance_id in list(self._recent):
                view = self._state.get(instance_id)
                self._unseen(instance_id, InstanceLoad() if view is None else view.load)
            self._cached_s = now
            self._build()
            return True
        for view in delta.changed:
            if view.info.instance_id not in moved:
                self._renew(view.info.instance_id)
        for instance_id in delta.loads:
            self._renew(instance_id)
        if moved:
            self._cached_s = 0.0  # what is derived from the loads includes those of the instances
        if now - self._cached_s >= CACHED_S:
            self._cached_s = now
            self.current.forget_cached()
        return True

    def book(self, assignment: Assignment) -> None:
        """Count a decision until a load shows it; a decode on its way counts as long as the ledger has it."""
        self._drop_old(assignment.time_s)
        if not assignment.coming:
            self._remember(assignment)
        self.current.book(assignment)

    def arrived(self, job_id: str, now: float) -> None:
        """Report that a job's decode has reached its instance: it counts until a load shows it."""
        assignment = self.ledger.arrived(job_id)
        if assignment is not None:
            self._remember(replace(assignment, time_s=now, coming=False))

    def ended(self, job_id: str) -> None:
        """Report that a job has ended: while loads are stale, its assignments no longer count."""
        self._over.add(job_id)

    def _remember(self, assignment: Assignment) -> None:
        self._recent.setdefault(assignment.instance_id, []).append(assignment)

    def _move(self, moved: Mapping[str, InstanceView | None]) -> bool:
        """Apply the instances that have come, gone or changed; by id, with their views before."""
        index = self.current
        for instance_id, before in moved.items():
            view = self._state.get(instance_id)
            pending = self._pending(view) if view is not None else self._unseen(instance_id, InstanceLoad())
            if not index.move(before, view, pending):
                return False
        return True

    def _renew(self, instance_id: str) -> None:
        view = self._state.get(instance_id)
        if view is not None:
            self.current.renew(view, self._pending(view))

    def _pending(self, view: InstanceView) -> Iterable[Assignment]:
        """The assignments that the load of an instance does not show yet."""
        instance_id = view.info.instance_id
        if instance_id not in self._recent and not view.load.promised and not self.ledger.coming_to(instance_id):
            return ()
        recent, coming = self._unseen(instance_id, view.load), self.ledger.coming_to(instance_id)
        if coming and view.load.accepted:
            accepted = frozenset(view.load.accepted)
            # The load already shows these decodes; their arrival has not been reported here yet.
            coming = [one for one in coming if mark_of(one.job_id) not in accepted]
        return (*recent, *coming, *self._of_others(view))

    def _of_others(self, view: InstanceView) -> Iterable[Assignment]:
        """The decodes that other schedulers have bound to the instance and that have not reached it, by its load."""
        promised = view.load.promised
        if not promised:
            return ()
        instance_id = view.info.instance_id
        own = {mark_of(one.job_id) for one in (*self._recent.get(instance_id, ()), *self.ledger.coming_to(instance_id))}
        return [promised_to(instance_id, one, self._now) for one in promised if one.mark not in own]

    def _unseen(self, instance_id: str, load: InstanceLoad) -> Iterable[Assignment]:
        """The assignments that a load does not show; the others are forgotten.

        A load that lists the jobs accepted lately shows those, however long they took to reach the instance. For a
        load without that list, its time decides.
        """
        recent, now = self._recent.get(instance_id), self._now
        if not recent:
            return ()
        if load.accepted is not None:
            accepted = frozenset(load.accepted)
            recent = [a for a in recent if a.time_s > now - FORGET_S and mark_of(a.job_id) not in accepted]
        else:
            since_s = max(min(load.time_s, now) - REACH_S, now - FORGET_S)
            recent = [a for a in recent if a.time_s > since_s]
        if recent:
            self._recent[instance_id] = recent
        else:
            del self._recent[instance_id]
        return recent

    def _drop_old(self, now: float) -> None:
        """While loads are stale, forget the assignments of jobs that have ended or are older than `HOLD_S`."""
        if not self.stale_s(now) or now - self._cleaned_s < CLEAN_UP_S:
            return
        self._cleaned_s = now
        kept = [
            a
            for recent in self._recent.values()
            for a in recent
            if now - a.time_s < HOLD_S and a.job_id not in self._over
        ]
        self._recent = {}
        for assignment in kept:
            self._remember(assignment)
        self._over.clear()
        self._build()

    def _build(self) -> None:
        view = self._state.view()
        recent = chain.from_iterable(self._recent.values())
        of_others = chain.from_iterable(self._of_others(one) for one in view.instances if one.load.promised)
        self._index = ClusterIndex(
            view,
            (*recent, *self.ledger.coming, *of_others),
            rng=self._rng,
            turn=self._index.turn if self._index is not None else 0,
            ledger=self.ledger,
            prefixes=self.prefixes,
            live=self._state,
        )
