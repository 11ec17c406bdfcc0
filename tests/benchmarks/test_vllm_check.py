"""`make vllm-check` without vLLM's tests: which tests run, and how the result is reported."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.vllm_check import __main__ as vllm_check

pytestmark = pytest.mark.slow  # each run of pytest imports vLLM

TESTS = """
import pytest
from tests.utils import RemoteOpenAIServer, something_else

@pytest.mark.parametrize("name", ["a b{", "c"])
def test_passes(name):
    with RemoteOpenAIServer("any", ["--option"]) as server:
        assert server.url_for("v1", "x") == "http://127.0.0.1:9/v1/x"
        assert str(server.get_client().base_url) == "http://127.0.0.1:9/v1/"
        assert something_else() is None

def test_fails():
    assert 1 == 2

def test_of_chance(tmp_path_factory):
    from pathlib import Path
    seen = Path(__file__).with_name("seen")
    first = not seen.exists()
    seen.touch()
    assert not first

@pytest.fixture
def broken():
    raise OSError("no such thing")

def test_cannot_start(broken):
    pass

def test_skipped():
    pytest.skip("not here")
"""
NAMES = ["test_passes[a b{]", "test_passes[c]", "test_fails", "test_of_chance", "test_cannot_start", "test_skipped"]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a folder of tests that looks like vLLM's."""
    folder = tmp_path / f"vllm-{vllm_check.version()}" / vllm_check.FOLDER
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, folder.parents[1]):
        (package / "__init__.py").touch()
    (folder / "test_some.py").write_text(TESTS)
    monkeypatch.setattr(vllm_check, "listed_tests", lambda: paths(NAMES))
    return tmp_path


def paths(names: list[str]) -> list[str]:
    return [f"{vllm_check.FOLDER}/test_some.py::{name}" for name in names]


async def test_failures_are_named_and_one_by_chance_is_tried_again(work: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    assert await vllm_check.check("http://127.0.0.1:9", vllm_check.LOCAL, work, console) == 1
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1 passed at try 2" in said
    assert "3 of 6 pass" in said
    for name, why in (
        ("test_fails", "assert 1 == 2"),
        ("test_cannot_start", "no such thing"),
        ("test_skipped", "not here"),
    ):
        assert f"test_some.py::{name}" in said
        assert why in said


async def test_all_pass(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(vllm_check, "listed_tests", lambda: paths(NAMES[:2]))
    assert await vllm_check.check("http://127.0.0.1:9", vllm_check.LOCAL, work, console) == 0
    assert "2 of 2 pass" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_list_names_each_test_once() -> None:
    tests = vllm_check.listed_tests()
    assert len(tests) == len(set(tests)) == 76
    assert all("::" in test for test in tests)
