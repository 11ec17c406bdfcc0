"""Train a length classifier on prompts and their answers (TetriInfer figure 8)."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from shutil import rmtree
from typing import Annotated, Any

import msgspec
import typer

from predictor.buckets import Buckets
from predictor.card import write_card
from predictor.checkpoint import TOKENIZER_FILE, CheckpointMeta, replacing, write_meta
from predictor.data.examples import Example, digest, labels, load_examples, split_examples
from predictor.evaluate import Evaluation, evaluate
from predictor.scores import Scores, bucket_means
from predictor.served import load_served
from shared.errors import InvalidRequest

SETTINGS_FILE = "settings.json"


def train_checkpoint(
    examples: list[Example], out: Path, served_model: str, plan: Any
) -> tuple[CheckpointMeta, Evaluation]:
    """Split, fine-tune as `plan` (a `fine_tune.FineTuning`) says, calibrate, score on test, save to `out`.

    `out` is replaced as a whole at the end. A training of the same examples and plan that was cut short is gone on
    with. Raises InvalidRequest when a split is empty.
    """
    from predictor.fine_tune import fine_tune, fit_temperature, save, start
    from predictor.model import LengthClassifier

    splits = split_examples(examples)
    if empty := [name for name, members in splits.items() if not members]:
        raise InvalidRequest(f"{len(examples)} examples leave nothing for {', '.join(empty)}")
    meta = _untested_meta(examples, splits, served_model, plan)
    work = out.with_name(f".{out.name}.training")
    _agree(work, {**asdict(plan), "progress": None, "data": meta.data_digest})
    network, tokenizer = start(splits["train"], plan)
    network = fine_tune(network, tokenizer, splits["train"], splits["val"], plan, work)
    raw = LengthClassifier(network, tokenizer, meta)
    logits = [raw.logits([raw.encode(example.text)])[0] for example in splits["val"]]
    temperature = fit_temperature(logits, labels(splits["val"], plan.buckets))
    meta = msgspec.structs.replace(meta, temperature=temperature)
    found = evaluate(LengthClassifier(network, tokenizer, meta), splits["train"], splits["test"])
    baselines = {"majority": found.majority.accuracy, "prompt_length": found.prompt_length.accuracy}
    meta = msgspec.structs.replace(meta, scores=found.scores, baselines=baselines, ceiling=found.ceiling)
    with replacing(out) as folder:
        save(network, tokenizer, folder, TOKENIZER_FILE)
        write_meta(folder, meta)
        write_card(folder, meta, asdict(plan), found)
    rmtree(work, ignore_errors=True)
    return meta, found


def train(
    data: Annotated[list[Path], typer.Option(help="What `dataset` wrote, or JSON and JSONL; may be repeated.")],
    out: Annotated[Path, typer.Option(help="Folder of the checkpoint; replaced when done.")],
    served_model: Annotated[str, typer.Option(help="Folder or name: its tokenizer counts answers.")],
    base: Annotated[str, typer.Option(help="OPT model to fine-tune: folder or name.")] = "facebook/opt-125m",
    from_scratch: Annotated[str, typer.Option(help="Instead of a base: tiny, small, medium or base.")] = "",
    bucket_tokens: Annotated[int, typer.Option(help="Granularity.", min=1)] = 200,
    bucket_count: Annotated[int, typer.Option(help="Classes; the last is open-ended.", min=2)] = 10,
    input_tokens: Annotated[int, typer.Option(help="Of the prompt, its head and tail.", min=1)] = 128,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data, at most; else 3, from scratch 8.")] = None,
    max_steps: Annotated[int, typer.Option(help="Instead of epochs.")] = -1,
    patience: Annotated[int, typer.Option(help="Epochs without gain that end it.", min=1)] = 2,
    batch_size: Annotated[int, typer.Option(help="Examples a step.", min=1)] = 32,
    learning_rate: Annotated[float | None, typer.Option(help="Else 5e-5; from scratch 1e-3, base 3e-4.")] = None,
    class_weights: Annotated[bool, typer.Option(help="Weigh rare buckets up.")] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Mixed precision.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of weights and order.")] = 0,
    threads: Annotated[int, typer.Option(help="Threads of torch.", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Only the JSON object of the last line.")] = False,
) -> None:
    """Train a classifier of answer lengths and save it with its scores; run again after a kill, it goes on."""
    import torch

    from predictor.fine_tune import FineTuning

    torch.set_num_threads(threads)
    plan = FineTuning(
        Buckets(bucket_tokens, bucket_count),
        base,
        from_scratch,
        input_tokens,
        default_epochs(from_scratch) if epochs is None else epochs,
        max_steps,
        batch_size,
        default_learning_rate(from_scratch) if learning_rate is None else learning_rate,
        class_weights,
        seed,
        patience,
        bf16,
        device,
        progress=not as_json,
    )
    examples = load_examples(data, load_served(served_model, with_template=True))
    meta, found = train_checkpoint(examples, out, served_model, plan)
    report = found.report(aim_accuracy=None, aim_p99_ms=250.0)
    if not as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(meta), indent=2).decode())
    typer.echo(json.dumps(report))
    raise typer.Exit(0 if report["ok"] else 1)


def default_epochs(from_scratch: str) -> float:
    """Passes over the data. The learning rate falls to nothing over them: many more end before it has, by patience."""
    return 8.0 if from_scratch else 3.0


def default_learning_rate(from_scratch: str) -> float:
    """The highest of the schedule: what a trained model only has to be changed by teaches an untrained one nothing."""
    if not from_scratch:
        return 5e-5
    return 3e-4 if from_scratch == "base" else 1e-3


def _agree(work: Path, settings: dict[str, Any]) -> None:
    """What stands in the folder is of this very training; of another it is thrown away."""
    known, said = work / SETTINGS_FILE, json.dumps(settings, sort_keys=True)
    if not known.exists() or known.read_text(encoding="utf-8") != said:
        rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        known.write_text(said, encoding="utf-8")


def _untested_meta(
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
