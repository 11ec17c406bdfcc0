"""The dataset builder against an endpoint over real sockets, killed and started again."""

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from predictor import dataset
from predictor.dataset import Api, BuildResult, BuildSettings, Target, build, read_prompts, seed_of, settings_of
from predictor.examples import split_of
from shared.errors import Conflict, InvalidRequest, Unavailable
from tests.predictor.openai_server import Model, length, served

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(dataset, "FIRST_PAUSE_S", 0.01)
    return Model()


@pytest.fixture
def url(model: Model) -> Iterator[str]:
    with served(model) as found:
        yield found


def prompts_file(folder: Path, texts: list[str]) -> Path:
    file = folder / "prompts.txt"
    file.write_text("\n".join(texts) + "\n")
    return file


def built(file: Path, out: Path, target: Target, **changes: Any) -> BuildResult:
    told: list[tuple[int, int]] = []
    made = asyncio.run(
        build(read_prompts([file]), BuildSettings(target, **changes), out, lambda *now: told.append(now))
    )
    assert told[-1][0] == told[-1][1]
    return made


def rows(made: BuildResult) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pyarrow.parquet.read_table(made.path).to_pylist()
    return found


TEXTS = [f"tell me about {'very ' * n}old things" for n in range(40)]


def test_every_prompt_is_answered_once_and_stored_with_its_settings(tmp_path: Path, model: Model, url: str) -> None:
    made = built(prompts_file(tmp_path, [*TEXTS, *TEXTS[:5]]), tmp_path / "out", Target(url), samples=2, concurrency=4)
    assert {(row["prompt"], row["sample"]): row["output_tokens"] for row in rows(made)} == {
        (text, sample): length(text, seed_of(text, sample)) for text in TEXTS for sample in range(2)
    }
    assert all(row["split"] == split_of(row["prompt"]) for row in rows(made))
    assert set(model.asked.values()) == {1}
    assert 2 <= model.most <= 4
    settings = settings_of(made.path)
    assert (settings["model"], settings["samples"], settings["prompts"]) == ("demo", 2, 40)
    again = built(prompts_file(tmp_path, TEXTS), tmp_path / "out", Target(url), samples=2)
    assert (again.requested, again.rows) == (0, 80)


def test_no_two_answers_are_drawn_under_one_seed(tmp_path: Path, model: Model, url: str) -> None:
    built(prompts_file(tmp_path, TEXTS), tmp_path / "out", Target(url), samples=3)
    assert len({seed for _, seed in model.asked}) == 3 * len(TEXTS)
    assert all(0 <= seed < 2**31 for _, seed in model.asked)


def test_answers_that_are_cut_are_marked(tmp_path: Path, url: str) -> None:
    made = built(prompts_file(tmp_path, TEXTS), tmp_path / "out", Target(url, api=Api.COMPLETIONS, max_tokens=20))
    for row in rows(made):
        assert row["cut"] == (length(row["prompt"], seed_of(row["prompt"], 0)) > 20)
        assert row["output_tokens"] <= 20
    assert made.cut == sum(row["cut"] for row in rows(made)) > 0


def test_a_prompt_that_is_refused_is_told_and_costs_nothing_else(tmp_path: Path, model: Model, url: str) -> None:
    made = built(prompts_file(tmp_path, ["one", "TOO LONG", "three"]), tmp_path / "out", Target(url))
    assert made.rows == 2
    assert made.refused == {"HTTP 400: the prompt is longer than 4096 tokens": 1}
    before = len(model.bodies)
    assert built(prompts_file(tmp_path, ["one", "TOO LONG", "three"]), tmp_path / "out", Target(url)).requested == 0
    assert len(model.bodies) == before, "nor asked again"


def test_what_passes_is_tried_again(tmp_path: Path, model: Model, url: str) -> None:
    model.fails = 3
    assert built(prompts_file(tmp_path, TEXTS), tmp_path / "out", Target(url), concurrency=2).rows == 40


def test_an_endpoint_that_errs_for_good_ends_it_and_nothing_is_lost(tmp_path: Path, model: Model, url: str) -> None:
    file, out = prompts_file(tmp_path, TEXTS), tmp_path / "out"
    built(file, out, Target(url), limit=10)
    answered = set(model.asked)
    model.fails = 10_000
    with pytest.raises(Unavailable, match=r"chat/completions: HTTP 503: the engine is away, 5 times"):
        built(file, out, Target(url))
    model.fails = 0  # a question whose asker has given up may still be on its way, and is answered now
    assert built(file, out, Target(url)).rows == 40
    assert {model.asked[key] for key in answered} == {1}


