"""`polyphase bench overhead`: CPU time and time to first token that the suite adds to a request and a token.

All services are real and the instances are emulated and compute in no time; vLLM's API layer alone takes the same load
in turns. Structured outputs are measured with real engines beside plain vLLM, and long prompts by how long they hold up
the gateway's event loop.
"""

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from rich.console import Console

from benchmarks.results import at_most
from benchmarks.suite import BARE, CPU_ENGINE, started
from gateway.alone import TimerTokens
from gateway.app import prepare_environment, running
from gateway.auth import KeyRing
from gateway.settings import GatewaySettings
from services.launcher import ports
from services.launcher.cluster_file import Cluster
from services.launcher.model_source import PROJECT
from services.launcher.suite import Suite, until
from services.launcher.supervisor import StartFailed
from services.launcher.up import running_suite
from tools.client import CHAT, COMPLETIONS, StreamResult, chat_body, completion_body, run_load, stream_completion

HOST = "127.0.0.1"
STEP_S = 0.025  # of a decode: each token is a message and an event of its own, as with a real engine
PORT, ALONE_PORT, FIRST_PORT = 19099, 19098, 19100
MODEL = PROJECT / "models" / "demo"
_MAX_JOBS = 4096
_START_S = 120.0


@dataclass(frozen=True, slots=True)
class Target:
    """Something that answers chats and completions, and the CPU seconds that it has used by now."""

    port: int
    cpu_s: Callable[[], float]


def cluster() -> Cluster:
    """Two prefill and two decode instances that compute in no time, on fixed ports."""
    return Cluster.model_validate(
        {
            **BARE,
            "name": "overhead bench (emulated instances)",
            "ports": FIRST_PORT,
            "gateway": {"port": PORT, "max_queued_jobs": _MAX_JOBS},
            "instance_defaults": {
                "engine": "emulated",
                "accelerator": "A100-SXM-80",
                "emulated_step_s": 0.0,
                "max_seqs": 256,
                "kv_cache_bytes": 64 << 30,
            },
            "instances": [
                {"id": "p", "count": 2, "role": "prefill"},
                {"id": "d", "count": 2, "role": "decode", "emulated_step_s": STEP_S},
            ],
        }
    )


def of_suite(suite: Suite) -> Target:
    """Gateway, schedulers and monitor: all but the instances."""
    pids = [p.pid for p in suite.state.processes if p.name.startswith(("gateway", "scheduler", "monitor"))]
    return Target(PORT, lambda: sum(map(cpu_s, pids)))


@asynccontextmanager
async def api_layer_alone(folder: Path) -> AsyncIterator[Target]:
    """vLLM's own streams behind our admission; its tokens come from a timer in its process."""
    settings = GatewaySettings(
        schedulers=("tcp://127.0.0.1:9",),
        model=str(MODEL),
        served_model_name="demo",
        port=ALONE_PORT,
        max_queued_jobs=_MAX_JOBS,
        lean_streams=False,
    )
    environment = {**os.environ, **settings.to_environment(), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, "-m", "gateway.alone"]
    with (folder / "alone.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)  # noqa: ASYNC220
    try:
        await until(_answers, _START_S, "the API layer alone")
        yield Target(ALONE_PORT, lambda: cpu_s(process.pid))
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 15)


async def _answers() -> bool:
    async with httpx.AsyncClient() as client:
        try:
            return (await client.get(f"http://127.0.0.1:{ALONE_PORT}/health", timeout=2)).is_success
        except httpx.HTTPError:
            return False


def cpu_s(pid: int) -> float:
    """Of all threads, to the nanosecond: the usual clocks have ticks of 10 ms, more than some requests cost."""
    try:
        threads = [thread.read_text() for thread in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        return sum(int(thread.split()[0]) for thread in threads) / 1e9
    except FileNotFoundError:  # a kernel without them
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)


# Structured outputs, on a suite with two real engines and on plain vLLM, in turns. A grammar is cold when no process
# has seen it before, although others of its kind; it is repeated when the previous request used it.

