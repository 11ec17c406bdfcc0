"""A real engine in a process of its own, for scripts that try it and send what they found."""

import asyncio
import importlib
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine_client import PROCESSES
from benchmarks.engine_process import own_process
from services.launcher.model_source import PROJECT
from services.worker.__main__ import _prepare_environment
from services.worker.kv.rank_events import KvEvents
from services.worker.settings import WorkerSettings
from shared.runtime.logs import configure_logs
from tests.ports import free_port

PATIENCE_S = 600  # of a test, for all that its script tries
Script = Callable[..., Awaitable[dict[str, Any]]]


def found_by(module: str, folder: Path, *arguments: Any) -> dict[str, Any]:
    """What the script `found` of a module sends, which gets a free port and the arguments."""
    log = folder / "log"
    receiver, sender = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=_run, args=(module, str(log), sender, free_port(), *arguments))
    process.start()
    sender.close()  # so that its end is seen here
    try:
        assert receiver.poll(PATIENCE_S), log.read_text()[-6000:]
        answer: dict[str, Any] = receiver.recv()
    except EOFError:
        pytest.fail(log.read_text()[-6000:])
    finally:
        process.kill()
        process.join()
    return answer


def _run(module: str, log: str, sender: "Connection[dict[str, Any], None]", *arguments: Any) -> None:
    own_process(log)  # what the engine prints goes to `log`
    configure_logs("engine", "WARNING")
    script: Script = importlib.import_module(module).found
    sender.send(asyncio.run(script(*arguments)))  # type: ignore[arg-type]
    os._exit(0)  # a grammar may compile for minutes yet, in a thread that nobody can end


@dataclass(frozen=True)
class Started:
    """An engine that runs, and what it runs with."""

    engine: Any
    settings: WorkerSettings
    events: KvEvents
    total_blocks: int
    stages: tuple[int, ...]


@asynccontextmanager
async def started(port: int, staging_bytes: int, engine: dict[str, Any], **settings: Any) -> AsyncIterator[Started]:
    """The demo model's engine; `engine` are further arguments of VllmEngine."""
    from services.worker.engines.vllm import VllmEngine

    given = WorkerSettings(
        instance_id="e",
        model=str(PROJECT / "models" / "demo"),
        rpc_port=0,
        http_port=0,
        kv_port=port,
        monitor_url="",
        heartbeat_address="",
        broadcast_address="",
        **settings,
    )
    _prepare_environment(given)
    with tempfile.TemporaryDirectory() as folder:
        async with KvEvents(f"ipc://{folder}/events") as events:
            connector = {
                "endpoints": list(given.kv_endpoints),
                "events": events.address,
                "control_key": "k",
                "instance_id": "e",
                "generation": 1,
                "fingerprint": "f",
                "staging_bytes": staging_bytes,
                "adapters": given.lora.digests(),
            }
            running = VllmEngine(given, connector, **engine)
            info = await running.start()
            yield Started(running, given, events, info.total_blocks, info.stages)
            await running.close()
