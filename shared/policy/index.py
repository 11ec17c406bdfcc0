"""The ready instances of the cluster, kept in the order in which policies ask for them.

Built when somebody comes, goes or changes, O(n log n). A decision then looks at a few entries; booking it, and taking
in another load, cost O(log n) comparisons each. Pure: no clock, no I/O; the driver says when to build and what to book.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from itertools import chain
from math import log
from operator import attrgetter
from random import Random
from statistics import median
from typing import Any, TypeVar, cast

from shared.domain.cluster import ClusterDelta, ClusterState
from shared.domain.instance import ClusterView, InstanceLoad, InstanceState, InstanceView, Role
from shared.domain.rates import UNKNOWN_STEPS, Rates
from shared.errors import Unavailable
from shared.policy.assignment import Assignment, mark_of, promised_to
from shared.policy.decode_admission import takes_tokens, with_job
from shared.policy.ledger import WorkloadLedger
from shared.policy.prefix_index import MAX_BLOCKS, PrefixIndex
from shared.policy.step_budget import TpotBudget

# MERGED backlog.py
# How fast instances prefill, by the rates that they report, and how much prefill waits at them, in seconds.


CLASS_WIDTH = 1.1  # instances whose speeds differ by less count as equally fast
_LOG_WIDTH = log(CLASS_WIDTH)
UNKNOWN_S_PER_TOKEN = 1e-4  # of a prefill, where nothing was measured: 10,000 tokens a second

Speed = Callable[[InstanceView], tuple[float, float]]
Key = tuple[float, float, str]


def prefill_rate(rates: Rates) -> tuple[float, float]:
    """Seconds a prompt token, and seconds a prompt, on an instance that only prefills; (0, 0) when not measured.

    Source: Cronus eq. 2, k_p and b_p.
    """
    cost = rates.prefill
    if cost is None or cost.k_p <= 0:
        return 0.0, 0.0
    return cost.k_p, max(0.0, cost.b_p)


def chunked_rate(view: InstanceView) -> tuple[float, float]:
    """The same beside the decodes that run there: a step takes as long as they make it, and has room for so much less.

    Source: Cronus eq. 3 at a prefill context of 0, over the tokens of a step that decodes leave. Without a measured
    chunked cost it is `prefill_rate`.
    """
    cost, load = view.info.rates.chunked, view.load
    step_s = cost.time_s(0.0, load.context_tokens) if cost else 0.0
    if step_s <= 0:
        return prefill_rate(view.info.rates)
    return step_s / max(1, view.info.chunk_size - load.decoding), 0.0


def queued_prefill_s(view: InstanceView, unknown_s_per_token: float = UNKNOWN_S_PER_TOKEN) -> float:
    """Seconds of prefill that wait at a prefill instance."""
    load = view.load
    per_token_s, per_job_s = prefill_rate(view.info.rates)
    return (per_token_s or unknown_s_per_token) * load.queued_prefill_tokens + per_job_s * load.queued_prefill


class Backlog:
    """Instances by speed and backlog, in the order in which a placement asks for them.

    backlog = s * queued tokens + base * queued jobs: seconds of prefill that wait. `speed` gives (s, base) of an
    instance. One without a measured speed gets the median of the measured ones, or 1 s a token when none is measured:
    then backlogs are plain token counts. Source: Cronus eq. 2 for the form.
    """

    def __init__(self, views: Iterable[InstanceView], rng: Random, speed: Speed) -> None:
        self._speed = speed
        speeds = [(view, *speed(view)) for view in views]
        known = [per_token_s for _, per_token_s, _ in speeds if per_token_s > 0]
        self._unknown_s = median(known) if known else 1.0
        self._unmeasured = {view.info.instance_id for view, per_token_s, _ in speeds if not per_token_s > 0}
        self._rates: dict[str, tuple[float, float]] = {}
        self._keys: dict[str, Key] = {}
        self._class_of: dict[str, int] = {}
        # By class of speed: within one the shortest backlog is (nearly) the best for a prompt of any length.
        self._order: dict[int, list[Key]] = {}
        classes: dict[float, int] = {}
        for view, per_token_s, per_job_s in speeds:
            instance_id, load, per_token_s = view.info.instance_id, view.load, per_token_s or self._unknown_s
            waits_s = per_token_s * load.queued_prefill_tokens + per_job_s * load.queued_prefill
            found = classes.get(per_token_s)
            if found is None:
                found = classes[per_token_s] = speed_class(per_token_s)
            self._rates[instance_id] = per_token_s, per_job_s
            self._class_of[instance_id] = found
            # Ties break at random, once a broadcast: several schedulers must not all like the same idle instance.
            key = self._keys[instance_id] = waits_s, rng.random(), instance_id
            self._order.setdefault(found, []).append(key)
        for keys in self._order.values():
            keys.sort()

    def classes(self) -> Iterable[Sequence[Key]]:
        """For each class of speed (backlog in seconds, tie-break, instance id), least backlog first."""
        return self._order.values()

    def waits_s(self, instance_id: str) -> float:
        """Seconds of prefill that wait there."""
        return self._keys[instance_id][0]

    def cost_s(self, instance_id: str, tokens: int) -> float:
        """Seconds that a prefill of `tokens` takes there, once it is its turn."""
        per_token_s, per_job_s = self._rates[instance_id]
        return per_token_s * tokens + per_job_s

    def refresh(self, view: InstanceView, tie: float | None = None) -> bool:
        """Take in a changed load, and perhaps rates; unknown instances are ignored. `tie`: another tie-break.

        False when its speed was not measured before and is now, or the other way round: what stands for those that are
        not is another then, and this is to be made anew.
        """
        instance_id, load = view.info.instance_id, view.load
        key = self._keys.get(instance_id)
        if key is None:
            return True
        per_token_s, per_job_s = self._speed(view)
        if (per_token_s > 0) is (instance_id in self._unmeasured):
            return False
        keys = self._order[self._class_of[instance_id]]
        del keys[bisect_left(keys, key)]
        per_token_s = per_token_s or self._unknown_s
        waits_s = per_token_s * load.queued_prefill_tokens + per_job_s * load.queued_prefill
        self._rates[instance_id] = per_token_s, per_job_s
        self._class_of[instance_id] = found = speed_class(per_token_s)
        self._keys[instance_id] = key = waits_s, key[1] if tie is None else tie, instance_id
        insort(self._order.setdefault(found, []), key)
        return True


def speed_class(per_token_s: float) -> int:
    """The same for those that need about as long."""
    return round(log(per_token_s) / _LOG_WIDTH)


# MERGED pressure.py
# Decode instances by how long a token of one more job would take there.


TYPICAL_TOKENS = 1000  # context of the job that is imagined; it only has to be the same everywhere


def pressure_s(view: InstanceView) -> float:
    """Seconds of a decode step with one more job in it, and of its wait for a place spread over so many tokens."""
    info, load = view.info, view.load
    rates, seats = info.rates.step or UNKNOWN_STEPS, info.max_seqs or load.decoding + 1
    running = min(load.decoding + 1, seats)
    context = (load.context_tokens + TYPICAL_TOKENS) * running / (load.decoding + 1)
    step_s = rates.decode_s(running, context)
    waits = (load.decoding + 1 - running) / seats
    short = load.waiting_tokens + TYPICAL_TOKENS - load.free_blocks * info.block_size
    if short > 0:
        waits = max(waits, short / max(1.0, context))
    return step_s * (1.0 + waits)


class Pressures:
    """By class of speed, the least pressed first; ties break at random, once a broadcast."""

    def __init__(self, views: Iterable[InstanceView], rng: Random) -> None:
        self._keys: dict[str, Key] = {}
        self._class_of: dict[str, int] = {}
        self._order: dict[int, list[Key]] = {}
        for view in views:
            instance_id = view.info.instance_id
            key = self._keys[instance_id] = pressure_s(view), rng.random(), instance_id
            found = self._class_of[instance_id] = _class_of(view)
            self._order.setdefault(found, []).append(key)
        for keys in self._order.values():
            keys.sort()

    def classes(self) -> Iterable[Sequence[Key]]:
        """For each class of speed (pressure in seconds, tie-break, instance id), least first."""
        return self._order.values()

    def refresh(self, view: InstanceView, tie: float | None = None) -> None:
        """Take in a changed load, and perhaps rates; unknown instances are ignored. `tie`: another tie-break."""
        instance_id = view.info.instance_id
        key = self._keys.get(instance_id)
        if key is None:
            return
        keys = self._order[self._class_of[instance_id]]
        del keys[bisect_left(keys, key)]
        key = self._keys[instance_id] = pressure_s(view), key[1] if tie is None else tie, instance_id
        if tie is not None:  # its rates may be others
            found = self._class_of[instance_id] = _class_of(view)
            keys = self._order.setdefault(found, [])
        insort(keys, key)


def _class_of(view: InstanceView) -> int:
    return speed_class((view.info.rates.step or UNKNOWN_STEPS).decode_s(1, 0))


Made = TypeVar("Made")
_by_id = attrgetter("info.instance_id")


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

    def put(self, view: InstanceView) -> bool:
        """The instance as it is now; False, and nothing is done, where it is none of these."""
        at = self._at.get(view.info.instance_id)
        if at is not None:
            self._views[at] = view
        return at is not None

    def book(self, assignment: Assignment) -> InstanceView | None:
        """Count work on its instance and give back the instance as it is now; None for unknown ids."""
        at = self._at.get(assignment.instance_id)
        if at is None:
            return None
        raised = self._views[at] = _booked(self._views[at], assignment)
        return raised


class ClusterIndex:
    """The cluster as broadcasts tell of it, indexed, plus the assignments that they cannot know yet.

    coupled: no instance has the prefill role, so each computes whole jobs, and placement chooses among those with the
    decode role. turn: decisions booked so far, over all broadcasts: what round-robin counts by. ledger: what the
    driver remembers of its placements. prefixes: what instances have told of the prompts whose KV they hold.
    limited: steps keep to the TPOT targets of those that decode. `live`: where `view` comes from and goes on.
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
        self._view, self._live = view, live
        self.turn = turn
        self.limited = view.policies.step_budget.name == TpotBudget.name
        self.ledger = WorkloadLedger() if ledger is None else ledger
        self.prefixes = PrefixIndex() if prefixes is None else prefixes
        prefills: list[InstanceView] = []
        decodes: list[InstanceView] = []
        self.coupled = True
        prefill, ready = Role.PREFILL, InstanceState.READY
        for one in view.instances:
            if one.role is prefill:
                self.coupled = False
                if one.state is ready:
                    prefills.append(one)
            elif one.state is ready:
                decodes.append(one)
        self.prefill = ReadySet(prefills)
        self.decode = ReadySet(decodes)
        self._rng = rng
        self._backlog: Backlog | None = None
        self._pressures: Pressures | None = None
        self._made: dict[Hashable, Any] = {}
        for assignment in pending:
            self._apply(assignment)

    @property
    def view(self) -> ClusterView:
        """The cluster without what was booked; O(instances)."""
        return self._view if self._live is None else self._live.view()

    @property
    def sequence(self) -> int:
        """Of the newest broadcast."""
        return self._view.sequence if self._live is None else self._live.sequence

    @property
    def size(self) -> int:
        """Instances, ready or not."""
        return len(self._view.instances) if self._live is None else len(self._live)

    @property
    def placing(self) -> Role:
        """The role among whose instances placement chooses."""
        return Role.DECODE if self.coupled else Role.PREFILL

    @property
    def candidates(self) -> ReadySet:
        """The instances among which placement chooses."""
        return self.decode if self.coupled else self.prefill

    @property
    def backlog(self) -> Backlog:
        """The candidates by what waits at them. Built when first asked for: dispatchers never do."""
        if self._backlog is None:
            speed = chunked_rate if self.coupled else _prefill_rate
            self._backlog = Backlog(self.candidates.views, self._rng, speed)
        return self._backlog

    @property
    def pressures(self) -> Pressures:
        """The decode instances by what one more job would meet there. Built when first asked for."""
        if self._pressures is None:
            self._pressures = Pressures(self.decode.views, self._rng)
        return self._pressures

    @property
    def states(self) -> "Counter[tuple[Role, InstanceState]]":
        """How many instances are in which state."""
        return Counter((v.role, v.state) for v in self.view.instances)

    def cached(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """`make()`, once a key and broadcast, or a tenth of a second of them. It may not rest on bookings."""
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = make()
        return cast(Made, found)

    def book(self, assignment: Assignment) -> None:
        """Let later decisions see this one."""
        self.turn += 1
        self._apply(assignment)

    def forget_cached(self) -> None:
        """What was made for `cached` is old by now."""
        self._made = {}

    def renew(self, view: InstanceView, pending: Iterable[Assignment]) -> None:
        """An instance has another load or other rates, in the same role and state; `pending`: what is to be counted on
        top of that.
        """
        for assignment in pending:
            view = _booked(view, assignment)
        if not (self.prefill.put(view) or self.decode.put(view)):
            return
        if self._backlog is not None and not self._backlog.refresh(view, self._rng.random()):
            self._backlog = None
        if self._pressures is not None:
            self._pressures.refresh(view, self._rng.random())

    def for_dispatch(self) -> "ClusterIndex":
        """The same broadcast for one more dispatcher: decode jobs booked on either do not show on the other.

        Cheap: one copy of a list. Only dispatch may use it; it shares everything else.
        """
        twin = copy(self)
        twin.decode = self.decode.copy()
        twin._backlog = twin._pressures = None  # the same broadcast: it is not renewed
        return twin

    def _apply(self, assignment: Assignment) -> None:
        placed = self.candidates.book(assignment)
        if placed is not None and self._backlog is not None:
            self._backlog.refresh(placed)
        if placed is None and not self.coupled:
            placed = self.decode.book(assignment)
        if placed is not None and self._pressures is not None:
            self._pressures.refresh(placed)


def _prefill_rate(view: InstanceView) -> tuple[float, float]:
    return prefill_rate(view.info.rates)


def _booked(view: InstanceView, more: Assignment) -> InstanceView:
    return InstanceView(view.info, view.role, view.state, _with(view, more))


def _with(view: InstanceView, more: Assignment) -> InstanceLoad:
    load, block_size = view.load, max(1, view.info.block_size)
    inbound_bytes = int(more.import_tokens * view.info.kv_bytes_per_token) if more.import_tokens else 0
    decodes = more.decode_tokens > 0
    free_blocks, ahead = load.free_blocks, load.kv_ahead
    if decodes:
        takes = takes_tokens(view, more.decode_tokens, more.saved_tokens)
        free_blocks -= -(-takes // block_size)
        ahead = with_job(ahead, takes, more.answer_tokens, block_size, more.lead_steps)
    return InstanceLoad(
        time_s=load.time_s,
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
        staged_bytes=load.staged_bytes,
        inbound_bytes=load.inbound_bytes + inbound_bytes,
        inflight=load.inflight,
        prefill_share=load.prefill_share,
        kv_ahead=ahead,
    )


# MERGED load_tracker.py
# The index over a stream of broadcasts: what its owner assigned since a load was taken counts, too.
#
# Loads are up to 200 ms old when a decision uses them. Without this every job of that time would go to one
# instance. The assignments of other schedulers are in the loads themselves: jobs that have come to an instance, and
# decodes that are bound to it and still to come (`InstanceLoad.promised`).


REACH_S = 0.03  # time a job takes from the decision into the instance's load
FORGET_S = 1.0  # an assignment older than this is in every load, whatever the clocks of the hosts say
SHOWN_S = 2.0  # for so long a load says that a job has come, so that no broadcast with it is missed
STALE_S = 1.0  # without a broadcast for so long the loads are old
HOLD_S = 30.0  # then an assignment counts until its job ends, or for so long
_AGAIN_S = 0.5  # between two looks at which of them are over, and at who has forgotten what
CACHED_S = 0.1  # for so long what is made of all loads stands


class LoadTracker:
    """What broadcasts come to, and the own assignments that they do not show yet. Times are unix seconds.

    While no broadcast comes, assignments count on top of the last one until their jobs end, or for HOLD_S: else they
    would add up for ever. `ledger` lives as long as this does: add each placement to it and complete it when its job
    ends. So does `prefixes`: apply to it what instances tell of theirs. `moves` rises when somebody comes, goes, or has
    another role or state.
    """

    def __init__(self, prefix_blocks: int = MAX_BLOCKS) -> None:
        self.ledger = WorkloadLedger()
        self.prefixes = PrefixIndex(max_blocks=prefix_blocks)
        self.moves = 0
        self._state = ClusterState()
        self._index: ClusterIndex | None = None
        self._recent: dict[str, list[Assignment]] = {}  # by instance
        self._over: set[str] = set()
        self._rng = Random()
        self._now = self._updated_s = self._looked_s = self._cached_s = 0.0

    @property
    def current(self) -> ClusterIndex:
        """The index to decide on. Raises Unavailable before the first broadcast."""
        if self._index is None:
            raise Unavailable("no broadcast from the cluster monitor yet", retry_after_s=1.0)
        return self._index

    @property
    def known(self) -> bool:
        """Whether there was a broadcast."""
        return self._state.known

    @property
    def view(self) -> ClusterView:
        """What broadcasts have come to, without own assignments; O(instances)."""
        return self._state.view()

    def stale_s(self, now: float) -> float:
        """How old the newest broadcast is, if that is too old; else 0."""
        age_s = now - self._updated_s
        return age_s if self.known and age_s > STALE_S else 0.0

    def update(self, view: ClusterView, now: float, rng: Random) -> None:
        """Take in a broadcast of all there is."""
        self.hear(ClusterDelta.of(view), now, rng)

    def hear(self, delta: ClusterDelta, now: float, rng: Random) -> bool:
        """Take in a broadcast; assignments that loads cannot show yet are counted on top of them.

        False, and nothing is changed, where a broadcast before it is missing. O(log instances) for each load.
        """
        moved = self._state.moved(delta)
        if not self._state.apply(delta):
            return False
        self._rng, self._now, self._updated_s = rng, now, now
        self._over.clear()
        self.moves += moved
        if delta.whole or now - self._looked_s >= _AGAIN_S:
            self._looked_s = now
            self.ledger.settle(self._state.view(), now)
        if moved or delta.policies is not None:  # what the index rests on
            self._rebuild()
            return True
        for view in delta.changed:
            self._renew(view.info.instance_id)
        for instance_id in delta.loads:
            self._renew(instance_id)
        if now - self._cached_s >= CACHED_S:
            self._cached_s = now
            self.current.forget_cached()
        return True

    def book(self, assignment: Assignment) -> None:
        """Count a decision until a load shows it; what is still to come counts as long as the ledger knows it."""
        self._drop_old(assignment.time_s)
        if not assignment.coming:
            self._remember(assignment)
        self.current.book(assignment)

    def arrived(self, job_id: str, now: float) -> None:
        """A job's decode has come to its instance: it counts until a load shows it."""
        assignment = self.ledger.arrived(job_id)
        if assignment is not None:
            self._remember(replace(assignment, time_s=now, coming=False))

    def ended(self, job_id: str) -> None:
        """A job is over: with old loads, what it was assigned to counts no more."""
        self._over.add(job_id)

    def _remember(self, assignment: Assignment) -> None:
        self._recent.setdefault(assignment.instance_id, []).append(assignment)

    def _renew(self, instance_id: str) -> None:
        """Its load was told."""
        view = self._state.get(instance_id)
        if view is None:
            return
        recent, coming = self._unseen(instance_id, view.load), self.ledger.coming_to(instance_id)
        if coming and view.load.accepted:
            came = frozenset(view.load.accepted)
            coming = [one for one in coming if mark_of(one.job_id) not in came]  # its report is still under way
        self.current.renew(view, (*recent, *coming, *self._of_others(view)))

    def _of_others(self, view: InstanceView) -> Iterable[Assignment]:
        """Decodes that other schedulers have bound to the instance and that are still to come, as its load says."""
        promised = view.load.promised
        if not promised:
            return ()
        instance_id = view.info.instance_id
        own = {mark_of(one.job_id) for one in (*self._recent.get(instance_id, ()), *self.ledger.coming_to(instance_id))}
        return [promised_to(instance_id, one, self._now) for one in promised if one.mark not in own]

    def _unseen(self, instance_id: str, load: InstanceLoad) -> Iterable[Assignment]:
        """Assignments that a load does not show; the others are forgotten.

        A load that names the jobs which came lately shows those, however long they took to come there. Of one that
        does not, its time has to tell.
        """
        recent, now = self._recent.get(instance_id), self._now
        if not recent:
            return ()
        if load.accepted is not None:
            came = frozenset(load.accepted)
            recent = [a for a in recent if a.time_s > now - FORGET_S and mark_of(a.job_id) not in came]
        else:
            since_s = max(min(load.time_s, now) - REACH_S, now - FORGET_S)
            recent = [a for a in recent if a.time_s > since_s]
        if recent:
            self._recent[instance_id] = recent
        else:
            del self._recent[instance_id]
        return recent

    def _drop_old(self, now: float) -> None:
        if not self.stale_s(now) or now - self._looked_s < _AGAIN_S:
            return
        self._looked_s = now
        kept = [a for a in self._pending() if now - a.time_s < HOLD_S and a.job_id not in self._over]
        self._recent = {}
        for assignment in kept:
            self._remember(assignment)
        self._over.clear()
        self._build()

    def _rebuild(self) -> None:
        for instance_id in list(self._recent):
            view = self._state.get(instance_id)
            self._unseen(instance_id, InstanceLoad() if view is None else view.load)
        self._cached_s = self._now
        self._build()

    def _build(self) -> None:
        view = self._state.view()
        of_others = chain.from_iterable(self._of_others(one) for one in view.instances if one.load.promised)
        self._index = ClusterIndex(
            view,
            (*self._pending(), *self.ledger.coming, *of_others),
            rng=self._rng,
            turn=self._index.turn if self._index is not None else 0,
            ledger=self.ledger,
            prefixes=self.prefixes,
            live=self._state,
        )

    def _pending(self) -> Iterator[Assignment]:
        for assignments in self._recent.values():
            yield from assignments
