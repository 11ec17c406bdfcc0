"""Reports on jobs: messages to schedulers, and the file of lengths."""

import asyncio
import json
import os
import stat
import threading
from collections.abc import Callable
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
from tests.gateway.api import MODEL, PROMPT, Api, until
from tests.gateway.cluster import make_job


class Schedulers:
    """Takes reports, or does not; counts how often it is asked."""

    def __init__(self) -> None:
        self.there = True
        self.reported: list[list[JobReport]] = []
        self.refreshed = 0
        self.refusals: list[list[Refused]] = []
        self.left = False
        self.asked = asyncio.Event()

    async def report(self, reports: list[JobReport], *, timeout_s: float) -> list[JobReport]:
        self.reported.append(reports)
        self.asked.set()
        return [] if self.there else reports

    async def refresh(self, open_jobs: list[JobReport], *, timeout_s: float) -> None:
        self.refreshed += 1

    async def refused(self, counts: list[Refused], *, timeout_s: float) -> bool:
        self.refusals.append(list(counts))
        return self.there

    async def leave(self, *, timeout_s: float) -> None:
        self.left = True


async def test_it_tells_at_once_and_sleeps_while_nothing_changes() -> None:
    schedulers = Schedulers()
    reporter = Reporter(schedulers, GatewayMetrics("demo", CollectorRegistry()))  # type: ignore[arg-type]
    job, _ = make_job([1, 2, 3], 5)
    running = asyncio.create_task(reporter.run())
    async with asyncio.timeout(REFRESH_S - 1):
        await asyncio.sleep(0)
        reporter.report(job)
        await schedulers.asked.wait()
    assert [report.job_id for report in schedulers.reported[0]] == [job.spec.job_id]
    for _ in range(5):
        await asyncio.sleep(0.05)
    assert len(schedulers.reported) == 1
    assert schedulers.refreshed == 1  # that it lives, with its first word
    running.cancel()


async def test_final_reports_that_nobody_takes_are_told_again() -> None:
    schedulers = Schedulers()
    schedulers.there = False
    reporter = Reporter(schedulers, GatewayMetrics("demo", CollectorRegistry()))  # type: ignore[arg-type]
    job, _ = make_job([1, 2, 3], 5)
    job.phase = type(job.phase).FAILED
    running = asyncio.create_task(reporter.run())
    reporter.report(job, "lost")
    async with asyncio.timeout(5):
        while len(schedulers.reported) < 3:
            schedulers.asked.clear()
            await schedulers.asked.wait()
        schedulers.there = True
        schedulers.asked.clear()
        await schedulers.asked.wait()
    told = len(schedulers.reported)
    for _ in range(5):
        await asyncio.sleep(0.05)
    assert len(schedulers.reported) == told
    running.cancel()


async def test_refusals_are_told_with_the_next_refresh_and_again_under_the_same_keys() -> None:
    schedulers = Schedulers()
    schedulers.there = False
    reporter = Reporter(schedulers, GatewayMetrics("demo", CollectorRegistry()))  # type: ignore[arg-type]
    for code in ("busy", "busy", "unavailable"):
        reporter.refused("chat", code)
    await reporter.flush()
    (first,) = schedulers.refusals
    assert {(one.slo, one.code, one.count) for one in first} == {("chat", "busy", 2), ("chat", "unavailable", 1)}
    schedulers.there = True
    reporter.refused("chat", "busy")
    await reporter.leave()
    again = schedulers.refusals[-1]
    assert again[:2] == first
    assert (again[2].code, again[2].count) == ("busy", 1)
    assert schedulers.left
    told = len(schedulers.refusals)
    await reporter.leave()
    assert len(schedulers.refusals) == told  # there is nothing more to tell


async def test_reports_of_a_job_under_way_carry_what_is_known_and_whose_it_is() -> None:
    job, _ = make_job([1, 2, 3], 5, caller="anna")
    job.record_until(Span.INTAKE, job.spec.arrived_s + 0.1)
    report = job.report()
    assert report.timeline is not None
    assert [span.span for span in report.timeline.spans] == [Span.INTAKE]
    assert (report.caller, report.asked, report.prediction) == ("anna", False, None)


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

    def __init__(self, path: Path, decode: Callable[[list[int]], str] = str) -> None:
        self.path = path
        self.registry = CollectorRegistry()
        self.file = RecordsFile(path, BYTES)
        self.recorder = Recorder(self.file, decode, GatewayMetrics("demo", self.registry))

    async def record(self, *jobs: Job) -> None:
        for job in jobs:
            self.recorder.note(job)
        await self.recorder.flush()

    def counted(self, outcome: str) -> float:
        return self.registry.get_sample_value("polyphase_gateway_records_total", {"outcome": outcome}) or 0.0

    @property
    def failures(self) -> float:
        return self.registry.get_sample_value("polyphase_gateway_record_failures_total") or 0.0


