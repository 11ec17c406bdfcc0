"""`polyphase bench overhead`: CPU time and time to first token that the suite adds to a request and a token.

All services are real and the instances are emulated and compute in no time; vLLM's API layer alone takes the same load
in turns. With `full`, more numbers of streams are measured, routers of other projects take turns, where they are
installed, structured outputs are measured with real engines beside plain vLLM, and long prompts by how long they hold
up the gateway's event loop.
"""

import asyncio
import os
import shutil
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.cluster_files import emulated
from benchmarks.measuring import OFFLINE, Usage, pids_of, plain_vllm, port_of, serving, usage
from benchmarks.results import Aim, Figures, Result, at_most, in_turns, medians, merged, result
from benchmarks.suite import BARE, CPU_ENGINE, DEMO_MODEL, started
from gateway.alone import TimerTokens
from gateway.app import prepare_environment, running
from gateway.auth import KeyRing
from gateway.settings import GatewaySettings
from services.launcher import ports
from services.launcher.spec import CONTROL
from tools.client import CHAT, COMPLETIONS, Json, chat_body, completion_body, run_load, stream_completion

HOST = "127.0.0.1"
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
PROMPT = "The quick brown fox jumps over the lazy dog. " * 8

# The load on emulated instances.
PATHS = {"chat": CHAT, "completions": COMPLETIONS}
STREAMS, ALL_STREAMS = (16,), (1, 4, 16, 64, 256)
STEP_S = 0.025  # of a decode: each token is a message and an event of its own, as with a real engine
SHORT, LONG = 2, 66  # output tokens of the two loads, from which the costs of a request and of a token follow
TIMED = 24  # output tokens of the requests of which the first token is timed
ROUNDS, MIN_SHORT, MIN_LONG = 3, 24, 4  # requests of a load, or twice as many as there are streams
SETTLE_S, IDLE_S = 3.0, 10.0
MAX_JOBS = 4096
AIM_TOKEN_RATIO, AIM_TOKEN_FROM, AIM_FEW_RATIO = 0.5, 16, 0.8  # the last: with fewer streams
AIM_REQUEST_RATIO, AIM_IDLE_MS, AIM_TTFT_MS = 1.1, 5.0, 1.5

# Routers of other projects, by the command that starts them. They pass bytes on, and neither parse nor tokenise.
ROUTERS = {"vllm-router": ("vllm-router",), "sglang-router": ("sglang-router", "launch")}

# Structured outputs.
STRUCTURED_ROUNDS = 9  # of each kind, cold and repeated, at each of the two
AIM_RATIO, AIM_ADDED_MS = 1.2, 20.0

# Long prompts.
LENGTHS, LONG_PROMPT_ROUNDS, AIM_CALLBACK_MS = (8_000, 32_000, 120_000), 5, 5.0


def run_overhead_bench(
    streams: tuple[int, ...] = (), *, full: bool = False, one_process: bool = False, rounds: int = ROUNDS
) -> Result:
    """`streams`: the numbers of streams, by default STREAMS, or all of them with `full`. one_process: as in the cluster
    file, of the suite.
    """
    counts = streams or (ALL_STREAMS if full else STREAMS)
    if not full:
        return asyncio.run(_load(rounds, counts, one_process, {}))
    routers = found_routers()
    load = asyncio.run(_load(rounds, counts, one_process, routers))
    structured = asyncio.run(_structured(STRUCTURED_ROUNDS))
    long_prompts = _long_prompts()  # sets environment variables that real engines would follow
    missing = ", ".join(ROUTERS.keys() - routers.keys())
    return merged(load, structured, long_prompts, {"notes": [f"not installed: {missing}"] if missing else []})


@dataclass(frozen=True, slots=True)
class Target:
    """A server of the API, and the processes whose CPU time counts, by kind."""

    port: int
    pids: Mapping[str, list[int]]

    def usage(self) -> dict[str, Usage]:
        return {kind: usage(pids) for kind, pids in self.pids.items()}


