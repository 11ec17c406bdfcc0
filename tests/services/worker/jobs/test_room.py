"""A decode instance says what is still to come to it, and refuses what it has no room for if it is to say so."""

import asyncio
from typing import Any, cast

import msgspec
import pytest

from services.worker.kv.port import KvPort
from services.worker.rpc import handlers
from shared.domain.instance import Promised, Role
from shared.domain.job import Generation, JobView
from shared.domain.kv import Codec
from shared.domain.prompt import packed
from shared.errors import NoRoom
from shared.wire.messages import EXPECT, RELEASE, DecodeRequest, ExpectRequest, ReleaseRequest, TokenStep
from shared.wire.rpc_server import ServerCall
from tests.services.worker.jobs.sides import Call, Side, decode_request

COMING = Promised(mark=7, decode_tokens=3, answer_tokens=8, lead_steps=2)


def expecting(side: Side, transfer_id: str, promised: Promised = COMING, peer: bytes = b"gateway", **more: Any) -> None:
    calls = handlers(side._prefill, side._decode, side.roles, cast(KvPort, side.port))
    calls[EXPECT](ExpectRequest(transfer_id, promised, **more), cast(ServerCall, Call(peer)))


async def test_what_is_bound_to_it_shows_until_it_comes_is_released_or_its_gateway_is_gone() -> None:
    side = Side(Role.DECODE)
    for transfer_id in ("comes", "released", "of another"):
        expecting(side, transfer_id, peer=transfer_id.encode())
    assert side._decode.promised == (COMING,) * 3
    task = await side.decode(decode_request(side.port.handle("comes", 3, Codec.RAW)))
    assert (len(side._decode.promised), side._decode.active) == (2, 1)
    calls = handlers(side._prefill, side._decode, side.roles, cast(KvPort, side.port))
    await calls[RELEASE](ReleaseRequest(["released"]), cast(ServerCall, side.call))
    assert len(side._decode.promised) == 1
    await side._decode.drop_of(b"of another")
    assert side._decode.promised == ()
    side.engine.step(TokenStep([1], "length"))
    await task


async def test_what_never_comes_is_forgotten_with_its_time() -> None:
    side = Side(Role.DECODE)
    expecting(side, "late", keep_s=-1.0)
    expecting(side, "in time")
    assert len(side._decode.promised) == 1


def _sized(tokens: int, *, if_room: bool = True) -> DecodeRequest:
    """A job that takes so many of the 64 tokens that the instance has."""
    prompt = packed(range(tokens - 8))
    return DecodeRequest(JobView("job", tokens - 8, 8), prompt, Generation(b"", 1.0), if_room=if_room)


async def _start(side: Side, request: DecodeRequest) -> "asyncio.Task[Any]":
    side.engine.arrived.clear()
    return await side.decode(request)


async def _refused(side: Side, request: DecodeRequest) -> None:
    async with asyncio.timeout(5):
        await side._decode.decode(request, cast(ServerCall, side.call))


async def test_a_job_is_refused_where_its_answer_finds_no_room_beside_those_that_decode() -> None:
    side = Side(Role.DECODE)
    tasks = [await _start(side, _sized(32)), await _start(side, _sized(22))]
    with pytest.raises(NoRoom, match="d0: the answers that decode there come to 54 tokens of KV, and the job to 11; "):
        await _refused(side, _sized(11))
    assert (side._decode.active, side.roles.inflight, side.roles.accepted.__len__()) == (2, 2, 2)
    tasks.append(await _start(side, _sized(10)))
    tasks.append(await _start(side, _sized(11, if_room=False)))  # it is to wait there
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    tasks = [await _start(side, _sized(100))]  # alone: whatever it needs
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_room_that_an_answer_leaves_is_there_from_the_next_heartbeat_on() -> None:
    side = Side(Role.DECODE)
    first, second = await _start(side, _sized(32)), await _start(side, _sized(22))
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    with pytest.raises(NoRoom):
        await _refused(side, _sized(30))
    side._decode.kv_ahead(0, 0)
    third = await _start(side, _sized(30))
    for task in (first, third):
        task.cancel()
    await asyncio.gather(first, third, return_exceptions=True)


async def test_a_refused_job_drops_what_was_fetched_for_it() -> None:
    side = Side(Role.DECODE)
    task = await _start(side, _sized(60))
    expecting(side, "t")
    request = msgspec.structs.replace(_sized(10), handle=side.port.handle("t", 3, Codec.RAW))
    with pytest.raises(NoRoom):
        await _refused(side, request)
    assert (side.port.dropped, side._decode.promised) == (["t"], ())
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_without_a_seat_there_is_no_room_either() -> None:
    side = Side(Role.DECODE)
    side.info = msgspec.structs.replace(side.info, max_seqs=1)
    task = await _start(side, _sized(10))
    with pytest.raises(NoRoom, match="all 1 seats are taken"):
        await _refused(side, _sized(10))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
