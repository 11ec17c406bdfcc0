"""Latency of a predictor: a real process over its RPC, with few and with many calls at once.

Measured with the demo model's checkpoint and with OPT-125M in full size with random weights; the module makes both
checkpoints and starts the process. torch and transformers are imported when a checkpoint is made.
"""

import asyncio
import os
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from shutil import copy
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter
from typing import Any

import httpx

from predictor.buckets import Buckets
from predictor.checkpoint import TOKENIZER_FILE, CheckpointMeta, Scores, write_meta
from predictor.examples import Example
from predictor.loading import has_cuda
from predictor.service import SOURCE
from predictor.settings import PredictorSettings
from services.launcher import ports
from services.launcher.model_source import PROJECT
from shared.domain.job import PREDICTED_FROM, ends_of
from shared.errors import PolyphaseError, Unavailable
from shared.wire.messages import PREDICT, PredictRequest
from shared.wire.rpc_client import RpcClient, RpcClients
from shared.wire.sockets import Sockets

# Checkpoints to measure, and the speed of their fine-tuning.

DEMO, SERVED = PROJECT / "models" / "demo-lengths", PROJECT / "models" / "demo"
BUCKETS = Buckets(200, 10)
FEW_STEPS, MANY_STEPS, FEW = 5, 45, 32


def make_opt_125m(folder: Path) -> Path:
    """facebook/opt-125m in shape, with random weights and the demo model's tokenizer."""
    from tokenizers import Tokenizer
    from transformers import OPTConfig, OPTForSequenceClassification

    from predictor.fine_tune import save

    source = SERVED / TOKENIZER_FILE
    tokenizer = Tokenizer.from_file(str(source))
    network = OPTForSequenceClassification(OPTConfig(num_labels=BUCKETS.count))  # its defaults are OPT-125M's
    folder.mkdir(parents=True)
    save(network, tokenizer, folder, TOKENIZER_FILE)
    copy(source, folder / TOKENIZER_FILE)
    write_meta(folder, untrained_meta("OPT-125M, random weights", PREDICTED_FROM))
    return folder


def untrained_meta(base: str, input_tokens: int) -> CheckpointMeta:
    """The metadata of untrained weights."""
    return CheckpointMeta(
        bucket_tokens=BUCKETS.width_tokens,
        bucket_count=BUCKETS.count,
        input_tokens=input_tokens,
        base=base,
        served_model=str(SERVED),
        data_digest="",
        examples={},
        scores=Scores(0, 0.0, 0.0, 0.0, 0.0, [], []),
        seed=0,
        trained_unix_s=0.0,
        means=[(at + 0.5) * BUCKETS.width_tokens for at in range(BUCKETS.count)],
    )


def fine_tuning_rate(examples: list[Example], plan: Any) -> float:
    """Prompts a second of `plan` (a `fine_tune.FineTuning`), from what further steps add: what begins and ends a
    training is in both. examples: at least as many as MANY_STEPS take.
    """
    from predictor.fine_tune import fine_tune, start

    took_s: dict[int, float] = {}
    for steps in (FEW_STEPS, FEW_STEPS, MANY_STEPS):  # the first one warms up
        network, tokenizer = start(examples, replace(plan, max_steps=steps))
        with TemporaryDirectory(prefix="polyphase-bench-") as folder:
            began_s = monotonic()
            fine_tune(network, tokenizer, examples, examples[:FEW], replace(plan, max_steps=steps), Path(folder))
            took_s[steps] = monotonic() - began_s
    seconds = took_s[MANY_STEPS] - took_s[FEW_STEPS]
    return float((MANY_STEPS - FEW_STEPS) * plan.batch_size / seconds)


# The predictor process.

READY_S, LOOK_S, END_S = 180.0, 0.2, 20.0


