"""`make vllm-check`: runs those of vLLM's entrypoint tests that pass on plain vLLM against a suite.

Run as `python -m benchmarks.vllm_check [--url URL --model FOLDER]`. The tests are in vLLM's source package, which pip
fetches into the work folder; tests.txt names those that pass on plain vLLM with the demo model. Without --url a suite
is started on free ports. Exit code 1: a test failed each time; 2: the tests could not be run.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import requires
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.suite import BARE, CPU_ENGINE, SPLIT, CommandFailed, run_command, started
from shared.errors import NotFound, PolyphaseError

HERE = Path(__file__).parent
FOLDER = "tests/entrypoints/openai"  # of the tests that tests.txt names
LOCAL = Path("models/demo")
CLUSTER: dict[str, Any] = {  # one instance of each role, of unlike block sizes
    **BARE,
    "name": "vllm-check",
    "gateway": {"dtype": "float32"},
    "policies": SPLIT,
    "instance_defaults": CPU_ENGINE,
    "instances": [
        {"id": "prefill-0", "role": "prefill", "block_size": 32},
        {"id": "decode-0", "role": "decode", "block_size": 128},
    ],
}
WORK = Path(".polyphase/vllm-check")
FETCH_S, TEST_S, ALL_S = 600, 120, 1800
# Answers are sampled, and one in ten of the demo model's to a JSON schema is white space up to the end of its context,
# on plain vLLM as here: a test has failed when it fails each time.
TRIES = 4
_MODEL_NAME = re.compile(r"^MODEL_NAME = .*$", re.MULTILINE)


def listed_tests() -> list[str]:
    """The tests, by their names in pytest."""
    return [f"{FOLDER}/{line}" for line in (HERE / "tests.txt").read_text(encoding="utf-8").splitlines()]


def version() -> str:
    """The release of vLLM that this project requires."""
    return next(each.split("==")[1].split(";")[0] for each in requires("polyphase") or () if each.startswith("vllm=="))


async def fetch(release: str, work: Path) -> Path:
    """The folder with vLLM's tests of that release, made ready for the model `demo`. Raises NotFound."""
    root = work / f"vllm-{release}"
    if (root / FOLDER).is_dir():
        return root
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        options = ("--no-deps", "--no-binary=:all:", "--no-clean", "--no-build-isolation", "-q", "-d", folder)
        command = (sys.executable, "-m", "pip", "download", *options, f"vllm=={release}")
        output = await _output(command, {"TMPDIR": folder}, FETCH_S)  # its build of vLLM fails, which is no matter
        found = next(Path(folder).glob("pip-*/vllm_*/tests/entrypoints"), None)
        if found is None:
            raise NotFound(f"pip has no source package of vLLM {release}; the end of its output: {output[-500:]}")
        tree = Path(folder) / "tree"
        shutil.copytree(found, tree / "tests" / "entrypoints")
        (tree / "tests" / "__init__.py").touch()
        for file in (tree / FOLDER).rglob("test_*.py"):
            file.write_text(_MODEL_NAME.sub('MODEL_NAME = "demo"', file.read_text(encoding="utf-8")), encoding="utf-8")
        tree.rename(root)
    return root


async def _output(words: Sequence[str], env: Mapping[str, str], timeout_s: float, folder: Path = Path()) -> str:
    """What a command prints, or the end of it for one that fails or takes too long."""
    try:
        return await asyncio.to_thread(run_command, words, env, timeout_s, folder)
    except CommandFailed as error:
        return error.message


async def failures(root: Path, tests: Sequence[str], url: str, model: Path) -> dict[str, str]:
    """The tests that do not pass, with the reasons. Raises NotFound when pytest ran no test."""
    with tempfile.TemporaryDirectory() as folder:
        results, settings = Path(folder) / "results.jsonl", root / "pytest.ini"
        env = {
            "VLLM_CHECK_URL": url,
            "VLLM_CHECK_MODEL": str(model.resolve()),
            "VLLM_CHECK_RESULTS": str(results),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        settings.write_text(f"[pytest]\nasyncio_mode = strict\ntimeout = {TEST_S}\n", encoding="utf-8")
        options = ("-q", "-c", str(settings), "--rootdir", str(root), "-p", "no:cacheprovider")
        command = (sys.executable, "-m", "pytest", *options, "-p", "benchmarks.vllm_check.plugin", *tests)
        output = await _output(command, env, ALL_S, root)
        if not results.exists():
            raise NotFound(f"pytest ran no test: {output[-2000:]}")
        results_of = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    passed = {each["test"] for each in results_of if each["outcome"] == "passed"}
    why = {each["test"]: each["why"] for each in results_of if each["outcome"] != "passed"}
    return {test: why.get(test, "not run") for test in tests if test not in passed or test in why}


async def check(url: str, model: Path, work: Path, console: Console) -> int:
    """Run all tests against the server; returns the exit code."""
    with console.status("fetching vLLM's source package …"):
        root = await fetch(version(), work.resolve())
    tests = listed_tests()
    failed = dict.fromkeys(tests, "")
    for attempt in range(1, TRIES + 1):
        before, word = len(failed), "tests" if len(failed) > 1 else "test"
        with console.status(f"{before} {word}, try {attempt} …"):
            failed = await failures(root, list(failed), url, model)
        if not failed:
            break
        if attempt > 1 and len(failed) < before:
            console.print(f"{before - len(failed)} passed at try {attempt}")
    for test, why in failed.items():
        console.print(f"✘ {test}", style="red", markup=False, highlight=False)
        console.print(why, style="dim", markup=False, highlight=False)
    console.print(f"vLLM {version()}, its entrypoint tests: {len(tests) - len(failed)} of {len(tests)} pass")
    return int(bool(failed))


async def run(options: argparse.Namespace, console: Console) -> int:
    """Check the given server, or a suite that is started for this."""
    if options.url:
        return await check(options.url.rstrip("/"), options.model, options.work, console)
    async with started(CLUSTER, options.work / "suite", console) as running:
        return await check(running.plan.api_url, options.model, options.work, console)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_check", description=__doc__)
    parser.add_argument("--url", default="", help="a server that serves --model as `demo`; default: start a suite")
    parser.add_argument("--model", type=Path, default=LOCAL, help="the folder of the model, for its tokenizer")
    parser.add_argument("--work", type=Path, default=WORK, help="folder for vLLM's tests and the suite's data")
    console = Console()
    try:
        return asyncio.run(run(parser.parse_args(), console))
    except PolyphaseError as error:
        console.print(error.message, style="red", markup=False)
        return 2


if __name__ == "__main__":
    sys.exit(main())
