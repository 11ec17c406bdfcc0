"""Two monitors of a running suite under load: the one that acts is killed, or frozen, and the other one takes over."""

import asyncio
import contextlib
import os
import re
import signal
import sqlite3
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import pytest_asyncio

from services.launcher import cluster_keys
from services.launcher.suite import Suite, until
from shared.errors import OutcomeUnknown, PolyphaseError, Standby
from shared.wire.clients.monitor import MonitorClient
from tests.services.launcher.up import running

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]
MOST_S = 60.0  # on a busy machine; what it took is printed
USERS, LONG = 4, 24  # with short answers, and with one that takes a minute and a half: several of them on each instance
SLOW = {"engine": "emulated", "accelerator": "A100-SXM-80", "kv_cache_bytes": 8 << 30, "emulated_step_s": 0.05}
# Its lease and the silence that counts allow for pauses; a takeover takes longer than both, and a monitor that took its
# own absence for the silence of instances would be found.
# Without migration a drain lasts as long as the answers of its instance: it cannot end before its monitor is lost.
TWO = {
    "monitors": 2,
    "monitor": {"lease_s": 3.0, "silence_s": 2.0},
    "launcher": {"hang_s": 60},
    "scheduler": {"count": 2},
    "gateway": {"migration": False},
    "instance_defaults": SLOW,
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def suite(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Suite]:
    """One for all tests of this file; each leaves the roles as they were."""
    async with running(tmp_path_factory.mktemp("failover"), **TWO) as (_, suite):
        yield suite


@dataclass
class Load:
    """Users that ask one thing after the other; what they were answered."""

    suite: Suite
    tokens: list[int] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    async def user(self) -> None:
        body: dict[str, Any] = {"model": "m", "prompt": "Hello", "max_tokens": 20, "ignore_eos": True}
        async with httpx.AsyncClient(timeout=180, trust_env=False) as http:
            while True:
                answer = await http.post(f"{self.suite.state.api_url}/v1/completions", json=body)
                if answer.is_success:
                    self.tokens.append(answer.json()["usage"]["completion_tokens"])
                else:
                    self.failed.append(answer.text)


@asynccontextmanager
async def loaded(suite: Suite) -> AsyncIterator[Load]:
    load = Load(suite)
    users = [asyncio.create_task(load.user()) for _ in range(USERS)]
    try:
        await until(lambda: len(load.tokens) >= USERS, 60, "answers")
        yield load
        more = len(load.tokens) + 2 * USERS
        await until(lambda: len(load.tokens) >= more, 60, "answers go on")
    finally:
        for user in users:
            user.cancel()
        await asyncio.gather(*users, return_exceptions=True)
    assert load.failed == []
    assert set(load.tokens) == {20}


async def who(suite: Suite) -> tuple[str, str]:
    """The names of the monitor that acts and of the one that stands by, as both say themselves."""
    urls = suite.state.monitor_url.split(",")
    said = [await standing(url) for url in urls]
    names = [f"monitor-{index}" for index in range(len(urls))]
    assert sorted(said) == ["active", "standby"], said
    return names[said.index("active")], names[said.index("standby")]


async def standing(url: str) -> str:
    async with httpx.AsyncClient(timeout=20, trust_env=False) as http:
        answer = (await http.get(f"{url}/health")).json()
    assert answer["status"] == "ok"
    return str(answer["monitor"])


def url_of(suite: Suite, name: str) -> str:
    return suite.state.monitor_url.split(",")[int(name[-1])]


async def taken_over(suite: Suite, name: str, began: float) -> float:
    """Seconds since `began` until that monitor tells of all instances as ready, and carries out what is asked for."""
    token = cluster_keys.kept_token(suite.data_dir)
    async with MonitorClient(url_of(suite, name), token=token) as monitor:

        async def acts() -> bool:
            ready = [one for one in await monitor.instances() if one.state in ("ready", "draining")]
            return len(ready) == 4

        await until(acts, MOST_S, f"{name} to act", poll_s=0.01)
    return time.monotonic() - began


async def drain_under_way(suite: Suite) -> tuple[asyncio.Task[Any], str]:
    """A drain of d-0 that takes long, since a long answer is written there; it is under way, and in the database."""
    body = {"model": "m", "prompt": "Hi", "max_tokens": 1900, "ignore_eos": True}
    operation_id = uuid.uuid4().hex

    async def write() -> None:
        async with httpx.AsyncClient(timeout=120, trust_env=False) as http:
            await asyncio.gather(*(http.post(f"{suite.state.api_url}/v1/completions", json=body) for _ in range(LONG)))

    async def drain() -> None:
        answers = asyncio.create_task(write())
        try:
            async with suite.monitor() as monitor:
                await until(lambda: busy(monitor), 30, "d-0 has work")
                await monitor.drain("d-0", timeout_s=60.0, who="test", operation_id=operation_id)
        finally:
            answers.cancel()
            await asyncio.gather(answers, return_exceptions=True)

    task = asyncio.create_task(drain())
    async with suite.monitor() as monitor:

        async def running() -> bool:
            with contextlib.suppress(PolyphaseError):
                return (await monitor.operation(operation_id)).result == "running"
            return False

        await until(running, 40, "the drain is under way")
    await until(lambda: on_record(suite, operation_id), 40, "its row in the database")
    return task, operation_id


def on_record(suite: Suite, operation_id: str) -> bool:
    with contextlib.closing(sqlite3.connect(suite.data_dir / "polyphase.db", timeout=30.0)) as database:
        rows = database.execute("SELECT kind FROM flips WHERE operation_id = ?", (operation_id,)).fetchall()
    return rows == [("drain",)]


async def busy(monitor: MonitorClient) -> bool:
    return int((await monitor.instance("d-0")).load.inflight) > USERS


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_monitor_is_replaced_and_returns_as_the_standby(suite: Suite, number: signal.Signals) -> None:
    async with loaded(suite):
        active, other = await who(suite)
        draining, operation_id = await drain_under_way(suite)
        pid, began = suite.kill(active, number), time.monotonic()
        if number == signal.SIGKILL:
            with pytest.raises(OutcomeUnknown) as unknown:
                await draining
            assert unknown.value.operation_id == operation_id
        took_s = await taken_over(suite, other, began)
        print(f"\n{other} acts {took_s:.2f} s after {active} got {number.name}")
        assert took_s < MOST_S
        async with suite.monitor() as monitor:
            row = await monitor.operation(operation_id)
            assert (row.result, row.code) == ("unknown", "outcome_unknown")
            assert (await monitor.resume("d-0", who="test")).result == "succeeded"
            assert (await monitor.flip("p-1", who="test")).to_role == "decode"
        if number == signal.SIGKILL:
            await suite.restarted(active, pid)
        else:
            os.kill(pid, signal.SIGCONT)
            with pytest.raises(PolyphaseError):  # the drain's answer: the old monitor does not act any more
                await draining
            await require_standby(suite, active, other)
        assert await who(suite) == (other, active)
        found = await suite.instances()
        roles = {"p-0": "prefill", "p-1": "decode", "d-0": "decode", "d-1": "decode"}
        assert {name: (each.role, each.state) for name, each in found.items()} == {
            name: (role, "ready") for name, role in roles.items()
        }
        async with suite.monitor() as monitor:
            assert (await monitor.operation(operation_id)).result == "unknown"
            kinds = {row.kind for row in await monitor.events(limit=500, since_s=time.time() - 60)}
            assert not kinds & {"death", "unresponsive"}, kinds
            assert (await monitor.flip("p-1", who="test")).to_role == "prefill"


async def require_standby(suite: Suite, name: str, acting: str) -> None:
    """Once the monitor answers, it refuses to act and, as soon as it has read the lease again, names the acting one."""
    token, give_up, refusal = cluster_keys.kept_token(suite.data_dir), time.monotonic() + MOST_S, ""
    async with MonitorClient(url_of(suite, name), token=token) as monitor:
        while not re.match(rf"{name} does not act: .*{acting} at http://", refusal):
            assert time.monotonic() < give_up, refusal
            try:
                await monitor.cluster()
            except PolyphaseError as error:
                refusal = error.message
            await asyncio.sleep(0.02)
        with pytest.raises(Standby):
            await monitor.flip("d-0", who="test")
