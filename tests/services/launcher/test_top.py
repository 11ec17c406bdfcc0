"""`polyphase top`: pages in a pipe, and what stays when the monitor goes."""

import asyncio
import io
from dataclasses import replace

import pytest
from rich.console import Console

from services.launcher import status
from services.launcher.status import Snapshot
from shared.errors import NotFound, Unavailable
from tests.services.launcher.suites import many, seen


def drawn(view: status.LiveView, rows: int | None = 10) -> str:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(status.top_page(view, 80, rows))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= 80 for line in text.splitlines())
    return text


def view_of(*answers: Snapshot | Exception) -> status.LiveView:
    left = list(answers)

    async def look() -> Snapshot:
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return status.LiveView(look)


def now(**changes: object) -> Snapshot:
    return replace(seen(**changes), time_s=1e12)  # not old, whatever the clock says


async def test_a_page_has_the_verdict_rates_the_chain_and_instances() -> None:
    view = view_of(now(rates={"requests_per_s": 12.34, "output_tokens_per_s": 1234.5}))
    await view.refresh()
    text = drawn(view)
    assert "Good: 100 requests" in text
    assert "12.3 requests, – tokens in, 1,234 tokens out /s" in text
    assert "decode queue" in text
    assert "decode-3" in text


async def test_what_the_monitor_said_stays_with_its_age_while_it_is_away() -> None:
    away = Snapshot(2.0, seen().state, "connection refused", health={"scheduler": "", "monitor": "dead"}, jobs={})
    view = view_of(seen(), away, now(instances=many(1)))
    await view.refresh()
    await view.refresh()
    text = drawn(view)
    assert "The monitor does not answer: connection refused" in text
    assert "ago:" in text
    assert "not healthy: monitor (dead)" in text
    assert "decode-3" in text
    await view.refresh()
    assert "does not answer" not in drawn(view)
    assert "decode-3" not in drawn(view)


async def test_a_picture_that_grows_old_says_so() -> None:
    view = view_of(seen())
    await view.refresh()
    assert "The monitor has not answered yet." in drawn(view)


async def test_without_any_picture_an_error_is_one_and_later_a_word() -> None:
    with pytest.raises(NotFound):
        await view_of(NotFound("no suite runs")).refresh()
    view = view_of(seen(), NotFound("the suite is not running any more"))
    await view.refresh()
    await view.refresh()
    assert "not running any more" in drawn(view)


async def test_with_the_monitor_away_from_the_start_others_are_shown() -> None:
    away = Snapshot(1e12, seen().state, "gone", instances=many(2), health={"scheduler": ""}, jobs={"decode": 2})
    view = view_of(away)
    await view.refresh()
    text = drawn(view)
    assert "Answers of the processes themselves:" in text
    assert "running jobs: 2" in text
    assert "decode-1" in text


async def test_once_shows_all_instances_and_ends() -> None:
    console = Console(file=io.StringIO(), width=80)

    async def look() -> Snapshot:
        return now(instances=many(60))

    await status.run_top(console, look, once=True)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert "decode-59" in text


async def test_into_a_pipe_it_prints_page_after_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "PERIOD_S", 0.0)
    console, looks = Console(file=io.StringIO(), width=80), 0

    async def look() -> Snapshot:
        nonlocal looks
        looks += 1
        if looks > 3:
            raise asyncio.CancelledError
        return now(instances=many(60))

    with pytest.raises(asyncio.CancelledError):
        await status.run_top(console, look)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("Good:") == 3
    assert text.count("… and 41 more, all ready") == 3


async def test_the_first_error_ends_it() -> None:
    async def look() -> Snapshot:
        raise Unavailable("nobody there")

    with pytest.raises(Unavailable):
        await status.run_top(Console(file=io.StringIO()), look)
