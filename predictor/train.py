"""The `polyphase predictor train` command: splits the examples, fine-tunes the classifier, calibrates and evaluates
it, and writes the checkpoint with its model card. torch is imported when training starts.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from shutil import rmtree
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from predictor.buckets import Buckets
from predictor.checkpoint import TOKENIZER_FILE, CheckpointMeta, Scores, bucket_means, replacing, write_meta
from predictor.evaluate import (
    Evaluation,
    OnProgress,
    choose_buckets,
    evaluate,
    print_evaluation,
    print_granularities,
    progress_bar,
    silent,
)
from predictor.examples import Example, digest, labels, load_examples, load_served, split_examples
from shared.errors import InvalidRequest

CARD_FILE = "README.md"
SETTINGS_FILE = "settings.json"
AUTO = "auto"
BUCKET_COUNT = 10
MAX_WIDTH = 1_000_000
NOT_GOOD_ENOUGH = 3  # exit code for a classifier that is no better than the baselines, or misses an aim


def model_card(meta: CheckpointMeta, settings: Mapping[str, Any], found: Evaluation) -> str:
    """The checkpoint's `README.md`, in the format of model hubs."""
    last = (meta.bucket_count - 1) * meta.bucket_tokens
    rows = [("this classifier", found.scores), ("commonest bucket", found.majority)]
    rows.append(("the prompt's length alone", found.prompt_length))
    table = "\n".join(_row(name, scores) for name, scores in rows)
    noise = "was not measured (one answer a prompt)"
    if found.ceiling is not None:
        noise = (
            f"lies between {found.ceiling.lower:.1%} and {found.ceiling.upper:.1%} ({found.ceiling.prompts} prompts)"
        )
    findings = "".join(f"**{finding.text}**\n\n" for finding in found.findings())
    unused = {"base" if settings.get("from_scratch") else "from_scratch"}
    lines = "\n".join(f"- {key}: {value}" for key, value in settings.items() if value is not None and key not in unused)
    return f"""---
library_name: transformers
pipeline_tag: text-classification
---

# Output lengths of {Path(meta.served_model).name}

Predicts the length of the model's answer to a prompt, in buckets of {meta.bucket_tokens} tokens; the last is {last}
and more. Made by `polyphase predictor train` (TetriInfer, arXiv 2401.11181, section 3.3.2); base: {meta.base}.

| on {found.scores.examples} held-out answers | right | within one bucket | mean error, tokens | calibration error |
|---|---|---|---|---|
{table}

The noise ceiling, the highest possible accuracy for answers that differ each time, {noise}.

{findings}Data: {", ".join(f"{count} for {name}" for name, count in meta.examples.items())}; SHA-256 {meta.data_digest}.

Settings:

{lines}
"""


def _row(name: str, scores: Scores) -> str:
    shares = f"{scores.accuracy:.1%} | {scores.within_one:.1%}"
    return f"| {name} | {shares} | {scores.mean_error_tokens:.0f} | {scores.calibration_error:.3f} |"


