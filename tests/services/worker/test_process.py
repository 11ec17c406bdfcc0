"""One prefill worker as a process, with a real engine and no decode instance: what it survives, from outside."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
import zmq
from vllm import SamplingParams

from shared.domain.job import Generation, JobView
from shared.domain.prompt import packed
from shared.domain.route import PolicySpec
from shared.errors import InvalidRequest
from shared.wire.messages import PREFILL, RELEASE, PrefillReply, PrefillRequest, ReleaseRequest
from shared.wire.rpc_client import RpcClient, RpcClients
from shared.wire.sockets import Sockets
from tests.services.worker.kv.wire.peers import NOT_UTF8, SEALED_NESTED
from tests.services.worker.worker_process import ROOT, WorkerProcess, worker_process

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
CHUNK = 64
SAMPLING = msgspec.msgpack.encode(SamplingParams(temperature=0))
LEASE_S = 120.0


@dataclass
class Worker:
    process: WorkerProcess
    http: httpx.AsyncClient
    clients: RpcClients

    @property
    def rpc(self) -> RpcClient:
        return self.clients.to(self.process.rpc)

    async def prefill(self, name: str, prompt: list[int], items: list[Any] | None = None) -> PrefillReply:
        request = PrefillRequest(
            JobView(name, len(prompt), 8),
            f"t-{name}",
            packed(prompt),
            Generation(SAMPLING, time.time()),
            dispatch=PolicySpec("power_of_two"),
        )
        on_item = (items if items is not None else []).append
        return await self.rpc.call(PREFILL, request, timeout_s=120, on_item=on_item)

    async def staged_bytes(self, wanted: bool, within_s: float = 60.0) -> float:
        """Seconds until something, or nothing, is staged."""
        began = time.monotonic()
        async with asyncio.timeout(within_s):
            while bool((await self.http.get("/instance")).json()["load"]["staged_bytes"]) is not wanted:
                await asyncio.sleep(0.02)
        return time.monotonic() - began


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    limits = {"kv_cache_bytes": 64 << 20, "chunk_size": CHUNK, "lease_s": LEASE_S, "staging_bytes": 8 << 20}
    async with (
        worker_process(tmp_path_factory.mktemp("worker"), instance_id="p0", **limits) as process,
        httpx.AsyncClient(base_url=process.http, timeout=60) as http,
    ):
        with RpcClients(Sockets()) as clients:
            yield Worker(process, http, clients)


async def test_long_prompts_without_a_decode_instance_end_well_and_the_worker_lives(worker: Worker) -> None:
    items: list[Any] = []
    prompts = [list(range(10 + number, 400)) for number in range(6)]
    replies = await asyncio.gather(
        *(worker.prefill(f"long{number}", prompt, items) for number, prompt in enumerate(prompts))
    )
    for reply, prompt in zip(replies, prompts, strict=True):
        assert reply.decode is None
        assert reply.handle is not None
        assert reply.handle.tokens == len(prompt)
        assert reply.reasons
    assert items == []  # nothing to announce
    assert worker.process.lives()
    await worker.staged_bytes(True)
    worker.rpc.notify(RELEASE, ReleaseRequest([f"t-long{number}" for number in range(6)]))
    await worker.staged_bytes(False)


async def test_what_a_killed_gateway_had_staged_is_free_soon_after(worker: Worker) -> None:
    gateway = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("prefill_client.py")),
        worker.process.rpc,
        SAMPLING.hex(),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    assert gateway.stdout is not None
    try:
        assert (await gateway.stdout.readline()).strip() == b"staged"
        await worker.staged_bytes(True)
    finally:
        gateway.kill()
        await gateway.wait()
    took_s = await worker.staged_bytes(False)
    print(f"free {took_s:.2f} s after the kill")
    assert took_s < LEASE_S / 4  # within 3 s, on a machine that is not this busy


async def test_frames_of_garbage_on_the_kv_socket_and_requests_without_sense_do_no_harm(worker: Worker) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(worker.process.kv)
        stranger.send(NOT_UTF8)
        stranger.send(SEALED_NESTED)
        for prompt in ([], [10**6], list(range(10, 4000))):
            with pytest.raises(InvalidRequest):
                await worker.prefill("senseless", prompt)
        assert (await worker.prefill("after", list(range(10, 300)))).handle is not None
        worker.rpc.notify(RELEASE, ReleaseRequest(["t-after"]))
    assert worker.process.lives()


async def test_prompts_whose_kv_does_not_fit_together_wait_for_each_other(worker: Worker) -> None:
    """Two thirds of the pool each, at 3 KB a token: one after the other, as the one before is released; none fails."""
    first = await worker.prefill("first", list(range(10, 1810)))
    second = asyncio.create_task(worker.prefill("second", list(range(20, 1820))))
    await asyncio.sleep(0.5)
    assert not second.done()
    assert first.handle is not None
    worker.rpc.notify(RELEASE, ReleaseRequest(["t-first"]))
    assert (await second).handle is not None
    worker.rpc.notify(RELEASE, ReleaseRequest(["t-second"]))
    await worker.staged_bytes(False)
