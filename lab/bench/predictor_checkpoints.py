"""Checkpoints to measure a predictor with, and how quickly they are fine-tuned. Imports torch in its functions."""

from dataclasses import replace
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

from predictor.buckets import Buckets
from predictor.checkpoint import TOKENIZER_FILE, CheckpointMeta, write_meta
from predictor.data.examples import Example
from predictor.scores import Scores
from services.launcher.model_source import PROJECT
from shared.domain.job import PREDICTED_FROM

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
    """Of weights that nobody trained."""
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