def train_checkpoint(
    examples: list[Example], out: Path, served_model: str, plan: Any, on_progress: OnProgress = silent
) -> tuple[CheckpointMeta, Evaluation]:
    """Split, fine-tune, calibrate, evaluate on the test split, and save to `out`, which is replaced as a whole.

    plan: a `fine_tune.FineTuning`. An interrupted training with the same examples and plan continues. Raises
    InvalidRequest when a split is empty.
    """
    from predictor.fine_tune import fine_tune, fit_temperature, save, start
    from predictor.model import LengthClassifier

    splits = split_examples(examples)
    if empty := [name for name, members in splits.items() if not members]:
        raise InvalidRequest(
            f"{len(examples)} answers leave none for {', '.join(empty)}: 80, 10 and 10 % of the prompts go to "
            "train, val and test, by their hashes. Record answers to more prompts"
        )
    meta = _meta_without_scores(examples, splits, served_model, plan)
    work = out.with_name(f".{out.name}.training")
    _prepare(work, {**asdict(plan), "data": meta.data_digest})
    network, tokenizer = start(splits["train"], plan)
    network = fine_tune(network, tokenizer, splits["train"], splits["val"], plan, work, on_progress)
    raw = LengthClassifier(network, tokenizer, meta)
    logits = []
    for number, example in enumerate(splits["val"], start=1):
        logits += raw.logits([raw.encode(example.text)])
        on_progress("calibrating", number, len(splits["val"]))
    temperature = fit_temperature(logits, labels(splits["val"], plan.buckets))
    meta = msgspec.structs.replace(meta, temperature=temperature)
    found = evaluate(LengthClassifier(network, tokenizer, meta), splits["train"], splits["test"], on_progress)
    baselines = {"majority": found.majority.accuracy, "prompt_length": found.prompt_length.accuracy}
    meta = msgspec.structs.replace(meta, scores=found.scores, baselines=baselines, ceiling=found.ceiling)
    with replacing(out) as folder:
        save(network, tokenizer, folder, TOKENIZER_FILE)
        write_meta(folder, meta)
        (folder / CARD_FILE).write_text(model_card(meta, asdict(plan), found), encoding="utf-8")
    rmtree(work, ignore_errors=True)
    return meta, found