# The load: the suite with emulated instances, and the API layer with a timer as its engine.

CLUSTER = emulated(
    "overhead",
    [{"id": "p", "count": 2, "role": "prefill"}, {"id": "d", "count": 2, "role": "decode", "emulated_step_s": STEP_S}],
    {"emulated_step_s": 0.0, "max_seqs": 256, "kv_cache_bytes": 64 << 30},
    gateway={"max_queued_jobs": MAX_JOBS},
)


async def _load(
    rounds: int, streams: tuple[int, ...], one_process: bool, routers: Mapping[str, tuple[str, ...]]
) -> Result:
    async with AsyncExitStack() as stack:
        running_suite = await stack.enter_async_context(started({**CLUSTER, "one_process": one_process}))
        # All processes but the instances, of which a real cluster has the same.
        kinds = (CONTROL,) if one_process else ("gateway", "scheduler", "monitor")
        suite = Target(port_of(running_suite), {kind: pids_of(running_suite, kind) for kind in kinds})
        idle = await _idle(suite)
        engines = [await stack.enter_async_context(_api_layer_alone()) for _ in range(2 if routers else 1)]
        targets = {"suite": suite, "alone": engines[0]}
        for name, command in routers.items():
            targets[name] = await stack.enter_async_context(_router(name, command, engines))
        for target in targets.values():
            for path in PATHS.values():
                await run_load(HOST, target.port, _bodies(path, 64, SHORT), 8, path)
        cells = {
            kind: {str(count): await _cell(targets, path, count, rounds) for count in streams}
            for kind, path in PATHS.items()
        }
    return result(idle, aims_of(idle["idle_cpu_ms_per_s"], cells)) | {"tables": tables_of(cells)}


async def _idle(suite: Target) -> Figures:
    """CPU and wake-ups of a suite that has not served a request yet, by kind of process."""
    await asyncio.sleep(SETTLE_S)
    began, before = time.monotonic(), suite.usage()
    await asyncio.sleep(IDLE_S)
    took_s, after = time.monotonic() - began, suite.usage()
    used = {kind: after[kind] - before[kind] for kind in after}
    figures = {"idle_cpu_ms_per_s": sum(each.cpu_s for each in used.values()) / took_s * 1e3}
    for kind, each in used.items():
        figures[f"idle_{kind}_cpu_ms_per_s"] = each.cpu_s / took_s * 1e3
        figures[f"idle_{kind}_wakes_per_s"] = each.wakes / took_s
    return {name: round(value, 2) for name, value in figures.items()}


@asynccontextmanager
async def _api_layer_alone() -> AsyncIterator[Target]:
    """vLLM's own streams behind the gateway's admission; the tokens come from a timer in the same process."""
    settings = GatewaySettings(
        schedulers=("tcp://127.0.0.1:9",),
        model=str(DEMO_MODEL),
        served_model_name="demo",
        port=ports.free_range(size=1),
        max_queued_jobs=MAX_JOBS,
        lean_streams=False,
    )
    environment = {**OFFLINE, **settings.to_environment()}
    async with serving(f"http://{HOST}:{settings.port}/health", "-m", "gateway.alone", **environment) as process:
        yield Target(settings.port, {"alone": [process.pid]})


def found_routers() -> dict[str, tuple[str, ...]]:
    """The commands of the routers that are installed, in this environment or on the path."""
    beside = str(Path(sys.executable).parent)
    found = {name: shutil.which(command[0], path=f"{beside}:{os.environ['PATH']}") for name, command in ROUTERS.items()}
    return {name: (path, *ROUTERS[name][1:]) for name, path in found.items() if path is not None}


