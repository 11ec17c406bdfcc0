"""Drain, flip, resume."""

import asyncio

import pytest

from services.worker.jobs.roles import RoleState
from shared.domain.instance import Role
from shared.errors import Conflict, InvalidRequest, WrongRole


async def test_a_job_of_another_role_is_refused() -> None:
    state = RoleState(Role.PREFILL)
    with pytest.raises(WrongRole), state.job(Role.DECODE, "j"):
        pass
    assert state.inflight == 0


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
async def test_a_drain_of_no_time_is_refused_and_changes_nothing(seconds: float) -> None:
    state = RoleState(Role.DECODE)
    with pytest.raises(InvalidRequest, match="0 or more"):
        await state.drain(seconds)
    assert not state.draining


async def test_a_drain_waits_for_what_was_accepted_and_takes_no_more() -> None:
    state = RoleState(Role.DECODE)
    with state.job(Role.DECODE, "j"):
        pass  # its end is no end of a later drain
    with state.job(Role.DECODE, "j"):
        drain = asyncio.create_task(state.drain(60))
        await asyncio.sleep(0)
        with pytest.raises(WrongRole), state.job(Role.DECODE, "j"):
            pass
        assert not drain.done()
    reply = await asyncio.wait_for(drain, 30)
    assert reply.drained
    assert reply.remaining == 0


async def test_a_drain_gives_up_at_its_timeout_and_says_what_is_left() -> None:
    state = RoleState(Role.DECODE)
    with state.job(Role.DECODE, "j"):
        reply = await state.drain(0.01)
        assert not reply.drained
        assert reply.remaining == 1
        with pytest.raises(Conflict):
            state.flip(Role.PREFILL)


async def test_a_flip_needs_a_drain_and_work_waits_for_the_resume() -> None:
    state = RoleState(Role.DECODE)
    with pytest.raises(Conflict):
        state.flip(Role.PREFILL)
    await state.drain(1)
    assert state.flip(Role.PREFILL).role is Role.PREFILL
    with pytest.raises(WrongRole), state.job(Role.PREFILL, "j"):
        pass  # still draining until resumed
    state.resume()
    with state.job(Role.PREFILL, "j"):
        assert state.inflight == 1


async def test_a_drain_whose_caller_is_gone_goes_on_in_sight_and_can_be_resumed() -> None:
    state = RoleState(Role.DECODE)
    with state.job(Role.DECODE, "j"):
        drain = asyncio.create_task(state.drain(60))
        await asyncio.sleep(0)
        drain.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drain
        assert state.draining  # what heartbeats show
        state.resume()
        with state.job(Role.DECODE, "j"):
            assert state.inflight == 2
    assert (await state.drain(1)).drained


async def test_a_resume_ends_a_drain_under_way_without_success() -> None:
    state = RoleState(Role.DECODE)
    with state.job(Role.DECODE, "j"):
        drains = [asyncio.create_task(state.drain(60)) for _ in range(2)]
        await asyncio.sleep(0)
        state.resume()
        replies = [await asyncio.wait_for(drain, 30) for drain in drains]
    assert [(reply.drained, reply.remaining) for reply in replies] == [(False, 1), (False, 1)]
    with state.job(Role.DECODE, "j"):
        assert state.inflight == 1


async def test_monitors_that_were_replaced_are_refused_and_a_single_one_is_obeyed() -> None:
    state = RoleState(Role.DECODE)
    for epoch in (5, 6, 6, 0):
        state.obey(epoch)
    with pytest.raises(Conflict, match="of epoch 5; this instance obeys epoch 6"):
        state.obey(5)
    assert state.epoch == 6
