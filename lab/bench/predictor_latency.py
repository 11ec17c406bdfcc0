"""How quickly a predictor answers: a real process over its RPC, with few and many calls at once.

Once with the demo model's checkpoint, once with OPT-125M in full size and random weights, whose answers mean nothing
but take as long; with the service's deadline of 250 ms, and with one of 2 s, which shows how long they would wait.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import monotonic, perf_counter
from typing import Any

import httpx
import numpy as np

from predictor.loading import has_cuda
from predictor.settings import PredictorSettings
from services.launcher import ports
from services.launcher.model_source import PROJECT
from shared.domain.job import ends_of
from shared.errors import PolyphaseError, Unavailable
from shared.wire.messages import PredictRequest
from shared.wire.methods import PREDICT
from shared.wire.rpc_client import RpcClient
from shared.wire.sockets import Sockets

DEMO, SERVED = PROJECT / "models" / "demo-lengths", PROJECT / "models" / "demo"
AT_ONCE = (1, 8, 64)
DEADLINES_S = (0.25, 2.0)
CELL_S, READY_S = 5.0, 180.0
PROMPT_TOKENS = (20, 1000)
SPARE_S = 0.1  # a call beyond its deadline by so much is late: the rest is the way and a busy machine


@dataclass(frozen=True, slots=True)
class Cell:
    """Calls at one concurrency and deadline: seconds of each, and how many the classifier answered or failed."""

    took_s: tuple[float, ...]
    classified: int
    failed: int
    lasted_s: float

    def figures(self, name: str) -> dict[str, float]:
        """By name and unit."""
        ms = np.percentile(self.took_s, (50, 99)) * 1e3
        return {
            f"{name}_p50_ms": float(ms[0]),
            f"{name}_p99_ms": float(ms[1]),
            f"{name}_a_second": len(self.took_s) / self.lasted_s,
            f"{name}_classified": self.classified / len(self.took_s),
        }


def run_latency() -> dict[str, Any]:
    """Every cell; the aim is that no call fails or takes longer than its deadline."""
    return asyncio.run(_run())


async def _run() -> dict[str, Any]:
    figures: dict[str, float] = {}
    notes, late, failed = [], 0, 0
    with tempfile.TemporaryDirectory(prefix="polyphase-opt-") as folder:
        for name, checkpoint in (("demo", DEMO), ("opt_125m", make_opt_125m(Path(folder) / "opt-125m"))):
            for device in _devices():
                async with serving(checkpoint, device) as (client, runs):
                    notes.append(f"{name} on {device}: {runs}")
                    for deadline_s in DEADLINES_S:
                        for at_once in AT_ONCE:
                            cell = await measured(client, at_once, deadline_s)
                            of = f"{name}_{device}" if device != "cpu" else name
                            figures |= cell.figures(f"{of}_{at_once}_at_once_within_{deadline_s * 1e3:.0f}")
                            late += sum(took_s > deadline_s + SPARE_S for took_s in cell.took_s)
                            failed += cell.failed
    aims = {
        "calls that failed": {"want": "0", "got": failed, "met": failed == 0},
        "calls that took longer than their deadline": {"want": "0", "got": late, "met": late == 0},
    }
    return {"figures": figures, "aims": aims, "notes": notes}


async def measured(client: RpcClient, at_once: int, deadline_s: float) -> Cell:
    """Callers in turns of their own, for a while; one that was fobbed off comes again when its deadline is over."""
    began_s, rng = monotonic(), Random(at_once)
    took_s, classified, failed = list[float](), [0], [0]

    async def caller() -> None:
        while monotonic() - began_s < CELL_S:
            prompt = [rng.randrange(5, 4000) for _ in range(rng.randint(*PROMPT_TOKENS))]
            sent_s, quick = perf_counter(), False
            try:
                request = PredictRequest(ends_of(prompt), len(prompt), 900)
                said = await client.call(PREDICT, request, timeout_s=deadline_s)
                quick = said.source == "classifier"
                classified[0] += quick
            except PolyphaseError:
                failed[0] += 1
            took_s.append(perf_counter() - sent_s)
            if not quick:
                await asyncio.sleep(max(0.0, deadline_s - took_s[-1]))

    await asyncio.gather(*(caller() for _ in range(at_once)))
    return Cell(tuple(took_s), classified[0], failed[0], monotonic() - began_s)


@asynccontextmanager
async def serving(checkpoint: Path, device: str) -> AsyncIterator[tuple[RpcClient, dict[str, Any]]]:
    """A predictor process with a checkpoint, loaded; and how it runs it."""
    base = ports.free_range()
    url, address = f"http://127.0.0.1:{base}", f"tcp://127.0.0.1:{base + 1}"
    settings = PredictorSettings(
        port=base, rpc_address=address, checkpoint=checkpoint, model=str(SERVED), device=device, use="classifier"
    )
    environment = {**os.environ, **settings.to_environment()}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "predictor", env=environment, stderr=subprocess.DEVNULL
    )
    sockets = Sockets()
    try:
        runs = await _loaded(url, process)
        client = RpcClient(sockets, address)
        try:
            yield client, runs
        finally:
            client.close()
    finally:
        sockets.close()
        process.terminate()
        await asyncio.wait_for(process.wait(), 20)


async def _loaded(url: str, process: asyncio.subprocess.Process) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=url, timeout=5, trust_env=False) as http, asyncio.timeout(READY_S):
        while True:
            if process.returncode is not None:
                raise Unavailable("the predictor did not start")
            try:
                about = (await http.get("/v1/model")).json()["checkpoint"]
            except httpx.HTTPError:
                about = {"state": "starting"}
            if about["state"] == "loaded":
                return dict(about["runs"])
            if about["state"] in ("broken", "missing") and about.get("path") and not Path(about["path"]).exists():
                raise Unavailable(f"{about['path']}: there is no checkpoint")
            if about["state"] == "broken":
                raise Unavailable(str(about["error"]))
            await asyncio.sleep(0.2)


def make_opt_125m(folder: Path) -> Path:
    """A checkpoint of OPT-125M's shape with random weights, and the demo model's tokenizer."""
    from shutil import copy

    from tokenizers import Tokenizer
    from transformers import OPTConfig, OPTForSequenceClassification

    from predictor.buckets import Buckets
    from predictor.checkpoint import TOKENIZER_FILE, CheckpointMeta, write_meta
    from predictor.scores import Scores

    buckets, tokenizer = Buckets(200, 10), SERVED / TOKENIZER_FILE
    folder.mkdir(parents=True)
    pad = Tokenizer.from_file(str(tokenizer)).token_to_id("<pad>") or 0
    config = OPTConfig(num_labels=buckets.count, pad_token_id=pad, bos_token_id=2, eos_token_id=2)
    OPTForSequenceClassification(config).save_pretrained(folder)
    copy(tokenizer, folder / TOKENIZER_FILE)
    meta = CheckpointMeta(
        bucket_tokens=buckets.width_tokens,
        bucket_count=buckets.count,
        input_tokens=256,
        base="facebook/opt-125m, random weights",
        served_model=str(SERVED),
        data_digest="",
        examples={},
        scores=Scores(0, 1.0, 1.0, 0.0, 0.0, [], []),
        seed=0,
        trained_unix_s=0.0,
        means=[buckets.width_tokens * (at + 0.5) for at in range(buckets.count)],
    )
    write_meta(folder, meta)
    return folder


def _devices() -> tuple[str, ...]:
    return ("cpu", "cuda") if has_cuda() else ("cpu",)
