"""An instance as a process, told to end by SIGTERM while it decodes: the answer is whole, others are refused."""

import asyncio
import signal
import time
from pathlib import Path

import msgspec
import pytest
from vllm import SamplingParams

from services.launcher.suite import until
from shared.domain.job import Generation, JobView
from shared.domain.prompt import packed
from shared.errors import PolyphaseError, WrongRole
from shared.wire.messages import DECODE, DecodeReply, DecodeRequest, TokenStep
from shared.wire.rpc_client import RpcClients
from shared.wire.sockets import Sockets
from tests.services.worker.worker_process import worker_process

pytestmark = pytest.mark.slow  # vLLM is imported
TOKENS, STEP_S = 200, 0.05  # for longer than a machine pauses this test
SAMPLING = msgspec.msgpack.encode(SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))


def request(name: str) -> DecodeRequest:
    return DecodeRequest(JobView(name, 3, TOKENS), packed([1, 2, 3]), Generation(SAMPLING, time.time()))


@pytest.mark.parametrize("drain_s", [60.0, 0.0])
async def test_what_it_has_begun(tmp_path: Path, drain_s: float) -> None:
    items: list[TokenStep] = []
    emulated = {"engine": "emulated", "accelerator": "A10", "emulated_step_s": STEP_S}
    async with worker_process(tmp_path, instance_id="d0", role="decode", drain_s=drain_s, **emulated) as worker:
        process, address = worker.process, worker.rpc
        with RpcClients(Sockets()) as clients:
            call = clients.to(address).call(DECODE, request("first"), timeout_s=120, on_item=items.append)
            first = asyncio.create_task(call)
            await until(lambda: items, 30, "tokens")
            process.send_signal(signal.SIGTERM)
            if not drain_s:
                with pytest.raises(PolyphaseError):  # it goes on elsewhere
                    await first
                assert sum(len(item.tokens) for item in items) < TOKENS
            else:
                await until(lambda: "Shutting down" in worker.log.read_text(), 30, "it to have heard")
                with pytest.raises(WrongRole, match="draining"):
                    await _refused(clients, address)
                assert isinstance(await first, DecodeReply)
                assert sum(len(item.tokens) for item in items) == TOKENS
            await asyncio.wait_for(process.wait(), 60)
    assert process.returncode in (0, -signal.SIGTERM)


async def _refused(clients: RpcClients, address: str) -> None:
    """Ask until it is refused: the signal was heard a moment before the drain begins."""
    for number in range(20):
        more = asyncio.ensure_future(clients.to(address).call(DECODE, request(f"more{number}"), timeout_s=60))
        await asyncio.wait([more], timeout=0.3)
        if more.done():
            await more
        more.cancel()