STRUCTURED_ROUNDS = 9  # of each kind, cold and repeated, at each of the two
AIM_RATIO, AIM_ADDED_MS = 1.2, 20.0
_MIB = 1 << 20
_VLLM_START_S, _VLLM_END_S = 180.0, 30.0
_TOOLS = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}

Body = dict[str, Any]
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


def structured_ttfts(rounds: int = STRUCTURED_ROUNDS) -> dict[str, dict[str, Figures]]:
    """By kind of grammar, cold and repeated: medians of both, their ratio, what the suite adds beyond AIM_RATIO."""
    return asyncio.run(_measure(rounds))


def structured_aims(figures: dict[str, dict[str, Figures]]) -> dict[str, Any]:
    """Beyond AIM_RATIO times plain vLLM the suite may add AIM_ADDED_MS."""
    aims = {}
    for when in ("cold", "repeated"):
        worst = max(of_kind[when]["beyond_ms"] for of_kind in figures.values())
        name = f"structured_{when}_ttft_ms beyond {AIM_RATIO:g} x plain vLLM"
        aims[name] = at_most(AIM_ADDED_MS, worst)
    return aims


def _cluster() -> dict[str, Any]:
    instance = {**CPU_ENGINE, "kv_cache_bytes": 128 * _MIB, "staging_bytes": 64 * _MIB, "inbox_bytes": 64 * _MIB}
    return {
        **BARE,
        "name": "bench overhead (structured outputs)",
        "gateway": {"dtype": "float32", "vllm_args": _TOOLS},
        "instance_defaults": instance,
        "instances": [{"id": "prefill", "role": "prefill"}, {"id": "decode", "role": "decode"}],
    }


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
        await until(lambda: _vllm_answers(process, port, path), _VLLM_START_S, "plain vLLM")
        yield port
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, _VLLM_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


async def _vllm_answers(process: "subprocess.Popen[bytes]", port: int, log: Path) -> bool:
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
        async with _plain_vllm(folder) as plain, started(_cluster()) as running:
            targets = {"suite": urlsplit(running.plan.api_url).port or 80, "plain": plain}
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
    body = chat_body("Write an order.", 3, ignore_eos=False, **wish)
    return (await stream_completion(HOST, port, body, path=CHAT)).ttft_s


def _figures(suite: list[float], plain: list[float]) -> Figures:
    ours, theirs = statistics.median(suite), statistics.median(plain)
    return {
        "suite_ttft_ms": round(ours, 1),
        "plain_vllm_ttft_ms": round(theirs, 1),
        "ratio": round(ours / theirs, 2),
        "beyond_ms": round(ours - AIM_RATIO * theirs, 1),
    }


# Long prompts: how long one holds up the gateway's event loop. The gateway's application runs in this process, on a
# loop that times each of its callbacks; tokens come from a timer.

LENGTHS = (8_000, 32_000, 120_000)
LONG_PROMPT_ROUNDS = 5
AIM_MS = 5.0
_WORD = " fox"  # a token of the demo's model
_MODEL = PROJECT / "models" / "demo"


def run_long_prompts() -> dict[str, Any]:
    """The longest callback, in ms, of each length as text and as token ids: medians."""
    prepare_environment()
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # than the demo's model has; nothing computes here
    return asyncio.run(_measured())


async def _measured() -> dict[str, Any]:
    settings = GatewaySettings(
        schedulers=("tcp://127.0.0.1:9",), model=str(_MODEL), served_model_name="demo", max_model_len=131_072
    )
    async with running(settings, KeyRing(()), TimerTokens(0.001)) as app:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60) as client:
            await _longest_ms(client, 1_000)
            return {
                kind: {str(tokens): await _median(client, tokens, as_ids=kind == "ids") for tokens in LENGTHS}
                for kind in ("text", "ids")
            }


async def _median(client: httpx.AsyncClient, tokens: int, *, as_ids: bool) -> float:
    return round(
        statistics.median([await _longest_ms(client, tokens, as_ids=as_ids) for _ in range(LONG_PROMPT_ROUNDS)]), 2
    )


