"""The dataset builder against an endpoint over real sockets, interrupted and resumed, and its input files."""

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
TEXTS = [f"tell me about {'very ' * n}old things" for n in range(40)]
Build = Callable[..., BuildResult]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setattr(dataset, "FIRST_PAUSE_S", 0.01)
    return Model()


@pytest.fixture
def url(model: Model) -> Iterator[str]:
    with served(model) as found:
        yield found


@pytest.fixture
def built(tmp_path: Path, url: str) -> Build:
    """`built(texts, samples=…, api=…)`: a build in `tmp_path / "out"` with these settings of build and target."""

    def run(texts: list[str] = TEXTS, base_url: str = url, **changes: Any) -> BuildResult:
        names = set(changes) & set(BuildSettings.__dataclass_fields__)
        own = {name: changes.pop(name) for name in names}
        progress: list[tuple[int, int]] = []
        settings = BuildSettings(Target(base_url, **changes), **own)
        prompts = read_prompts([prompts_file(tmp_path, texts)])
        result = asyncio.run(build(prompts, settings, tmp_path / "out", lambda *now: progress.append(now)))
        assert progress[-1][0] == progress[-1][1]
        return result

    return run


def prompts_file(folder: Path, texts: list[str]) -> Path:
    file = folder / "prompts.txt"
    file.write_text("\n".join(texts) + "\n")
    return file


def rows(result: BuildResult) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pyarrow.parquet.read_table(result.path).to_pylist()
    return found


def test_each_prompt_is_answered_once_and_stored_with_the_settings(model: Model, built: Build) -> None:
    result = built([*TEXTS, *TEXTS[:5]], samples=2, concurrency=4)
    assert {(row["prompt"], row["sample"]): row["output_tokens"] for row in rows(result)} == {
        (text, sample): length(text, seed_of(text, sample)) for text in TEXTS for sample in range(2)
    }
    assert all(row["split"] == split_of(row["prompt"]) for row in rows(result))
    assert set(model.requests.values()) == {1}
    assert 2 <= model.most <= 4
    settings = settings_of(result.path)
    assert (settings["model"], settings["samples"], settings["prompts"]) == ("demo", 2, 40)
    again = built(samples=2)
    assert (again.requested, again.rows) == (0, 80)


def test_each_answer_has_a_seed_of_its_own(model: Model, built: Build) -> None:
    built(samples=3)
    assert len({seed for _, seed in model.requests}) == 3 * len(TEXTS)
    assert all(0 <= seed < 2**31 for _, seed in model.requests)


def test_cut_answers_are_marked(built: Build) -> None:
    result = built(api=Api.COMPLETIONS, max_tokens=20)
    for row in rows(result):
        assert row["cut"] == (length(row["prompt"], seed_of(row["prompt"], 0)) > 20)
        assert row["output_tokens"] <= 20
    assert result.cut == sum(row["cut"] for row in rows(result)) > 0


def test_a_refused_prompt_is_counted_and_not_requested_again(model: Model, built: Build) -> None:
    texts = ["one", "TOO LONG", "three"]
    result = built(texts)
    assert result.rows == 2
    assert result.refused == {"HTTP 400: the prompt is longer than 4096 tokens": 1}
    before = len(model.bodies)
    assert built(texts).requested == 0
    assert len(model.bodies) == before


def test_temporary_failures_are_retried(model: Model, built: Build) -> None:
    model.fails = 3
    assert built(concurrency=2).rows == 40


def test_a_permanent_failure_ends_the_build_and_keeps_the_answers(model: Model, built: Build) -> None:
    built(limit=10)
    answered = set(model.requests)
    model.fails = 10_000
    with pytest.raises(Unavailable, match=r"chat/completions: HTTP 503: the engine is away, 5 times"):
        built()
    model.fails = 0
    assert built().rows == 40
    assert {model.requests[key] for key in answered} == {1}


@pytest.mark.parametrize(
    ("change", "target", "error", "message"),
    [
        ({"names": ["a", "b"]}, {}, InvalidRequest, "--model is required; served models: a, b"),
        ({"names": ["a"]}, {"model": "b"}, InvalidRequest, "model 'b' is not served there; served models: a"),
        ({"key": "secret"}, {}, InvalidRequest, "HTTP 401: no such key"),
        ({"hangs": True}, {"timeout_s": 0.1}, Unavailable, r"no answer in 0.1 s, 5 times"),
        ({"usage": False}, {}, Unavailable, "no lengths in the answer"),
        ({}, {"base_url": "http://127.0.0.1:9"}, Unavailable, r"127.0.0.1:9/v1/models: ConnectError"),
    ],
)
def test_endpoints_that_cannot_be_used(
    model: Model, built: Build, change: dict[str, Any], target: dict[str, Any], error: type[Exception], message: str
) -> None:
    for key, value in change.items():
        setattr(model, key, value)
    with pytest.raises(error, match=message):
        built(**target)


def test_the_key_is_sent(model: Model, built: Build, url: str) -> None:
    model.key = "secret"
    assert built(base_url=f"{url}/v1/", key="secret").rows == 40


