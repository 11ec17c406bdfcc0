"""An instance that is told to end: its jobs are done and their KV was fetched first, or the time is up."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from services.worker.app import finish
from services.worker.jobs.roles import RoleState
from shared.domain.instance import Role
from shared.errors import WrongRole


async def test_it_waits_for_its_jobs_and_takes_no_more() -> None:
    roles, kv = RoleState(Role.DECODE), SimpleNamespace(staged_bytes=0)
    with roles.job(Role.DECODE, "j"):
        ending = asyncio.create_task(finish(roles, kv, 60.0))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        with pytest.raises(WrongRole), roles.job(Role.DECODE, "j"):
            pass
        assert not ending.done()
    await asyncio.wait_for(ending, 5)


async def test_it_waits_until_the_kv_of_its_jobs_was_fetched() -> None:
    kv: Any = SimpleNamespace(staged_bytes=100)
    ending = asyncio.create_task(finish(RoleState(Role.PREFILL), kv, 60.0))
    done, _ = await asyncio.wait([ending], timeout=0.2)
    assert not done
    kv.staged_bytes = 0
    await asyncio.wait_for(ending, 5)


async def test_it_ends_when_its_time_is_up() -> None:
    roles, kv = RoleState(Role.DECODE), SimpleNamespace(staged_bytes=1)
    began = time.monotonic()
    with roles.job(Role.DECODE, "j"):
        await finish(roles, kv, 0.2)  # type: ignore[arg-type]
    assert 0.2 <= time.monotonic() - began < 5


async def test_without_any_time_it_ends_at_once_and_refuses_nobody() -> None:
    roles = RoleState(Role.DECODE)
    with roles.job(Role.DECODE, "j"):
        await finish(roles, SimpleNamespace(staged_bytes=1), 0.0)  # type: ignore[arg-type]
        assert not roles.draining
