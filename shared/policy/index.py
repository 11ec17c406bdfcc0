"""The ready instances of one broadcast, kept in the order in which policies ask for them.

Built once a broadcast, O(n log n); a decision then looks at a few entries, and booking it costs O(log n)
comparisons. Pure: no clock, no I/O; the driver says when to build and what to book.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import log
from random import Random
from statistics import median

import msgspec

from shared.domain.instance import ClusterView, InstanceState, InstanceView, Role

CLASS_WIDTH = 1.1  # instances whose speeds differ by less count as equally fast


@dataclass(frozen=True, slots=True)
class Assignment:
    """Work given to an instance at `time_s` (unix seconds), perhaps not yet in the instance's load."""

    instance_id: str
    time_s: float
    prefill_tokens: int = 0
    decode_tokens: int = 0  # prompt tokens that a decode job brings; 0 when it is no decode job
    heavy: bool = False


class PrefillBacklog:
    """Ready prefill instances by speed and backlog. Backlogs are seconds of prefill that wait.

    backlog = k_p * queued tokens + b_p * queued jobs. An instance without a measured rate gets the median of
    the measured ones, or 1 s a token when none is measured: then backlogs are plain token counts.
    Source: Cronus eq. 2 for the cost of a prefill.
    """

    def __init__(self, views: Iterable[InstanceView], rng: Random) -> None:
        self.views = tuple(sorted(views, key=lambda view: view.instance_id))
        known = [v.info.prefill_s_per_token for v in self.views if v.info.prefill_s_per_token > 0]
        self._unknown_rate = median(known) if known else 1.0
        self._by_id = {view.instance_id: view for view in self.views}
        # Ties break at random, once a broadcast: several schedulers must not all like the same idle instance.
        self._keys = {v.instance_id: (self._backlog(v), rng.random(), v.instance_id) for v in self.views}
        # By class of speed: within one the shortest backlog is (nearly) the best for a prompt of any length.
        self._order: dict[int, list[tuple[float, float, str]]] = {}
        for view in self.views:
            self._order.setdefault(self._class(view), []).append(self._keys[view.instance_id])
        for keys in self._order.values():
            keys.sort()

    def __len__(self) -> int:
        return len(self.views)

    def rate(self, view: InstanceView) -> float:
        """Seconds a prompt token takes there."""
        return view.info.prefill_s_per_token or self._unknown_rate

    def classes(self) -> Iterator[Iterator[tuple[float, InstanceView]]]:
        """For each class of speed, backlog in seconds and instance, least backlog first."""
        for keys in self._order.values():
            yield ((backlog_s, self._by_id[instance_id]) for backlog_s, _, instance_id in keys)

    def book(self, instance_id: str, tokens: int) -> None:
        """Count `tokens` more on that instance; unknown ids are ignored."""
        key, view = self._keys.get(instance_id), self._by_id.get(instance_id)
        if key is None or view is None:
            return
        keys = self._order[self._class(view)]
        del keys[bisect_left(keys, key)]
        raised = (key[0] + self.rate(view) * tokens + view.info.prefill_base_s, key[1], instance_id)
        self._keys[instance_id] = raised
        insort(keys, raised)

    def _class(self, view: InstanceView) -> int:
        return round(log(self.rate(view)) / log(CLASS_WIDTH))

    def _backlog(self, view: InstanceView) -> float:
        load = view.load
        return self.rate(view) * load.queued_prefill_tokens + view.info.prefill_base_s * load.queued_prefill


class DecodeSet:
    """Ready decode instances; booked jobs show in the loads of `views`."""

    def __init__(self, views: Iterable[InstanceView]) -> None:
        self.views = sorted(views, key=lambda view: view.instance_id)
        self._position = {view.instance_id: at for at, view in enumerate(self.views)}

    def __len__(self) -> int:
        return len(self.views)

    def book(self, instance_id: str, tokens: int, heavy: bool) -> None:
        """Count one decode job of `tokens` prompt tokens more there; unknown ids are ignored."""
        at = self._position.get(instance_id)
        if at is None:
            return
        view = self.views[at]
        load, block_size = view.load, max(1, view.info.block_size)
        raised = msgspec.structs.replace(
            load,
            decoding=load.decoding + 1,
            heavy_decodes=load.heavy_decodes + int(heavy),
            context_tokens=load.context_tokens + tokens,
            free_blocks=max(0, load.free_blocks - -(-tokens // block_size)),
        )
        self.views[at] = msgspec.structs.replace(view, load=raised)


class ClusterIndex:
    """One broadcast, indexed, plus the assignments that it cannot know yet."""

    def __init__(self, view: ClusterView, pending: Iterable[Assignment] = (), *, rng: Random, turn: int = 0) -> None:
        self.view = view
        self.turn = turn  # decisions booked so far, over all broadcasts: what round-robin counts by
        self.states: Counter[tuple[Role, InstanceState]] = Counter((v.role, v.state) for v in view.instances)
        self.prefill = PrefillBacklog(view.ready(Role.PREFILL), rng)
        self.decode = DecodeSet(view.ready(Role.DECODE))
        for assignment in pending:
            self._apply(assignment)

    def book(self, assignment: Assignment) -> None:
        """Let later decisions see this one."""
        self.turn += 1
        self._apply(assignment)

    def _apply(self, assignment: Assignment) -> None:
        if assignment.prefill_tokens:
            self.prefill.book(assignment.instance_id, assignment.prefill_tokens)
        if assignment.decode_tokens:
            self.decode.book(assignment.instance_id, assignment.decode_tokens, assignment.heavy)
