"""The queue of an engine: jobs in the order in which they start."""

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Generic, TypeVar

from shared.domain.rates import StepRates
from shared.policy.prefill_order import PrefillOrder, Sjf, WaitingJob

Item = TypeVar("Item", bound=Hashable)
CLASS_WINDOW = 16.0
Group = tuple[bool, float]  # whether it holds streams, and the weight of its class
# The KV of most streams comes from another instance, so that they have one token to compute.
STREAMS = Sjf(overtake=True)


@dataclass(slots=True, eq=False)
class _Entry(Generic[Item]):
    item: Item
    waiting: WaitingJob
    here: bool = True
    taken: bool = False  # not removed; it counts as overtaking while jobs that came before it wait


class _ClassLine(Generic[Item]):
    """The jobs of one weight, in a policy's order, without starvation; O(log n) for each.

    While a job waits, at most the order's `window` jobs that came after it are taken before it; then it is the next,
    unless an earlier job is in the same position. With an order that works in batches, new jobs wait apart (`_raw`)
    until the batch (`_heap`) is empty; then the oldest `window` of them are the batch. A job that was taken and is put
    back, because it was preempted or could not start, goes before all others and does not count as overtaking again.
    """

    def __init__(self, order: PrefillOrder, rates: Callable[[], StepRates | None] = lambda: None) -> None:
        self._order = order
        self._rates = rates
        self._front: deque[Item] = deque()  # put back, or held
        self._entries: dict[Item, _Entry[Item]] = {}
        self._came: deque[_Entry[Item]] = deque()  # in order of arrival, from the oldest waiting job on
        self._passed = 0  # taken jobs in `_came`: those that have overtaken the oldest
        self._heap: list[tuple[float, int, _Entry[Item]]] = []
        self._raw: deque[_Entry[Item]] = deque()
        self._count = 0

    def __len__(self) -> int:
        return len(self._front) + len(self._entries)

    def __iter__(self) -> Iterator[Item]:
        """The jobs put back, then the others by key, batch by batch where the order has batches."""
        yield from tuple(self._front)
        for _, _, entry in sorted(self._heap, key=lambda row: row[:2]):
            if entry.here:
                yield entry.item
        raw, size, rates = [entry for entry in self._raw if entry.here], self._order.window, self._rates()
        for at in range(0, len(raw), size):
            for entry in sorted(raw[at : at + size], key=lambda one: self._order.key(one.waiting, rates)):
                yield entry.item

    def everyone(self) -> Iterator[Item]:
        """All items, in no order."""
        return chain(self._front, self._entries)

    def push(self, item: Item, waiting: WaitingJob) -> None:
        entry = self._entries[item] = _Entry(item, waiting)
        self._came.append(entry)
        self._add(entry)

    def put_back(self, item: Item) -> None:
        """Add an item that has been taken before: it is the next."""
        self._front.appendleft(item)

    def peek(self) -> Item:
        """The next item, without taking it; a later item may become the next. Raises IndexError when empty."""
        return self._front[0] if self._front else self._next().item

    def hold(self) -> Item:
        """The next item, which stays the next whatever is added. It counts as taken."""
        if not self._front:
            self._front.append(self._take())
        return self._front[0]

    def pop(self) -> Item:
        """Take the next item. Raises IndexError when empty."""
        return self._front.popleft() if self._front else self._take()

    def remove(self, item: Item) -> bool:
        """Remove an item; False when it is not in the queue."""
        entry = self._entries.pop(item, None)
        if entry is not None:
            entry.here = False
            self._forget_the_gone()
            return True
        if item in self._front:
            self._front.remove(item)
            return True
        return False

    def reorder(self, order: PrefillOrder) -> None:
        """Use another order, for waiting jobs, too; the count of jobs that overtook them stays."""
        self._order = order
        self._heap, self._raw = [], deque()
        for entry in self._came:
            if entry.here:
                self._add(entry)

    def _add(self, entry: _Entry[Item]) -> None:
        if self._order.batches:
            self._raw.append(entry)
        else:
            self._enter(entry)

    def _enter(self, entry: _Entry[Item]) -> None:
        self._count += 1
        heappush(self._heap, (self._order.key(entry.waiting, self._rates()), self._count, entry))

    def _next(self) -> _Entry[Item]:
        while self._heap and not self._heap[0][2].here:
            heappop(self._heap)
        if not self._heap:
            self._next_batch()
        if not self._heap:
            raise IndexError("the queue is empty")
        if self._order.batches:
            return self._heap[0][2]
        return self._came[0] if self._passed >= self._order.window else self._heap[0][2]

    def _next_batch(self) -> None:
        while self._raw and len(self._heap) < self._order.window:
            entry = self._raw.popleft()
            if entry.here:
                self._enter(entry)

    def _take(self) -> Item:
        entry = self._next()
        del self._entries[entry.item]
        entry.here, entry.taken = False, True
        self._passed += 1
        self._forget_the_gone()
        return entry.item

    def _forget_the_gone(self) -> None:
        """Drop the entries before the oldest waiting job: jobs taken before it came have not overtaken it."""
        while self._came and not self._came[0].here:
            self._passed -= self._came.popleft().taken
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._entries):
            self._heap = [row for row in self._heap if row[2].here]
            heapify(self._heap)
        if len(self._raw) > 64 and len(self._raw) > 2 * len(self._entries):
            self._raw = deque(entry for entry in self._raw if entry.here)


