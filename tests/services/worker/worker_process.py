"""A worker of the demo model as a process of its own, without a monitor."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.launcher.suite import until
from tests.ports import free_address, free_port

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class WorkerProcess:
    process: asyncio.subprocess.Process
    log: Path
    rpc: str
    kv: str
    http: str

    def lives(self) -> bool:
        return self.process.returncode is None


@asynccontextmanager
async def worker_process(folder: Path, **settings: Any) -> AsyncIterator[WorkerProcess]:
    """It is ready; at the end it is killed if it still lives."""
    rpc, http, kv = free_port(), free_port(), free_port()
    given = {
        "model": str(ROOT / "models" / "demo"),
        "rpc_port": rpc,
        "http_port": http,
        "kv_port": kv,
        "monitor_url": "http://127.0.0.1:1",
        "heartbeat_address": free_address(),
        "broadcast_address": free_address(),
        **settings,
    }
    env = {"PYTHONPATH": str(ROOT)} | {f"POLYPHASE_WORKER_{key.upper()}": str(value) for key, value in given.items()}
    log = folder / "log"
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.worker"), cwd=ROOT, env=os.environ | env, stdout=out, stderr=out
        )
    made = WorkerProcess(process, log, *(f"{scheme}://127.0.0.1:{port}" for scheme, port in
                                         (("tcp", rpc), ("tcp", kv), ("http", http))))  # fmt: skip
    try:
        await until(lambda: not made.lives() or "instance is ready" in log.read_text(), 200, "the instance")
        assert made.lives(), log.read_text()[-4000:]
        yield made
    finally:
        if made.lives():
            process.kill()
        await process.wait()