def test_an_endpoint_that_hangs_is_given_up(tmp_path: Path, model: Model, url: str) -> None:
    model.hangs = True
    with pytest.raises(Unavailable, match=r"no answer in 0.1 s, 5 times"):
        built(prompts_file(tmp_path, TEXTS), tmp_path / "out", Target(url, timeout_s=0.1))


@pytest.mark.parametrize(
    ("change", "asking", "said"),
    [
        ({"names": ["a", "b"]}, {}, "--model is required; served models: a, b"),
        ({"names": ["a"]}, {"model": "b"}, "model 'b' is not served there; served models: a"),
        ({"key": "secret"}, {}, "HTTP 401: no such key"),
    ],
)
def test_what_cannot_be_asked_is_said(
    tmp_path: Path, model: Model, url: str, change: dict[str, Any], asking: dict[str, Any], said: str
) -> None:
    for key, value in change.items():
        setattr(model, key, value)
    with pytest.raises(InvalidRequest, match=said):
        built(prompts_file(tmp_path, TEXTS), tmp_path / "out", Target(url, **asking))


def test_the_key_is_sent(tmp_path: Path, model: Model, url: str) -> None:
    model.key = "secret"
    assert built(prompts_file(tmp_path, TEXTS), tmp_path / "out", Target(f"{url}/v1/", key="secret")).rows == 40


def test_an_endpoint_that_counts_nothing_is_said(tmp_path: Path, model: Model, url: str) -> None:
    model.usage = False
    with pytest.raises(Unavailable, match="no lengths in the answer"):
        built(prompts_file(tmp_path, TEXTS), tmp_path / "out", Target(url))


def test_nobody_there_is_said(tmp_path: Path, model: Model) -> None:
    with pytest.raises(Unavailable, match=r"127.0.0.1:9/v1/models: ConnectError"):
        built(prompts_file(tmp_path, TEXTS), tmp_path / "out", Target("http://127.0.0.1:9"))


def test_other_settings_are_not_mixed(tmp_path: Path, url: str) -> None:
    file = prompts_file(tmp_path, TEXTS)
    built(file, tmp_path / "out", Target(url), limit=3)
    with pytest.raises(Conflict, match="max_tokens was 1024 and is 99"):
        built(file, tmp_path / "out", Target(url, max_tokens=99))


@pytest.mark.parametrize("records", [[], [""], [{"prompt": "  "}], [{"id": 3}], [7]])
def test_files_without_prompts_are_named(tmp_path: Path, records: list[Any]) -> None:
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(records))
    with pytest.raises(InvalidRequest, match=r"no prompts in .*bad.json"):
        read_prompts([file])


