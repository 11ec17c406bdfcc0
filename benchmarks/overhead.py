"""`polyphase bench overhead`: CPU time and time to first token that the suite adds to a request and a token.

All services are real and the instances are emulated and compute in no time; vLLM's API layer alone takes the same load
in turns. Structured outputs are measured with real engines beside plain vLLM, and long prompts by how long they hold up
the gateway's event loop.
"""

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.cluster_files import emulated
from benchmarks.measuring import OFFLINE, cores, cpu_s, pids_of, plain_vllm, port_of, serving
from benchmarks.results import Aim, Figures, Result, at_most, in_turns, medians, merged, result
from benchmarks.suite import BARE, CPU_ENGINE, DEMO_MODEL, started
from gateway.alone import TimerTokens
from gateway.app import prepare_environment, running
from gateway.auth import KeyRing
from gateway.settings import GatewaySettings
from services.launcher import ports
from tools.client import CHAT, COMPLETIONS, Json, chat_body, completion_body, run_load, stream_completion

HOST = "127.0.0.1"
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
PROMPT = "The quick brown fox jumps over the lazy dog. " * 8

# The load on emulated instances.
PATHS = {"chat": CHAT, "completions": COMPLETIONS}
STREAMS = (1, 16, 64, 256)
STEP_S = 0.025  # of a decode: each token is a message and an event of its own, as with a real engine
SHORT, LONG = 2, 66  # output tokens of the two loads, from which the costs of a request and of a token follow
TIMED = 24  # output tokens of the requests of which the first token is timed
ROUNDS, MIN_SHORT, MIN_LONG = 3, 24, 4  # requests of a load, or twice as many as there are streams
IDLE_S = 8.0
MAX_JOBS = 4096
AIM_TOKEN_RATIO, AIM_TOKEN_FROM, AIM_REQUEST_RATIO, AIM_IDLE_MS = 0.5, 16, 1.1, 10.0
AIM_TTFT_MS = {1: 2.0, 16: 2.0, 64: 5.0}

# Structured outputs.
STRUCTURED_ROUNDS = 9  # of each kind, cold and repeated, at each of the two
AIM_RATIO, AIM_ADDED_MS = 1.2, 20.0

# Long prompts.
LENGTHS, LONG_PROMPT_ROUNDS, AIM_CALLBACK_MS = (8_000, 32_000, 120_000), 5, 5.0


def run_overhead_bench(rounds: int = ROUNDS, streams: tuple[int, ...] = STREAMS) -> Result:
    structured = asyncio.run(_structured(STRUCTURED_ROUNDS))
    long_prompts = _long_prompts()  # sets environment variables that real engines would follow
    return merged(asyncio.run(_load(rounds, streams)), structured, long_prompts)


@dataclass(frozen=True, slots=True)
class Target:
    """A server of the API, and the processes whose CPU time counts."""

    port: int
    pids: list[int]


# The load: the suite with emulated instances, and the API layer with a timer as its engine.

CLUSTER = emulated(
    "overhead",
    [{"id": "p", "count": 2, "role": "prefill"}, {"id": "d", "count": 2, "role": "decode", "emulated_step_s": STEP_S}],
    {"emulated_step_s": 0.0, "max_seqs": 256, "kv_cache_bytes": 64 << 30},
    gateway={"max_queued_jobs": MAX_JOBS},
)


async def _load(rounds: int, streams: tuple[int, ...]) -> Result:
    async with started(CLUSTER) as running_suite, _api_layer_alone() as alone:
        # All processes but the instances, of which a real cluster has the same.
        suite = Target(port_of(running_suite), pids_of(running_suite, "gateway", "scheduler", "monitor"))
        targets = {"suite": suite, "alone": alone}
        for target in targets.values():
            for path in PATHS.values():
                await run_load(HOST, target.port, _bodies(path, 64, SHORT), 8, path)
        idle_ms = (await cores({"suite": suite.pids}, IDLE_S))["suite"] * 1e3
        cells = {
            kind: {str(count): await _cell(targets, path, count, rounds) for count in streams}
            for kind, path in PATHS.items()
        }
    return result({"idle_cpu_ms_per_s": round(idle_ms, 2), **cells}, aims_of(idle_ms, cells))


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
        yield Target(settings.port, [process.pid])


async def _cell(targets: Mapping[str, Target], path: str, streams: int, rounds: int) -> Figures:
    """Medians of rounds in each of which both targets have their turn."""
    seen = await in_turns(targets, rounds, lambda _, name: _costs(targets[name], path, streams))
    found = medians(_compared(each["suite"], each["alone"]) for each in seen)
    return {name: round(value, 3) for name, value in found.items()}


def _compared(ours: Figures, base: Figures) -> Figures:
    ratios = {f"{name}_ratio": ours[name] / base[name] for name in ("cpu_per_token_us", "cpu_per_request_ms")}
    added = {f"added_{name}": ours[name] - base[name] for name in ("ttft_p50_ms", "ttft_p99_ms")}
    return ours | {f"api_layer_alone_{name}": value for name, value in base.items()} | ratios | added


async def _costs(target: Target, path: str, streams: int) -> Figures:
    """Of short and of long answers; the difference is the cost of the tokens."""
    short_s = await _cpu_s(target, path, max(MIN_SHORT, 2 * streams), SHORT, streams)
    long_s = await _cpu_s(target, path, max(MIN_LONG, 2 * streams), LONG, streams)
    per_token_s = (long_s - short_s) / (LONG - SHORT)
    times = await _ttfts(target, path, max(MIN_SHORT, 2 * streams), streams)
    return {
        "cpu_per_token_us": per_token_s * 1e6,
        "cpu_per_request_ms": (short_s - SHORT * per_token_s) * 1e3,
        "ttft_p50_ms": times[len(times) // 2] * 1e3,
        "ttft_p99_ms": times[len(times) * 99 // 100] * 1e3,
    }


async def _cpu_s(target: Target, path: str, requests: int, tokens: int, streams: int) -> float:
    """CPU seconds per request."""
    before_s = cpu_s(target.pids)
    await run_load(HOST, target.port, _bodies(path, requests, tokens), streams, path)
    return (cpu_s(target.pids) - before_s) / requests


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
    request_ratio = max(cell["cpu_per_request_ms_ratio"] for _, cell in by_streams)
    aims = {
        "idle_cpu_ms_per_s": at_most(AIM_IDLE_MS, idle_ms),
        "cpu_per_request_ratio": at_most(AIM_REQUEST_RATIO, request_ratio),
    }
    if many := [cell["cpu_per_token_us_ratio"] for count, cell in by_streams if count >= AIM_TOKEN_FROM]:
        aims[f"cpu_per_token_ratio at {AIM_TOKEN_FROM} and more"] = at_most(AIM_TOKEN_RATIO, max(many))
    for count, want in AIM_TTFT_MS.items():
        if seen := [cell["added_ttft_p50_ms"] for streams, cell in by_streams if streams == count]:
            aims[f"added_ttft_p50_ms at {count}"] = at_most(want, max(seen))
    return aims


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
