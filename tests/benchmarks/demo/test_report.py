"""Findings and the report: nothing that failed may read as if it held."""

import io

from rich.console import Console

from benchmarks.demo.report import Section, as_result, show_section, show_summary
from services.launcher.cli_common import summary


def section(*, good: bool) -> Section:
    made = Section("Something [promised]")
    made.equal("tokens", 25, 25)
    made.at_most("time", 1.0, 0.5 if good else 1.5)
    made.table = (("a", "b"), [("x", "[not markup]")])
    return made


def printed(made: Section) -> str:
    text = io.StringIO()
    console = Console(file=text, width=120)
    show_section(console, 1, made)
    show_summary(console, [made], {"ready_s": 12.5, "total_s": 60.0})
    return text.getvalue()


def test_a_section_holds_iff_all_its_checks_do() -> None:
    assert section(good=True).ok
    failed = section(good=False)
    assert not failed.ok
    assert [check.name for check in failed.failures] == ["time"]


def test_the_report_says_what_held() -> None:
    text = printed(section(good=True))
    assert "Everything held." in text
    assert "✘" not in text
    assert "[not markup]" in text
    assert "12.5 s" in text


def test_the_report_says_what_did_not_hold_and_what_was_wanted() -> None:
    text = printed(section(good=False))
    assert "Everything held." not in text
    assert "wanted at most 1 s" in text


def test_the_json_says_the_same() -> None:
    for good in (True, False):
        answer = summary(as_result([section(good=good)], {"ready_s": 1.0}))
        assert answer["ok"] is good
        assert answer["aims"]["Something [promised]: time"]["met"] is good
        assert answer["figures"] == {"ready_s": 1.0}
