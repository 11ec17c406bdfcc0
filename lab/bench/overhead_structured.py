"""The time to first token of structured outputs: a suite with two real engines, and plain vLLM, in turns.

A grammar is cold when no process has seen it, although it has seen others of its kind; it is repeated when the request
before brought it.
"""

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from lab.bench.live_clusters import SERVICES
from lab.bench.stream_client import stream_completion
from lab.demo.run import on_free_ports
from services.launcher import ports
from services.launcher.cluster_file import Cluster
from services.launcher.keeper import StartFailed
from services.launcher.model_source import PROJECT
from services.launcher.suite import until
from services.launcher.up import running_suite

MODEL = PROJECT / "models" / "demo"
HOST, PATH = "127.0.0.1", "/v1/chat/completions"
ROUNDS = 9  # of each kind, cold and repeated, at each of the two
AIM_RATIO, AIM_ADDED_MS = 1.2, 20.0
_MIB = 1 << 20
_START_S, _END_S = 180.0, 30.0
_TOOLS = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}

Body = dict[str, object]
Figures = dict[str, float]


def _schema(number: int) -> dict[str, Any]:
    item = {
        "type": "object",
        "properties": {"name": {"type": "string"}, f"price_{number}": {"type": "number"}},
        "required": ["name", f"price_{number}"],
    }
    return {
        "type": "object",
        "properties": {
            f"title_{number}": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["book", "film", "song"]},
            "year": {"type": "integer", "minimum": 1900},
            "items": {"type": "array", "items": item, "maxItems": 5},
        },
        "required": [f"title_{number}", "kind", "year", "items"],
        "additionalProperties": False,
    }


def _tool(number: int) -> Body:
    function = {"name": f"order_{number}", "description": "Order things.", "parameters": _schema(number)}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


KINDS: dict[str, Callable[[int], Body]] = {
    "json_schema": lambda number: {
        "response_format": {"type": "json_schema", "json_schema": {"name": "order", "schema": _schema(number)}}
    },
    "regex": lambda number: {"structured_outputs": {"regex": f"order-{number}: [a-z]{{3,8}}( [a-z]{{3,8}}){{2}}"}},
    "choice": lambda number: {"structured_outputs": {"choice": [f"yes {number}", f"no {number}", "perhaps"]}},
    "grammar": lambda number: {
        "structured_outputs": {"grammar": f'root ::= "order {number}: " item\nitem ::= [a-z] [a-z] [a-z]'}
    },
    "tool_choice": _tool,
}


def structured_ttfts(rounds: int = ROUNDS) -> dict[str, dict[str, Figures]]:
    """By kind of grammar, cold and repeated: medians of both, their ratio, what the suite adds beyond AIM_RATIO."""
    return asyncio.run(_measure(rounds))


def aims_of(figures: dict[str, dict[str, Figures]]) -> dict[str, Any]:
    """Beyond AIM_RATIO times plain vLLM the suite may add AIM_ADDED_MS."""
    aims = {}
    for when in ("cold", "repeated"):
        worst = max(of_kind[when]["beyond_ms"] for of_kind in figures.values())
        name = f"structured_{when}_ttft_ms beyond {AIM_RATIO:g} x plain vLLM"
        aims[name] = {"want": f"<= {AIM_ADDED_MS:g}", "got": worst, "met": worst <= AIM_ADDED_MS}
    return aims


def _cluster() -> Cluster:
    instance = {
        "engine": "vllm",
        "accelerator": "cpu",
        "dtype": "float32",
        "kv_cache_bytes": 128 * _MIB,
        "staging_bytes": 64 * _MIB,
        "inbox_bytes": 64 * _MIB,
        "threads": 1,
    }
    return Cluster.model_validate(
        {
            **SERVICES,
            "name": "bench overhead (structured outputs)",
            "gateway": {"dtype": "float32", "vllm_args": _TOOLS},
            "instance_defaults": instance,
            "instances": [{"id": "prefill", "role": "prefill"}, {"id": "decode", "role": "decode"}],
        }
    )


@asynccontextmanager
async def _plain_vllm(folder: Path) -> AsyncIterator[int]:
    """vLLM's own server with one engine of the same model; its port."""
    port = ports.free_range()
    arguments = ["--model", str(MODEL), "--served-model-name", "demo", "--dtype", "float32", "--max-model-len", "2048"]
    arguments += ["--enforce-eager", "--kv-cache-memory-bytes", str(128 * _MIB), "--host", HOST, "--port", str(port)]
    arguments += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]
    path = folder / "plain-vllm.log"
    with path.open("wb") as log:
        process = subprocess.Popen(  # noqa: ASYNC220
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        await until(lambda: _answers(process, port, path), _START_S, "plain vLLM")
        yield port
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, _END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def _answers(process: "subprocess.Popen[bytes]", port: int, log: Path) -> bool:
    if process.poll() is not None:
        raise StartFailed(f"plain vLLM ended with {process.returncode}: {log.read_text('utf-8', 'replace')[-2000:]}")
    async with httpx.AsyncClient(trust_env=False) as client:
        try:
            return (await client.get(f"http://{HOST}:{port}/health", timeout=2)).is_success
        except httpx.HTTPError:
            return False


async def _measure(rounds: int) -> dict[str, dict[str, Figures]]:
    with tempfile.TemporaryDirectory(prefix="polyphase-bench-") as name:
        folder = Path(name)
        async with _plain_vllm(folder) as plain:
            cluster = on_free_ports(_cluster())
            async with running_suite(cluster, folder / "suite", Console(stderr=True)):
                targets = {"suite": cluster.gateway.port, "plain": plain}
                return await _rounds(targets, rounds)


async def _rounds(targets: dict[str, int], rounds: int) -> dict[str, dict[str, Figures]]:
    seen: dict[tuple[str, str, str], list[float]] = {}
    for number in range(rounds + 1):  # the first one warms up
        for kind, wish in KINDS.items():
            for when in ("cold", "repeated"):
                for target, port in targets.items():
                    ttft_s = await _ttft_s(port, wish(number))
                    if number:
                        seen.setdefault((kind, when, target), []).append(ttft_s * 1e3)
    return {
        kind: {when: _figures(seen[kind, when, "suite"], seen[kind, when, "plain"]) for when in ("cold", "repeated")}
        for kind in KINDS
    }


async def _ttft_s(port: int, wish: Body) -> float:
    body = {
        "model": "demo",
        "max_tokens": 3,
        "stream": True,
        "temperature": 0,
        "messages": [{"role": "user", "content": "Write an order."}],
        **wish,
    }
    return (await stream_completion(HOST, port, body, path=PATH)).ttft_s


def _figures(suite: list[float], plain: list[float]) -> Figures:
    ours, theirs = statistics.median(suite), statistics.median(plain)
    return {
        "suite_ttft_ms": round(ours, 1),
        "plain_vllm_ttft_ms": round(theirs, 1),
        "ratio": round(ours / theirs, 2),
        "beyond_ms": round(ours - AIM_RATIO * theirs, 1),
    }
