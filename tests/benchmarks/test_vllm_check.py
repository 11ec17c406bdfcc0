"""`make vllm-check` without vLLM's tests: which tests run, and how the result is reported."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.vllm_check import __main__ as vllm_check

pytestmark = pytest.mark.slow  # each run of pytest imports vLLM

TESTS = """
import pytest
from pathlib import Path
from tests.utils import RemoteOpenAIServer, something_else

@pytest.mark.parametrize("name", ["a b{", "c"])
def test_passes(name):
    with RemoteOpenAIServer("any", ["--option"]) as server:
        assert server.url_for("v1", "x") == "http://127.0.0.1:9/v1/x"
        assert str(server.get_client().base_url) == "http://127.0.0.1:9/v1/"
        assert something_else() is None

def test_fails():
    assert 1 == 2

def test_of_chance():
    ran = Path(__file__).with_name("ran")
    first = not ran.exists()
    ran.touch()
    assert not first

@pytest.fixture
def broken():
    raise OSError("no such thing")

def test_cannot_start(broken):
    pass

def test_skipped():
    pytest.skip("not here")
"""
PASSING = ["test_passes[a b{]", "test_passes[c]"]
FAILING = {"test_fails": "assert 1 == 2", "test_cannot_start": "no such thing", "test_skipped": "not here"}


@pytest.mark.parametrize(
    ("names", "code", "lines"),
    [(PASSING, 0, ["2 of 2 pass"]), ([*PASSING, "test_of_chance", *FAILING], 1, ["1 passed at try 2", "3 of 6 pass"])],
)
async def test_failures_are_named_and_one_by_chance_is_tried_again(
    names: list[str], code: int, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / f"vllm-{vllm_check.version()}" / vllm_check.FOLDER  # looks like vLLM's
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, folder.parents[1]):
        (package / "__init__.py").touch()
    (folder / "test_some.py").write_text(TESTS)
    paths = [f"{vllm_check.FOLDER}/test_some.py::{name}" for name in names]
    monkeypatch.setattr(vllm_check, "listed_tests", lambda: paths)
    monkeypatch.setattr(vllm_check, "TRIES", 2)
    output = io.StringIO()
    console = Console(file=output, width=200)
    assert await vllm_check.check("http://127.0.0.1:9", vllm_check.LOCAL, tmp_path, console) == code
    failed = [text for name, why in FAILING.items() for text in (f"test_some.py::{name}", why)] if code else []
    assert not [text for text in (*lines, *failed) if text not in output.getvalue()]


def test_the_list_names_each_test_once() -> None:
    tests = vllm_check.listed_tests()
    assert len(tests) == len(set(tests)) == 76
    assert all("::" in test for test in tests)
