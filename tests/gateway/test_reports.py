"""Reports on jobs: messages to schedulers, and the file of lengths."""

import asyncio
import json
import os
import stat
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from gateway import reports
from gateway.job import Job
from gateway.metrics import GatewayMetrics
from gateway.reports import MAX_WAITING, REFRESH_S, Recorder, RecordsFile, Reporter, recording, seen_text
from gateway.settings import GatewaySettings
from predictor.examples import load_served
from shared.domain.job import PREDICTED_FROM, Phase, ends_of
from shared.errors import InvalidRequest
from shared.runtime.tasks import background
from shared.timeline import Span
from shared.wire.messages import JobReport, Refused, TokenStep
from tests.gateway.api import MODEL, PROMPT, Api
from tests.gateway.cluster import make_job, until


class Schedulers:
    """Accepts messages while `up`."""

    def __init__(self) -> None:
        self.up = True
        self.reported: list[list[JobReport]] = []
        self.refreshed = 0
        self.refusals: list[list[Refused]] = []
        self.left = False

    async def report(self, reports: list[JobReport], *, timeout_s: float) -> list[JobReport]:
        self.reported.append(reports)
        return [] if self.up else reports

    async def refresh(self, open_jobs: list[JobReport], *, timeout_s: float) -> None:
        self.refreshed += 1

    async def refused(self, counts: list[Refused], *, timeout_s: float) -> bool:
        self.refusals.append(list(counts))
        return self.up

    async def leave(self, *, timeout_s: float) -> None:
        self.left = True


@asynccontextmanager
async def reporter_of(schedulers: Schedulers) -> AsyncIterator[Reporter]:
    reporter = Reporter(schedulers, GatewayMetrics("demo", CollectorRegistry()))
    running = asyncio.create_task(reporter.run())
    await asyncio.sleep(0)
    yield reporter
    running.cancel()


async def test_a_report_leaves_soon_and_no_other_while_nothing_changes() -> None:
    schedulers, (job, _) = Schedulers(), make_job([1, 2, 3], 5)
    async with reporter_of(schedulers) as reporter:
        reporter.report(job)
        await until(lambda: schedulers.reported, REFRESH_S - 1)
        assert [report.job_id for report in schedulers.reported[0]] == [job.spec.job_id]
        await asyncio.sleep(0.1)
        assert (len(schedulers.reported), schedulers.refreshed) == (1, 1)


async def test_a_job_that_ends_soon_sends_one_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is reported at once, and its begin not at all."""
    monkeypatch.setattr("gateway.reports.PERIOD_S", 3600.0)
    schedulers, (job, _) = Schedulers(), make_job([1, 2, 3], 5)
    async with reporter_of(schedulers) as reporter:
        reporter.report(job)
        for _ in range(5):  # turns of the loop, in which the reporter begins to wait for the end
            await asyncio.sleep(0)
        job.phase = Phase.FAILED
        reporter.report(job, "lost")
        await until(lambda: schedulers.reported)
    assert [[report.outcome for report in sent] for sent in schedulers.reported] == [["lost"]]


async def test_a_final_report_that_no_scheduler_accepts_is_repeated() -> None:
    schedulers, (job, _) = Schedulers(), make_job([1, 2, 3], 5)
    schedulers.up, job.phase = False, Phase.FAILED
    async with reporter_of(schedulers) as reporter:
        reporter.report(job, "lost")
        await until(lambda: len(schedulers.reported) >= 3)
        schedulers.up = True
        count = len(schedulers.reported)
        await until(lambda: len(schedulers.reported) > count)
        await asyncio.sleep(0.1)
        assert len(schedulers.reported) == count + 1


async def test_refusals_are_reported_and_repeated_under_the_same_keys() -> None:
    schedulers = Schedulers()
    schedulers.up = False
    reporter = Reporter(schedulers, GatewayMetrics("demo", CollectorRegistry()))
    for code in ("busy", "busy", "unavailable"):
        reporter.refused("chat", code)
    await reporter.flush()
    (first,) = schedulers.refusals
    counts = {("chat", "busy", 2), ("chat", "unavailable", 1)}
    assert {(each.slo, each.code, each.count) for each in first} == counts
    schedulers.up = True
    reporter.refused("chat", "busy")
    await reporter.leave()
    again = schedulers.refusals[-1]
    assert (again[:2], again[2].code, again[2].count, schedulers.left) == (first, "busy", 1, True)
    count = len(schedulers.refusals)
    await reporter.leave()
    assert len(schedulers.refusals) == count


def test_the_report_of_a_running_job_has_its_timeline_and_its_caller() -> None:
    job, _ = make_job([1, 2, 3], 5, caller="anna")
    job.record_until(Span.INTAKE, job.spec.arrived_s + 0.1)
    report = job.report()
    assert [span.span for span in report.timeline().spans] == [Span.INTAKE]
    assert (report.caller, report.asked, report.prediction) == ("anna", False, None)


# The file of lengths

BYTES = 4096


def finished(length: int = 5, finish_reason: str = "length", prompt: list[int] = PROMPT) -> Job:
    job, _ = make_job(prompt, max_tokens=64)
    job.accept(TokenStep(list(range(length)), finish_reason))
    job.phase = Phase.COMPLETED
    return job


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


class Recording:
    """A recorder, its file and its metrics."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.decode: Callable[[list[int]], str] = str
        self.registry = CollectorRegistry()
        self.file = RecordsFile(path, BYTES)
        self.recorder = Recorder(self.file, lambda ids: self.decode(ids), GatewayMetrics("demo", self.registry))

    async def record(self, *jobs: Job) -> None:
        for job in jobs:
            self.recorder.note(job)
        await self.recorder.flush()

    def counts(self) -> tuple[float, float, float]:
        """Records written and dropped, and failures."""
        name, read = "polyphase_gateway_records_total", self.registry.get_sample_value
        written, dropped = (read(name, {"outcome": outcome}) or 0.0 for outcome in ("written", "dropped"))
        return written, dropped, read("polyphase_gateway_record_failures_total") or 0.0

    def lengths(self) -> list[int]:
        return [line["output_tokens"] for line in lines(self.path)]