def test_every_form_of_prompt_and_what_is_left_out(tmp_path: Path) -> None:
    records = [
        {"conversations": [{"from": "gpt", "value": "hi"}, {"from": "human", "value": "first"}]},
        {"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "second"}]},
        {"instruction": "third", "input": "more"},
        {"prompt": "fourth"},
        {"conversations": []},
        {"other": 1},
    ]
    (tmp_path / "a.json").write_text(json.dumps(records))
    (tmp_path / "b.jsonl").write_text('{"prompt": "fourth"}\n\n{"prompt": ""}\n')
    (tmp_path / "c.txt").write_text("fifth\n\n")
    found = read_prompts([tmp_path])
    assert set(found.texts) == {"first", "second", "third\n\nmore", "fourth", "fifth"}
    assert found.duplicates == 1
    assert [one.split("/")[-1] for one in found.bad] == [
        "a.json, record 5: conversations: no message of a user",
        "a.json, record 6: no prompt, instruction, messages or conversations among 'other'",
        "b.jsonl, record 2: the prompt is empty",
    ]


@pytest.mark.parametrize("separator", "\u2028\u2029\u0085\x0b\x0c\x1c\x1d\x1e")
def test_a_prompt_holds_every_character_but_the_end_of_a_line(tmp_path: Path, separator: str) -> None:
    text = f"first{separator}second"
    (tmp_path / "a.txt").write_text(f"{text}\r\nthird\n", encoding="utf-8")
    assert set(read_prompts([tmp_path]).texts) == {text, "third"}
    record = json.dumps({"prompt": text}, ensure_ascii=separator < " ")
    (tmp_path / "b.jsonl").write_text(f"{record}\n{record}\n", encoding="utf-8")
    (tmp_path / "c.json").write_text(f"[{record}]", encoding="utf-8")
    found = read_prompts([tmp_path])
    assert set(found.texts) == {text, "third"}
    assert (found.duplicates, found.bad) == (3, ())


def test_a_byte_order_mark_belongs_to_no_prompt_and_gzip_is_read(tmp_path: Path) -> None:
    for number, (name, content) in enumerate(
        {"a.txt": "one\n", "b.json": '[{"prompt": "two"}]', "c.jsonl": '{"prompt": "three"}\n'}.items()
    ):
        marked = f"\ufeff{content}".encode()
        (tmp_path / name).write_bytes(marked)
        (tmp_path / f"{number}-{name}.gz").write_bytes(gzip.compress(marked))
    found = read_prompts([tmp_path])
    assert set(found.texts) == {"one", "two", "three"}
    assert (found.duplicates, found.bad) == (3, ())


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", b"[" * 100_000, r"a\.json:1: not JSON: nested too deeply"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": \n', r"a\.jsonl:2: not JSON"),
        ("a.json", b'{\n "prompt": "x"}', r"a\.json:1: not JSON: .*wanted is one record a line, or a list"),
        ("a.txt", b"x\ny\0\n", r"a\.txt:2: a NUL character"),
        ("a.txt", b"x\n\xff\n", r"a\.txt:2: not text in UTF-8"),
        ("a.parquet", b"PAR1 not at all", r"a\.parquet: not a Parquet file"),
        (
            "a.jsonl.gz",
            gzip.compress(b"{}\n" * 99, mtime=0)[:-9],
            r"a\.jsonl\.gz: cannot be read: it is not whole gzip",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_line(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidRequest, match=says):
        read_prompts([tmp_path])


def test_what_is_left_out_can_be_printed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n{"\\ud800": 1}\n{"prompt": "\\ud800"}\n')
    found = read_prompts([tmp_path])
    assert len(found.bad) == 2
    for one in found.bad:
        one.encode()


def test_killed_in_the_middle_it_goes_on_without_loss_or_duplicates(tmp_path: Path, model: Model, url: str) -> None:
    model.pause_s = 0.02
    texts = [f"number {n} {'x' * (n % 13)}" for n in range(300)]
    file, out = prompts_file(tmp_path, texts), tmp_path / "out"
    command = [sys.executable, "-P", "-m", "predictor.cli", "dataset", str(file), "--out", str(out), "--endpoint", url]
    command += ["--concurrency", "4"]
    journal, environment = out / "answers.jsonl", {**os.environ, "PYTHONPATH": str(ROOT)}
    for kept in (40, 120):
        process = subprocess.Popen(command, cwd=ROOT, env=environment)
        deadline = time.monotonic() + 60
        while not journal.exists() or journal.read_bytes().count(b"\n") < kept:
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    with journal.open("ab") as torn:
        torn.write(b'{"prompt": "number 2')
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=60)
    printed = done.stderr.decode()
    assert done.returncode == 0, printed
    assert "9 of 10 answers take" in printed
    assert "━" not in printed, "a bar is for a terminal"
    table = pyarrow.parquet.read_table(out / "dataset.parquet").to_pylist()
    assert sorted(row["prompt"] for row in table) == sorted(texts)
    assert all(row["output_tokens"] == length(row["prompt"], seed_of(row["prompt"], 0)) for row in table)
    again = [key for key, times in model.asked.items() if times > 1]
    assert len(again) <= 2 * 4, "only what was under way at a kill is asked again"


def test_two_builders_do_not_write_one_folder(tmp_path: Path, model: Model, url: str) -> None:
    file, out = prompts_file(tmp_path, TEXTS), tmp_path / "out"
    prompts = read_prompts([file])

    async def both() -> list[Any]:
        ways = (build(prompts, BuildSettings(Target(url), concurrency=1), out, lambda *_: None) for _ in range(2))
        return await asyncio.gather(*ways, return_exceptions=True)

    model.pause_s = 0.01
    found = asyncio.run(both())
    assert sorted(type(one).__name__ for one in found) == ["BuildResult", "Conflict"]
