"""What holds for all tests."""

import asyncio
import os
from pathlib import Path

import pytest
import structlog
import zmq
from hypothesis import settings

from services.launcher.on_ray import stay_local
from shared.cost.library import Library
from tests.patience import PatientLoops

stay_local()  # before any test imports Ray
asyncio.set_event_loop_policy(PatientLoops())

# Machines are shared and noisy: no test is judged by its time. The same examples are drawn each time, so that a rare
# one never fails a change that has nothing to do with it; the search for rare ones is a run of its own, `random`.
settings.register_profile("default", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None, derandomize=False, max_examples=2000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Services that a test makes by themselves let anybody change things; what they refuse has tests of its own.
for service in ("MONITOR", "SCHEDULER", "WORKER", "PREDICTOR", "PLANNER"):
    os.environ.setdefault(f"POLYPHASE_{service}_CLUSTER_TOKEN", "open")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Pass over files that do not name the mark that is asked for: importing them takes longer than many a test."""
    wanted = str(config.option.markexpr).split()[:1]
    if wanted in (["slow"], ["alone"]) and collection_path.name.startswith("test_"):
        return f"mark.{wanted[0]}" not in collection_path.read_text() or None
    return None


# The garbage collector may wait for ever for a context that a failed test has left with open sockets, in the middle of
# pytest's report.
zmq.Context.__del__ = lambda context: None


class Failures:
    """Names each failure at once: a run that ends before its time prints no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            cause = str(crash.message if crash else report.longrepr).splitlines()[:1]
            terminal.write_line(f"\nFAILED {report.nodeid} ({report.when}): {''.join(cause)}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Failures(config))


# What the default prints of an exception, every local variable with colours, takes a busy machine seconds.
_plain = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
structlog.configure(processors=[*structlog.get_config()["processors"][:-1], _plain])


@pytest.fixture(autouse=True)
def fresh_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """`/metrics` of services within a test is of the moment; that it is kept for a while has a test of its own."""
    monkeypatch.setattr("shared.runtime.http.METRICS_KEPT_S", 0.0)


@pytest.fixture(scope="session")
def library() -> Library:
    return Library.built_in()


@pytest.fixture(scope="session")
def profiles() -> Path:
    """Public profiles of operators and runs."""
    return _public("profiles")


@pytest.fixture(scope="session")
def traces() -> Path:
    """Public traces of requests."""
    return _public("traces")


@pytest.fixture(scope="session")
def prompt_response() -> Path:
    """Public prompts and responses, with which the demo model was trained, but for a part of them."""
    return _public("prompt_response")


def _public(name: str) -> Path:
    """A folder of public data: in POLYPHASE_DATA, or in `shared/data` beside the repository. The project has none."""
    named = os.environ.get("POLYPHASE_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not (folder / name).is_dir():
        pytest.skip(f"no public data at {folder / name}: set POLYPHASE_DATA to a folder that holds `{name}/`")
    return folder / name
