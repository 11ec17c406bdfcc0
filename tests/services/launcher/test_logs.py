"""`polyphase logs`: the last lines of a file of any length, new ones as they come, and names that are there."""

import asyncio
import io
import json
from contextlib import aclosing
from pathlib import Path

import pytest
from rich.console import Console

from services.launcher import logs
from shared.errors import NotFound


def shown(line: str) -> str:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    logs.show(console, line)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text.rstrip("\n")


def folder(tmp_path: Path, text: str, name: str = "monitor") -> Path:
    (tmp_path / "logs").mkdir(exist_ok=True)
    (tmp_path / "logs" / f"{name}.log").write_text(text)
    return tmp_path


async def lines_of(data: Path, name: str, lines: int) -> list[str]:
    return [line async for line in logs.read(data, "", name, lines, follow=False)]


@pytest.mark.parametrize("wanted", [0, 1, 3, 5_000, 20_000])
def test_the_last_lines_of_a_long_file(tmp_path: Path, wanted: int) -> None:
    written = [f"{number}: {'ä' * (number % 50)}" for number in range(10_000)]
    file = tmp_path / "x.log"
    file.write_text("\n".join(written) + "\n")
    assert logs.last_lines(file, wanted) == (written[-wanted:] if wanted else [])


def test_a_file_without_a_last_newline_and_an_empty_one(tmp_path: Path) -> None:
    file = tmp_path / "x.log"
    file.write_text("a\nb")
    assert logs.last_lines(file, 1) == ["b"]
    file.write_text("")
    assert logs.last_lines(file, 5) == []


async def test_new_lines_come_as_they_are_written_and_a_new_file_from_its_beginning(tmp_path: Path) -> None:
    data = folder(tmp_path, "old\n")
    file = data / "logs" / "monitor.log"
    async with aclosing(logs.read(data, "", "monitor", 1, follow=True)) as lines, asyncio.timeout(20):
        assert await anext(lines) == "old"
        new = asyncio.ensure_future(anext(lines))
        await asyncio.sleep(0)
        with file.open("a") as log:
            log.write("half")
            log.flush()
            log.write(" a line\nand more\n")
        assert await new == "half a line"
        assert await anext(lines) == "and more"
        file.write_text("anew\n")
        assert await anext(lines) == "anew"


async def test_an_unknown_name_lists_those_that_have_a_log(tmp_path: Path) -> None:
    data = folder(folder(tmp_path, ""), "", "decode-0")
    with pytest.raises(NotFound) as error:
        await lines_of(data, "decode0", 1)
    assert error.value.message == "no process 'decode0'; did you mean decode-0? Known: decode-0, monitor"


async def test_without_any_log_it_says_how_to_start(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="polyphase up"):
        await lines_of(tmp_path, "monitor", 1)


async def test_logs_outlive_their_suite(tmp_path: Path) -> None:
    assert await lines_of(folder(tmp_path, "a\nb\n"), "monitor", 5) == ["a", "b"]


def test_json_is_read_for_people() -> None:
    entry = {"event": "slow", "level": "warning", "timestamp": "2026-01-02T03:04:05.678901Z", "job_id": "j", "n": 3}
    line = shown(json.dumps({**entry, "service": "gateway"}))
    assert line[12:] == " warning slow  job_id=j  n=3"
    assert shown("plain words") == "plain words"
    assert shown("{not json") == "{not json"
    assert "\nTraceback" in shown(json.dumps({"event": "x", "exception": "Traceback\n  y"}))


@pytest.mark.parametrize(
    ("shown_before", "found", "news"),
    [
        ([], ["a"], ["a"]),
        (["a", "b"], ["a", "b"], []),
        (["a", "b"], ["b", "c", "d"], ["c", "d"]),
        (["a", "b"], ["x", "y"], ["x", "y"]),
        (["a", "a"], ["a", "a", "a"], ["a"]),
    ],
)
def test_what_is_new_of_a_tail(shown_before: list[str], found: list[str], news: list[str]) -> None:
    assert logs._new_lines(shown_before, found) == news
