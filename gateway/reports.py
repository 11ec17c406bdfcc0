"""Reports on jobs: batched messages to the schedulers and, if enabled, a bounded file with the lengths of answers, from
which a length classifier can be trained. No request waits for either.
"""

import asyncio
import errno
import json
import os
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
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

log = get_log(__name__)
PERIOD_S = 0.1
REFRESH_S = 3.0  # between two reports of each open job; schedulers drop jobs without reports
_MAX_FINAL = 10_000  # final reports kept while no scheduler is there
_BATCH = 200  # reports in one message
_REPORT_S = 2.0


class Reporter:
    """Keeps the changed jobs until the next `flush`, so that a short job costs one message."""

    def __init__(
        self, schedulers: SchedulerClient, metrics: GatewayMetrics, recorder: "Recorder | None" = None
    ) -> None:
        self._schedulers = schedulers
        self._metrics = metrics
        self._recorder = recorder
        self._open: dict[str, Job] = {}
        metrics.requests.open = self._open.values
        self._changed: dict[str, Job] = {}
        self._final: deque[JobReport] = deque()
        self._refused: Counter[tuple[str, str]] = Counter()
        self._unsent: list[Refused] = []
        self._refreshed_mono = 0.0
        self._changes = asyncio.Event()
        self._ended = asyncio.Event()

    def report(self, job: Job, outcome: str = "") -> None:
        """Note that a job changed; at its end, with its outcome."""
        job_id = job.spec.job_id
        self._changes.set()
        if job.phase.final:
            self._open.pop(job_id, None)
            self._changed.pop(job_id, None)
            final = job.report(outcome)
            self._keep(final)
            self._ended.set()
            self._metrics.ended(job, final)
            if self._recorder is not None:
                self._recorder.note(job)
        else:
            self._open[job_id] = self._changed[job_id] = job

    def refused(self, slo: str, code: str) -> None:
        """A request was refused before it was a job; reported at the next refresh."""
        self._refused[slo, code] += 1

    async def run(self) -> None:
        """Flush after changes, at intervals of at least PERIOD_S and at most REFRESH_S. The change of an open job waits
        PERIOD_S for its end.
        """
        clock = asyncio.get_running_loop().time
        while True:
            await _set_within(self._changes, self._refreshed_mono + REFRESH_S - clock())
            if self._changed:
                await _set_within(self._ended, PERIOD_S)
            self._changes.clear()
            self._ended.clear()
            await self.flush()
            if self._final:  # no scheduler accepted them
                self._changes.set()
            await asyncio.sleep(PERIOD_S)

    async def flush(self) -> None:
        """Send reports of the changed jobs, in messages of bounded size; final reports wait for a scheduler."""
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
            if left:  # no scheduler is there: final reports are sent later
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
        await self._report_refusals()

    async def _report_refusals(self) -> None:
        """Refusals that no scheduler has accepted yet are sent again with the same keys."""
        self._unsent += [Refused(uuid.uuid4().hex, slo, code, count) for (slo, code), count in self._refused.items()]
        self._refused.clear()
        del self._unsent[:-_MAX_FINAL]
        if self._unsent and await self._schedulers.refused(self._unsent, timeout_s=_REPORT_S):
            self._unsent = []

    async def leave(self) -> None:
        """Send the last reports, and announce that this gateway stops."""
        await self.flush()
        await self._report_refusals()
        await self._schedulers.leave(timeout_s=_REPORT_S)

    def _keep(self, report: JobReport) -> None:
        self._final.append(report)
        if len(self._final) > _MAX_FINAL:
            lost = self._final.popleft()
            self._metrics.reports_dropped.inc()
            log.error("a final report is dropped: no scheduler accepted reports", job_id=lost.job_id, kept=_MAX_FINAL)


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()


RECORDING_PERIOD_S = 1.0
MAX_WAITING = 4096  # records that wait to be written
_CLOSE_S = 2.0  # for the disk to write the last records
_RECORDED = ("stop", "length")  # finish reasons of answers that are complete or reached their limit
Decode = Callable[[list[int]], str]


@dataclass(frozen=True, slots=True)
class Answered:
    """A finished job."""

    seen: list[int]  # the part of its prompt that a classifier gets
    prompt_tokens: int
    output_tokens: int
    cut: bool
    max_tokens: int


