"""What a gateway tells of its jobs: gathered, so that a short job costs one message and no request waits for it."""

import asyncio
import errno
import json
import os
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gateway.job import Job
from gateway.metrics import GatewayMetrics
from gateway.settings import GatewaySettings
from shared.domain.job import Phase, ends_of
from shared.errors import InvalidRequest
from shared.runtime.logs import get_log
from shared.runtime.tasks import Background
from shared.wire.clients.scheduler import SchedulerClient
from shared.wire.messages import JobReport, Refused

# MERGED records_file.py
# A file of lines that only its owner may read, bounded: the full one becomes NAME.1, and a new one is begun.


_MODE = 0o600


class RecordsFile:
    """`path` and its predecessor, of half of `most_bytes` each. One process, and one thread of it, writes at a time."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self.path = path
        self.older = path.with_name(f"{path.name}.1")
        self.half_bytes = most_bytes // 2
        self._fd = -1
        self._size = 0

    def check(self) -> None:
        """Whether it can be written now. Raises InvalidRequest that says why not."""
        try:
            self._refuse_what_is_there()
            if not os.access(self.path.parent, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, f"files cannot be made in {self.path.parent}")
            with self.opened():
                pass
        except OSError as error:
            raise InvalidRequest(f"record_lengths: {self.path}: {error.strerror or error}") from error

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open it for some lines only, so that one that was moved away or deleted is begun anew. Raises OSError."""
        self._open()
        try:
            yield
        finally:
            self._close()

    def write(self, line: bytes) -> None:
        """Add one line, whole or not at all; it has no more than `half_bytes`. Raises OSError."""
        if self._size + len(line) > self.half_bytes:
            self._close()
            os.replace(self.path, self.older)
            self._open()
        try:
            if os.write(self._fd, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._fd, self._size)  # no reader understands half a line
            raise
        self._size += len(line)

    def _open(self) -> None:
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)
        try:
            found = os.fstat(self._fd)
            if found.st_mode & 0o777 != _MODE:
                os.fchmod(self._fd, _MODE)
            self._size = found.st_size
            if self._size and os.pread(self._fd, 1, self._size - 1) != b"\n":
                self._drop_half_a_line()
        except BaseException:
            self._close()
            raise

    def _drop_half_a_line(self) -> None:
        """What a kill has cut short."""
        self._size = os.pread(self._fd, self._size, 0).rfind(b"\n") + 1
        os.ftruncate(self._fd, self._size)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _refuse_what_is_there(self) -> None:
        for file in (self.path, self.older):
            if not file.exists():
                continue
            if not file.is_file():
                raise InvalidRequest(f"record_lengths: {file} is no regular file")
            if (size := file.stat().st_size) > self.half_bytes:
                raise InvalidRequest(
                    f"record_lengths: {file} has {size} bytes already, over half of record_bytes; move it away"
                )


# MERGED recording.py
# Keeps how long answers got, for a length classifier to learn from: opt-in, and never at a request's cost.

RECORDING_PERIOD_S = 1.0
KEPT = 4096  # records that wait to be written
_CLOSE_S = 2.0  # the disk has so long to take the last ones
_WHOLE = ("stop", "length")  # how answers end of which the length is their own, or that of their limit
Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True)
class Answered:
    """A finished job: of its prompt only what a classifier would be shown."""

    seen: list[int]
    prompt_tokens: int
    output_tokens: int
    cut: bool
    max_tokens: int


