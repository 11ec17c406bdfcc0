"""The `polyphase predictor` commands: `dataset`, `train` and `evaluate`. `services.launcher.cli` loads the module
by name.
"""

import asyncio
import json
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from predictor.data.dataset import NAMED, Api, Asking, Built, Prompts, Wanted, build, read_prompts
from predictor.data.examples import load_examples, split_examples
from predictor.evaluate import evaluate, print_evaluation
from predictor.progress import progress_bar
from predictor.served import load_served
from predictor.train import NOT_GOOD_ENOUGH, train
from shared.errors import PolyphaseError


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


KEY_VARIABLE = "OPENAI_API_KEY"


def dataset(
    prompts: Annotated[
        list[Path], typer.Argument(help="ShareGPT-style JSON, JSONL, Parquet, text (a prompt a line), or folders.")
    ],
    out: Annotated[Path, typer.Option(help="Folder; a builder that was killed goes on there.")],
    endpoint: Annotated[str, typer.Option(help="OpenAI API of the model whose lengths are to be learnt.")],
    model: Annotated[str, typer.Option(help="Default: the only one that is served there.")] = "",
    api: Annotated[Api, typer.Option(help="How prompts are sent.")] = Api.CHAT,
    max_tokens: Annotated[int, typer.Option(help="Answers are cut there.", min=1)] = 1024,
    temperature: Annotated[float | None, typer.Option(help="Default: the model's own.", min=0)] = None,
    samples: Annotated[int, typer.Option(help="Answers a prompt.", min=1)] = 1,
    held_out_samples: Annotated[
        int, typer.Option(help="Of those that are not trained on; several measure the noise ceiling. 0: as others.")
    ] = 0,
    limit: Annotated[int, typer.Option(help="At most so many prompts; 0: all.", min=0)] = 0,
    concurrency: Annotated[int, typer.Option(help="Answers under way at once.", min=1, max=1024)] = 16,
    timeout: Annotated[float, typer.Option(help="Seconds for one answer.", min=1)] = 120.0,
) -> None:
    """Ask a running model for answers to your prompts, and keep how long they get.

    Run the same command again after a kill: nothing is asked twice. The API key is taken from OPENAI_API_KEY.
    """
    console = Console(stderr=True)
    asking = Asking(endpoint, model, api, max_tokens, temperature, timeout, os.environ.get(KEY_VARIABLE, ""))
    try:
        found = read_prompts(prompts)
        _say_what_was_read(console, found)
        with progress_bar(console) as on_progress:
            made = asyncio.run(
                build(
                    found,
                    Wanted(asking, samples, held_out_samples, limit, concurrency),
                    out,
                    lambda done, whole: on_progress("answers", done, whole),
                )
            )
    except KeyboardInterrupt:
        console.print(f"stopped; what is answered is kept in {out}: run the same command again")
        raise typer.Exit(130) from None
    except PolyphaseError as error:
        console.print(f"{error.message}\nwhat is answered is kept in {out}", style="red", markup=False)
        raise typer.Exit(1) from None
    _say_what_was_made(console, made)


def _say_what_was_read(console: Console, found: Prompts) -> None:
    console.print(f"{len(found.texts)} prompts, {found.duplicates} duplicates", markup=False)
    for one in found.bad[:NAMED]:
        console.print(f"left out: {one}", style="yellow", markup=False)
    if len(found.bad) > NAMED:
        console.print(f"left out: {len(found.bad) - NAMED} more", style="yellow")


def _say_what_was_made(console: Console, made: Built) -> None:
    console.print(f"{made.path}: {made.rows} answers ({made.asked} asked for now), {made.cut} cut", markup=False)
    low, middle, high = made.lengths
    console.print(f"9 of 10 answers take {low} to {high} tokens, the median is {middle}", markup=False)
    for reason, count in made.refused.most_common(NAMED):
        console.print(f"refused, {count} times: {reason}", style="yellow", markup=False)


app = typer.Typer(
    name="predictor",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Teach the suite how long your model's answers get: `dataset` asks the model, `train` learns from it, "
    "`evaluate` says how good that is. The predictor serves a checkpoint with "
    "`predictor: {checkpoint: FOLDER}` in the cluster file.",
)
app.command()(dataset)
app.command()(train)
app.command("evaluate")(evaluate_command)


if __name__ == "__main__":
    app()
