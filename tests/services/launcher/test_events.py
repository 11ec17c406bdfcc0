"""Events, finished requests and explained requests, and how they look at 80 columns."""

import asyncio
import io
import time
from collections.abc import Callable
from typing import Any, Self

import msgspec
import pytest
from rich.console import Console

from services.launcher import events
from services.launcher.events import (
    EventFilter,
    Explained,
    RequestFilter,
    find_job,
    find_request,
    show_explanation,
    waterfall,
)
from shared.domain.instance import Role
from shared.domain.job import NAME_CHARS, Phase, job_name
from shared.domain.route import Reason
from shared.errors import InvalidRequest, NotFound, Unavailable
from shared.explain import explain
from shared.timeline import Decision, RequestTimeline, Span, SpanRecord
from shared.wire.api import Event, EventKind, Operation, OperationKind, OperationResult
from shared.wire.api.scheduler import RequestPage, StoredRequest
from shared.wire.messages import JobReport


def drawn(draw: Any, told: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    draw(console, told)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(len(line) <= 80 for line in lines)
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize(("words", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("2d", 172_800)])
def test_how_long_ago(words: str, seconds: float) -> None:
    assert events.ago_s(words) == seconds


@pytest.mark.parametrize("words", ["10", "m", "-1m", "1w", "soon"])
def test_what_is_no_time_is_refused_with_an_example(words: str) -> None:
    with pytest.raises(InvalidRequest, match="10m"):
        events.ago_s(words)


def test_an_event_has_its_words_on_lines_of_their_own_beside_its_kind() -> None:
    event = Event("e", time.time(), EventKind.OPERATION_FAILED, "it was " + "very " * 30, "d-1")
    first, *more = drawn(events.show_event, event)
    assert "operation failed      d-1  it was very" in first
    assert more
    assert all(line.startswith(" " * 32) for line in more)


def test_an_old_event_has_its_date() -> None:
    (line,) = drawn(events.show_event, Event("e", 1e9, EventKind.DEATH, "gone"))
    assert line.startswith("09-0")


def test_a_search_is_asked_for_in_the_words_of_the_service() -> None:
    wanted = RequestFilter("abc", slo="fast", missed=True, since_s=600.0, limit=5)
    sent = {name: value for name, value in wanted.parameters(1_000.0).items() if value not in (None, "")}
    shared = {"order": "slowest_ttft", "limit": 5}
    assert sent == {**shared, "job": "abc", "slo": "fast", "missed": "true", "since": 400.0}
    assert RequestFilter(missed=False).parameters(0.0)["missed"] == "false"


def row(job_id: str = "chatcmpl-mine-0123456789", **changes: Any) -> StoredRequest:
    report = JobReport(
        job_id, "g0", Phase.COMPLETED, time.time(), 12_345, 678, outcome="stop", ttft_s=1.2, slo_met=True
    )
    stored = {"scheduler_id": "s0", "final": True, "updated_s": 1.0, "slo_met": True}
    return msgspec.convert({**msgspec.structs.asdict(report), **stored, **changes}, StoredRequest)


def test_requests_that_missed_are_marked_without_colour() -> None:
    rows = [row(slo_met=False), row(outcome="", phase="decode")]
    lines = drawn(events.show_requests, RequestPage(rows, more=True))
    assert lines[1].startswith("✘ mine-0123456789")
    assert lines[2].startswith("  mine-0123456789")
    assert "decode" in lines[2]
    assert "--limit" in " ".join(lines)


def test_no_requests() -> None:
    assert drawn(events.show_requests, RequestPage([])) == ["no such requests"]


class Monitor:
    """Answers as a monitor does; between two looks of who follows the next of `steps` happens, then nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object]) -> None:
        self.log: list[Event] = []
        self.operations: dict[str, Operation] = {}
        self._steps = list(steps)
        monkeypatch.setattr(events, "MonitorClient", lambda url: self)
        monkeypatch.setattr(asyncio, "sleep", self._sleep)

    async def _sleep(self, _: float) -> None:
        if not self._steps:
            raise EOFError
        self._steps.pop(0)()

    def happens(self, count: int, time_s: float) -> None:
        """So many events of that moment, a quarter of a millisecond apart."""
        for number in range(count):
            at = time_s + number / 4096
            self.log.append(Event(f"e{len(self.log)}", at, EventKind.DEATH, ""))

    def operation(self, name: str, result: str, started_s: float, total_s: float | None = None) -> None:
        roles, outcome = (Role.DECODE, Role.PREFILL), OperationResult(result)
        self.operations[name] = Operation(
            name, OperationKind.FLIP, "d0", 1, *roles, "ann", started_s, total_s=total_s, result=outcome
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def flips(self, limit: int) -> list[Operation]:
        return sorted(self.operations.values(), key=lambda operation: -operation.started_s)

    async def events(self, *, limit: int, since_s: float, before_s: float | None, **_: Any) -> list[Event]:
        fits = [event for event in self.log if since_s < event.time_s < (before_s or 1e12)]
        return sorted(fits, key=lambda event: -event.time_s)[:limit]


async def followed(limit: int = 5) -> list[events.LogEntry]:
    """What a follower sees until the steps are over."""
    found: list[events.LogEntry] = []
    try:
        async for each in events.events("http://monitor", EventFilter(limit=limit), follow=True):
            found.append(each)
    except EOFError:
        return found
    raise AssertionError("it ended")


@pytest.mark.parametrize(("result", "total_s"), [("succeeded", 40.0), ("unknown", None)])
async def test_who_follows_hears_of_an_operation_twice(
    monkeypatch: pytest.MonkeyPatch, result: str, total_s: float | None
) -> None:
    monitor = Monitor(
        monkeypatch,
        lambda: monitor.operation("flip-1", "running", 1_000.0),
        lambda: monitor.happens(1, 1_030.0),
        lambda: monitor.operation("flip-1", result, 1_000.0, total_s),
        lambda: monitor.happens(1, 1_080.0),
        lambda: None,
    )
    told = await followed()
    assert [event.event_id for event in told] == ["flip-1-running", "e0", f"flip-1-{result}", "e1"]
    assert result in told[2].text


async def test_who_follows_hears_of_all_however_many_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = Monitor(
        monkeypatch, lambda: monitor.happens(2_500, 1_010.0), lambda: None, lambda: monitor.happens(7, 1_012.0)
    )
    monitor.happens(8, 1_000.0)
    told = [event.event_id for event in await followed(limit=5)]
    assert told[:5] == [f"e{number}" for number in range(3, 8)]  # as many as were asked for
    assert sorted(told[5:]) == sorted(f"e{number}" for number in range(8, 2_515))


async def test_what_comes_to_light_late_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = Monitor(
        monkeypatch,
        lambda: monitor.operation("resume-1", "succeeded", 1_005.0, 0.5),
        lambda: monitor.happens(1, 1_004.0),
        lambda: None,
    )
    assert [event.event_id for event in await followed()] == ["resume-1-succeeded", "e0"]


def timeline(**changes: Any) -> RequestTimeline:
    spans = [
        SpanRecord(Span.QUEUE, 100.0, 100.5, "prefill-0"),
        SpanRecord(Span.PREFILL, 100.5, 101.0, "prefill-0"),
        SpanRecord(Span.DECODE, 101.0, 102.0, "decode-in-a-rack-with-a-long-name-17", 2),
    ]
    reason = Reason("odd", {"weight": 0.25, "instances": 4.0, "chosen": "prefill-0"})
    told = {"first_token_s": 101.0, "last_token_s": 102.0, "ended_s": 102.0, "outcome": "stop", "output_tokens": 11}
    decisions = [Decision(100.0, "placement", "prefill-0", (reason,))]
    return RequestTimeline("chatcmpl-x", 100.0, 512, **{**told, "spans": spans, "decisions": decisions, **changes})


def drawn_explanation(one: RequestTimeline, *, width: int = 80, figures: bool = False) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    show_explanation(console, Explained(one.job_id, explain(one), one), figures=figures)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in lines)
    return [line.rstrip() for line in lines]


def bars(one: RequestTimeline, width: int = 80) -> list[str]:
    return [str(row) for row in waterfall(one, width)]


def test_bars_follow_each_other_and_are_as_long_as_their_times() -> None:
    rows = bars(timeline())
    starts = [row.index("█") for row in rows[:3]]
    lengths = [row.count("█") for row in rows[:3]]
    assert starts[1] == starts[0] + lengths[0]
    assert starts[2] == starts[1] + lengths[1]
    assert lengths[2] == pytest.approx(2 * lengths[0], abs=2)
    assert [row.split()[-2:] for row in rows[:2]] == [["0.5", "s"], ["0.5", "s"]]
    assert "▲ first token after 1 s" in rows[3]
    assert rows[3].index("▲") <= starts[2]


def test_a_long_decode_leaves_the_rest_its_room() -> None:
    long = timeline(spans=[*timeline().spans[:2], SpanRecord(Span.DECODE, 101.0, 1_000.0, "d")])
    rows = bars(long)
    assert rows[0].count("█") > 5
    assert rows[2].count("█") > 10


def test_stretches_too_short_for_a_column_have_one() -> None:
    short = timeline(
        spans=[SpanRecord(Span.QUEUE, 100.0, 100.000_01, "p"), SpanRecord(Span.PREFILL, 100.0, 101.0, "p")]
    )
    assert bars(short)[0].count("█") == 1


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_it_fits(width: int) -> None:
    assert any("█" in line for line in drawn_explanation(timeline(), width=width))


def test_names_keep_their_ends_and_say_the_attempt() -> None:
    assert any(
        line.startswith("decode · ") and "name-17 · attempt 2" in line
        for line in drawn_explanation(timeline(), width=90)
    )


def test_figures_come_on_demand() -> None:
    text = "\n".join(drawn_explanation(timeline()))
    assert "Prefill went to prefill-0" in text
    assert "\n         weight 0.25" not in text
    assert "weight 0.25, instances 4, chosen prefill-0" in "\n".join(drawn_explanation(timeline(), figures=True))


def test_one_under_way_has_no_mark_of_a_first_token() -> None:
    lines = drawn_explanation(
        timeline(first_token_s=0.0, last_token_s=0.0, ended_s=0.0, outcome="", spans=timeline().spans[:1])
    )
    assert "Under way" in lines[1]
    assert not any("▲" in line for line in lines)


def test_one_of_which_nothing_is_known_yet() -> None:
    bare = timeline(first_token_s=0.0, last_token_s=0.0, ended_s=0.0, outcome="", spans=[], decisions=[])
    assert bars(bare) == []
    assert any("Under way" in line for line in drawn_explanation(bare))


async def test_an_empty_id_and_a_suite_that_is_away() -> None:
    with pytest.raises(InvalidRequest, match="polyphase requests"):
        await find_request(["http://127.0.0.1:9"], " ")
    with pytest.raises(Unavailable):
        await find_request(["http://127.0.0.1:9"], "x")


class Scheduler:
    """Knows the requests of `ids`."""

    ids: tuple[str, ...] = ()

    def __init__(self, _: str) -> None:
        pass

    async def close(self) -> None:
        pass

    async def requests(self, limit: int) -> list[StoredRequest]:
        return [row(each) for each in self.ids[:limit]]

    async def search(self, **_: object) -> RequestPage:
        return RequestPage([])

    async def request(self, job_id: str) -> StoredRequest:
        if job_id not in self.ids:
            raise NotFound(job_id)
        return row(job_id)

    async def timeline(self, job_id: str) -> RequestTimeline:
        if job_id not in self.ids:
            raise NotFound(job_id)
        return msgspec.structs.replace(timeline(), job_id=job_id)


@pytest.mark.parametrize("wanted", ["4257/g6hr", "a, b", "\u0437\u0430", "x" * 500, "x" * 20, "cmpl-4257=2Fg6hr-0-aa"])
async def test_a_request_is_found_by_the_id_that_its_client_sent(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    sent = ("4257/g6hr", "a, b", "\u0437\u0430", "x" * 500)
    ids = tuple(f"cmpl-{job_name(name)}"[:NAME_CHARS] + "-0-aa" for name in sent)
    monkeypatch.setattr(Scheduler, "ids", ids)
    monkeypatch.setattr("services.launcher.events.SchedulerAdmin", Scheduler)
    found = (await find_request(["http://127.0.0.1:9"], wanted)).timeline.job_id
    assert found == await find_job(["http://127.0.0.1:9"], wanted)
    assert found == next(each for each in ids if each == wanted or job_name(wanted)[:100] in each)
