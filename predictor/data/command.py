"""`polyphase predictor dataset`."""

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from predictor.data.build import NAMED, Built, Prompts, Wanted, build, read_prompts
from predictor.data.endpoint import Api, Asking
from predictor.progress import progress_bar
from shared.errors import PolyphaseError

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