class WaitingLine(Generic[Item]):
    """A queue of a caller's items: streams (requests whose client has tokens) before prompts without a token, and in
    each of the two groups heavier classes first.

    Within a group, while a class waits, at most `CLASS_WINDOW` times the ratio of the weights are taken of heavier
    classes, then one of it: two classes that both wait all the time are served in a fixed proportion. Within one weight
    (`_ClassLine`), prompts follow the policy's order, and of streams the one with the fewest tokens to compute is
    first.
    """

    def __init__(self, order: PrefillOrder, rates: Callable[[], StepRates | None] = lambda: None) -> None:
        self._order = order
        self._rates = rates
        self._lines: dict[Group, _ClassLine[Item]] = {}  # streams before prompts, then the heaviest first
        self._passed: dict[Group, float] = {}  # taken of heavier classes while it waits, by the ratio of weights
        self._held: Group | None = None  # the group whose next item is held

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def __iter__(self) -> Iterator[Item]:
        """Group by group and class by class: the items put back, then the others by key."""
        for line in self._lines.values():
            yield from line

    def everyone(self) -> Iterator[Item]:
        """All items, in no order."""
        return chain.from_iterable(line.everyone() for line in self._lines.values())

    @property
    def stream(self) -> Item | None:
        """The next stream; None where none waits."""
        started = [group for group, line in self._lines.items() if group[0] and len(line)]
        return self._lines[self._turn(started)].peek() if started else None

    def push(self, item: Item, waiting: WaitingJob) -> None:
        self._of((waiting.started, waiting.job.slo.weight)).push(item, waiting)

    def put_back(self, item: Item, weight: float = 1.0, *, started: bool = False) -> None:
        """Add an item that has been taken before: it is the next of its class."""
        self._of((started, weight)).put_back(item)

    def peek(self) -> Item:
        """The next item, without taking it; a later item may become the next. Raises IndexError when empty."""
        return self._lines[self._next()].peek()

    def hold(self) -> Item:
        """The next item, which stays the next whatever is added. It counts as taken."""
        self._held = self._next()
        return self._lines[self._held].hold()

    def pop(self) -> Item:
        """Take the next item. Raises IndexError when empty."""
        taken = self._next()
        self._held = None
        for group, line in self._lines.items():
            if group[0] is taken[0] and group[1] < taken[1] and len(line):
                self._passed[group] += group[1] / taken[1]
        self._passed[taken] = 0.0
        return self._lines[taken].pop()

    def remove(self, item: Item) -> bool:
        """Remove an item; False when it is not in the queue."""
        if self._held is not None and self._lines[self._held].peek() == item:
            self._held = None
        return any(line.remove(item) for line in self._lines.values())

    def reorder(self, order: PrefillOrder) -> None:
        """Use another order of prompts, for waiting ones, too; the count of jobs that overtook them stays."""
        self._order = order
        for (started, _), line in self._lines.items():
            if not started:
                line.reorder(order)

    def _of(self, group: Group) -> _ClassLine[Item]:
        line = self._lines.get(group)
        if line is None:
            self._lines[group] = _ClassLine(STREAMS if group[0] else self._order, self._rates)
            self._passed[group] = 0.0
            self._lines = dict(sorted(self._lines.items(), key=lambda row: row[0], reverse=True))
            line = self._lines[group]
        return line

    def _next(self) -> Group:
        """The group whose turn it is. Raises IndexError when the queue is empty."""
        if self._held is not None:
            return self._held
        waiting = [group for group, line in self._lines.items() if len(line)]
        if not waiting:
            raise IndexError("the queue is empty")
        return self._turn([group for group in waiting if group[0] is waiting[0][0]])

    def _turn(self, waiting: list[Group]) -> Group:
        """Of the waiting classes of one group, the one whose turn it is: the heaviest, unless another is due."""
        return next((one for one in reversed(waiting) if self._passed[one] > CLASS_WINDOW - 1e-9), waiting[0])