def train(
    data: Annotated[list[Path], typer.Option(help="Output of `dataset`, or JSON and JSONL; may be repeated.")],
    out: Annotated[Path, typer.Option(help="Folder of the checkpoint; replaced at the end.")],
    served_model: Annotated[str, typer.Option(help="Folder or name; its tokenizer counts the answers.")],
    base: Annotated[str, typer.Option(help="OPT model to fine-tune: folder or name.")] = "facebook/opt-125m",
    from_scratch: Annotated[
        str, typer.Option(help="Size of a new model instead of a base: tiny, small, medium or base.")
    ] = "",
    granularity: Annotated[
        list[str] | None,
        typer.Option(
            "--granularity",
            "--bucket-tokens",
            help="Tokens of a bucket, default 200; auto: the largest of 5, 10, 25, 50, 100, 200 … with at most half of "
            "the answers in one bucket. Several values: a classifier for each, in OUT/25, OUT/50 …, and a table.",
        ),
    ] = None,
    bucket_count: Annotated[
        int | None,
        typer.Option(help="Number of buckets, the last is open-ended. Default: 10; with auto, by the answers.", min=2),
    ] = None,
    input_tokens: Annotated[
        int, typer.Option(help="Tokens of the prompt that are read, from its head and tail.", min=1)
    ] = 128,
    epochs: Annotated[
        float | None, typer.Option(help="Maximum passes over the data. Default: 3, from scratch 8.")
    ] = None,
    max_steps: Annotated[int, typer.Option(help="Instead of epochs.")] = -1,
    patience: Annotated[int, typer.Option(help="Epochs without improvement that end the training.", min=1)] = 2,
    batch_size: Annotated[int, typer.Option(help="Examples in a step.", min=1)] = 32,
    learning_rate: Annotated[
        float | None, typer.Option(help="Default: 5e-5; from scratch 1e-3, size base 3e-4.")
    ] = None,
    class_weights: Annotated[bool, typer.Option(help="Give rare buckets a higher weight.")] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Train in mixed precision.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order.")] = 0,
    threads: Annotated[int, typer.Option(help="Threads of torch.", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Train a classifier of answer lengths and save it with its scores; run again after an interruption, it continues.

    Exit code 0: the classifier is better than the baselines. 3: it is saved, but is not better. 1: an error.
    """
    import torch

    from predictor.fine_tune import FineTuning

    torch.set_num_threads(threads)
    widths = [_width(text) for text in granularity or ["200"]]
    examples = load_examples(data, load_served(served_model, with_template=True))
    plan = FineTuning(
        buckets=Buckets(),
        base=base,
        from_scratch=from_scratch,
        input_tokens=input_tokens,
        epochs=default_epochs(from_scratch) if epochs is None else epochs,
        max_steps=max_steps,
        batch_size=batch_size,
        learning_rate=default_learning_rate(from_scratch) if learning_rate is None else learning_rate,
        class_weights=class_weights,
        seed=seed,
        patience=patience,
        bf16=bf16,
        device=device,
    )
    found: dict[int, Evaluation] = {}
    for width in widths:
        buckets = _buckets(width, bucket_count, examples)
        if buckets.width_tokens in found:  # `auto` chose a width that is also named
            continue
        folder = out / str(buckets.width_tokens) if len(widths) > 1 else out
        with progress_bar(Console(stderr=True)) as on_progress:
            _, found[buckets.width_tokens] = train_checkpoint(
                examples, folder, served_model, replace(plan, buckets=buckets), on_progress
            )
        if not as_json:
            title = f"{folder}: buckets of {buckets.width_tokens} tokens, {buckets.count} of them"
            print_evaluation(Console(), title, found[buckets.width_tokens])
            if found[buckets.width_tokens].report(aim_accuracy=None, aim_p99_ms=None)["ok"]:
                typer.echo(f"To serve it, set in the cluster file: predictor: {{checkpoint: {folder}}}")
    reports = {str(width): each.report(aim_accuracy=None, aim_p99_ms=None) for width, each in found.items()}
    ok = any(report["ok"] for report in reports.values())
    if as_json:
        several = {"ok": ok, "granularities": reports}
        typer.echo(json.dumps(several if len(widths) > 1 else next(iter(reports.values()))))
    elif len(found) > 1:
        print_granularities(Console(), found)
    raise typer.Exit(0 if ok else NOT_GOOD_ENOUGH)


def _width(text: str) -> int | None:
    """Tokens of a bucket; None for `auto`."""
    if text == AUTO:
        return None
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:10]) <= MAX_WIDTH:
        raise InvalidRequest(f"--granularity must be auto or a whole number from 1 to {MAX_WIDTH:,}, got {text!r}")
    return int(text)


def _buckets(width: int | None, count: int | None, examples: list[Example]) -> Buckets:
    """`auto` uses the lengths of the training answers alone."""
    if width is not None:
        return Buckets(width, count or BUCKET_COUNT)
    lengths = [example.output_tokens for example in examples if example.split == "train"]
    if not lengths:
        raise InvalidRequest(f"{len(examples)} answers leave none to train on: record answers to more prompts")
    return choose_buckets(lengths, count)


def default_epochs(from_scratch: str) -> float:
    """The learning rate decays to 0 over the epochs; with many more, patience ends the training before the decay."""
    return 8.0 if from_scratch else 3.0


def default_learning_rate(from_scratch: str) -> float:
    """The maximum of the schedule; a model from scratch learns nothing at the rate of a pretrained one."""
    if not from_scratch:
        return 5e-5
    return 3e-4 if from_scratch == "base" else 1e-3


def _prepare(work: Path, settings: dict[str, object]) -> None:
    """Keep the folder of an interrupted training with these settings; empty that of another training."""
    known, wanted = work / SETTINGS_FILE, json.dumps(settings, sort_keys=True)
    if not known.exists() or known.read_text(encoding="utf-8") != wanted:
        rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        known.write_text(wanted, encoding="utf-8")


def _meta_without_scores(
    examples: list[Example], splits: dict[str, list[Example]], served_model: str, plan: Any
) -> CheckpointMeta:
    return CheckpointMeta(
        bucket_tokens=plan.buckets.width_tokens,
        bucket_count=plan.buckets.count,
        input_tokens=plan.input_tokens,
        base=f"from scratch: {plan.from_scratch}" if plan.from_scratch else plan.base,
        served_model=served_model,
        data_digest=digest(examples),
        examples={name: len(members) for name, members in splits.items()},
        scores=Scores(0, 0.0, 0.0, 0.0, 0.0, [], []),
        seed=plan.seed,
        trained_unix_s=time.time(),
        means=bucket_means([example.output_tokens for example in splits["train"]], plan.buckets),
        class_weights=plan.class_weights,
    )
