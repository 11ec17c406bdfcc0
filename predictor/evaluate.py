"""Score a checkpoint: accuracy, confusion, calibration, latency, beside the two baselines it has to beat."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Annotated, Any

import msgspec
import typer

from predictor.dataset import Example, labels, load_examples, split_examples
from predictor.observed import ObservedLengths
from predictor.scores import Scores, score
from predictor.served import load_served
from predictor.service import TextClassifier

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of the classifier and of the observed estimator on the same examples, and latencies in ms."""

    scores: Scores
    observed: Scores
    latency_p50_ms: float
    latency_p99_ms: float

    def report(self, aim_accuracy: float | None, aim_p99_ms: float) -> dict[str, Any]:
        """`{"ok", "figures", "aims"}`; the accuracy wanted by default is that of the commonest bucket."""
        want = self.scores.majority if aim_accuracy is None else aim_accuracy
        aims = {
            "accuracy": {"want": want, "got": self.scores.accuracy, "met": self.scores.accuracy >= want},
            "latency_p99_ms": {
                "want": aim_p99_ms,
                "got": self.latency_p99_ms,
                "met": self.latency_p99_ms <= aim_p99_ms,
            },
        }
        figures = {
            "examples": self.scores.examples,
            "accuracy": self.scores.accuracy,
            "accuracy_within_one_bucket": self.scores.within_one,
            "accuracy_majority": self.scores.majority,
            "accuracy_observed": self.observed.accuracy,
            "calibration_error": self.scores.calibration_error,
            "latency_p50_ms": self.latency_p50_ms,
            "latency_p99_ms": self.latency_p99_ms,
        }
        return {"ok": all(aim["met"] for aim in aims.values()), "figures": figures, "aims": aims}


def evaluate(classifier: TextClassifier, train: list[Example], examples: list[Example]) -> Evaluation:
    """Predict each example alone, as the service does; the observed estimator learns from `train` first."""
    buckets = classifier.meta.buckets
    observed = ObservedLengths(buckets, half_life=float(max(1, len(train))))
    for example in train:
        observed.observe(example.prompt_tokens, example.output_tokens)
    truth = labels(examples, buckets)
    rows, latencies_ms = [], []
    for example in examples:
        started_s = perf_counter()
        rows.append(classifier.probabilities(example.text))
        latencies_ms.append((perf_counter() - started_s) * 1000)
    baseline = [observed.probabilities(example.prompt_tokens) for example in examples]
    return Evaluation(
        scores=score(truth, rows, buckets.count),
        observed=score(truth, baseline, buckets.count),
        latency_p50_ms=median(latencies_ms),
        latency_p99_ms=quantiles(latencies_ms, n=100, method="inclusive")[-1] if len(rows) > 1 else latencies_ms[0],
    )


@app.command(name="evaluate")
def evaluate_command(
    checkpoint: Annotated[Path, typer.Option(help="Folder that train wrote.")],
    data: Annotated[list[Path], typer.Option(help="JSON or JSONL files, or folders of them; may be repeated.")],
    served_model: Annotated[str, typer.Option(help="Default: the one it was trained for.")] = "",
    split: Annotated[str, typer.Option(help="train, val or test.")] = "test",
    limit: Annotated[int, typer.Option(help="At most this many examples; 0: all.")] = 0,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    aim_accuracy: Annotated[float | None, typer.Option(help="Default: beat the commonest bucket.")] = None,
    aim_p99_ms: Annotated[float, typer.Option(help="The service's deadline.")] = 250.0,
    as_json: Annotated[bool, typer.Option("--json", help="Only the JSON object of the last line.")] = False,
) -> None:
    """Score a checkpoint on a split of its data."""
    from predictor.model import load_classifier  # torch

    classifier = load_classifier(checkpoint, threads)
    served = load_served(served_model or classifier.meta.served_model, with_template=True)
    splits = split_examples(load_examples(data, served))
    found = evaluate(classifier, splits["train"], splits[split][: limit or None])
    report = found.report(aim_accuracy, aim_p99_ms)
    if not as_json:
        typer.echo(json.dumps({"scores": msgspec.to_builtins(found.scores)}, indent=2))
    typer.echo(json.dumps(report))
    raise typer.Exit(0 if report["ok"] else 1)


if __name__ == "__main__":
    app()
