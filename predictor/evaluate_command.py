"""`polyphase predictor evaluate`."""

import json
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from predictor.data.examples import load_examples, split_examples
from predictor.evaluate import evaluate
from predictor.served import load_served


def evaluate_command(
    checkpoint: Annotated[Path, typer.Option(help="Folder that `train` wrote.")],
    data: Annotated[list[Path], typer.Option(help="What it was trained on: Parquet, JSON, JSONL; may be repeated.")],
    served_model: Annotated[str, typer.Option(help="Default: the one it was trained for.")] = "",
    split: Annotated[str, typer.Option(help="train, val or test.")] = "test",
    limit: Annotated[int, typer.Option(help="At most this many examples; 0: all.")] = 0,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder for plots and for what `polyphase simulate` reads.")] = None,
    aim_accuracy: Annotated[float | None, typer.Option(help="Default: the better baseline's.")] = None,
    aim_p99_ms: Annotated[float, typer.Option(help="The service's deadline.")] = 250.0,
    as_json: Annotated[bool, typer.Option("--json", help="Only the JSON object of the last line.")] = False,
) -> None:
    """Say how good a checkpoint is on a split of its data, beside the baselines and the noise ceiling."""
    from predictor.model import load_classifier  # torch

    classifier = load_classifier(checkpoint, threads)
    served = load_served(served_model or classifier.meta.served_model, with_template=True)
    splits = split_examples(load_examples(data, served))
    found = evaluate(classifier, splits["train"], splits[split][: limit or None])
    report = found.report(aim_accuracy, aim_p99_ms)
    if out is not None:
        from predictor.evaluation_files import write_files  # plotly

        write_files(out, found, classifier.meta.buckets)
    if not as_json:
        typer.echo(json.dumps({"scores": msgspec.to_builtins(found.scores)}, indent=2))
    typer.echo(json.dumps(report))
    raise typer.Exit(0 if report["ok"] else 1)