class Recorder:
    """Accepts jobs on the event loop; decodes and writes their records in a thread of its own.

    Records that cannot be written wait for the next attempt; records without room are dropped and counted.
    """

    def __init__(self, file: "RecordsFile", decode: Decode, metrics: GatewayMetrics) -> None:
        self._file = file
        self._decode = decode
        self._waiting: deque[Answered] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="records")
        self._written = metrics.records.labels(outcome="written")
        self._dropped = metrics.records.labels(outcome="dropped")
        self._failures = metrics.record_failures
        self._failing = False  # as the log says
        self._logged: set[str] = set()  # reasons for dropped records

    def note(self, job: Job) -> None:
        """Keep the record of a job that is over, if it has its whole answer."""
        if job.phase is not Phase.COMPLETED or job.finish_reason not in _RECORDED:
            return
        if len(self._waiting) >= MAX_WAITING:
            self._drop("too many wait to be written")
            return
        prompt, cut = job.spec.prompt_token_ids, job.finish_reason == "length"
        self._waiting.append(Answered(ends_of(prompt), len(prompt), len(job.tokens), cut, job.spec.max_tokens))

    async def flush(self) -> None:
        if self._waiting:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._write)

    async def close(self) -> None:
        """Write the last records, if the disk is fast enough."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self.flush()
        except TimeoutError:
            log.error("records are lost: the disk is too slow", file=str(self._file.path), records=len(self._waiting))
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _write(self) -> None:
        """Runs in the thread, which alone removes records from the queue."""
        try:
            with self._file.opened():
                for _ in range(len(self._waiting)):
                    self._write_next()
                    self._waiting.popleft()
        except OSError as error:
            self._failures.inc()
            if not self._failing:
                log.error(
                    "the lengths of answers are not recorded for now", file=str(self._file.path), error=str(error)
                )
            self._failing = True
            return
        if self._failing:
            log.info("lengths of answers are recorded again", file=str(self._file.path))
        self._failing = False

    def _write_next(self) -> None:
        answered = self._waiting[0]
        try:
            line = self._line(answered)
        except Exception as error:  # tokenizers raises bare Exception
            self._drop("a prompt cannot be decoded", str(error))
            return
        if len(line) > self._file.half_bytes:
            self._drop("a line is longer than half of record_bytes")
            return
        self._file.write(line)
        self._written.inc()

    def _line(self, answered: Answered) -> bytes:
        """Only ASCII: some other characters would end a line for a reader."""
        return json.dumps({**asdict(answered), "seen": self._decode(answered.seen)}).encode() + b"\n"

    def _drop(self, why: str, error: str = "") -> None:
        self._dropped.inc()
        if why not in self._logged:
            self._logged.add(why)
            log.error("a record of an answer's length is dropped; others may be, too", why=why, error=error or None)


@asynccontextmanager
async def recording(
    settings: GatewaySettings, metrics: GatewayMetrics, tasks: Background
) -> AsyncIterator[Recorder | None]:
    """A recorder that writes while the block lasts; None where the settings name no file.

    Raises InvalidRequest where the file cannot be written, or the model has no tokenizer to decode with.
    """
    if settings.record_lengths is None:
        yield None
        return
    file = RecordsFile(settings.record_lengths, settings.record_bytes)
    file.check()
    recorder = Recorder(file, seen_text(settings.model, settings.trust_remote_code), metrics)
    tasks.every("records", RECORDING_PERIOD_S, recorder.flush)
    try:
        yield recorder
    finally:
        await recorder.close()


def seen_text(model: str, trust_remote_code: bool = False) -> Decode:
    """Decodes the ends of a prompt to the text that the predictor's classifier gets, with a tokenizer of its own: the
    front end's is changed by each prompt that it reads, and must not be used in two threads.
    """
    try:
        tokenizer = _tokenizer(model, trust_remote_code)
    except Exception as error:  # tokenizers raises bare Exception
        raise InvalidRequest(f"record_lengths: model {model!r} has no usable tokenizer: {error}") from error

    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=True))

    return decode


def _tokenizer(model: str, trust_remote_code: bool) -> Any:
    file = Path(model) / "tokenizer.json"
    if file.is_file():
        return Tokenizer.from_file(str(file))
    from transformers import AutoTokenizer  # only where the model is not a folder: it is slow to import

    return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code).backend_tokenizer


_MODE = 0o600


class RecordsFile:
    """A bounded file of lines that only its owner may read; a full file is renamed to NAME.1, and a new one is begun.

    Each of the two may have half of `max_bytes`. Only one process, and one thread of it, may write.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.older = path.with_name(f"{path.name}.1")
        self.half_bytes = max_bytes // 2
        self._fd = -1
        self._size = 0

    def check(self) -> None:
        """Raises InvalidRequest if the file cannot be written."""
        try:
            self._check_existing()
            if not os.access(self.path.parent, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, f"files cannot be made in {self.path.parent}")
            with self.opened():
                pass
        except OSError as error:
            raise InvalidRequest(f"record_lengths: {self.path}: {error.strerror or error}") from error

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open the file for some lines only; a file that was moved or deleted is created again. Raises OSError."""
        self._open()
        try:
            yield
        finally:
            self._close()

    def write(self, line: bytes) -> None:
        """Append one line of at most `half_bytes`, whole or not at all. Raises OSError."""
        if self._size + len(line) > self.half_bytes:
            self._close()
            os.replace(self.path, self.older)
            self._open()
        try:
            if os.write(self._fd, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._fd, self._size)  # removes the partial line
            raise
        self._size += len(line)

    def _open(self) -> None:
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)
        try:
            found = os.fstat(self._fd)
            if found.st_mode & 0o777 != _MODE:
                os.fchmod(self._fd, _MODE)
            self._size = found.st_size
            if self._size and os.pread(self._fd, 1, self._size - 1) != b"\n":  # a kill has interrupted a line
                self._size = os.pread(self._fd, self._size, 0).rfind(b"\n") + 1
                os.ftruncate(self._fd, self._size)
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _check_existing(self) -> None:
        for file in (self.path, self.older):
            if not file.exists():
                continue
            if not file.is_file():
                raise InvalidRequest(f"record_lengths: {file} is not a regular file")
            if (size := file.stat().st_size) > self.half_bytes:
                raise InvalidRequest(
                    f"record_lengths: {file} has {size} bytes already, over half of record_bytes; move it away"
                )
