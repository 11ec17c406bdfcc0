"""`polyphase events` and `polyphase requests`: what is asked for, and how it looks at 80 columns."""

import asyncio
import io
import time
from collections.abc import Callable
from typing import Any, Self

import pytest
from rich.console import Console

from services.launcher import events
from services.launcher.events import EventFilter, RequestFilter
from shared.errors import InvalidRequest


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
    event = {"time_s": time.time(), "kind": "operation_failed", "instance_id": "d-1", "text": "it was " + "very " * 30}
    first, *more = drawn(events.show_event, event)
    assert "operation failed      d-1  it was very" in first
    assert more
    assert all(line.startswith(" " * 32) for line in more)


def test_an_old_event_has_its_date() -> None:
    (line,) = drawn(events.show_event, {"time_s": 1e9, "kind": "death", "instance_id": "", "text": "gone"})
    assert line.startswith("09-0")


def test_a_search_is_asked_for_in_the_words_of_the_service() -> None:
    wanted = RequestFilter("abc", slo="fast", missed=True, since_s=600.0, limit=5)
    assert wanted.params(1_000.0) == {
        "order": "slowest_ttft",
        "limit": 5,
        "job": "abc",
        "slo": "fast",
        "missed": "true",
        "since": 400.0,
    }
    assert RequestFilter(missed=False).params(0.0)["missed"] == "false"


def row(**changes: Any) -> dict[str, Any]:
    plain = {"job_id": "chatcmpl-mine-0123456789", "arrived_s": time.time(), "slo": "default", "outcome": "stop"}
    figures = {"phase": "completed", "prompt_tokens": 12_345, "output_tokens": 678, "ttft_s": 1.2, "tpot_s": None}
    return {**plain, **figures, "slo_met": True, **changes}


def test_requests_that_missed_are_marked_without_colour() -> None:
    rows = [row(slo_met=False), row(outcome="", phase="decode")]
    lines = drawn(events.show_requests, {"rows": rows, "more": True})
    assert lines[1].startswith("✘ mine-0123456789")
    assert lines[2].startswith("  mine-0123456789")
    assert "decode" in lines[2]
    assert "--limit" in " ".join(lines)


def test_no_requests() -> None:
    assert drawn(events.show_requests, {"rows": [], "more": False}) == ["no such requests"]


class Monitor:
    """Answers as a monitor does; between two looks of who follows the next of `steps` happens, then nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object]) -> None:
        self.events: list[dict[str, Any]] = []
        self.flips: dict[str, dict[str, Any]] = {}
        self._steps = list(steps)
        monkeypatch.setattr(events, "JsonClient", lambda url: self)
        monkeypatch.setattr(asyncio, "sleep", self._sleep)

    async def _sleep(self, _: float) -> None:
        if not self._steps:
            raise EOFError
        self._steps.pop(0)()

    def happens(self, count: int, time_s: float) -> None:
        """So many events of that moment, a quarter of a millisecond apart."""
        for number in range(count):
            at = time_s + number / 4096
            self.events.append({"event_id": f"e{len(self.events)}", "time_s": at, "kind": "death", "instance_id": ""})

    def operation(self, name: str, result: str, started_s: float, total_s: float | None = None) -> None:
        said = {
            "operation_id": name,
            "kind": "flip",
            "instance_id": "d0",
            "generation": 1,
            "from_role": "decode",
            "to_role": "prefill",
        }
        self.flips[name] = {**said, "who": "ann", "why": None, "result": result, "started_s": started_s}
        self.flips[name]["total_s"] = total_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def call(self, method: str, path: str, *, params: dict[str, Any], timeout_s: float = 0.0) -> Any:
        if path == "/flips":
            return sorted(self.flips.values(), key=lambda row: -row["started_s"])
        fits = [row for row in self.events if params["since"] < row["time_s"] < params.get("before", 1e12)]
        return sorted(fits, key=lambda row: -row["time_s"])[: params["limit"]]


async def followed(limit: int = 5) -> list[dict[str, Any]]:
    """What a follower sees until the steps are over."""
    found: list[dict[str, Any]] = []
    try:
        async for each in events.events("http://monitor", EventFilter(limit=limit), follow=True):
            found.append(dict(each))
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
    assert [row["event_id"] for row in told] == ["flip-1-running", "e0", f"flip-1-{result}", "e1"]
    assert result in told[2]["text"]


async def test_who_follows_hears_of_all_however_many_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = Monitor(
        monkeypatch, lambda: monitor.happens(2_500, 1_010.0), lambda: None, lambda: monitor.happens(7, 1_012.0)
    )
    monitor.happens(8, 1_000.0)
    told = [row["event_id"] for row in await followed(limit=5)]
    assert told[:5] == [f"e{number}" for number in range(3, 8)]  # as many as were asked for
    assert sorted(told[5:]) == sorted(f"e{number}" for number in range(8, 2_515))


async def test_what_comes_to_light_late_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = Monitor(
        monkeypatch,
        lambda: monitor.operation("resume-1", "succeeded", 1_005.0, 0.5),
        lambda: monitor.happens(1, 1_004.0),
        lambda: None,
    )
    assert [row["event_id"] for row in await followed()] == ["resume-1-succeeded", "e0"]
