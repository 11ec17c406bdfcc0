"""Keeps how long answers got, for a length classifier to learn from: opt-in, and never at a request's cost."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gateway.job import Job
from gateway.metrics import GatewayMetrics
from gateway.records_file import RecordsFile
from gateway.settings import GatewaySettings
from shared.domain.job import Phase, ends_of
from shared.errors import InvalidRequest
from shared.runtime.logs import get_log
from shared.runtime.tasks import Background

log = get_log(__name__)
PERIOD_S = 1.0
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
    tasks.every("records", PERIOD_S, recorder.flush)
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