async def _longest_ms(client: httpx.AsyncClient, tokens: int, *, as_ids: bool = False) -> float:
    prompt: object = [300 + number % 500 for number in range(tokens)] if as_ids else _WORD * tokens
    body = {"model": "demo", "prompt": prompt, "max_tokens": 4, "stream": True, "temperature": 0, "ignore_eos": True}
    request = client.build_request("POST", "/v1/completions", json=body)
    with _timed_callbacks() as times:
        await asyncio.sleep(0)  # the making of the body is not the gateway's
        answer = await client.send(request)
    if not answer.is_success:
        raise RuntimeError(f"{answer.status_code}: {answer.text[:500]}")
    return max(times) * 1e3


@contextmanager
def _timed_callbacks() -> Iterator[list[float]]:
    """CPU seconds that each callback of the loop takes: on a machine of its own it takes no longer."""
    times: list[float] = []
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        times.append(time.thread_time() - began)

    asyncio.Handle._run = timed  # type: ignore[method-assign,assignment]
    try:
        yield times
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]


PATHS = {"chat": CHAT, "completions": COMPLETIONS}
STREAMS = (1, 16, 64, 256)
SHORT, LONG = 2, 66  # output tokens of the two loads, from which the costs of a request and of a token follow
TIMED = 24  # output tokens of the requests of which the first token is timed
ROUNDS, LEAST_SHORT, LEAST_LONG = 3, 24, 4  # requests of a load, or twice as many as there are streams
IDLE_S = 8.0
PROMPT = "The quick brown fox jumps over the lazy dog. " * 8
AIM_TOKEN_RATIO, AIM_TOKEN_FROM, AIM_REQUEST_RATIO, AIM_IDLE_MS = 0.5, 16, 1.1, 10.0
AIM_TTFT_MS = {1: 2.0, 16: 2.0, 64: 5.0}

Cell = dict[str, float]


def run_overhead_bench(rounds: int = ROUNDS, streams: tuple[int, ...] = STREAMS) -> dict[str, Any]:
    """Start an emulated suite, load it, and give figures and aims."""
    structured = structured_ttfts()
    long_prompts = run_long_prompts()  # sets environment variables, which real engines would go by
    result = asyncio.run(_bench(rounds, streams))
    result["figures"]["structured_outputs"] = structured
    result["aims"] |= structured_aims(structured)
    result["figures"]["long_prompt_longest_turn_ms"] = long_prompts
    worst = max(turn for of_kind in long_prompts.values() for turn in of_kind.values())
    result["aims"]["long_prompt_longest_turn_ms"] = at_most(AIM_MS, worst)
    return result


async def _bench(rounds: int, streams: tuple[int, ...]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="polyphase-bench-") as folder:
        async with (
            running_suite(cluster(), Path(folder), Console(stderr=True)) as running,
            api_layer_alone(Path(folder)) as alone,
        ):
            suite = of_suite(running.suite)
            for target in (suite, alone):
                for path in PATHS.values():
                    await run_load(HOST, target.port, _bodies(path, 64, SHORT), 8, path)
            idle_ms = await _idle_ms(suite)
            cells = {
                kind: {str(count): await _cell(suite, alone, path, count, rounds) for count in streams}
                for kind, path in PATHS.items()
            }
    return {"figures": {"idle_cpu_ms_per_s": round(idle_ms, 2), **cells}, "aims": aims_of(idle_ms, cells)}


async def _idle_ms(suite: Target) -> float:
    before, began = suite.cpu_s(), time.monotonic()
    await asyncio.sleep(IDLE_S)
    return (suite.cpu_s() - before) * 1e3 / (time.monotonic() - began)


async def _cell(suite: Target, alone: Target, path: str, streams: int, rounds: int) -> Cell:
    """Medians of rounds in each of which both targets have their turn."""
    seen = [await _round(suite, alone, path, streams) for _ in range(rounds)]
    return {name: round(statistics.median(each[name] for each in seen), 3) for name in seen[0]}


