"""`polyphase predictor evaluate`."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from predictor.data.examples import load_examples, split_examples
from predictor.evaluate import evaluate
from predictor.progress import progress_bar
from predictor.served import load_served
from predictor.tables import print_evaluation
from predictor.train import NOT_GOOD_ENOUGH


class Split(StrEnum):
    """Parts of the data."""

    TRAIN = "train"
    VAL = "val"
    TEST = "test"


def evaluate_command(
    checkpoint: Annotated[Path, typer.Option(help="Folder that `train` wrote.")],
    data: Annotated[list[Path], typer.Option(help="What it was trained on: Parquet, JSON, JSONL; may be repeated.")],
    served_model: Annotated[str, typer.Option(help="Default: the one it was trained for.")] = "",
    split: Annotated[Split, typer.Option(help="Which part of the data to judge by.")] = Split.TEST,
    limit: Annotated[int, typer.Option(help="At most this many examples; 0: all.", min=0)] = 0,
    threads: Annotated[int, typer.Option(help="Threads of torch.", min=1)] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder for plots and for what `polyphase simulate` reads.")] = None,
    aim_accuracy: Annotated[float | None, typer.Option(help="Default: more than the better baseline's.")] = None,
    aim_p99_ms: Annotated[float, typer.Option(help="The service's deadline.")] = 250.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Say how good a checkpoint is on a split of its data, beside the baselines and the noise ceiling.

    Exit code 0: both aims are met. 3: one is missed, or the data teaches nothing. 1: an error.
    """
    from predictor.model import load_classifier  # torch

    classifier = load_classifier(checkpoint, threads)
    served = load_served(served_model or classifier.meta.served_model, with_template=True)
    splits = split_examples(load_examples(data, served))
    with progress_bar(Console(stderr=True)) as on_progress:
        found = evaluate(classifier, splits["train"], splits[split][: limit or None], on_progress)
    report = found.report(aim_accuracy, aim_p99_ms)
    if out is not None:
        from predictor.evaluation_files import PAGE, PREDICTION, write_files  # plotly

        write_files(out, found, classifier.meta.buckets)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        meta = classifier.meta
        title = f"{checkpoint} on {split}: buckets of {meta.bucket_tokens} tokens, {meta.bucket_count} of them"
        print_evaluation(Console(), title, found)
        if aim_accuracy is not None and found.scores.accuracy < aim_accuracy:
            typer.echo(
                f"Missed: right for {found.scores.accuracy:.1%} of the answers, --aim-accuracy is {aim_accuracy:.1%}"
            )
        if found.latency_p99_ms > aim_p99_ms:
            typer.echo(f"Missed: p99 of {found.latency_p99_ms:.1f} ms, --aim-p99-ms is {aim_p99_ms:g}")
        if out is not None:
            typer.echo(f"Written: {out / PAGE} with plots, {out / PREDICTION} for `polyphase simulate --prediction`")
    raise typer.Exit(0 if report["ok"] else NOT_GOOD_ENOUGH)
