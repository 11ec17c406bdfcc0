"""`python -m tests.gateway.rude_predictor ADDRESS`: a predictor in a process of its own, to be killed and frozen."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from shared.domain.job import LengthPrediction
from shared.wire.messages import PREDICT, PredictRequest
from shared.wire.rpc_server import RpcServer, ServerCall
from shared.wire.sockets import Sockets
from tests.gateway.worker import listen

SOURCE = "rude"  # by which its answers are known


@asynccontextmanager
async def rude_predictor(address: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """It listens; at the end it is gone, however it was."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.gateway.rude_predictor", address, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            assert await process.stdout.readline() == b"ready\n"
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _predict(request: PredictRequest, _: ServerCall) -> LengthPrediction:
    await asyncio.sleep(0.02)
    return LengthPrediction(0, 0, 200, 0.5, SOURCE)


async def _serve(address: str) -> None:
    await listen(RpcServer(Sockets(), address, {PREDICT: _predict}))
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:]))