async def _round(suite: Target, alone: Target, path: str, streams: int) -> Cell:
    ours, base = await _costs(suite, path, streams), await _costs(alone, path, streams)
    cell = {**ours, **{f"api_layer_alone_{name}": value for name, value in base.items()}}
    for name in ("cpu_per_token_us", "cpu_per_request_ms"):
        cell[f"{name}_ratio"] = ours[name] / base[name]
    for name in ("ttft_p50_ms", "ttft_p99_ms"):
        cell[f"added_{name}"] = ours[name] - base[name]
    return cell


async def _costs(target: Target, path: str, streams: int) -> Cell:
    """Of short and of long answers; the difference is the cost of the tokens."""
    short_s, _ = await _cpu_of(target, path, max(LEAST_SHORT, 2 * streams), SHORT, streams)
    long_s, long = await _cpu_of(target, path, max(LEAST_LONG, 2 * streams), LONG, streams)
    per_token_s = (long_s - short_s) / (LONG - SHORT)
    times = await _ttfts(target, path, max(LEAST_SHORT, 2 * streams), streams)
    return {
        "cpu_per_token_us": per_token_s * 1e6,
        "cpu_per_request_ms": (short_s - SHORT * per_token_s) * 1e3,
        "events_per_token": sum(result.chunks for result in long) / (len(long) * LONG),
        "ttft_p50_ms": times[len(times) // 2] * 1e3,
        "ttft_p99_ms": times[len(times) * 99 // 100] * 1e3,
    }


async def _cpu_of(
    target: Target, path: str, requests: int, tokens: int, streams: int
) -> tuple[float, list[StreamResult]]:
    """CPU seconds a request, and what the client saw."""
    before = target.cpu_s()
    results = await run_load(HOST, target.port, _bodies(path, requests, tokens), streams, path)
    return (target.cpu_s() - before) / requests, results


async def _ttfts(target: Target, path: str, requests: int, streams: int) -> list[float]:
    """In order, of requests that come evenly, as many at once as there are to be streams.

    Prefill takes no time in either target, so the difference between two is what our services add.
    """
    answer_s = (await stream_completion(HOST, target.port, _bodies(path, 1, TIMED)[0], path=path)).total_s
    began = time.monotonic()

    async def one(number: int, body: dict[str, object]) -> float:
        await asyncio.sleep(began + number * answer_s / streams - time.monotonic())
        return (await stream_completion(HOST, target.port, body, path=path)).ttft_s

    bodies = _bodies(path, requests, TIMED)
    return sorted(await asyncio.gather(*(one(number, body) for number, body in enumerate(bodies))))


def _bodies(path: str, count: int, tokens: int) -> list[dict[str, Any]]:
    body = chat_body if path == CHAT else completion_body
    return [body(f"{index} {PROMPT}", tokens) for index in range(count)]


def aims_of(idle_ms: float, cells: dict[str, dict[str, Cell]]) -> dict[str, Any]:
    of_streams = [(int(count), cell) for of_kind in cells.values() for count, cell in of_kind.items()]
    many = [cell for count, cell in of_streams if count >= AIM_TOKEN_FROM]
    aims = {
        "idle_cpu_ms_per_s": at_most(AIM_IDLE_MS, idle_ms),
        "cpu_per_request_ratio": at_most(
            AIM_REQUEST_RATIO, max(cell["cpu_per_request_ms_ratio"] for _, cell in of_streams)
        ),
    }
    if many:
        worst = max(cell["cpu_per_token_us_ratio"] for cell in many)
        aims[f"cpu_per_token_ratio at {AIM_TOKEN_FROM} and more"] = at_most(AIM_TOKEN_RATIO, worst)
    for count, want in AIM_TTFT_MS.items():
        seen = [cell["added_ttft_p50_ms"] for streams, cell in of_streams if streams == count]
        if seen:
            aims[f"added_ttft_p50_ms at {count}"] = at_most(want, max(seen))
    return aims
