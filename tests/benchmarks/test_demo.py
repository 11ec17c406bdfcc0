"""Findings and the report: nothing that failed may read as if it held. And the list of bad input."""

import io

import pytest
from rich.console import Console

from benchmarks.demo.checks import bad_requests
from benchmarks.demo.report import Report, Section
from services.launcher.cli_common import summary
from shared.errors import Unavailable


async def fill(good: bool, section: Section) -> None:
    section.equal("tokens", 25, 25)
    section.at_most("time", 1.0, 0.5 if good else 1.5)
    section.columns, section.rows = ("a", "b"), [("x", "[not markup]")]
    section.figures["ready_s"] = 12.5


async def broken(_: bool, section: Section) -> None:
    raise Unavailable("no gateway")


@pytest.mark.parametrize("good", [True, False])
async def test_the_report_and_the_json_say_what_held_and_what_was_wanted(good: bool) -> None:
    text = io.StringIO()
    report = Report(Console(file=text, width=120))
    await report.run({"Something [promised]": fill}, good)
    report.summarise()
    assert report.ok is good
    assert [finding.name for finding in report.sections[0].failures] == ([] if good else ["time"])
    printed = text.getvalue()
    assert "[not markup]" in printed
    assert "12.5 s" in printed
    assert ("Everything held." in printed) == ("✘" not in printed) == good
    assert ("wanted at most 1 s" in printed) != good
    result = summary(report.as_result())
    assert (result["ok"], result["aims"]["Something [promised]: time"]["met"]) == (good, good)
    assert result["figures"]["ready_s"] == 12.5


async def test_a_check_that_cannot_be_made_fails_and_ends_a_run_that_stops() -> None:
    report = Report(Console(file=io.StringIO()))
    await report.run({"one": broken, "two": fill}, True, stop=True)
    assert [(section.title, section.failures[0].got) for section in report.sections] == [
        ("one", "Unavailable: no gateway")
    ]
    assert not summary(report.as_result(finished=False))["ok"]


def test_every_bad_request_wants_a_4xx() -> None:
    found = bad_requests("m", 2048, 1000)
    assert len({name for name, *_ in found}) == len(found) >= 15
    assert all(400 <= status < 500 for _, _, want, _ in found for status in want)
