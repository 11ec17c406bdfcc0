"""`polyphase up` for real: emulated instances, every service and process real."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from services.launcher.child_process import KILL_S, STOP_S
from services.launcher.suite import Suite, until
from tests.services.launcher.up import Up, polyphase, running

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


async def ask(suite: Suite) -> httpx.Response:
    body: dict[str, Any] = {"model": "m", "prompt": "Hello", "max_tokens": 5}
    async with httpx.AsyncClient(timeout=120, trust_env=False) as http:
        return await http.post(f"{suite.state.api_url}/v1/completions", json=body)


def pids(suite: Suite) -> list[int]:
    return [process.pid for process in suite.state.processes]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def up(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Up]:
    """One for the tests that leave it serving, and for the last one, which ends it."""
    async with running(tmp_path_factory.mktemp("up"), launcher={"hang_s": 6.0}) as found:
        yield found


async def test_serves_and_is_operated(up: Up, tmp_path: Path) -> None:
    _, suite = up
    assert (await ask(suite)).json()["usage"]["completion_tokens"] == 5
    where = ["--data-dir", str(suite.data_dir)]
    code = 1
    async with asyncio.timeout(120):  # a busy monitor may not answer in time
        while code:
            code, text = await polyphase("status", *where)
    assert "p-1" in text
    code, text = await polyphase("flip", "p-1", *where, "--json")
    assert code == 0, text
    operation = json.loads(text.splitlines()[-1])
    assert 0 < operation["flip_s"] < operation["total_s"]
    assert (await suite.instances())["p-1"].role == "decode"
    code, text = await polyphase("flip", "p-0", *where)  # the last prefill instance
    assert code == 1
    assert "last ready prefill" in text
    code, text = await polyphase("forget", "p-0", *where)
    assert code == 1
    assert "only dead instances can be forgotten" in text
    for what, state in (("drain", "draining"), ("resume", "ready")):
        code, text = await polyphase(what, "d-0", *where)
        assert code == 0, text
        assert (await suite.instances())["d-0"].state == state
    file = ["--cluster", str(suite.data_dir.parent / "cluster.yaml")]
    code, text = await polyphase("up", *file, *where)
    assert code == 1
    assert "already runs" in text
    code, text = await polyphase("up", *file, "--data-dir", str(tmp_path / "other"))
    assert code == 1
    assert "for monitor is taken by process" in text


async def test_the_clusters_secret_is_wanted_and_told_to_nobody(up: Up, tmp_path: Path) -> None:
    _, suite = up
    file = suite.data_dir / "cluster-token"
    secret = file.read_text().strip()
    assert file.stat().st_mode & 0o077 == 0
    monitor = ["--monitor", suite.state.monitor_url, "--data-dir", str(tmp_path / "elsewhere")]
    code, text = await polyphase("flip", "p-1", *monitor)
    assert (code, "needs the cluster's secret" in text) == (1, True), text
    (tmp_path / "wrong").write_text("another-secret-of-a-cluster")
    for variable, value, said in (
        ("POLYPHASE_CLUSTER_TOKEN_FILE", tmp_path / "wrong", "is not this cluster's secret"),
        ("POLYPHASE_CLUSTER_TOKEN_FILE", file, "is now"),
    ):
        code, text = await polyphase("flip", "p-1", *monitor, **{variable: str(value)})
        assert said in text
    assert code == 0
    for process in suite.state.processes:
        one = psutil.Process(process.pid)
        assert secret not in repr((one.cmdline(), one.environ())), process.name
    for log in (suite.data_dir / "logs").iterdir():
        assert secret not in log.read_text(), log
    assert secret not in (suite.data_dir / "state.json").read_text()
    async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
        for url in (suite.state.monitor_url, *suite.state.scheduler_urls, suite.state.api_url):
            for path in ("/health", "/metrics", "/openapi.json"):
                assert secret not in (await http.get(url + path)).text


async def test_a_frozen_process_is_noticed_and_told_to_end_the_launcher_ends_all_that_it_started(up: Up) -> None:
    """SIGSTOP is the rudest hang: nothing is closed, nothing is answered, SIGTERM is not taken."""
    launcher, suite = up
    for names in (("d-0", "gateway"), ("monitor",)):
        frozen = {name: suite.kill(name, signal.SIGSTOP) for name in names}
        for name, old in frozen.items():
            await suite.restarted(name, old)
            state = next(process for process in suite.state.processes if process.name == name)
            assert "hung" in state.fault
            assert "stopped by a signal" in state.fault
            assert not _alive(old)
        await suite.wait_ready()
        assert (await ask(suite)).json()["usage"]["completion_tokens"] == 5
    started = pids(suite)
    suite.kill("gateway", signal.SIGSTOP)
    launcher.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(launcher.wait(), STOP_S + KILL_S + 60) == 0
    assert not any(_alive(pid) for pid in started)
    assert not (suite.data_dir / "state.json").exists()


async def test_a_killed_instance_comes_back_and_none_outlives_the_launcher(tmp_path: Path) -> None:
    async with running(tmp_path) as (launcher, suite):
        old = suite.kill("d-0")
        await suite.restarted("d-0", old)
        await suite.wait_ready()
        assert (await ask(suite)).is_success
        started = pids(suite)
        launcher.kill()
        await launcher.wait()
        await until(lambda: not any(_alive(pid) for pid in started), 60, "every process to end")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