@asynccontextmanager
async def _router(name: str, command: tuple[str, ...], engines: list[Target]) -> AsyncIterator[Target]:
    """The router in front of the API layers, whose CPU time does not count."""
    port = ports.free_range(size=2)
    options = ["--worker-urls", *(f"http://{HOST}:{each.port}" for each in engines)]
    options += ["--host", HOST, "--port", str(port), "--prometheus-port", str(port + 1), "--policy", "round_robin"]
    async with serving(f"http://{HOST}:{port}/health", *command[1:], *options, program=command[0]) as process:
        yield Target(port, {name: [process.pid]})


async def _cell(targets: Mapping[str, Target], path: str, streams: int, rounds: int) -> Figures:
    """Medians of rounds in each of which all targets have their turn."""
    seen = await in_turns(targets, rounds, lambda _, name: _costs(targets[name], path, streams))
    found = medians(_compared(each) for each in seen)
    return {name: round(value, 3) for name, value in found.items()}


def _compared(costs: Mapping[str, Figures]) -> Figures:
    """The suite's costs, those of the other targets, and the suite's beside those of the API layer alone."""
    ours, base = costs["suite"], costs["alone"]
    ratios = {f"{name}_ratio": ours[name] / base[name] for name in ("cpu_per_token_us", "cpu_per_request_ms")}
    added = {f"added_{name}": ours[name] - base[name] for name in ("ttft_p50_ms", "ttft_p99_ms")}
    others = {
        f"{'api_layer_alone' if target == 'alone' else target}_{name}": figures[name]
        for target, figures in costs.items()
        for name in (TOTALS if target != "suite" else ())
    }
    return ours | others | ratios | added


TOTALS = ("cpu_per_token_us", "cpu_per_request_ms", "ttft_p50_ms", "ttft_p99_ms")
TITLES = {
    "cpu_per_token_us": "CPU per token, µs",
    "wakes_per_token": "wake-ups per token",
    "cpu_per_request_ms": "CPU per request, ms",
    "ttft_p50_ms": "TTFT, p50, ms",
    "ttft_p99_ms": "TTFT, p99, ms",
}


def tables_of(cells: Mapping[str, Mapping[str, Figures]]) -> dict[str, list[dict[str, object]]]:
    """A table of each kind of figure; columns are the suite, its kinds of process, the other targets, comparisons."""
    tables: dict[str, list[dict[str, object]]] = {}
    for path, of_kind in cells.items():
        for streams, cell in of_kind.items():
            for name, title in TITLES.items():
                found = {key.replace(name, "").strip("_") or "suite": cell[key] for key in cell if name in key}
                tables.setdefault(title, []).append({"API": path, "streams": int(streams)} | found)
    return tables