@pytest.fixture
def kept(tmp_path: Path) -> Recording:
    (tmp_path / "disk").mkdir()
    return Recording(tmp_path / "disk" / "lengths.jsonl")


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_each_answered_request_leaves_a_line(api: Api) -> None:
    path, decode = api.settings.record_lengths, api.cluster.decodes[0]
    assert path is not None
    reached = decode.hang_at(2)
    given_up = asyncio.create_task(api.complete(prompt=[411, 412, 413, 414, 415], max_tokens=53))
    await reached.wait()
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    await asyncio.wait_for(decode.cancelled.wait(), 20)
    decode.before_token = None
    long = list(range(300, 300 + PREDICTED_FROM + 50))
    seen = load_served(str(MODEL)).seen_text
    cut = {"seen": seen(long), "prompt_tokens": len(long), "output_tokens": 7, "cut": True, "max_tokens": 7}
    stopped = {"seen": seen(PROMPT[:3]), "prompt_tokens": 3, "output_tokens": 1, "cut": False, "max_tokens": 9}
    api.cluster.prefill.stop_token = (sum(PROMPT[:3]) * 31 + 3 * 7) % 1000  # the first token
    assert (await api.complete(prompt=PROMPT[:3], max_tokens=9)).status_code == 200
    assert (await api.complete(prompt=long, max_tokens=7)).status_code == 200
    await until(lambda: path.exists() and {str(cut), str(stopped)} <= set(map(str, lines(path))), 20.0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not any(line["max_tokens"] == 53 for line in lines(path))


@pytest.mark.parametrize("length", [0, 3, PREDICTED_FROM, 5 * PREDICTED_FROM])
def test_the_text_of_a_record_is_the_one_that_the_classifier_sees(length: int) -> None:
    ids = [(7 * at) % 4000 for at in range(length)]
    assert seen_text(str(MODEL))(ends_of(ids)) == load_served(str(MODEL)).seen_text(ids)


async def test_only_whole_answers_count(kept: Recording) -> None:
    cancelled, failed, repeating = finished(2, ""), finished(3, ""), finished(4, "repetition")
    cancelled.phase, failed.phase = Phase.CANCELLED, Phase.FAILED
    await kept.record(cancelled, failed, repeating, finished(5, "stop"), finished(6))
    assert [(line["output_tokens"], line["cut"]) for line in lines(kept.path)] == [(5, False), (6, True)]
    assert kept.counts() == (2, 0, 0)


async def test_both_files_stay_within_the_bound_and_hold_the_newest(kept: Recording) -> None:
    for length in range(100):
        await kept.record(finished(length + 1))
        sizes = [file.stat().st_size for file in (kept.path, kept.file.older) if file.exists()]
        assert sum(sizes) <= BYTES
        assert max(sizes) <= BYTES // 2
    await kept.record(*(finished(length + 1) for length in range(100, 200)))  # one batch may fill several files
    recorded = [line["output_tokens"] for file in (kept.file.older, kept.path) for line in lines(file)]
    assert recorded == list(range(201 - len(recorded), 201))
    assert len(recorded) > 10
    assert {stat.S_IMODE(file.stat().st_mode) for file in (kept.path, kept.file.older)} == {0o600}
    assert sorted(kept.path.parent.iterdir()) == [kept.path, kept.file.older]
    assert kept.counts() == (200, 0, 0)


async def test_a_prompt_may_have_any_character_and_one_that_cannot_be_decoded_is_dropped(kept: Recording) -> None:
    text = "a\nb\x0bc\u2028d\x85e\x00"

    def decode(ids: list[int]) -> str:
        if ids == [1]:
            raise RuntimeError("not this one")
        return text * (BYTES if ids == [2] else 1)

    kept.decode = decode
    await kept.record(finished(prompt=[1]), finished(prompt=[2]), finished(7, prompt=[3]))
    (line,) = kept.path.read_text().splitlines()
    assert json.loads(line)["seen"] == text
    assert kept.counts()[1] == 2


async def test_a_folder_that_vanishes_is_logged_once_and_costs_nothing_once_it_is_back(kept: Recording) -> None:
    folder = kept.path.parent
    await kept.record(finished(1))
    folder.rename(folder.with_name("away"))
    with capture_logs() as logged:
        await kept.record(finished(2))
        await kept.record(finished(3))
        assert kept.counts() == (1, 0, 2)
        folder.mkdir()
        await kept.record(finished(4))
    assert kept.lengths() == [2, 3, 4]
    assert [each["log_level"] for each in logged] == ["error", "info"]


async def test_a_full_disk_or_a_kill_leaves_no_half_a_line(kept: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    await kept.record(finished(1))
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
        await kept.record(finished(2))
    assert kept.lengths() == [1]
    await kept.record()
    assert (kept.lengths(), kept.counts()[2]) == ([1, 2], 1)
    with kept.path.open("ab") as file:
        file.write(b'{"seen": "hal')
    await kept.record(finished(3))
    assert kept.lengths() == [1, 2, 3]


async def test_a_disk_that_hangs_holds_up_no_job_and_takes_bounded_memory(
    kept: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "_CLOSE_S", 0.01)
    go, begun = threading.Event(), threading.Event()

    def hang(_: list[int]) -> str:
        begun.set()
        assert go.wait(20)
        return "x"

    kept.decode = hang
    kept.recorder.note(finished())
    flushing = asyncio.create_task(kept.recorder.flush())
    await until(begun.is_set)
    job = finished()
    with capture_logs() as logged:
        for _ in range(MAX_WAITING + 9):
            kept.recorder.note(job)
    assert (flushing.done(), kept.counts()[1], len(logged)) == (False, 10, 1)
    go.set()
    await flushing
    await kept.recorder.flush()
    assert kept.counts()[0] == MAX_WAITING
    go.clear()
    kept.recorder.note(job)
    async with asyncio.timeout(10):
        await kept.recorder.close()
    go.set()


async def begin(**changes: Any) -> bool:
    """Whether a gateway with these settings has a recorder."""
    settings = GatewaySettings(schedulers=("x",), **{"model": str(MODEL), **changes})
    metrics = GatewayMetrics("demo", CollectorRegistry())
    async with background() as tasks, recording(settings, metrics, tasks) as recorder:
        return recorder is not None


@pytest.mark.parametrize(
    "case", ["no folder", "a folder", "too large", "older too large", "a file as folder", "no tokenizer"]
)
async def test_a_file_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path, case: str) -> None:
    path, changes, message = tmp_path / "lengths.jsonl", dict[str, Any](), r"record_lengths: .*lengths\.jsonl"
    match case:
        case "no folder":
            path = tmp_path / "nowhere" / "lengths.jsonl"
        case "a folder":
            path.mkdir()
        case "too large":
            path.write_bytes(b"{}\n" * (1 << 16))
        case "older too large":
            path.with_name("lengths.jsonl.1").write_bytes(b"{}\n" * (1 << 16))
        case "a file as folder":
            path.write_bytes(b"{}\n")
            path = path / "lengths.jsonl"
        case _:
            (tmp_path / "tokenizer.json").write_text("{}")
            changes, message = {"model": str(tmp_path)}, r"record_lengths: model .* has no usable tokenizer"
    with pytest.raises(InvalidRequest, match=message):
        await begin(record_lengths=path, record_bytes=1 << 17, **changes)


async def test_nothing_is_recorded_without_the_setting() -> None:
    assert not await begin(model="no such model")
