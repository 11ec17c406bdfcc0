"""The decision log: every event that placement decisions rest on, and the decisions; and their replay."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec

from shared.domain.cluster import ClusterDelta
from shared.domain.prompt import PrefixDelta
from shared.domain.route import Route
from shared.errors import InvalidRequest, PolyphaseError
from shared.policy.decider import Decider
from shared.policy.prefix_index import MAX_BLOCKS
from shared.policy.truth import Compared
from shared.runtime.logs import get_log
from shared.wire.messages import PlaceRequest

log = get_log(__name__)
_LENGTH_BYTES = 4


class LogStarted(msgspec.Struct, tag=True):
    """The first entry of a log."""

    seed: int
    prefix_blocks: int = MAX_BLOCKS


class BroadcastApplied(msgspec.Struct, tag=True):
    """A broadcast of the monitor that was applied at `now`, unix seconds; `now` means the same in the other entries."""

    delta: ClusterDelta
    now: float


class PrefixesReported(msgspec.Struct, tag=True):
    """A change of an instance's prefix cache; None: nothing is known of the cache any more."""

    instance_id: str
    delta: PrefixDelta | None


class Decision(msgspec.Struct, tag=True):
    """A route, or the code, message and retry time of the error that was raised instead."""

    request: PlaceRequest
    now: float
    route: Route | None
    error: str = ""
    message: str = ""
    retry_after_s: float | None = None

    @classmethod
    def refusal(cls, request: PlaceRequest, now: float, error: PolyphaseError) -> "Decision":
        return cls(request, now, None, error.code, error.message, error.retry_after_s)


class DecodeStarted(msgspec.Struct, tag=True):
    """A job has arrived at its decode instance."""

    job_id: str
    now: float


class JobEnded(msgspec.Struct, tag=True):
    """A job has ended; met: whether it met its targets. compared: as in `Decider.ended`."""

    job_id: str
    output_tokens: int
    met: bool | None = None
    now: float = 0.0
    compared: Compared | None = None


Entry = LogStarted | BroadcastApplied | PrefixesReported | Decision | DecodeStarted | JobEnded


class Journal:
    """Writes entries, each after its length. Use as a context manager.

    Once `max_bytes` are written, or the disk is full, it logs a warning and stops: no request fails for it.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._left = max_bytes
        self._file: BinaryIO | None = None
        self._encoder = msgspec.msgpack.Encoder()

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("wb")
        except OSError as error:
            raise InvalidRequest(f"decision_log: cannot write {self._path}: {error.strerror}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def add(self, entry: Entry) -> None:
        if self._file is None:
            return
        data = self._encoder.encode(entry)
        self._left -= _LENGTH_BYTES + len(data)
        if self._left < 0:
            log.warning("the decision log is full; decisions are no longer logged", path=str(self._path))
            self._close()
            return
        try:
            self._file.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
        except OSError as error:
            log.warning("decisions are no longer logged", path=str(self._path), error=error.strerror)
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # of buffered data, on a full disk
                file.close()


def read(path: Path) -> Iterator[Entry]:
    """All complete entries; one that was being written when the process died is left out.

    Raises InvalidRequest for an entry that this version does not know.
    """
    decoder = msgspec.msgpack.Decoder(Entry)
    with path.open("rb") as file:
        while len(head := file.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
            size = int.from_bytes(head, "big")
            data = file.read(size)
            if len(data) < size:
                return
            try:
                entry = decoder.decode(data)
            except msgspec.DecodeError as error:
                raise InvalidRequest(f"{path} is not a decision log of this version: {error}") from error
            yield entry


def replay(path: Path) -> Iterator[tuple[Decision, Decision]]:
    """Each decision as it was logged, and as it is made again. Raises InvalidRequest if `path` is not such a log."""
    entries = read(path)
    first = next(entries, None)
    if not isinstance(first, LogStarted):
        raise InvalidRequest(f"{path} does not begin like a decision log")
    decider = Decider(first.seed, first.prefix_blocks)
    for entry in entries:
        if isinstance(entry, Decision):
            yield entry, _decide(decider, entry)
        else:
            _apply(decider, entry)


def _decide(decider: Decider, entry: Decision) -> Decision:
    try:
        route = decider.decide(entry.request.job, entry.request.exclude, entry.now)
    except PolyphaseError as error:
        return Decision.refusal(entry.request, entry.now, error)
    return Decision(entry.request, entry.now, route)


def _apply(decider: Decider, entry: Entry) -> None:
    match entry:
        case BroadcastApplied():
            decider.apply(entry.delta, entry.now)
        case PrefixesReported():
            if entry.delta is None:
                decider.forget_prefixes(entry.instance_id)
            else:
                decider.apply_prefixes(entry.instance_id, entry.delta)
        case DecodeStarted():
            decider.arrived(entry.job_id, entry.now)
        case JobEnded():
            decider.ended(entry.job_id, entry.output_tokens, entry.met, entry.now, entry.compared)
