"""Exports of what an instance holds, pulls into its prefix cache, and decodes that leave it."""

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest

from services.worker.engines.base import CacheExport, EngineRequest, Left
from services.worker.kv import lossy_salt
from shared.domain.instance import Role
from shared.domain.job import Generation, JobView
from shared.domain.kv import Codec, KvHandle, TransferOutcome, TransferReport
from shared.domain.prompt import packed
from shared.errors import InvalidRequest, NotFound, WrongRole
from shared.wire.messages import DecodeReply, ExportRequest, LeaveRequest, PullReply, PullRequest, TokenStep
from shared.wire.rpc_server import ServerCall
from tests.services.worker.jobs.sides import Side, decode_request

GENERATION = Generation(b"", 1.0)
HANDLE = KvHandle("t9", "p1", 1, "f", (), 2, "bfloat16")


@dataclass
class Exports:
    """The engine's answers, and what it was requested."""

    tokens: int = 3
    left: Left | None = field(default_factory=lambda: Left(4, b"state"))
    cached: list[EngineRequest] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    exports: list[CacheExport] = field(default_factory=list)

    async def export_cached(self, request: EngineRequest, export: CacheExport) -> int:
        self.cached.append(request)
        self.exports.append(export)
        return self.tokens

    async def export_running(self, request_id: str, export: CacheExport) -> int:
        self.running.append(request_id)
        self.exports.append(export)
        return self.tokens

    async def leave(self, request_id: str, export: CacheExport) -> Left | None:
        self.running.append(request_id)
        self.exports.append(export)
        return self.left


def side(exports: Exports) -> Side:
    made = Side(Role.DECODE)
    for name in ("export_cached", "export_running", "leave"):
        setattr(made.engine, name, getattr(exports, name))
    return made


async def exported(of: Side, request: ExportRequest) -> KvHandle | None:
    return (await of.exports.export(request, cast(ServerCall, of.call))).handle


async def leave(of: Side, request: LeaveRequest) -> None:
    await of.decodes.leave(request, cast(ServerCall, of.call))


async def test_a_prefix_is_exported_as_far_as_it_is_cached() -> None:
    exports = Exports()
    here = side(exports)
    handle = await exported(here, ExportRequest("t1", prompt=packed([1, 2, 3, 4]), generation=GENERATION, start=1))
    assert handle is not None
    assert (handle.transfer_id, handle.start, handle.tokens, handle.salt) == ("t1", 1, 3, "")
    (request,), (export,) = exports.cached, exports.exports
    assert (request.prompt_token_ids, request.decodes) == ([1, 2, 3, 4], False)
    export.announce(2)
    assert here.port.announced == {"t1": b"gateway"}
    here.port.full = True
    assert not export.has_room()
    exports.tokens = 0
    assert await exported(here, ExportRequest("t2", prompt=packed([1]), generation=GENERATION)) is None
    with pytest.raises(InvalidRequest, match="generation"):
        await exported(here, ExportRequest("t3", prompt=packed([1])))


async def test_a_decode_is_exported_while_it_runs() -> None:
    exports = Exports()
    here = side(exports)
    with pytest.raises(NotFound, match="job"):
        await exported(here, ExportRequest("t1", "job"))
    task = await here.decode(decode_request())
    handle = await exported(here, ExportRequest("t1", "job"))
    assert handle is not None
    assert (handle.start, handle.tokens) == (0, 3)
    assert exports.running == ["job#d1"]
    here.engine.step(TokenStep([7], "length"))
    await task


async def test_kv_that_came_in_another_form_keeps_its_salt() -> None:
    here = side(Exports())
    lossy = msgspec.structs.replace(HANDLE, codec=Codec.INT8)
    task = await here.decode(decode_request(lossy))
    handle = await exported(here, ExportRequest("t1", "job"))
    assert handle is not None
    assert handle.salt == lossy_salt("t9")
    here.engine.step(TokenStep([7], "length"))
    await task


async def test_a_decode_leaves_with_its_kv_and_the_samplers_state() -> None:
    exports = Exports()
    here = side(exports)
    task: asyncio.Task[DecodeReply] = await here.decode(decode_request())
    here.engine.step(TokenStep([7]))
    await leave(here, LeaveRequest("job", "t1", 2))
    reply = await task
    assert reply.handover is not None
    assert reply.handover.state == b"state"
    assert reply.handover.handle is not None
    assert (reply.handover.handle.start, reply.handover.handle.tokens) == (2, 4)
    assert here.call.items[-1].tokens == [7]
    assert here.decodes.active == 0
    with pytest.raises(NotFound):
        await leave(here, LeaveRequest("job", "t2"))


async def test_a_decode_leaves_without_kv_where_none_was_staged() -> None:
    exports = Exports(left=Left(0, b""))
    here = side(exports)
    task: asyncio.Task[DecodeReply] = await here.decode(decode_request())
    here.engine.step(TokenStep([7]))
    await leave(here, LeaveRequest("job", "t1"))
    reply = await task
    assert reply.handover is not None
    assert reply.handover.handle is None


async def test_a_decode_that_ends_first_does_not_leave() -> None:
    exports = Exports(left=None)
    here = side(exports)
    task = await here.decode(decode_request())
    with pytest.raises(NotFound, match="has ended"):
        await leave(here, LeaveRequest("job", "t1"))
    here.engine.step(TokenStep([7], "length"))
    assert (await task).handover is None


def pull_request(tokens: int = 3, **changes: Any) -> PullRequest:
    return PullRequest(JobView("job", tokens, 8), packed(range(tokens)), GENERATION, HANDLE, **changes)


async def pulls(here: Side, request: PullRequest) -> "asyncio.Task[PullReply]":
    here.engine.arrived.clear()
    task = asyncio.create_task(here.exports.pull(request, cast(ServerCall, here.call)))
    await asyncio.wait_for(here.engine.arrived.wait(), 5)
    return task


async def test_kv_is_pulled_into_the_prefix_cache() -> None:
    here = Side(Role.DECODE)
    task = await pulls(here, pull_request())
    (request,) = here.engine.requests
    assert (request.import_from, request.decodes, request.wants_token, request.max_tokens) == (HANDLE, False, False, 1)
    here.engine.step(TokenStep([7], "length"))
    reply = await task
    assert (reply.transfer.outcome, reply.held) == (TransferOutcome.PULLED, 2)
    assert here.transfers == [reply.transfer]
    assert here.port.expected == []


async def test_what_does_not_arrive_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Side(Role.DECODE)
    lost = TransferReport(TransferOutcome.RECOMPUTED, error="peer_lost")
    monkeypatch.setattr(here.port, "known_report", lambda _: lost)
    task = await pulls(here, pull_request())
    here.port.expected[0].complete.set()
    reply = await task
    assert (reply.transfer, reply.held) == (lost, 0)
    assert here.engine.aborted == ["job#i1"]


async def test_pulls_are_refused_where_they_make_no_sense() -> None:
    here = Side(Role.DECODE)
    with pytest.raises(InvalidRequest, match="2 tokens must be more than the handle's 2"):
        await here.exports.pull(pull_request(2), cast(ServerCall, here.call))
    here.roles.draining = True
    with pytest.raises(WrongRole, match="draining"):
        await here.exports.pull(pull_request(), cast(ServerCall, here.call))