async def _costs(target: Target, path: str, streams: int) -> Figures:
    """Of short and of long answers; the difference is the cost of the tokens. In sum and by kind of process."""
    short = await _used(target, path, max(MIN_SHORT, 2 * streams), SHORT, streams)
    long = await _used(target, path, max(MIN_LONG, 2 * streams), LONG, streams)
    times = await _ttfts(target, path, max(MIN_SHORT, 2 * streams), streams)
    figures = {"ttft_p50_ms": times[len(times) // 2] * 1e3, "ttft_p99_ms": times[len(times) * 99 // 100] * 1e3}
    total = {"": (sum(short.values(), Usage()), sum(long.values(), Usage()))}
    for kind, (few, many) in (total | {f"{kind}_": (short[kind], long[kind]) for kind in short}).items():
        per_token = (many - few).over(LONG - SHORT)
        figures[f"{kind}cpu_per_token_us"] = per_token.cpu_s * 1e6
        figures[f"{kind}cpu_per_request_ms"] = (few.cpu_s - SHORT * per_token.cpu_s) * 1e3
        figures[f"{kind}wakes_per_token"] = per_token.wakes
    return figures


async def _used(target: Target, path: str, requests: int, tokens: int, streams: int) -> dict[str, Usage]:
    """Per request, by kind of process."""
    before = target.usage()
    await run_load(HOST, target.port, _bodies(path, requests, tokens), streams, path)
    return {kind: (after - before[kind]).over(requests) for kind, after in target.usage().items()}


async def _ttfts(target: Target, path: str, requests: int, streams: int) -> list[float]:
    """Sorted TTFT of requests that arrive evenly, at a rate at which as many as `streams` are open.

    Prefill takes no time in either target, so the difference between two is what our services add.
    """
    answer_s = (await stream_completion(HOST, target.port, _bodies(path, 1, TIMED)[0], path=path)).total_s
    began = time.monotonic()

    async def one(number: int, body: dict[str, object]) -> float:
        await asyncio.sleep(began + number * answer_s / streams - time.monotonic())
        return (await stream_completion(HOST, target.port, body, path=path)).ttft_s

    bodies = _bodies(path, requests, TIMED)
    return sorted(await asyncio.gather(*(one(number, body) for number, body in enumerate(bodies))))


def _bodies(path: str, count: int, tokens: int) -> list[Json]:
    body = chat_body if path == CHAT else completion_body
    return [body(f"{index} {PROMPT}", tokens) for index in range(count)]


def aims_of(idle_ms: float, cells: Mapping[str, Mapping[str, Figures]]) -> dict[str, Aim]:
    by_streams = [(int(count), cell) for of_kind in cells.values() for count, cell in of_kind.items()]
    aims = {
        "idle_cpu_ms_per_s": at_most(AIM_IDLE_MS, idle_ms),
        "cpu_per_request_ratio": at_most(AIM_REQUEST_RATIO, _worst(by_streams, "cpu_per_request_ms_ratio")),
        "added_ttft_p50_ms": at_most(AIM_TTFT_MS, _worst(by_streams, "added_ttft_p50_ms")),
    }
    if many := [pair for pair in by_streams if pair[0] >= AIM_TOKEN_FROM]:
        aims[f"cpu_per_token_ratio at {AIM_TOKEN_FROM} and more"] = at_most(
            AIM_TOKEN_RATIO, _worst(many, "cpu_per_token_us_ratio")
        )
    if few := [pair for pair in by_streams if pair[0] < AIM_TOKEN_FROM]:
        aims[f"cpu_per_token_ratio below {AIM_TOKEN_FROM}"] = at_most(
            AIM_FEW_RATIO, _worst(few, "cpu_per_token_us_ratio")
        )
    return aims


def _worst(cells: list[tuple[int, Figures]], name: str) -> float:
    return max(cell[name] for _, cell in cells)


# Structured outputs: a suite with two real engines, and plain vLLM. A grammar is cold if no process has seen it before,
# although others of its kind; it is repeated if the previous request used it.


def _schema(number: int) -> Json:
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


def _tool(number: int) -> Json:
    function = {"name": f"order_{number}", "description": "Order things.", "parameters": _schema(number)}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}


KINDS: dict[str, Callable[[int], Json]] = {
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
_KV_BYTES, _STAGING_BYTES = 128 << 20, 64 << 20
STRUCTURED_CLUSTER: dict[str, object] = {
    **BARE,
    "name": "bench overhead (structured outputs)",
    "gateway": {"dtype": "float32", "vllm_args": {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}},
    "instance_defaults": {
        **CPU_ENGINE,
        "kv_cache_bytes": _KV_BYTES,
        "staging_bytes": _STAGING_BYTES,
        "inbox_bytes": _STAGING_BYTES,
    },
    "instances": [{"id": "prefill", "role": "prefill"}, {"id": "decode", "role": "decode"}],
}


async def _structured(rounds: int) -> Result:
    """By kind of grammar, cold and repeated: medians of both, their ratio, what the suite adds beyond AIM_RATIO."""
    async with plain_vllm(_KV_BYTES, *TOOLS) as plain, started(STRUCTURED_CLUSTER) as suite:
        ports_of = {"suite": port_of(suite), "plain": plain}
        seen = await in_turns(ports_of, 1 + rounds, lambda number, name: _structured_ttfts(ports_of[name], number))
    suite_ms, plain_ms = (medians(each[arm] for each in seen[1:]) for arm in ("suite", "plain"))  # the first warms up
    figures = {
        kind: {when: _ratio(suite_ms[f"{kind} {when}"], plain_ms[f"{kind} {when}"]) for when in ("cold", "repeated")}
        for kind in KINDS
    }
    return result({"structured_outputs": figures}, structured_aims(figures))


async def _structured_ttfts(port: int, number: int) -> Figures:
    """TTFT in ms of each kind of grammar, which is new, and then repeated."""
    found = {}
    for kind, grammar in KINDS.items():
        for when in ("cold", "repeated"):
            body = chat_body("Write an order.", 3, ignore_eos=False, **grammar(number))
            found[f"{kind} {when}"] = (await stream_completion(HOST, port, body, path=CHAT)).ttft_s * 1e3
    return found


def _ratio(suite_ms: float, plain_ms: float) -> Figures:
    return {
        "suite_ttft_ms": round(suite_ms, 1),
        "plain_vllm_ttft_ms": round(plain_ms, 1),
        "ratio": round(suite_ms / plain_ms, 2),
        "beyond_ms": round(suite_ms - AIM_RATIO * plain_ms, 1),
    }


def structured_aims(figures: Mapping[str, Mapping[str, Figures]]) -> dict[str, Aim]:
    """The suite may take AIM_RATIO times as long as plain vLLM and AIM_ADDED_MS more."""
    return {
        f"structured_{when}_ttft_ms beyond {AIM_RATIO:g} x plain vLLM": at_most(
            AIM_ADDED_MS, max(of_kind[when]["beyond_ms"] for of_kind in figures.values())
        )
        for when in ("cold", "repeated")
    }


# Long prompts: the gateway's application runs in this process, on a loop that times each of its callbacks.


def _long_prompts() -> Result:
    """The longest callback, in ms, of each length as text and as token ids: medians."""
    prepare_environment()
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # beyond the demo model's; nothing computes here
    found = asyncio.run(_longest_callbacks())
    worst = max(callback_ms for of_kind in found.values() for callback_ms in of_kind.values())
    name = "long_prompt_longest_turn_ms"
    return result({name: found}, {name: at_most(AIM_CALLBACK_MS, worst)})


async def _longest_callbacks() -> dict[str, Figures]:
    settings = GatewaySettings(
        schedulers=("tcp://127.0.0.1:9",), model=str(DEMO_MODEL), served_model_name="demo", max_model_len=131_072
    )
    async with running(settings, KeyRing(()), TimerTokens(0.001)) as app:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=60) as client:
            await _longest_ms(client, " fox" * 1_000)
            found: dict[str, Figures] = {"text": {}, "ids": {}}
            for tokens in LENGTHS:
                prompts: dict[str, str | list[int]] = {
                    "text": " fox" * tokens,
                    "ids": [300 + number % 500 for number in range(tokens)],
                }
                for kind, prompt in prompts.items():
                    times = [await _longest_ms(client, prompt) for _ in range(LONG_PROMPT_ROUNDS)]
                    found[kind][str(tokens)] = round(statistics.median(times), 2)
    return found


async def _longest_ms(client: httpx.AsyncClient, prompt: Any) -> float:
    request = client.build_request("POST", COMPLETIONS, json=completion_body(prompt, 4))
    with _timed_callbacks() as times:
        await asyncio.sleep(0)  # the callback that made the body is this bench's
        answer = await client.send(request)
    if not answer.is_success:
        raise RuntimeError(f"{answer.status_code}: {answer.text[:500]}")
    return max(times) * 1e3


@contextmanager
def _timed_callbacks() -> Iterator[list[float]]:
    """CPU seconds of each callback of the event loop: other processes do not add to them."""
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
