"""A predictor process to be measured: started with a checkpoint, asked over its RPC, ended with the context."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from predictor.settings import PredictorSettings
from services.launcher import ports
from shared.errors import Unavailable
from shared.wire.rpc_client import RpcClient, RpcClients
from shared.wire.sockets import Sockets

READY_S, LOOK_S, END_S = 180.0, 0.2, 20.0


@asynccontextmanager
async def serving(
    checkpoint: Path, served: Path, device: str, timeout_ms: float
) -> AsyncIterator[tuple[RpcClient, dict[str, Any]]]:
    """A client of a process whose classifier is loaded, and what the process says of how it runs it.

    Raises Unavailable when the checkpoint is not loaded in READY_S.
    """
    port = ports.free_range()
    rpc, http = f"tcp://127.0.0.1:{port + 1}", f"http://127.0.0.1:{port}"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "predictor"),
        env={**os.environ, **environment(port, rpc, checkpoint, served, device, timeout_ms)},
        stderr=subprocess.DEVNULL,
    )
    sockets = Sockets()
    try:
        runs = await _loaded(http, process)
        with RpcClients(sockets) as clients:
            yield clients.to(rpc), runs
    finally:
        sockets.close()
        await _end(process)


def environment(
    port: int, rpc_address: str, checkpoint: Path, served: Path, device: str, timeout_ms: float
) -> dict[str, str]:
    """Settings that make the classifier answer whatever it is worth: random weights are, too."""
    chosen = {
        "port": port,
        "rpc_address": rpc_address,
        "checkpoint": checkpoint,
        "model": str(served),
        "timeout_ms": timeout_ms,
        "device": device,
        "use": "classifier",
    }
    known = {key: value for key, value in chosen.items() if key in PredictorSettings.model_fields}
    return PredictorSettings.model_validate(known).to_environment()


async def _loaded(address: str, process: asyncio.subprocess.Process) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=address, timeout=5.0, trust_env=False) as client, asyncio.timeout(READY_S):
        while process.returncode is None:
            try:
                about = (await client.get("/v1/model")).json()["checkpoint"]
            except httpx.HTTPError:  # not listening yet
                about = {"state": "starting"}
            if about["state"] == "loaded":
                return dict(about.get("runs") or {})
            if about["state"] in ("broken", "missing"):
                raise Unavailable(f"the predictor did not load its checkpoint: {about.get('error') or about}")
            await asyncio.sleep(LOOK_S)
    raise Unavailable(f"the predictor ended with exit code {process.returncode}")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Politely, and after END_S at once. One that has ended by itself is no fault here."""
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), END_S)
    except TimeoutError:
        process.kill()
        await process.wait()
