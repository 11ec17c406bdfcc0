"""Pages of a terminal: they fit, trouble comes first, and nothing rests on colour."""

import io

import pytest
from rich.console import Console, RenderableType

from services.launcher import pages
from shared.domain.verdict import Level, Problem
from tests.services.launcher.suites import entry, many, verdict, window


def drawn(*parts: RenderableType, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    for part in parts:
        console.print(part)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in lines), "a line is wider than the terminal"
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("width", [60, 80, 132])
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("count", [1, 4, 40, 200])
def test_every_instance_has_a_line_that_fits(width: int, long: bool, count: int) -> None:
    lines = drawn(*pages.instances(many(count, long), width), width=width)
    assert len(lines) == count + 2  # the head, and what is said of emulated ones
    ends = sorted(int(line.split()[0].rpartition("-")[2]) for line in lines[1:-1])
    assert ends == list(range(count)), "names differ at their ends, which stay"


def test_trouble_comes_first_and_the_rest_is_counted() -> None:
    entries = [*many(197), entry("decode-x", "draining"), entry("decode-y", "dead"), entry("decode-z", "unresponsive")]
    lines = drawn(*pages.instances(entries, 80, 10))
    assert [line.split()[0] for line in lines[1:4]] == ["decode-y", "decode-z", "decode-x"]
    assert lines[-2] == "… and 191 more, all ready"
    assert len(lines) == 1 + 9 + 2


def test_what_is_left_out_is_counted_by_state() -> None:
    lines = drawn(*pages.instances([entry("a", "dead"), entry("b", "dead"), entry("c")], 80, 2))
    assert lines[2] == "… and 2 more, 1 dead, 1 ready"


def test_among_those_that_are_well_the_busiest_are_first() -> None:
    lines = drawn(*pages.instances([entry("calm"), entry("full", free_blocks=10), entry("late", waiting=3)], 80))
    assert [line.split()[0] for line in lines[1:4]] == ["late", "full", "calm"]
    assert "99 %" in lines[2]


def test_of_the_dead_no_load_is_told() -> None:
    line = drawn(*pages.instances([entry("d", "dead", running=7)], 80))[1]
    assert "7" not in line
    assert line.count(pages.NONE) == 4


@pytest.mark.parametrize("share", [0.2, None])
def test_the_chain_is_one_line_of_80_columns(share: float | None) -> None:
    (line,) = drawn(pages.chain(verdict(share=share)))[: 1 if share else 2][:1]
    assert "queue" in line
    assert "→ prefill" in line


def test_the_chain_tells_where_time_goes_else_where_jobs_are() -> None:
    assert drawn(pages.chain(verdict())) == [
        "time queue 20 % → prefill 20 % → transfer 20 % → decode queue 20 % → decode 20 %"
    ]
    assert "queue 12345 →" in " ".join(drawn(pages.chain(verdict(share=None))))


def test_the_chain_as_a_table_and_the_slo_fit() -> None:
    lines = drawn(pages.chain_table(verdict()), pages.slo([window()]))
    assert lines[1].split()[:3] == ["jobs", "now", "12345"]
    assert "26 %" in lines[-1]
    assert "12.3 s" in lines[-1]


def test_problems_with_a_cause_are_told_and_those_of_the_headline_not_again() -> None:
    bare = Problem("instances_dead", Level.DEGRADED, "2 of 16 decode instances dead")
    caused = Problem("tpot_missed", Level.DEGRADED, "TPOT met by 26 %", "decode KV is full")
    one = verdict(Level.DEGRADED, caused, bare)
    assert drawn(pages.headline(one)) == ["! Degraded: TPOT met by 26 %; 2 of 16 decode instances dead"]
    assert drawn(*pages.problems(one)) == ["! TPOT met by 26 %: decode KV is full"]


def test_names_give_way_in_the_middle() -> None:
    assert pages.elided("decode-0", 10) == "decode-0"
    assert pages.elided("decode-in-a-rack-17", 10) == "dec…ack-17"
    assert len(pages.elided("x" * 50, 13)) == 13
