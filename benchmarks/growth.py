"""`polyphase bench growth`: which collections of a scheduler and a monitor grow with requests, and where that ends.

The suite is real, its instances are emulated and fast. At given numbers of requests the load rests, and each of the two
processes has its heap walked by `heap_walk`.
"""

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks import heap_walk
from benchmarks.results import at_most, result
from benchmarks.suite import BARE, started
from services.launcher.suite import Suite

HOST = "127.0.0.1"
REQUESTS = (500, 2_500, 5_000, 7_500, 10_000, 15_000, 20_000, 30_000, 45_000, 60_000)
CLIENTS, ANSWER_TOKENS = 16, 8
# Of each instance: 5,461 blocks of 64 tokens, so that the run reaches the number at which blocks leave.
KV_BYTES = 1 << 30
PROMPT = "The quick brown fox jumps over the lazy dog. " * 6
REST_S = 4.0  # until deliveries and rows are written
PROCESSES = ("scheduler", "monitor")


@dataclass(slots=True)
class Load:
    """Clients of one gateway, each with a connection of its own that it keeps, and what failed."""

    port: int
    sent: int = 0
    failed: list[str] = field(default_factory=list)
    _streams: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = field(default_factory=dict)

    async def until(self, number: int) -> None:
        """Send requests, each with another prompt, until there were `number` in all; returns with the last answer."""
        await asyncio.gather(*(self._client(one, number) for one in range(CLIENTS)))

    async def _client(self, client: int, number: int) -> None:
        while self.sent < number:
            self.sent += 1
            try:
                if client not in self._streams:
                    self._streams[client] = await asyncio.open_connection(HOST, self.port)
                await _ask(*self._streams[client], f"{self.sent} {PROMPT}")
            except (OSError, EOFError, ValueError) as error:
                self.failed.append(f"{type(error).__name__}: {error}"[:300])
                self._streams.pop(client, None)


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, text: str) -> None:
    message = {"role": "user", "content": text}
    body = {"model": "demo", "messages": [message], "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    payload = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: "
    writer.write(head.encode() + b"%d\r\n\r\n" % len(payload) + payload)
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    size = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length:"))
    answer = await reader.readexactly(size)
    if " 200 " not in lines[0]:
        raise ValueError(f"{lines[0]}: {answer[:200]!r}")


def run_growth_bench(minutes: float, requests: Sequence[int] = REQUESTS) -> dict[str, Any]:
    """Figures at each of these numbers of requests that is reached within so many minutes, and the aims."""
    return asyncio.run(_bench(minutes, requests))


def _cluster(walks: Path) -> dict[str, Any]:
    path = os.pathsep.join((str(Path(heap_walk.__file__).parent), os.environ.get("PYTHONPATH", "")))
    watched = {"env": {"PYTHONPATH": path, "HEAP_WALKS": str(walks)}}
    return {
        **BARE,
        "name": "growth bench (emulated instances)",
        "scheduler": watched,
        "monitor": watched,
        "launcher": {"hang_s": 60.0},
        "instance_defaults": {
            "engine": "emulated",
            "accelerator": "A100-SXM-80",
            "emulated_step_s": 0.002,
            "kv_cache_bytes": KV_BYTES,
        },
        "instances": [{"id": "prefill", "count": 2, "role": "prefill"}, {"id": "decode", "count": 2, "role": "decode"}],
    }


async def _bench(minutes: float, requests: Sequence[int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="polyphase-bench-") as folder:
        walks = Path(folder) / "walks"
        walks.mkdir()
        async with started(_cluster(walks)) as running:
            load, began = Load(urlsplit(running.plan.api_url).port or 80), time.monotonic()
            seen: dict[str, list[dict[str, Any]]] = {name: [] for name in PROCESSES}
            with suppress(TimeoutError):
                async with asyncio.timeout(60.0 * minutes):
                    for number in requests:
                        await load.until(number)
                        await asyncio.sleep(REST_S)
                        for name, found in (await _walks(running.suite, walks, number)).items():
                            row = {"requests": number, "minutes": (time.monotonic() - began) / 60.0}
                            seen[name].append(row | found)
    return _result(seen, load)


async def _walks(suite: Suite, folder: Path, number: int) -> dict[str, dict[str, Any]]:
    pids = {process.name: process.pid for process in suite.state.processes if process.name in PROCESSES}
    (folder / f"go-{number}").touch()
    files = {name: folder / f"heap-{pid}-{number}.json" for name, pid in pids.items()}
    while not all(file.exists() for file in files.values()):  # noqa: ASYNC110 - other processes write them
        await asyncio.sleep(0.1)
    return {name: json.loads(file.read_text()) for name, file in files.items()}


def _result(seen: dict[str, list[dict[str, Any]]], load: Load) -> dict[str, Any]:
    figures: dict[str, Any] = {"requests": load.sent}
    aims = {"failed_requests": at_most(0, len(load.failed))}
    for name, rows in seen.items():
        for row in rows:
            sizes = {key: round(row[key] / 2**20, 2) for key in ("pss", "python", "c_used", "c_free", "sqlite")}
            kept = {what: f"{size / 2**20:.2f} MiB of {count}" for what, (size, count) in row["kept"].items() if count}
            sizes["garbage"] = row["garbage"]
            figures[f"{name} at {row['requests']} ({row['minutes']:.1f} min)"] = {**sizes, **kept}
        if len(rows) > 1:
            figures[f"{name}_growth_mib"] = _growth(rows[0], rows[-1])
    return result(figures, aims, load.failed[:5])


def _growth(first: dict[str, Any], last: dict[str, Any]) -> dict[str, float]:
    """MiB between two walks: of the process, of all its Python objects, and by collection."""
    grown = {what: size - first["kept"].get(what, [0, 0])[0] for what, (size, _) in last["kept"].items()}
    whole = {key: last[key] - first[key] for key in ("pss", "python", "c_free")}
    return {key: round(value / 2**20, 2) for key, value in (whole | grown).items()}
