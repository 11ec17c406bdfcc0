"""Every event that decisions rest on, and the decisions, in a file; and the same decided again from it."""

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
from shared.runtime.logs import get_log
from shared.wire.messages import PlaceRequest

log = get_log(__name__)
_LENGTH_BYTES = 4


class Begun(msgspec.Struct, tag=True):
    """The first entry."""

    seed: int
    prefix_blocks: int = MAX_BLOCKS


class Heard(msgspec.Struct, tag=True):
    """A broadcast: what has changed, and the policies in force."""

    delta: ClusterDelta
    now: float


class Told(msgspec.Struct, tag=True):
    """What an instance told of its prefix cache; without it nothing is known any more."""

    instance_id: str
    delta: PrefixDelta | None


class Decided(msgspec.Struct, tag=True):
    """A route, or the error that there was instead: its code, what it said, and when it said to come again."""

    request: PlaceRequest
    now: float
    route: Route | None
    error: str = ""
    said: str = ""
    retry_after_s: float | None = None

    @classmethod
    def refusal(cls, request: PlaceRequest, now: float, error: PolyphaseError) -> "Decided":
        """There was no route."""
        return cls(request, now, None, error.code, error.message, error.retry_after_s)


class Came(msgspec.Struct, tag=True):
    """A job came to its decode instance."""

    job_id: str
    now: float


class Ended(msgspec.Struct, tag=True):
    """A job was over; met: whether it kept its targets."""

    job_id: str
    output_tokens: int
    met: bool | None = None
    now: float = 0.0


Entry = Begun | Heard | Told | Decided | Came | Ended


class Journal:
    """Entries, each after its length. A context manager; once `most_bytes` are written, or the disk takes no more, it
    stops, and says so: no request fails for it.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._path = path
        self._left = most_bytes
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
        """Append one."""
        if self._file is None:
            return
        data = self._encoder.encode(entry)
        self._left -= _LENGTH_BYTES + len(data)
        if self._left < 0:
            log.warning("the decision log is full; decisions are logged no more", path=str(self._path))
            self._close()
            return
        try:
            self._file.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
        except OSError as error:
            log.warning("decisions are logged no more", path=str(self._path), error=error.strerror)
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # what it had not written yet, on a disk that is full
                file.close()


def read(path: Path) -> Iterator[Entry]:
    """All whole entries; one that was being written when the process died is left out."""
    decoder = msgspec.msgpack.Decoder(Entry)
    with path.open("rb") as file:
        while len(head := file.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
            size = int.from_bytes(head, "big")
            data = file.read(size)
            if len(data) < size:
                return
            yield decoder.decode(data)


def replay(path: Path) -> Iterator[tuple[Decided, Decided]]:
    """Each decision as it was logged, and as it is made again. Raises InvalidRequest for what is no journal."""
    entries = read(path)
    first = next(entries, None)
    if not isinstance(first, Begun):
        raise InvalidRequest(f"{path} does not begin like a decision log")
    decider = Decider(first.seed, first.prefix_blocks)
    for entry in entries:
        if isinstance(entry, Decided):
            yield entry, _again(decider, entry)
        else:
            _take(decider, entry)


def _again(decider: Decider, entry: Decided) -> Decided:
    try:
        route = decider.decide(entry.request.job, entry.request.exclude, entry.now)
    except PolyphaseError as error:
        return Decided.refusal(entry.request, entry.now, error)
    return Decided(entry.request, entry.now, route)


def _take(decider: Decider, entry: Entry) -> None:
    match entry:
        case Heard():
            decider.hear(entry.delta, entry.now)
        case Told():
            if entry.delta is None:
                decider.forget(entry.instance_id)
            else:
                decider.tell(entry.instance_id, entry.delta)
        case Came():
            decider.came(entry.job_id, entry.now)
        case Ended():
            decider.ended(entry.job_id, entry.output_tokens, entry.met, entry.now)