class Recorder:
    """Takes jobs on the event loop, decodes and writes them in a thread of its own.

    What cannot be written waits for the next time; what there is no room for is dropped and counted.
    """

    def __init__(self, file: RecordsFile, decode: Decode, metrics: GatewayMetrics) -> None:
        self._file = file
        self._decode = decode
        self._waiting: deque[Answered] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="records")
        self._written = metrics.records.labels(outcome="written")
        self._dropped = metrics.records.labels(outcome="dropped")
        self._failures = metrics.record_failures
        self._troubled = False  # as the log was told
        self._told: set[str] = set()  # of why records were dropped

    def note(self, job: Job) -> None:
        """Of a job that is over; only one that has its whole answer is kept."""
        if job.phase is not Phase.COMPLETED or job.finish_reason not in _WHOLE:
            return
        if len(self._waiting) >= KEPT:
            self._drop("too many wait to be written")
            return
        prompt, cut = job.spec.prompt_token_ids, job.finish_reason == "length"
        seen = ends_of(prompt)
        self._waiting.append(Answered(seen, len(prompt), len(job.tokens), cut, job.spec.max_tokens))

    async def flush(self) -> None:
        """Write what waits."""
        if self._waiting:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._write)

    async def close(self) -> None:
        """Write the last ones, if the disk takes them within a moment."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self.flush()
        except TimeoutError:
            log.error("records are lost: the disk is too slow", file=str(self._file.path), records=len(self._waiting))
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _write(self) -> None:
        """In the thread, which alone takes anything out of the queue."""
        try:
            with self._file.opened():
                for _ in range(len(self._waiting)):
                    self._write_next()
                    self._waiting.popleft()
        except OSError as error:
            self._failures.inc()
            if not self._troubled:
                log.error("answers' lengths are not recorded for now", file=str(self._file.path), error=str(error))
            self._troubled = True
            return
        if self._troubled:
            log.info("answers' lengths are recorded again", file=str(self._file.path))
        self._troubled = False

    def _write_next(self) -> None:
        one = self._waiting[0]
        try:
            line = self._line(one)
        except Exception as error:  # tokenizers raises bare Exception
            self._drop("a prompt cannot be decoded", str(error))
            return
        if len(line) > self._file.half_bytes:
            self._drop("a line is longer than half of record_bytes")
            return
        self._file.write(line)
        self._written.inc()

    def _line(self, one: Answered) -> bytes:
        """All ASCII: of other characters some would end a line for a reader."""
        figures = {
            "prompt_tokens": one.prompt_tokens,
            "output_tokens": one.output_tokens,
            "cut": one.cut,
            "max_tokens": one.max_tokens,
        }
        return json.dumps({"seen": self._decode(one.seen), **figures}).encode() + b"\n"

    def _drop(self, why: str, error: str = "") -> None:
        self._dropped.inc()
        if why not in self._told:
            self._told.add(why)
            log.error("a record of an answer's length is dropped; others may be, too", why=why, error=error or None)


@asynccontextmanager
async def recording(
    settings: GatewaySettings, metrics: GatewayMetrics, tasks: Background
) -> AsyncIterator[Recorder | None]:
    """A recorder that writes while the block lasts; None where nobody asked for it.

    Raises InvalidRequest where the file cannot be written, or the model has no tokenizer to decode with.
    """
    if settings.record_lengths is None:
        yield None
        return
    file = RecordsFile(settings.record_lengths, settings.record_bytes)
    file.check()
    recorder = Recorder(file, seen_text(settings.model), metrics)
    tasks.every("records", RECORDING_PERIOD_S, recorder.flush)
    try:
        yield recorder
    finally:
        await recorder.close()


def seen_text(model: str) -> Decode:
    """From a prompt's ends to the text that the predictor's classifier sees, by the same tokenizer, loaded alike.

    It is not the front end's, which is changed by every prompt that it reads and must not be used in two threads.
    """
    try:
        tokenizer = _tokenizer(model)
    except Exception as error:  # tokenizers raises bare Exception
        raise InvalidRequest(f"record_lengths: model {model!r} has no usable tokenizer: {error}") from error

    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    return decode


def _tokenizer(model: str) -> Any:
    file = Path(model) / "tokenizer.json"
    if file.is_file():
        return Tokenizer.from_file(str(file))
    from transformers import AutoTokenizer  # only where the model is not a folder: it is slow to import

    return AutoTokenizer.from_pretrained(model).backend_tokenizer


log = get_log(__name__)
PERIOD_S = 0.1
REFRESH_S = 3.0  # between two words of every open job; schedulers drop those that they hear nothing of
_KEPT = 10_000  # final reports kept while no scheduler is there
_BATCH = 200
_REPORT_S = 2.0


class Reporter:
    """Keeps the newest report of each job until the next `flush`."""

    def __init__(self, schedulers: SchedulerClient, metrics: GatewayMetrics, recorder: Recorder | None = None) -> None:
        self._schedulers = schedulers
        self._metrics = metrics
        self._recorder = recorder
        self._open: dict[str, Job] = {}
        metrics.requests.open = self._open.values
        self._changed: dict[str, Job] = {}
        self._final: deque[JobReport] = deque()
        self._refused: Counter[tuple[str, str]] = Counter()
        self._untold: list[Refused] = []
        self._refreshed_mono = 0.0
        self._news = asyncio.Event()

    def report(self, job: Job, outcome: str = "") -> None:
        """Note that a job changed; at its end, with its outcome."""
        job_id = job.spec.job_id
        self._news.set()
        if job.phase.final:
            self._open.pop(job_id, None)
            self._changed.pop(job_id, None)
            final = job.report(outcome)
            self._keep(final)
            self._metrics.ended(job, final)
            if self._recorder is not None:
                self._recorder.note(job)
        else:
            self._open[job_id] = self._changed[job_id] = job

    def refused(self, slo: str, code: str) -> None:
        """A request was turned away before it was a job: told at the next refresh."""
        self._refused[slo, code] += 1

    async def run(self) -> None:
        """Flush whenever there is something to tell, PERIOD_S apart at least and REFRESH_S at most."""
        clock = asyncio.get_running_loop().time
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._refreshed_mono + REFRESH_S - clock())):
                    await self._news.wait()
            self._news.clear()
            await self.flush()
            if self._final:  # nobody took them
                self._news.set()
            await asyncio.sleep(PERIOD_S)

    async def flush(self) -> None:
        """Send what has gathered, in messages of bounded size; final reports wait for a scheduler if need be."""
        changed, self._changed = self._changed, {}
        waiting = [job.report() for job in changed.values()]
        while self._final or waiting:
            batch = [self._final.popleft() for _ in range(min(_BATCH, len(self._final)))]
            batch += [waiting.pop() for _ in range(min(_BATCH - len(batch), len(waiting)))]
            left = batch
            try:
                left = await self._schedulers.report(batch, timeout_s=_REPORT_S)
            finally:
                self._final.extendleft(report for report in reversed(left) if report.phase.final)
            if left:  # none is there: the jobs go on, and what they were is told later
                return
        await self._refresh()

    async def _refresh(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._refreshed_mono < REFRESH_S:
            return
        self._refreshed_mono = now
        jobs = list(self._open.values())
        for start in range(0, max(1, len(jobs)), _BATCH):
            some = [job.report() for job in jobs[start : start + _BATCH] if not job.phase.final]
            await self._schedulers.refresh(some, timeout_s=_REPORT_S)
        await self._tell_refusals()

    async def _tell_refusals(self) -> None:
        """Those that nobody has taken yet are told again under the same keys."""
        self._untold += [Refused(uuid.uuid4().hex, slo, code, count) for (slo, code), count in self._refused.items()]
        self._refused.clear()
        del self._untold[:-_KEPT]
        if self._untold and await self._schedulers.refused(self._untold, timeout_s=_REPORT_S):
            self._untold = []

    async def leave(self) -> None:
        """Hand over what is left, and say that this gateway stops in good order."""
        await self.flush()
        await self._tell_refusals()
        await self._schedulers.leave(timeout_s=_REPORT_S)

    def _keep(self, report: JobReport) -> None:
        self._final.append(report)
        if len(self._final) > _KEPT:
            lost = self._final.popleft()
            self._metrics.reports_dropped.inc()
            log.error("a final report is dropped: no scheduler took any for long", job_id=lost.job_id, kept=_KEPT)
