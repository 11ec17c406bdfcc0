"""What vLLM's tests need of its test tree, for a server that runs already: a plugin of pytest's.

The tests start a server with `tests.utils.RemoteOpenAIServer` for a model of their own. Here its name means the server
at VLLM_CHECK_URL, and the tokenizer of any model is that of the folder VLLM_CHECK_MODEL. What became of each test goes
to the file VLLM_CHECK_RESULTS, a JSON object a line.
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
    """In the place of RemoteOpenAIServer; whatever options a test would start its server with are ignored."""

    DUMMY_API_KEY = "vllm-check"
    url_root = URL

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        """The address of a route."""
        return "/".join((URL, *parts))

    def get_client(self, **options: Any) -> openai.OpenAI:
        """OpenAI's client of the server."""
        return openai.OpenAI(**self._usual(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """The same for asyncio."""
        return openai.AsyncOpenAI(**self._usual(options))

    def _usual(self, options: dict[str, Any]) -> dict[str, Any]:
        usual = {"timeout": TIMEOUT_S, "max_retries": 0}
        return {**usual, **options, "base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY}


class _Utils(ModuleType):
    """The module `tests.utils`. Names that the tests import and do not use are functions that do nothing."""

    RemoteOpenAIServer = RunningServer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


sys.modules["tests.utils"] = _Utils("tests.utils")
_get_tokenizer = vllm.tokenizers.get_tokenizer
vllm.tokenizers.get_tokenizer = lambda tokenizer_name, *given, **more: _get_tokenizer(MODEL, *given, **more)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the outcome of a test, and of a fixture that failed."""
    if report.when == "call" or report.outcome != "passed":
        said = {"test": report.nodeid, "outcome": report.outcome, "why": report.longreprtext[-2000:]}
        with Path(RESULTS).open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(said)}\n")
