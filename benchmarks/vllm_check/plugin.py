"""A pytest plugin that lets vLLM's tests use a server that is already running.

The tests start a server with `tests.utils.RemoteOpenAIServer` for a model of their own. The plugin replaces that class
by a client of the server at VLLM_CHECK_URL, and the tokenizer of any model by that of the folder VLLM_CHECK_MODEL. It
writes the outcome of each test to the file VLLM_CHECK_RESULTS, one JSON object per line.
"""

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import openai
import pytest
import vllm.tokenizers

URL, MODEL, RESULTS = (os.environ[f"VLLM_CHECK_{name}"] for name in ("URL", "MODEL", "RESULTS"))
TIMEOUT_S = 120.0


class RunningServer:
    """Replaces RemoteOpenAIServer, and ignores the options that a test starts its server with."""

    DUMMY_API_KEY = "vllm-check"
    url_root = URL

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join((URL, *parts))

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._usual(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._usual(options))

    def _usual(self, options: dict[str, Any]) -> dict[str, Any]:
        usual = {"timeout": TIMEOUT_S, "max_retries": 0}
        return {**usual, **options, "base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY}


class _Utils(ModuleType):
    """The module `tests.utils`. Names that tests import without using them are functions that do nothing."""

    RemoteOpenAIServer = RunningServer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


sys.modules["tests.utils"] = _Utils("tests.utils")
_get_tokenizer = vllm.tokenizers.get_tokenizer
vllm.tokenizers.get_tokenizer = lambda tokenizer_name, *given, **more: _get_tokenizer(MODEL, *given, **more)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the outcome of a test, and of a fixture that failed."""
    if report.when == "call" or report.outcome != "passed":
        outcome = {"test": report.nodeid, "outcome": report.outcome, "why": report.longreprtext[-2000:]}
        with Path(RESULTS).open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(outcome)}\n")
