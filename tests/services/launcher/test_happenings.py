"""`polyphase events` and `polyphase requests`: what is asked for, and how it looks at 80 columns."""

import io
import time
from typing import Any

import pytest
from rich.console import Console

from services.launcher import happenings
from services.launcher.happenings import RequestsWanted
from shared.errors import InvalidRequest


def drawn(draw: Any, told: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    draw(console, told)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(len(line) <= 80 for line in lines)
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize(("words", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("2d", 172_800)])
def test_how_long_ago(words: str, seconds: float) -> None:
    assert happenings.ago_s(words) == seconds


@pytest.mark.parametrize("words", ["10", "m", "-1m", "1w", "soon"])
def test_what_is_no_time_is_refused_with_an_example(words: str) -> None:
    with pytest.raises(InvalidRequest, match="10m"):
        happenings.ago_s(words)


def test_an_event_has_its_words_on_lines_of_their_own_beside_its_kind() -> None:
    event = {"time_s": time.time(), "kind": "operation_failed", "instance_id": "d-1", "text": "it was " + "very " * 30}
    first, *more = drawn(happenings.show_event, event)
    assert "operation failed      d-1  it was very" in first
    assert more
    assert all(line.startswith(" " * 32) for line in more)


def test_an_old_event_has_its_date() -> None:
    (line,) = drawn(happenings.show_event, {"time_s": 1e9, "kind": "death", "instance_id": "", "text": "gone"})
    assert line.startswith("09-0")


def test_a_search_is_asked_for_in_the_words_of_the_service() -> None:
    wanted = RequestsWanted("abc", slo="fast", missed=True, since_s=600.0, limit=5)
    assert wanted.params(1_000.0) == {
        "order": "slowest_ttft",
        "limit": 5,
        "job": "abc",
        "slo": "fast",
        "missed": "true",
        "since": 400.0,
    }
    assert RequestsWanted(missed=False).params(0.0)["missed"] == "false"


def row(**changes: Any) -> dict[str, Any]:
    plain = {"job_id": "chatcmpl-mine-0123456789", "arrived_s": time.time(), "slo": "default", "outcome": "stop"}
    figures = {"phase": "completed", "prompt_tokens": 12_345, "output_tokens": 678, "ttft_s": 1.2, "tpot_s": None}
    return {**plain, **figures, "slo_met": True, **changes}


def test_requests_that_missed_are_marked_without_colour() -> None:
    rows = [row(slo_met=False), row(outcome="", phase="decode")]
    lines = drawn(happenings.show_requests, {"rows": rows, "more": True})
    assert lines[1].startswith("✘ mine-0123456789")
    assert lines[2].startswith("  mine-0123456789")
    assert "decode" in lines[2]
    assert "--limit" in " ".join(lines)


def test_no_requests() -> None:
    assert drawn(happenings.show_requests, {"rows": [], "more": False}) == ["no such request"]