@pytest.fixture
def kept(tmp_path: Path) -> Recording:
    return Recording(tmp_path / "lengths.jsonl")


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_requests_leave_a_line_each(api: Api) -> None:
    path = api.settings.record_lengths
    assert path is not None
    long = list(range(300, 300 + PREDICTED_FROM + 50))
    seen = load_served(str(MODEL)).seen_text
    expected = {"seen": seen(long), "prompt_tokens": len(long), "output_tokens": 7, "cut": True, "max_tokens": 7}
    stopped = {"seen": seen(PROMPT[:3]), "prompt_tokens": 3, "output_tokens": 1, "cut": False, "max_tokens": 9}
    api.cluster.prefill.stop_token = (sum(PROMPT[:3]) * 31 + 3 * 7) % 1000  # what the worker gives first
    assert (await api.complete(prompt=PROMPT[:3], max_tokens=9)).status_code == 200
    assert (await api.complete(prompt=long, max_tokens=7)).status_code == 200
    await until(lambda: path.exists() and {str(expected), str(stopped)} <= set(map(str, lines(path))), 20.0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_a_request_that_is_given_up_leaves_none(api: Api) -> None:
    path = api.settings.record_lengths
    assert path is not None
    decode = api.cluster.decodes[0]
    decode.before_token = lambda count: asyncio.sleep(0) if count < 2 else asyncio.Event().wait()
    task = asyncio.create_task(api.complete(prompt=[411, 412, 413, 414, 415], max_tokens=53))
    await until(lambda: bool(decode.decodes))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.wait_for(decode.cancelled.wait(), 5)
    decode.before_token = None
    await api.complete(prompt=[416, 417, 418, 419, 420, 421])
    await until(lambda: any(line["prompt_tokens"] == 6 for line in lines(path)), 20.0)
    assert not any(line["max_tokens"] == 53 for line in lines(path))


@pytest.mark.parametrize("length", [0, 3, PREDICTED_FROM, 5 * PREDICTED_FROM])
def test_the_text_is_what_the_classifier_sees(length: int) -> None:
    ids = [(7 * at) % 4000 for at in range(length)]
    assert seen_text(str(MODEL))(ends_of(ids)) == load_served(str(MODEL)).seen_text(ids)


async def test_only_whole_answers_count(kept: Recording) -> None:
    cancelled, failed, repeating = finished(2, ""), finished(3, ""), finished(4, "repetition")
    cancelled.phase, failed.phase = Phase.CANCELLED, Phase.FAILED
    await kept.record(cancelled, failed, repeating, finished(5, "stop"), finished(6))
    assert [(line["output_tokens"], line["cut"]) for line in lines(kept.path)] == [(5, False), (6, True)]
    assert (kept.counted("written"), kept.counted("dropped"), kept.failures) == (2, 0, 0)


async def test_both_files_stay_within_the_bound_and_hold_the_newest(kept: Recording) -> None:
    for length in range(200):
        await kept.record(finished(length + 1))
        sizes = [file.stat().st_size for file in (kept.path, kept.file.older) if file.exists()]
        assert sum(sizes) <= BYTES
        assert max(sizes) <= BYTES // 2
    found = [line["output_tokens"] for file in (kept.file.older, kept.path) for line in lines(file)]
    assert found == list(range(201 - len(found), 201))
    assert len(found) > 10
    assert {stat.S_IMODE(file.stat().st_mode) for file in (kept.path, kept.file.older)} == {0o600}
    assert sorted(kept.path.parent.iterdir()) == [kept.path, kept.file.older]


async def test_one_batch_may_fill_several_files(kept: Recording) -> None:
    await kept.record(*(finished(length + 1) for length in range(100)))
    assert kept.counted("written") == 100
    assert lines(kept.path)[-1]["output_tokens"] == 100
    assert kept.path.stat().st_size + kept.file.older.stat().st_size <= BYTES


async def test_no_character_of_a_prompt_ends_a_line(tmp_path: Path) -> None:
    said = "a\nb\x0bc\u2028d\x85e\x00"
    kept = Recording(tmp_path / "lengths.jsonl", lambda _: said)
    await kept.record(finished())
    (line,) = kept.path.read_text().splitlines()
    assert json.loads(line)["seen"] == said


async def test_a_folder_that_goes_is_told_once_and_costs_nothing_once_it_is_back(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    kept = Recording(folder / "lengths.jsonl")
    await kept.record(finished(1))
    folder.rename(tmp_path / "away")
    with capture_logs() as said:
        await kept.record(finished(2))
        await kept.record(finished(3))
        assert (kept.failures, kept.counted("written")) == (2, 1)
        folder.mkdir()
        await kept.record(finished(4))
    assert [line["output_tokens"] for line in lines(kept.path)] == [2, 3, 4]
    assert [one["log_level"] for one in said] == ["error", "info"]


async def test_a_full_disk_leaves_no_half_a_line(kept: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    await kept.record(finished(1))
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
        await kept.record(finished(2))
    assert [line["output_tokens"] for line in lines(kept.path)] == [1]
    await kept.record()
    assert [line["output_tokens"] for line in lines(kept.path)] == [1, 2]
    assert kept.failures == 1


async def test_a_line_that_a_kill_has_cut_short_is_dropped(kept: Recording) -> None:
    await kept.record(finished(1))
    with kept.path.open("ab") as file:
        file.write(b'{"seen": "hal')
    await kept.record(finished(2))
    assert [line["output_tokens"] for line in lines(kept.path)] == [1, 2]


async def test_a_disk_that_hangs_holds_up_nobody_and_no_more_than_so_much_memory(tmp_path: Path) -> None:
    go, begun = threading.Event(), threading.Event()

    def hang(_: list[int]) -> str:
        begun.set()
        assert go.wait(20)
        return "x"

    kept = Recording(tmp_path / "lengths.jsonl", hang)
    kept.recorder.note(finished())
    flushing = asyncio.create_task(kept.recorder.flush())
    await until(begun.is_set)
    job = finished()
    with capture_logs() as said:
        for _ in range(MAX_WAITING + 9):
            kept.recorder.note(job)
    assert not flushing.done()
    assert kept.counted("dropped") == 10
    assert len(said) == 1
    go.set()
    await flushing
    await kept.recorder.flush()
    assert kept.counted("written") == MAX_WAITING


async def test_the_end_does_not_wait_for_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "_CLOSE_S", 0.01)
    go = threading.Event()
    kept = Recording(tmp_path / "lengths.jsonl", lambda _: str(go.wait(20)))
    kept.recorder.note(finished())
    async with asyncio.timeout(10):
        await kept.recorder.close()
    go.set()


async def test_a_prompt_that_cannot_be_decoded_is_in_nobodys_way(tmp_path: Path) -> None:
    def picky(ids: list[int]) -> str:
        if ids == [1]:
            raise RuntimeError("not this one")
        return "x" * (BYTES if ids == [2] else 1)

    kept = Recording(tmp_path / "lengths.jsonl", picky)
    await kept.record(finished(prompt=[1]), finished(prompt=[2]), finished(7, prompt=[3]))
    assert [line["output_tokens"] for line in lines(kept.path)] == [7]
    assert kept.counted("dropped") == 2


@pytest.mark.parametrize("trouble", ["no folder", "a folder", "too large", "older too large", "a file as folder"])
async def test_what_cannot_be_written_is_an_error_at_the_start(tmp_path: Path, trouble: str) -> None:
    path = tmp_path / "lengths.jsonl"
    match trouble:
        case "no folder":
            path = tmp_path / "nowhere" / "lengths.jsonl"
        case "a folder":
            path.mkdir()
        case "too large":
            path.write_bytes(b"{}\n" * (1 << 16))
        case "older too large":
            path.with_name("lengths.jsonl.1").write_bytes(b"{}\n" * (1 << 16))
        case _:
            path.write_bytes(b"{}\n")
            path = path / "lengths.jsonl"
    settings = GatewaySettings(schedulers=("x",), model=str(MODEL), record_lengths=path, record_bytes=1 << 17)
    with pytest.raises(InvalidRequest, match=r"record_lengths: .*lengths\.jsonl"):
        await begin(settings)


async def test_a_model_without_a_tokenizer_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    settings = GatewaySettings(schedulers=("x",), model=str(tmp_path), record_lengths=tmp_path / "lengths.jsonl")
    with pytest.raises(InvalidRequest, match=r"record_lengths: model .* has no usable tokenizer"):
        await begin(settings)


async def test_nobody_records_unless_asked_to() -> None:
    assert not await begin(GatewaySettings(schedulers=("x",), model="no such model"))


async def begin(settings: GatewaySettings) -> bool:
    """Whether there is a recorder."""
    metrics = GatewayMetrics("demo", CollectorRegistry())
    async with background() as tasks, recording(settings, metrics, tasks) as recorder:
        return recorder is not None
