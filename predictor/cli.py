"""`polyphase predictor`: prompts with answers, a classifier of their lengths, and how good it is."""

import typer

from predictor.data.command import dataset
from predictor.evaluate_command import evaluate_command
from predictor.train import train

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
