"""The queue of an engine: in which order its prompts start, who starts next, and who loses its KV blocks when they run
short.

An order ranks the prompts of one class (`PrefillOrder`); the queue keeps streams before prompts and classes in
proportion, and lets no job starve.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Reversible
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain
from math import exp
from typing import ClassVar, Generic, Protocol, TypeVar

from shared.domain.job import JobView
from shared.errors import InvalidRequest

WINDOW = 16  # TetriInfer 5.1: PrefillSchedBatch


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A job that is queued at an engine.

    tokens: prompt tokens to compute here. started: its client has tokens (a stream), so that it comes before all
    prompts whose clients have none.
    """

    job: JobView
    tokens: int
    started: bool = False


class PrefillOrder(Protocol):
    """Orders queued jobs by a key that a job keeps while it waits, the least first; ties go to the job that came first.

    `window`, at least 1: the number of later jobs that may overtake a job (`PrefillQueue`). `batches`: instead, the
    oldest `window` jobs are ordered, and all of them are taken before others are looked at.
    """

    name: ClassVar[str]

    @property
    def batches(self) -> bool: ...

    @property
    def window(self) -> int: ...

    def key(self, waiting: WaitingJob) -> float: ...


@dataclass(frozen=True, slots=True)
class Fcfs:
    """First come, first served."""

    name: ClassVar[str] = "fcfs"
    batches: ClassVar[bool] = False
    window: ClassVar[int] = 1

    def key(self, waiting: WaitingJob) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Sjf:
    """The least tokens to compute first, `window` prompts (PrefillSchedBatch) at a time.

    overtake (ours): no batches, but at most `window` later prompts overtake one.
    Source: TetriInfer 3.3.1. The paper sorts by the length of the prompt, this policy by the tokens that are to be
    computed here: fewer where a prefix is cached.
    """

    name: ClassVar[str] = "sjf"
    window: int = WINDOW
    overtake: bool = False

    def __post_init__(self) -> None:
        if self.window < 1:
            raise InvalidRequest(f"{self.name}: window must be at least 1, not {self.window}")

    @property
    def batches(self) -> bool:
        return not self.overtake

    def key(self, waiting: WaitingJob) -> float:
        return float(waiting.tokens)


@dataclass(frozen=True, slots=True)
class Ljf(Sjf):
    """The most tokens to compute first; otherwise as `Sjf`. Source: TetriInfer 3.3.1."""

    name: ClassVar[str] = "ljf"

    def key(self, waiting: WaitingJob) -> float:
        return -float(waiting.tokens)


Item = TypeVar("Item", bound=Hashable)
CLASS_WINDOW = 16.0
Running = TypeVar("Running")
Group = tuple[bool, float]  # whether it holds streams, and the weight of its class
# The KV of most streams comes from another instance, so that they have one token to compute.
STREAMS = Sjf(overtake=True)


@dataclass(slots=True, eq=False)
class _Entry(Generic[Item]):
    item: Item
    waiting: WaitingJob
    here: bool = True
    taken: bool = False  # not removed; it counts as overtaking while jobs that came before it wait


class _ClassQueue(Generic[Item]):
    """The jobs of one weight, in a policy's order, without starvation; O(log n) for each.

    While a job waits, at most the order's `window` jobs that came after it are taken before it; then it is the next,
    unless an earlier job is in the same position. With an order that works in batches, new jobs wait apart (`_raw`)
    until the batch (`_heap`) is empty; then the oldest `window` of them are the batch. A job that was taken and is put
    back, because it was preempted or could not start, goes before all others and does not count as overtaking again.
    """

    def __init__(self, order: PrefillOrder) -> None:
        self._order = order
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
        raw, size = [entry for entry in self._raw if entry.here], self._order.window
        for at in range(0, len(raw), size):
            for entry in sorted(raw[at : at + size], key=lambda one: self._order.key(one.waiting)):
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
        heappush(self._heap, (self._order.key(entry.waiting), self._count, entry))

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


class PrefillQueue(Generic[Item]):
    """A queue of a caller's items: streams (requests whose client has tokens) before prompts without a token, and in
    each of the two groups heavier classes first.

    Within a group, while a class waits, at most `CLASS_WINDOW` times the ratio of the weights are taken of heavier
    classes, then one of it: two classes that both wait all the time are served in a fixed proportion. Within one weight
    (`_ClassQueue`), prompts follow the policy's order, and of streams the one with the fewest tokens to compute is
    first.
    """

    def __init__(self, order: PrefillOrder) -> None:
        self._order = order
        self._lines: dict[Group, _ClassQueue[Item]] = {}  # streams before prompts, then the heaviest first
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
        self._class_queue((waiting.started, waiting.job.slo.weight)).push(item, waiting)

    def put_back(self, item: Item, weight: float = 1.0, *, started: bool = False) -> None:
        """Add an item that has been taken before: it is the next of its class."""
        self._class_queue((started, weight)).put_back(item)

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

    def _class_queue(self, group: Group) -> _ClassQueue[Item]:
        line = self._lines.get(group)
        if line is None:
            self._lines[group] = _ClassQueue(STREAMS if group[0] else self._order)
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


Rank = tuple[float, bool]  # the weight of a request's class, and whether it is a stream: its client has tokens


def heaviest_first(running: Iterable[Running], rank: Callable[[Running], Rank]) -> list[Running]:
    """Heavier classes first, streams first within a class, and otherwise the order given, which is that of
    admission.
    """
    return sorted(running, key=rank, reverse=True)


def victim(running: Reversible[Running], rank: Callable[[Running], Rank]) -> Running:
    """The last by `heaviest_first`: of the lightest class the youngest prompt without a token, or without such a prompt
    the youngest stream. Raises ValueError when nothing runs.
    """
    return min(reversed(running), key=rank)


FADE = 1.0 - 1.0 / 64.0  # a step counts by this factor less with each later step
RECENT_S = 5.0  # over which `PromptTime` is a mean


class PromptTime:
    """The share of an engine's time in which its steps compute prompts: a mean that decays over `RECENT_S`."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last = 0.0, 0.0  # when the last such step ended, and the share then; another thread may read both

    def add(self, seconds: float, now: float) -> None:
        """Count a step that computed prompts, and ends now."""
        left = exp(-seconds / RECENT_S)
        self._last = now, self.at(now - seconds) * left + 1.0 - left

    def at(self, now: float) -> float:
        """The share, 0..1."""
        ended, share = self._last
        return share * exp(-max(0.0, now - ended) / RECENT_S) if share else 0.0


class PrefillShare:
    """The share of an engine's last steps with decodes that computed prompts, too: a decaying mean."""

    __slots__ = ("_mixed", "_steps")

    def __init__(self) -> None:
        self._steps = self._mixed = 0.0

    def mixed(self) -> None:
        """Count a step of decodes and prompts."""
        self._steps = self._steps * FADE + 1.0
        self._mixed = self._mixed * FADE + 1.0

    def plain(self, steps: int = 1) -> None:
        """Count steps of decodes alone."""
        fade: float = FADE**steps
        self._steps = self._steps * fade + (1.0 - fade) / (1.0 - FADE)
        self._mixed *= fade

    def after(self, plain_steps: int = 0) -> float:
        """The share, 0..1, after so many more plain steps; 0 before the first step."""
        fade: float = FADE**plain_steps
        steps = self._steps * fade + (1.0 - fade) / (1.0 - FADE)
        return self._mixed * fade / steps if steps > 0.0 else 0.0
