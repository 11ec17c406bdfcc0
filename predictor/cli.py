"""The `polyphase predictor` commands: `dataset`, `train` and `evaluate`."""

import asyncio
import json
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from predictor.dataset import Api, BuildResult, BuildSettings, Prompts, Target, build, read_prompts
from predictor.evaluate import PAGE, PREDICTION, evaluate, print_evaluation, progress_bar, write_files
from predictor.examples import load_examples, load_served, split_examples
from predictor.train import NOT_GOOD_ENOUGH, train
from shared.errors import PolyphaseError

KEY_VARIABLE = "OPENAI_API_KEY"
NAMED = 5  # records and reasons that a message names
app = typer.Typer(
    name="predictor",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Predict the lengths of your model's answers: `dataset` collects answers of the model, `train` learns their "
    "lengths, `evaluate` measures the result. The predictor serves a checkpoint with "
    "`predictor: {checkpoint: FOLDER}` in the cluster file.",
)


class Split(StrEnum):
    """Parts of the data."""

    TRAIN = "train"
    VAL = "val"
    TEST = "test"


@app.command()
def dataset(
    prompts: Annotated[
        list[Path], typer.Argument(help="ShareGPT-style JSON, JSONL, Parquet, text (a prompt a line), or folders.")
    ],
    out: Annotated[Path, typer.Option(help="Folder; an interrupted build continues there.")],
    endpoint: Annotated[str, typer.Option(help="OpenAI API of the model whose answers are measured.")],
    model: Annotated[str, typer.Option(help="Default: the only served model.")] = "",
    api: Annotated[Api, typer.Option(help="The route that prompts are sent to.")] = Api.CHAT,
    max_tokens: Annotated[int, typer.Option(help="Longer answers are cut.", min=1)] = 1024,
    temperature: Annotated[float | None, typer.Option(help="Default: the model's own.", min=0)] = None,
    samples: Annotated[int, typer.Option(help="Answers for each prompt.", min=1)] = 1,
    held_out_samples: Annotated[
        int, typer.Option(help="Answers for each held-out prompt; several measure the noise ceiling. 0: as --samples.")
    ] = 0,
    limit: Annotated[int, typer.Option(help="Maximum number of prompts; 0: all.", min=0)] = 0,
    concurrency: Annotated[int, typer.Option(help="Requests at the same time.", min=1, max=1024)] = 16,
    timeout: Annotated[float, typer.Option(help="Seconds for one answer.", min=1)] = 120.0,
) -> None:
    """Collect answers of a running model to your prompts, and store their lengths.

    After an interruption, run the same command again: stored answers are not requested twice. The API key is read from
    OPENAI_API_KEY.
    """
    console = Console(stderr=True)
    target = Target(endpoint, model, api, max_tokens, temperature, timeout, os.environ.get(KEY_VARIABLE, ""))
    settings = BuildSettings(target, samples, held_out_samples, limit, concurrency)
    try:
        found = read_prompts(prompts)
        _print_prompts(console, found)
        with progress_bar(console) as bar:
            result = asyncio.run(build(found, settings, out, lambda done, whole: bar("answers", done, whole)))
    except KeyboardInterrupt:
        console.print(f"interrupted; the answers so far are in {out}: run the same command again to continue")
        raise typer.Exit(130) from None
    except PolyphaseError as error:
        console.print(f"{error.message}\nthe answers so far are in {out}", style="red", markup=False)
        raise typer.Exit(1) from None
    _print_result(console, result)


def _print_prompts(console: Console, found: Prompts) -> None:
    console.print(f"{len(found.texts)} prompts, {found.duplicates} duplicates", markup=False)
    for record in found.bad[:NAMED]:
        console.print(f"skipped: {record}", style="yellow", markup=False)
    if len(found.bad) > NAMED:
        console.print(f"skipped: {len(found.bad) - NAMED} more", style="yellow")


def _print_result(console: Console, result: BuildResult) -> None:
    new = f"{result.requested} requested in this run"
    console.print(f"{result.path}: {result.rows} answers ({new}), {result.cut} cut", markup=False)
    low, middle, high = result.lengths
    console.print(f"9 of 10 answers take {low} to {high} tokens, the median is {middle}", markup=False)
    for reason, count in result.refused.most_common(NAMED):
        console.print(f"refused, {count} times: {reason}", style="yellow", markup=False)


app.command()(train)


@app.command("evaluate")
def evaluate_command(
    checkpoint: Annotated[Path, typer.Option(help="Folder that `train` wrote.")],
    data: Annotated[list[Path], typer.Option(help="The data of the training: Parquet, JSON, JSONL; may be repeated.")],
    served_model: Annotated[str, typer.Option(help="Default: the model of the training.")] = "",
    split: Annotated[Split, typer.Option(help="The part of the data to evaluate on.")] = Split.TEST,
    limit: Annotated[int, typer.Option(help="Maximum number of examples; 0: all.", min=0)] = 0,
    threads: Annotated[int, typer.Option(help="Threads of torch.", min=1)] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Folder for plots and for the input of `polyphase simulate`.")
    ] = None,
    aim_accuracy: Annotated[float | None, typer.Option(help="Default: above the better baseline.")] = None,
    aim_p99_ms: Annotated[float, typer.Option(help="The service's deadline.")] = 250.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Measure a checkpoint on a split of its data, beside the baselines and the noise ceiling.

    Exit code 0: both aims are met. 3: an aim is missed, or the data teaches nothing. 1: an error.
    """
    from predictor.model import load_classifier  # torch

    classifier = load_classifier(checkpoint, threads)
    meta = classifier.meta
    served = load_served(served_model or meta.served_model, with_template=True)
    splits = split_examples(load_examples(data, served))
    with progress_bar(Console(stderr=True)) as on_progress:
        found = evaluate(classifier, splits["train"], splits[split][: limit or None], on_progress)
    report = found.report(aim_accuracy, aim_p99_ms)
    if out is not None:
        write_files(out, found)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        title = f"{checkpoint} on {split}: buckets of {meta.bucket_tokens} tokens, {meta.bucket_count} of them"
        print_evaluation(Console(), title, found)
        accuracy = found.scores.accuracy
        if aim_accuracy is not None and accuracy < aim_accuracy:
            typer.echo(f"Missed: right for {accuracy:.1%} of the answers, --aim-accuracy is {aim_accuracy:.1%}")
        if found.latency_p99_ms > aim_p99_ms:
            typer.echo(f"Missed: p99 of {found.latency_p99_ms:.1f} ms, --aim-p99-ms is {aim_p99_ms:g}")
        if out is not None:
            typer.echo(f"Written: {out / PAGE} with plots, {out / PREDICTION} for `polyphase simulate --prediction`")
    raise typer.Exit(0 if report["ok"] else NOT_GOOD_ENOUGH)


if __name__ == "__main__":
    app()
