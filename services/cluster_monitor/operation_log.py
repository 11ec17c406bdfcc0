"""The log of flips, drains, resumes and moves: the newest in memory, all in the database, with their metrics."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram
from sqlalchemy.ext.asyncio import AsyncEngine

from shared.errors import OutcomeUnknown, PolyphaseError
from shared.runtime.logs import get_log
from shared.store.reading import read_flips
from shared.store.tables import flips
from shared.store.write_behind import WriteBehind
from shared.wire.api import Operation, OperationKind, OperationResult

log = get_log(__name__)
KEPT = 1_000  # operations in memory
_FLIP_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0)
_DRAIN_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class OperationLog:
    """The newest operations in memory, all of them in the database. `on_end` is called with each that has ended."""

    def __init__(
        self, store: WriteBehind, metrics: CollectorRegistry, on_end: Callable[[Operation], None] = lambda _: None
    ) -> None:
        self._store = store
        self._on_end = on_end
        self._operations: OrderedDict[str, Operation] = OrderedDict()  # by operation id, newest last
        self._ended = Counter(
            "polyphase_operations", "Flips, drains, resumes and moves by result", ["kind", "result"], registry=metrics
        )
        for kind in OperationKind:
            for result in OperationResult:
                if result is not OperationResult.RUNNING:
                    self._ended.labels(kind, result)  # a series starts at 0: rate() misses a first value other than 0
        self._flip = Histogram(
            "polyphase_flip_seconds",
            "From the end of a flip's drain until the instance serves in its new role",
            buckets=_FLIP_BUCKETS_S,
            registry=metrics,
        )
        self._drain = Histogram(
            "polyphase_drain_seconds", "Waiting for accepted work to end", buckets=_DRAIN_BUCKETS_S, registry=metrics
        )

    async def load(self, engine: AsyncEngine) -> None:
        """Read the newest operations of earlier monitor processes. Raises Unavailable."""
        for operation in await read_flips(engine, Operation, KEPT):  # newest first
            if operation.operation_id in self._operations or len(self._operations) >= KEPT:
                continue
            if operation.result is OperationResult.RUNNING:
                unknown = OutcomeUnknown("the monitor ended while it was under way")
                operation.result = OperationResult.UNKNOWN
                operation.error, operation.code = unknown.message, unknown.code
                self._write(operation)
            self._operations[operation.operation_id] = operation
            self._operations.move_to_end(operation.operation_id, last=False)

    def newest(self, limit: int) -> list[Operation]:
        """The newest first."""
        return list(islice(self.newest_first(), limit))

    def newest_first(self) -> Iterator[Operation]:
        """All operations in memory."""
        return reversed(self._operations.values())

    def find(self, operation_id: str) -> Operation | None:
        """An operation in memory."""
        return self._operations.get(operation_id)

    def begin(self, operation: Operation) -> None:
        """Log a request before it is checked."""
        self._operations[operation.operation_id] = operation
        if len(self._operations) > KEPT:
            self._operations.popitem(last=False)
        self._write(operation)

    def end(self, operation: Operation, result: OperationResult, error: PolyphaseError | None = None) -> None:
        """Log how an operation ended."""
        operation.total_s = max(0.0, time.time() - operation.started_s)
        operation.result = result
        if error is not None:
            operation.error, operation.code = error.message, error.code
        self._write(operation)
        self._ended.labels(operation.kind, result).inc()
        if operation.drain_s is not None:
            self._drain.observe(operation.drain_s)
        if operation.flip_s is not None:
            self._flip.observe(operation.flip_s)
        self._on_end(operation)
        level = log.warning if error else log.info
        level("operation ended", **msgspec.to_builtins(operation))

    def _write(self, operation: Operation) -> None:
        self._store.put(flips, msgspec.to_builtins(operation))
