"""The order in which a prefill instance works off its queue."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

from shared.domain.job import JobView
from shared.errors import InvalidRequest

Item = TypeVar("Item")
WINDOW = 16  # TetriInfer: PrefillSchedBatch


class PrefillOrder(Protocol):
    """Orders one window of the queue. A window is worked off before the next is formed: nobody starves."""

    name: ClassVar[str]

    @property
    def window(self) -> int:
        """Jobs of one window, at least 1."""
        ...

    def order(self, jobs: Sequence[JobView], now: float) -> list[int]:
        """Positions in `jobs` (which come in order of arrival), first to run first."""
        ...


@dataclass(frozen=True, slots=True)
class Fcfs:
    """First come, first served."""

    name: ClassVar[str] = "fcfs"
    window: int = 1

    def __post_init__(self) -> None:
        _check(self.name, self.window)

    def order(self, jobs: Sequence[JobView], now: float) -> list[int]:
        """See `PrefillOrder`."""
        return list(range(len(jobs)))


@dataclass(frozen=True, slots=True)
class Sjf:
    """Shortest prompt first within the window. Source: TetriInfer 3.3.1."""

    name: ClassVar[str] = "sjf"
    window: int = WINDOW

    def __post_init__(self) -> None:
        _check(self.name, self.window)

    def order(self, jobs: Sequence[JobView], now: float) -> list[int]:
        """See `PrefillOrder`."""
        return sorted(range(len(jobs)), key=lambda at: jobs[at].prompt_tokens)


@dataclass(frozen=True, slots=True)
class Ljf:
    """Longest prompt first within the window. Source: TetriInfer 3.3.1."""

    name: ClassVar[str] = "ljf"
    window: int = WINDOW

    def __post_init__(self) -> None:
        _check(self.name, self.window)

    def order(self, jobs: Sequence[JobView], now: float) -> list[int]:
        """See `PrefillOrder`."""
        return sorted(range(len(jobs)), key=lambda at: -jobs[at].prompt_tokens)


class OrderedQueue(Generic[Item]):
    """Jobs waiting for prefill, each with its driver's `item`, window by window in the policy's order."""

    def __init__(self, policy: PrefillOrder) -> None:
        self._policy = policy
        self._arrived: deque[tuple[JobView, Item]] = deque()
        self._window: deque[tuple[JobView, Item]] = deque()

    def __len__(self) -> int:
        return len(self._arrived) + len(self._window)

    @property
    def tokens(self) -> int:
        """Prompt tokens that wait."""
        return sum(job.prompt_tokens for queue in (self._window, self._arrived) for job, _ in queue)

    def push(self, job: JobView, item: Item) -> None:
        """Add at the end."""
        self._arrived.append((job, item))

    def pop(self, now: float) -> tuple[JobView, Item]:
        """Take the next. Raises IndexError when empty. `now` is unix seconds."""
        self.peek(now)
        return self._window.popleft()

    def peek(self, now: float) -> tuple[JobView, Item]:
        """The next, which stays. Raises IndexError when empty."""
        if not self._window:
            count = min(self._policy.window, len(self._arrived))
            batch = [self._arrived.popleft() for _ in range(count)]
            order = self._policy.order([job for job, _ in batch], now)
            self._window.extend(batch[at] for at in order)
        return self._window[0]

    def remove(self, job_id: str) -> Item | None:
        """Take a job out, wherever it is; None when it is not here."""
        for queue in (self._window, self._arrived):
            for at, (job, item) in enumerate(queue):
                if job.job_id == job_id:
                    del queue[at]
                    return item
        return None


def _check(name: str, window: int) -> None:
    if window < 1:
        raise InvalidRequest(f"{name}: window must be at least 1, not {window}")
