"""`polyphase predictor train` with a base of OPT-125M's size, end to end: a few steps, memory, time, one answer served.

The base has random weights and stands in a folder in the form of facebook/opt-125m's on the hub. What it costs, not how
right it is.
"""

import asyncio
import json
import os
import resource
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from benchmarks.predictor_bayes import Generator
from benchmarks.predictor_latency import SERVED, ask_once, serving
from predictor.service import SOURCE
from services.launcher.model_source import PROJECT

PROMPTS, SEED = 300, 7
STEPS, BATCH, INPUT_TOKENS, THREADS = 5, 32, 128, 2
PARAMETERS = 125_239_296  # of facebook/opt-125m
DEADLINE_MS = 5_000.0
_SAVED = "peak.json"


def run_full_size() -> dict[str, Any]:
    """The aims: it trains, is evaluated, and its classifier answers in the service."""
    with TemporaryDirectory(prefix="polyphase-bench-") as name:
        folder = Path(name)
        parameters = make_base(folder / "base")
        records = [json.dumps(one.record()) for one in Generator.like_sharegpt().draw(PROMPTS, SEED)]
        (folder / "data.jsonl").write_text("\n".join(records), encoding="utf-8")
        trained = _run(folder, str(STEPS), str(BATCH))
        found = asyncio.run(_served(folder / "checkpoint"))
    steps = trained["steps_s"]
    figures = {
        "parameters": parameters,
        "step_s": round(median(steps), 2),
        "step_cpu_s": round(median(trained["steps_cpu_s"]), 2),
        "prompts_per_s": round(BATCH / median(steps), 2),
        "training_peak_rss_gib": round(trained["peak_bytes"] / 2**30, 2),
        "prediction_p50_ms": round(trained["prediction_p50_ms"], 1),
        "served_ms": round(found["took_s"] * 1e3, 1),
        "served_rss_gib": round(found["rss_bytes"] / 2**30, 2),
    }
    aims = {
        "parameters": {"want": PARAMETERS, "got": parameters, "met": parameters == PARAMETERS},
        "steps": {"want": STEPS - 1, "got": len(steps), "met": len(steps) == STEPS - 1},
        "answered by": {"want": SOURCE, "got": found["source"], "met": found["source"] == SOURCE},
    }
    note = f"{STEPS} steps of {BATCH} prompts of {INPUT_TOKENS} tokens, {THREADS} threads; served as {found['runs']}"
    return {"figures": figures, "aims": aims, "notes": [note]}


def make_base(folder: Path) -> int:
    """Weights and tokenizer files as the hub has them of facebook/opt-125m; how many parameters the model has.

    50,272 embeddings, of which the tokenizer, trained on this project's documentation, uses only the first ones.
    """
    from tokenizers import ByteLevelBPETokenizer
    from transformers import OPTConfig, OPTForCausalLM, set_seed
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    set_seed(SEED)
    config = OPTConfig()  # its defaults are OPT-125M's
    network = OPTForCausalLM(config)
    network.save_pretrained(folder)
    tokenizer = ByteLevelBPETokenizer()
    texts = [str(path) for path in sorted((PROJECT / "docs").glob("*.md"))]
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer.train(
        texts, vocab_size=config.vocab_size - 7, min_frequency=2, special_tokens=special, show_progress=False
    )
    tokenizer.save_model(str(folder))
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_bos_token": True,
        "add_prefix_space": False,
        "bos_token": "</s>",
        "eos_token": "</s>",
        "unk_token": "</s>",
        "pad_token": "<pad>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return sum(each.numel() for each in network.parameters())


def _run(folder: Path, steps: str, batch: str) -> dict[str, Any]:
    """In another process, whose memory is that of the training alone."""
    command = [sys.executable, "-P", "-m", __name__, str(folder), steps, batch]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": str(THREADS)}
    subprocess.run(command, env=environment, check=True)
    found: dict[str, Any] = json.loads((folder / _SAVED).read_text(encoding="utf-8"))
    return found


def train_here(folder: Path, steps: int, batch: int) -> None:
    """As `train --base base --max-steps …` does; leaves the checkpoint, and what it took, in the folder."""
    import time

    from predictor.buckets import Buckets
    from predictor.examples import load_examples, load_served
    from predictor.fine_tune import FineTuning
    from predictor.train import train_checkpoint

    plan = FineTuning(
        Buckets(), base=str(folder / "base"), input_tokens=INPUT_TOKENS, max_steps=steps, batch_size=batch, device="cpu"
    )
    ends_s, cpu_s = list[float](), list[float]()

    def on_progress(stage: str, done: int, whole: int) -> None:
        if stage == "training" and len(ends_s) < done:
            ends_s.append(time.monotonic())
            cpu_s.append(time.process_time())

    examples = load_examples([folder / "data.jsonl"], load_served(str(SERVED), with_template=True))
    _, found = train_checkpoint(examples, folder / "checkpoint", str(SERVED), plan, on_progress)
    found_here = {
        "steps_s": [end - start for start, end in pairwise(ends_s)],
        "steps_cpu_s": [end - start for start, end in pairwise(cpu_s)],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "prediction_p50_ms": found.latency_p50_ms,
    }
    (folder / _SAVED).write_text(json.dumps(found_here), encoding="utf-8")


async def _served(checkpoint: Path) -> dict[str, Any]:
    async with serving(checkpoint, SERVED, "cpu", DEADLINE_MS) as (client, runs):
        call = await ask_once(client, DEADLINE_MS / 1e3)
        rss_bytes = max(each.memory_info().rss for each in psutil.Process().children())
    return {"source": call.source, "took_s": call.took_s, "rss_bytes": rss_bytes, "runs": runs}


if __name__ == "__main__":
    train_here(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
