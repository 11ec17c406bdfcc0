"""A progress bar on the terminal; silent where standard error is not one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

OnProgress = Callable[[str, int, int], None]  # the stage, how much of it is done, and how much there is


def silent(stage: str, done: int, whole: int) -> None:
    """An OnProgress that shows nothing."""


@contextmanager
def progress_bar(console: Console) -> Iterator[OnProgress]:
    """An OnProgress that draws a bar for each stage."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal
    )
    stages = {}

    def on_progress(stage: str, done: int, whole: int) -> None:
        if stage not in stages:
            stages[stage] = bar.add_task(stage)
        bar.update(stages[stage], completed=done, total=whole)

    with bar:
        yield on_progress
