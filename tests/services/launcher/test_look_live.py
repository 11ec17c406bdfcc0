"""The commands that look, on a real suite of emulated instances: each as a person would call it."""

import asyncio
import fcntl
import json
import os
import pty
import re
import signal
import struct
import termios
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from services.launcher.suite import Suite
from tests.services.launcher.up import EMULATED, POLYPHASE, running
from tests.services.launcher.up import polyphase as command

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def suite(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    """One for all tests of this file, after a few requests, each prefilled by a prefill instance; a monitor that is
    frozen stays so.
    """
    changes: dict[str, Any] = {"name": "looked at", "launcher": {"hang_s": 0}, "policies": {"split": "full"}}
    changes["instance_defaults"] = {**EMULATED, "emulated_step_s": 0.05}  # the long answer takes over a minute
    async with running(tmp_path_factory.mktemp("suite"), **changes) as (_, suite):
        await asyncio.gather(*(ask(suite, f"mine-{number}", 10 * number) for number in range(1, 5)))
        yield suite


async def ask(suite: Suite, request_id: str, tokens: int) -> dict[str, Any]:
    body = {"model": "m", "prompt": f"Hello {request_id}", "max_tokens": tokens, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=180, trust_env=False) as http:
        answer = await http.post(
            f"{suite.state.api_url}/v1/completions", json=body, headers={"X-Request-Id": request_id}
        )
    told: dict[str, Any] = answer.raise_for_status().json()
    return told


async def polyphase(suite: Suite, *words: str) -> tuple[int, str]:
    """Exit code and output; no line is wider than 80 columns."""
    return await command(*words, "--data-dir", str(suite.data_dir), COLUMNS="80", NO_COLOR="1")


async def test_status_and_top(suite: Suite) -> None:
    async with asyncio.timeout(120):
        while "The monitor does not answer" in (text := (await polyphase(suite, "status"))[1]):
            continue
    assert re.match(r"[✔·!] (Good|Idle|Degraded): ", text)
    assert all(len(line) <= 80 for line in text.splitlines())
    for name in ("p-0", "p-1", "d-0", "d-1", "default", suite.state.api_url):
        assert name in text
    code, text = await polyphase(suite, "top", "--once")
    assert code == 0
    assert "tokens out /s" in text
    assert all(len(line) <= 80 for line in text.splitlines())


async def test_status_as_json(suite: Suite) -> None:
    told: dict[str, Any] = {"verdict": None}
    async with asyncio.timeout(120):
        while told["verdict"] is None:  # a busy monitor may not answer in time
            _, text = await polyphase(suite, "status", "--json")
            told = json.loads(text.splitlines()[-1])
    assert {"api_url", "dashboard_url", "processes", "instances", "slo", "verdict"} == set(told)
    assert told["verdict"]["counts"]["decode"]["ready"] == 2


async def test_a_request_is_found_by_the_clients_id_and_explained(suite: Suite) -> None:
    async with asyncio.timeout(60):  # its end is reported after its answer
        while "Completed (length)" not in (await polyphase(suite, "explain", "mine-3"))[1]:
            continue
    code, text = await polyphase(suite, "explain", "mine-3")
    assert code == 0, text
    assert "prefill · p-" in text
    assert "█" in text
    assert "Decode went to d-" in text
    code, text = await polyphase(suite, "explain", "mine-", "--json")
    assert code == 1
    assert "4 request ids contain 'mine-'" in text
    code, text = await polyphase(suite, "explain", "nowhere")
    assert code == 1
    assert "polyphase requests" in text


async def test_one_under_way_is_explained(suite: Suite) -> None:
    asked = asyncio.ensure_future(ask(suite, "long-one", 1_500))
    text = ""
    async with asyncio.timeout(60):
        while "Under way" not in text:
            assert not asked.done(), "it ended before it was looked at"
            _, text = await polyphase(suite, "explain", "long-one")
    asked.cancel()


async def test_requests_are_searched(suite: Suite) -> None:
    async def found() -> list[str]:
        _, text = await polyphase(suite, "requests", "cmpl-mine-2", "--json")
        return [row["job_id"] for row in json.loads(text.splitlines()[-1])["rows"]]

    async with asyncio.timeout(60):  # rows are written a second later
        while not (ids := await found()):
            continue
    assert [job_id.startswith("cmpl-mine-2") for job_id in ids] == [True]
    code, text = await polyphase(suite, "requests", "--order", "worst")
    assert code == 1
    assert "--order must be one of newest" in text


async def test_an_operation_is_a_sentence_and_an_event(suite: Suite) -> None:
    code, text = await polyphase(suite, "flip", "d-1")
    assert code == 0, text
    assert text.startswith("✔ d-1 is now prefill: drained in ")
    operation = re.search(r"Operation (\w{32})", text)
    assert operation is not None
    code, text = await polyphase(suite, "operation", operation[1][:8])
    assert (code, text.startswith("✔ d-1 is now prefill")) == (0, True)
    _, text = await polyphase(suite, "events", "--instance", "d-1", "--kind", "flip")
    assert "decode → prefill by" in text
    code, text = await polyphase(suite, "flip", "d-0")
    assert code == 1
    assert "last ready decode instance" in text
    assert "polyphase flip d-0 --force" in text
    code, text = await polyphase(suite, "flip", "d-2")
    assert code == 1
    assert "Known: d-0, d-1, p-0, p-1" in text
    code, text = await polyphase(suite, "flip", "d-1", "--json")
    assert json.loads(text.splitlines()[-1])["to_role"] == "decode"


async def test_events_and_logs(suite: Suite) -> None:
    _, text = await polyphase(suite, "events", "--since", "1h", "--json")
    kinds = [json.loads(line)["kind"] for line in text.splitlines()]
    assert kinds.count("registered") == 4
    code, text = await polyphase(suite, "events", "--kind", "deth")
    assert code == 1
    assert "--kind must be one of" in text
    code, text = await polyphase(suite, "logs", "d-0", "-n", "1000")
    assert code == 0
    assert "instance is ready" in text
    code, text = await polyphase(suite, "logs", "d-9")
    assert code == 1
    assert "monitor" in text.partition("Known: ")[2]


async def test_status_works_with_the_monitor_away(suite: Suite) -> None:
    pid = suite.state.pid("monitor")
    os.kill(pid, signal.SIGSTOP)
    try:
        code, text = await polyphase(suite, "status")
        assert code == 3, text
        words = " ".join(text.split())
        assert "The monitor does not answer" in words
        assert "launcher's state file" in words
        assert "running" in words
        for name in ("p-0", "d-1", "scheduler", "gateway"):
            assert name in text
        code, text = await polyphase(suite, "status", "--json")
        told = json.loads(text.splitlines()[-1])
        assert told["verdict"] is None
        assert {one["instance_id"] for one in told["instances"]} == {"p-0", "p-1", "d-0", "d-1"}
    finally:
        os.kill(pid, signal.SIGCONT)


async def test_top_on_a_terminal_of_80_by_24(suite: Suite) -> None:
    """Live, through a stretch without a monitor, until q is pressed; and until Ctrl-C."""
    with Terminal(suite) as top:
        await top.shows("p-0")
        pid = suite.state.pid("monitor")
        os.kill(pid, signal.SIGSTOP)
        try:
            await top.shows("ago:")
            assert "d-1" in top.frames()[-1]
        finally:
            os.kill(pid, signal.SIGCONT)
        await top.shows("Good", "Idle", "Degraded", without="does not answer")
        for frame in top.frames():
            lines = frame.split("\n")
            assert len(lines) <= 24
            assert all(len(line) <= 80 for line in lines)
        top.type(b"q")
        assert await top.ended() == 0
    with Terminal(suite) as top:
        await top.shows("p-0")
        top.type(b"\x03")
        assert await top.ended() == 0


class Terminal:
    """`polyphase top` on a pseudo-terminal of 80 x 24."""

    def __init__(self, suite: Suite) -> None:
        words = [*POLYPHASE, "top", "--data-dir", str(suite.data_dir)]
        self.pid, self._number = pty.fork()
        if not self.pid:
            os.environ.update(TERM="xterm-256color", NO_COLOR="1")
            os.environ.pop("COLUMNS", None)
            os.execv(words[0], words)
        fcntl.ioctl(self._number, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        os.set_blocking(self._number, False)
        self._output = b""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._number)
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def frames(self) -> list[str]:
        """What was drawn, one picture after the other; not the one that is being drawn."""
        text = self._output.decode(errors="replace").replace("\r", "")
        return [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", part) for part in text.split("\x1b[H")[1:-1]]

    async def shows(self, *words: str, without: str = "\0", within_s: float = 60.0) -> None:
        """Wait for a picture with one of the words."""
        until_mono = time.monotonic() + within_s
        while not any(word in frame and without not in frame for frame in self.frames()[-1:] for word in words):
            assert time.monotonic() < until_mono, f"never {words}: {self.frames()[-1:]}"
            self._read()
            await asyncio.sleep(0.05)

    def type(self, keys: bytes) -> None:
        os.write(self._number, keys)

    async def ended(self, within_s: float = 30.0) -> int:
        """Its exit code."""
        until_mono = time.monotonic() + within_s
        while True:
            self._read()
            pid, status = os.waitpid(self.pid, os.WNOHANG)  # noqa: ASYNC222  (it does not wait)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < until_mono, "it goes on"
            await asyncio.sleep(0.05)

    def _read(self) -> None:
        try:
            while data := os.read(self._number, 65_536):
                self._output += data
        except (BlockingIOError, OSError):
            return