@asynccontextmanager
async def serving(
    checkpoint: Path, served: Path, device: str, timeout_ms: float
) -> AsyncIterator[tuple[RpcClient, dict[str, Any]]]:
    """A client of a process with a loaded classifier, and how the process runs it.

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


AT_ONCE = (1, 8, 64)
TIMEOUTS_MS = (250.0, 2000.0)
CELL_S = 5.0
PROMPT_TOKENS = (20, 1000)
PROMPTS, SEED, MAX_TOKENS = 256, 5, 1024
TEXTS = PROJECT / "docs"  # what the prompts are cut from
ANSWERED = 0.99  # of the calls of each cell: observed lengths answer what the classifier cannot
LATE_MS = 100.0  # over its deadline, a call is late: its way there and back, on a machine that is busy


@dataclass(frozen=True, slots=True)
class Call:
    """One call. source: of the answer; empty where an error came in its place."""

    took_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Cell:
    """All calls at one concurrency and timeout, and how long they took in all."""

    name: str
    timeout_ms: float
    calls: list[Call]
    lasted_s: float


def run_latency() -> dict[str, Any]:
    """Every cell. The aims: in each of them calls are answered, and none outlasts its deadline."""
    notes: list[str] = []
    cells: list[Cell] = []
    with TemporaryDirectory(prefix="polyphase-bench-") as folder:
        full = make_opt_125m(Path(folder) / "opt-125m")
        for device in ("cpu", "cuda") if has_cuda() else ("cpu",):
            for name, checkpoint in (("demo", DEMO), ("opt_125m", full)):
                if not checkpoint.is_dir():
                    notes.append(f"{name}_{device}: not measured: there is no {checkpoint}")
                    continue
                found, more = asyncio.run(_cells(f"{name}_{device}", checkpoint, device))
                cells, notes = cells + found, notes + more
    figures: dict[str, float] = {}
    for cell in cells:
        figures |= cell_figures(cell.name, cell.calls, cell.lasted_s)
    return {"figures": figures, "aims": aims_of(cells), "notes": notes}


def cell_figures(name: str, calls: list[Call], lasted_s: float) -> dict[str, float]:
    """Latencies and rates of calls that were answered, by whatever source; shares of all calls."""
    answered = sorted(call.took_s * 1e3 for call in calls if call.source)
    by_classifier = sum(call.source == SOURCE for call in calls)
    figures = {
        f"{name}_answers_per_s": len(answered) / lasted_s,
        f"{name}_by_classifier_per_s": by_classifier / lasted_s,
        f"{name}_by_classifier_share": by_classifier / max(1, len(calls)),
        f"{name}_not_answered_share": 1.0 - len(answered) / max(1, len(calls)),
    }
    if answered:
        figures |= {f"{name}_p50_ms": statistics.median(answered), f"{name}_p99_ms": _p99(answered)}
    return {key: round(value, 3) for key, value in figures.items()}


def aims_of(cells: list[Cell]) -> dict[str, Any]:
    """Of the worst cell; without any cell both are missed."""
    answered = min((_share([bool(call.source) for call in cell.calls]) for cell in cells), default=0.0)
    late = sum(call.took_s * 1e3 > cell.timeout_ms + LATE_MS for cell in cells for call in cell.calls)
    return {
        "share answered": {"want": f">= {ANSWERED:g}", "got": round(answered, 4), "met": answered >= ANSWERED},
        "calls past their deadline": {"want": 0, "got": late, "met": bool(cells) and late == 0},
    }


def real_prompts() -> list[list[int]]:
    """Token ids of texts of 20 to 1,000 tokens, as many lengths of each order of magnitude; equal each time."""
    from tokenizers import Tokenizer

    rng, tokenizer = Random(SEED), Tokenizer.from_file(str(SERVED / TOKENIZER_FILE))
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(TEXTS.glob("*.md")))
    ids, (fewest, most) = tokenizer.encode(text).ids, PROMPT_TOKENS
    found = []
    for _ in range(PROMPTS):
        length = round(fewest * (most / fewest) ** rng.random())
        start = rng.randrange(len(ids) - length)
        found.append(ids[start : start + length])
    return found


async def ask_once(client: RpcClient, timeout_s: float) -> Call:
    return await _call(client, real_prompts()[0], timeout_s)


async def _cells(name: str, checkpoint: Path, device: str) -> tuple[list[Cell], list[str]]:
    prompts, cells, notes = real_prompts(), list[Cell](), list[str]()
    for timeout_ms in TIMEOUTS_MS:
        async with serving(checkpoint, SERVED, device, timeout_ms) as (client, runs):
            notes.append(f"{name}, {timeout_ms:.0f} ms: {runs or 'unknown runtime'}")
            for at_once in AT_ONCE:
                calls, lasted_s = await _called(client, prompts, at_once, timeout_ms)
                cells.append(Cell(f"{name}_{at_once}_at_once_{timeout_ms:.0f}ms", timeout_ms, calls, lasted_s))
    return cells, notes


async def _called(
    client: RpcClient, prompts: list[list[int]], at_once: int, timeout_ms: float
) -> tuple[list[Call], float]:
    """Callers that each wait for an answer before the next request."""
    began_s, calls = monotonic(), list[Call]()

    async def caller(seed: int) -> None:
        rng = Random(seed)
        while monotonic() - began_s < CELL_S:
            calls.append(call := await _call(client, rng.choice(prompts), timeout_ms / 1e3))
            if call.source != SOURCE:  # a gateway continues with its next job
                await asyncio.sleep(max(0.0, timeout_ms / 1e3 - call.took_s))

    async with asyncio.TaskGroup() as callers:
        for number in range(at_once):
            callers.create_task(caller(number))
    return calls, monotonic() - began_s


async def _call(client: RpcClient, ids: list[int], timeout_s: float) -> Call:
    sent_s = perf_counter()
    try:
        answer = await client.call(PREDICT, PredictRequest(ends_of(ids), len(ids), MAX_TOKENS), timeout_s=timeout_s)
    except PolyphaseError:
        return Call(perf_counter() - sent_s, "")
    return Call(perf_counter() - sent_s, answer.source)


def _p99(ordered: list[float]) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]


def _share(true: list[bool]) -> float:
    return sum(true) / max(1, len(true))
