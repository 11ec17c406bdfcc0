"""A worker without an engine, for tests of the control plane: registers, beats, drains, flips, resumes."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from shared.domain.adapters import version_key
from shared.domain.instance import Compatibility, InstanceInfo, InstanceLoad, KvGeometry, Role
from shared.domain.rates import Rates
from shared.errors import Conflict, EngineFailed, NotFound, PolyphaseError
from shared.wire.broadcast import Publisher
from shared.wire.clients.monitor import MonitorClient
from shared.wire.messages import (
    DRAIN,
    FLIP,
    LOAD_ADAPTER,
    MOVE,
    RESUME,
    UNLOAD_ADAPTER,
    DrainReply,
    DrainRequest,
    FlipReply,
    FlipRequest,
    Heartbeat,
    LoadAdapterReply,
    LoadAdapterRequest,
    MoveRequest,
    ResumeRequest,
    UnloadAdapterRequest,
)
from shared.wire.rpc_server import Handlers, RpcServer, ServerCall
from shared.wire.sockets import Sockets

GEOMETRY = KvGeometry(layers=6, kv_heads=4, head_dim=64)
FIT = Compatibility("fp-1", "emulated", "0.1.0", 1, GEOMETRY)


def make_info(instance_id: str, rpc: str, *, generation: int = 1, **changes: Any) -> InstanceInfo:
    fields: dict[str, Any] = {
        "instance_id": instance_id,
        "generation": generation,
        "model": "demo",
        "compatibility": FIT,
        "accelerator": "cpu",
        "dtype": "bfloat16",
        "tensor_parallel": 1,
        "block_size": 32,
        "total_blocks": 1000,
        "max_model_len": 2048,
        "chunk_size": 512,
        "rpc": rpc,
        "http": "http://127.0.0.1:1",
        "kv_endpoints": ("tcp://127.0.0.1:1",),
    }
    return InstanceInfo(**{**fields, **changes})


class FakeWorker:
    """Faults are switches: `drained`, `fail_flip`, `beating`. Gates hold the answer to a request back."""

    def __init__(self, info: InstanceInfo, role: Role, sockets: Sockets, heartbeat_address: str) -> None:
        self.info = info
        self.role = role
        self.draining = False
        self.beating = True
        self.drained = True
        self.drain_gate: asyncio.Event | None = None
        self.resume_gate: asyncio.Event | None = None
        self.fail_flip = False
        self.lie_about_role = False
        self.load = InstanceLoad(free_blocks=900)
        self.loads: dict[Role, InstanceLoad] = {}  # in that role, instead of `load`
        self.rates: Rates | None = None
        self.policies = (0, "")  # followed, and why not
        self.chunk_size = 0  # 0: says nothing of it
        self.calls: list[str] = []
        self.jobs: dict[str, PolyphaseError | None] = {}  # that decode here, and why they cannot move
        self.move_gate: asyncio.Event | None = None
        self.adapters = dict(info.adapters)  # digests by key
        self.digests: dict[str, str] = {}  # of the adapters that it can load, by path
        self.unloadable: PolyphaseError = EngineFailed("LoRA rank 64 is greater than max_lora_rank 16.")
        self.load_gate: asyncio.Event | None = None
        handlers: Handlers = {DRAIN: self._drain, FLIP: self._flip, RESUME: self._resume, MOVE: self._move}
        handlers = {**handlers, LOAD_ADAPTER: self._load_adapter, UNLOAD_ADAPTER: self._unload_adapter}
        self.server = RpcServer(sockets, info.rpc, handlers)
        self.publisher = Publisher(sockets, heartbeat_address)

    def beat(self) -> None:
        role = self.role.other if self.lie_about_role else self.role
        load = msgspec.structs.replace(self.loads.get(role, self.load), time_s=time.time())
        said = (self.draining, load, self.rates, *self.policies, self.chunk_size)
        adapters = self.adapters if self.info.loads_adapters else None
        self.publisher.publish(Heartbeat(self.info.instance_id, self.info.generation, role, *said, adapters=adapters))

    async def beat_for_ever(self, period_s: float) -> None:
        while True:
            if self.beating:
                self.beat()
            await asyncio.sleep(period_s)

    async def _drain(self, request: DrainRequest, _: ServerCall) -> DrainReply:
        self.calls.append("drain")
        self.draining = True
        if self.drain_gate is not None:
            await self.drain_gate.wait()
        return DrainReply(self.drained, 0.01, 0 if self.drained else 3)

    async def _flip(self, request: FlipRequest, _: ServerCall) -> FlipReply:
        self.calls.append("flip")
        if self.fail_flip:
            raise EngineFailed("the engine is stuck")
        self.role = request.role
        return FlipReply(request.role, 0.0)

    async def _resume(self, request: ResumeRequest, _: ServerCall) -> None:
        self.calls.append("resume")
        self.draining = False
        if self.resume_gate is not None:
            await self.resume_gate.wait()

    async def _move(self, request: MoveRequest, _: ServerCall) -> None:
        if self.move_gate is not None:
            await self.move_gate.wait()
        if request.job_id not in self.jobs:
            raise NotFound(f"{request.job_id} does not decode on {self.info.instance_id}")
        self.calls.append(f"move {request.job_id} {request.to}".rstrip())
        if (refusal := self.jobs[request.job_id]) is not None:
            raise refusal

    async def _load_adapter(self, request: LoadAdapterRequest, _: ServerCall) -> LoadAdapterReply:
        self.calls.append(f"load {request.name}")
        if self.load_gate is not None:
            await self.load_gate.wait()
        digest = self.digests.get(request.path)
        if digest is None:
            raise self.unloadable
        if request.digest not in ("", digest):
            raise Conflict("other files")
        self.adapters = {**self.adapters, version_key(request.name, digest): digest}
        return LoadAdapterReply(digest)

    async def _unload_adapter(self, request: UnloadAdapterRequest, _: ServerCall) -> None:
        self.calls.append(f"unload {request.key}")
        self.adapters = {key: digest for key, digest in self.adapters.items() if key != request.key}


@asynccontextmanager
async def fake_worker(
    info: InstanceInfo, role: Role, heartbeat_address: str, monitor: MonitorClient | None, period_s: float = 0.05
) -> AsyncIterator[FakeWorker]:
    """A fake worker, registered if a monitor is given. Leaving the block is its sudden death."""
    sockets = Sockets()
    worker = FakeWorker(info, role, sockets, heartbeat_address)
    try:
        async with worker.server:
            beats = asyncio.get_running_loop().create_task(worker.beat_for_ever(period_s))
            try:
                if monitor is not None:
                    await monitor.register(info, role)
                yield worker
            finally:
                beats.cancel()
                await asyncio.gather(beats, return_exceptions=True)
    finally:
        worker.publisher.close()
        sockets.close()
