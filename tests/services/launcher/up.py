"""`polyphase up`, and the command beside it, as processes of their own."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from services.launcher.ports import free_range
from services.launcher.suite import POLL_S, Suite
from tests.commands import Commands
from tests.patient_clusters import patient

START_S = 300.0
EMULATED = {"engine": "emulated", "accelerator": "A100-SXM-80", "kv_cache_bytes": 1 << 30}
COMMANDS = Commands()
POLYPHASE = [sys.executable, "-m", "services.launcher.cli"]
Up = tuple[asyncio.subprocess.Process, Suite]


def cluster(folder: Path, **changes: Any) -> Path:
    """A file with two prefill and two decode instances, emulated, and with these keys."""
    base = free_range()
    content = {
        "name": "test",
        "model": "models/demo",
        "served_model_name": "m",
        "ports": base,
        "gateway": {"port": base + 240},
        "dashboard": {"enabled": False},
        "predictor": {"enabled": False},
        "planner": {"enabled": False},
        "instance_defaults": EMULATED,
        "instances": [{"id": "p", "role": "prefill", "count": 2}, {"id": "d", "role": "decode", "count": 2}],
        **changes,
    }
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(patient(content)))
    return file


async def polyphase(*words: str, **environment: str) -> tuple[int, str]:
    """The command's exit code, and what it prints: first its output, then its errors."""
    done = await asyncio.to_thread(COMMANDS.run, words, {**os.environ, **environment})
    return done.returncode, done.stdout + done.stderr


@asynccontextmanager
async def running(
    folder: Path, *, environment: Mapping[str, str] | None = None, output: Path | None = None, **changes: Any
) -> AsyncIterator[Up]:
    """`polyphase up` of a cluster file with these changes. output: a file for all that it prints, errors included."""
    file, data = cluster(folder, **changes), folder / "data"
    printed = output or folder / "up.out"
    with printed.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *POLYPHASE,
            *("up", "--cluster", str(file), "--data-dir", str(data)),
            env={**os.environ, **(environment or {})},
            stdout=out,
            stderr=asyncio.subprocess.STDOUT if output else None,
        )
    try:
        async with asyncio.timeout(START_S):
            while b"Ctrl-C" not in printed.read_bytes():
                assert process.returncode is None, "polyphase up ended"
                await asyncio.sleep(POLL_S)
        yield process, Suite(data)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