def test_a_folder_has_answers_of_one_setting(built: Build) -> None:
    built(limit=3)
    with pytest.raises(Conflict, match="max_tokens was 1024 and is 99"):
        built(max_tokens=99)


def test_two_builds_cannot_write_to_one_folder(tmp_path: Path, model: Model, url: str) -> None:
    prompts, settings = read_prompts([prompts_file(tmp_path, TEXTS)]), BuildSettings(Target(url), concurrency=1)

    async def both() -> list[Any]:
        builds = (build(prompts, settings, tmp_path / "out", lambda *_: None) for _ in range(2))
        return await asyncio.gather(*builds, return_exceptions=True)

    model.pause_s = 0.01
    assert sorted(type(each).__name__ for each in asyncio.run(both())) == ["BuildResult", "Conflict"]


def test_a_killed_build_continues_without_loss_or_duplicates(tmp_path: Path, model: Model, url: str) -> None:
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
    assert "━" not in printed, "progress bars are for terminals"
    table = pyarrow.parquet.read_table(out / "dataset.parquet").to_pylist()
    assert sorted(row["prompt"] for row in table) == sorted(texts)
    assert all(row["output_tokens"] == length(row["prompt"], seed_of(row["prompt"], 0)) for row in table)
    again = [key for key, times in model.requests.items() if times > 1]
    assert len(again) <= 2 * 4, "requests that ran at a kill"


@pytest.mark.parametrize("records", [[], [""], [{"prompt": "  "}], [{"id": 3}], [7]])
def test_files_without_prompts(tmp_path: Path, records: list[Any]) -> None:
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(records))
    with pytest.raises(InvalidRequest, match=r"no prompts in .*bad.json"):
        read_prompts([file])


def test_all_forms_of_prompts_and_skipped_records(tmp_path: Path) -> None:
    records = [
        {"conversations": [{"from": "gpt", "value": "hi"}, {"from": "human", "value": "first"}]},
        {"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "second"}]},
        {"instruction": "third", "input": "more"},
        {"prompt": "fourth"},
        {"conversations": []},
        {"other": 1},
    ]
    (tmp_path / "a.json").write_text(json.dumps(records))
    (tmp_path / "b.jsonl").write_text('{"prompt": "fourth"}\n\n{"prompt": ""}\n{"\\ud800": 1}\n{"prompt": "\\ud800"}\n')
    (tmp_path / "c.txt").write_text("fifth\n\n")
    found = read_prompts([tmp_path])
    assert set(found.texts) == {"first", "second", "third\n\nmore", "fourth", "fifth"}
    assert found.duplicates == 1
    assert [each.split("/")[-1] for each in found.bad[:3]] == [
        "a.json, record 5: conversations: no message of a user",
        "a.json, record 6: no prompt, instruction, messages or conversations among 'other'",
        "b.jsonl, record 2: the prompt is empty",
    ]
    assert len(found.bad) == 5
    assert all(each.encode() for each in found.bad), "messages can be printed"


@pytest.mark.parametrize("separator", "\u2028\u2029\u0085\x0b\x0c\x1c\x1d\x1e")
def test_only_line_ends_separate_prompts(tmp_path: Path, separator: str) -> None:
    text = f"first{separator}second"
    (tmp_path / "a.txt").write_text(f"{text}\r\nthird\n", encoding="utf-8")
    assert set(read_prompts([tmp_path]).texts) == {text, "third"}
    record = json.dumps({"prompt": text}, ensure_ascii=separator < " ")
    (tmp_path / "b.jsonl").write_text(f"{record}\n{record}\n", encoding="utf-8")
    (tmp_path / "c.json").write_text(f"[{record}]", encoding="utf-8")
    found = read_prompts([tmp_path])
    assert (set(found.texts), found.duplicates, found.bad) == ({text, "third"}, 3, ())


def test_byte_order_marks_and_gzip(tmp_path: Path) -> None:
    files = {"a.txt": "one\n", "b.json": '[{"prompt": "two"}]', "c.jsonl": '{"prompt": "three"}\n'}
    for number, (name, content) in enumerate(files.items()):
        marked = f"\ufeff{content}".encode()
        (tmp_path / name).write_bytes(marked)
        (tmp_path / f"{number}-{name}.gz").write_bytes(gzip.compress(marked))
    found = read_prompts([tmp_path])
    assert (set(found.texts), found.duplicates, found.bad) == ({"one", "two", "three"}, 3, ())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"[" * 100_000, r"a\.json:1: not JSON: nested too deeply"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": \n', r"a\.jsonl:2: not JSON"),
        ("a.json", b'{\n "prompt": "x"}', r"a\.json:1: not JSON: .*expected one record a line, or a list"),
        ("a.txt", b"x\ny\0\n", r"a\.txt:2: a NUL character"),
        ("a.txt", b"x\n\xff\n", r"a\.txt:2: not text in UTF-8"),
        ("a.parquet", b"PAR1 not at all", r"a\.parquet: not a Parquet file"),
        ("a.jsonl.gz", gzip.compress(b"{}\n" * 99, mtime=0)[:-9], r"a\.jsonl\.gz: cannot be read: it is not whole"),
    ],
)
def test_unreadable_files_are_named_with_the_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidRequest, match=message):
        read_prompts([tmp_path])
