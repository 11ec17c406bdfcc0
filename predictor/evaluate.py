"""Evaluates a checkpoint on labelled examples: scores, latency, findings, and their tables and files. The module also
chooses the width and number of buckets that a dataset supports.

TetriInfer uses 200 tokens per bucket, found by trial for ShareGPT's answers; other models and prompts need other
widths.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import msgspec
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining
from rich.table import Table

from predictor.buckets import Buckets
from predictor.checkpoint import Ceiling, Scores, bucket_means, by_prompt_length, ceiling, commonest, likeliest, score
from predictor.examples import Example, labels
from predictor.loading import TextClassifier
from shared.errors import InvalidRequest

WIDTHS = (5, 10, 25, 50, 100, 200, 400, 800, 1600, 3200)  # tokens; `choose_buckets` selects one
LARGEST_SHARE = 0.5  # of the answers, that one bucket may hold
LAST_FROM = 0.95  # the last bucket begins at or below this quantile of the lengths
MAX_BUCKETS = 64
ONE_BUCKET = 0.95  # share of the answers in one bucket from which on the accuracy means nothing
LATE_MS = 250.0  # the service's default deadline
PAGE, PREDICTION = "evaluation.html", "prediction.yaml"
OnProgress = Callable[[str, int, int], None]  # the stage, its progress, and its whole


def silent(stage: str, done: int, whole: int) -> None:
    """An OnProgress that shows nothing."""


@contextmanager
def progress_bar(console: Console) -> Iterator[OnProgress]:
    """An OnProgress with a bar for each stage; silent where the console is not a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), Remaining())
    stages: dict[str, TaskID] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:

        def on_progress(stage: str, done: int, whole: int) -> None:
            if stage not in stages:
                stages[stage] = bar.add_task(stage)
            bar.update(stages[stage], completed=done, total=whole)

        yield on_progress


def choose_buckets(lengths: Sequence[int], count: int | None = None) -> Buckets:
    """The largest of WIDTHS at which no bucket holds more than LARGEST_SHARE of these answers; if there is none, the
    width whose commonest bucket is the smallest. The result depends on the lengths alone.

    count: None also chooses the number of buckets, so that about one answer in twenty falls into the last one.
    """
    candidates = [Buckets(width, count or _count(lengths, width)) for width in reversed(WIDTHS)]
    fitting = (buckets for buckets in candidates if largest_share(lengths, buckets) <= LARGEST_SHARE)
    return next(fitting, None) or min(candidates, key=lambda buckets: largest_share(lengths, buckets))


def largest_share(lengths: Sequence[int], buckets: Buckets) -> float:
    """The share of the answers in the commonest bucket."""
    return max(counts(lengths, buckets)) / len(lengths)


def counts(lengths: Sequence[int], buckets: Buckets) -> list[int]:
    """The number of answers in each bucket."""
    found = Counter(map(buckets.of, lengths))
    return [found[bucket] for bucket in range(buckets.count)]


def _count(lengths: Sequence[int], width: int) -> int:
    ordered = sorted(lengths)
    last = ordered[min(int(LAST_FROM * len(ordered)), len(ordered) - 1)] // width
    return min(max(last + 1, 2), MAX_BUCKETS)


class Finding(msgspec.Struct, frozen=True):
    """Why the figures mean less than they seem to. code: one_bucket, no_gain, within_noise or slow."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of the classifier and of both baselines on the same examples, and the classifier's latencies.

    trained, judged: answers in each bucket. noise: twice the standard error of the gain over the better baseline.
    suggested: what `--granularity auto` would select for the training answers, of which its commonest bucket holds
    suggested_share; None where the answers are equal in length.
    """

    buckets: Buckets
    scores: Scores
    majority: Scores
    prompt_length: Scores
    ceiling: Ceiling | None
    latency_p50_ms: float
    latency_p99_ms: float
    trained: list[int]
    judged: list[int]
    noise: float
    suggested: Buckets | None
    suggested_share: float

    @property
    def baseline(self) -> float:
        """The accuracy of the better baseline."""
        return max(self.majority.accuracy, self.prompt_length.accuracy)

    @property
    def largest_share(self) -> float:
        """The share of the training answers in the commonest bucket."""
        return max(self.trained) / sum(self.trained)

    def report(self, aim_accuracy: float | None, aim_p99_ms: float | None) -> dict[str, Any]:
        """`{"ok", "figures", "aims", "findings"}`. Without `aim_accuracy`, the classifier has to be right more often
        than the better baseline, and no bucket may hold nearly all answers.
        """
        got, late, largest = self.scores, self.latency_p99_ms, self.largest_share
        if aim_accuracy is None:
            aims: dict[str, Any] = {
                "accuracy": {"want": self.baseline, "got": got.accuracy, "met": got.accuracy > self.baseline},
                "largest_bucket": {"want": ONE_BUCKET, "got": largest, "met": largest <= ONE_BUCKET},
            }
        else:
            aims = {"accuracy": {"want": aim_accuracy, "got": got.accuracy, "met": got.accuracy >= aim_accuracy}}
        if aim_p99_ms is not None:
            aims["latency_p99_ms"] = {"want": aim_p99_ms, "got": late, "met": late <= aim_p99_ms}
        figures: dict[str, float] = {"examples": got.examples}
        for name, scores in (("", got), ("majority_", self.majority), ("prompt_length_", self.prompt_length)):
            figures |= {
                f"{name}accuracy": scores.accuracy,
                f"{name}accuracy_within_one_bucket": scores.within_one,
                f"{name}mean_error_tokens": scores.mean_error_tokens,
                f"{name}calibration_error": scores.calibration_error,
            }
        if self.ceiling is not None:
            figures |= {"noise_ceiling_lower": self.ceiling.lower, "noise_ceiling_upper": self.ceiling.upper}
        figures |= {"latency_p50_ms": self.latency_p50_ms, "latency_p99_ms": late}
        ok = all(aim["met"] for aim in aims.values())
        return {"ok": ok, "figures": figures, "aims": aims, "findings": msgspec.to_builtins(self.findings())}

    def findings(self) -> list[Finding]:
        """What a reader of the accuracy has to know; empty for a useful classifier."""
        found = {}
        accuracy, gain = self.scores.accuracy, self.scores.accuracy - self.baseline
        if self.largest_share > ONE_BUCKET:
            found["one_bucket"] = (
                f"{self.largest_share:.1%} of the training answers fall into one bucket: at this granularity the "
                f"data teaches nothing, and an accuracy of {accuracy:.1%} means nothing. {self._advice}"
            )
        if gain <= 0:
            unused = "" if accuracy > self.majority.accuracy else " The service would not use it."
            found["no_gain"] = (
                f"The classifier is right for {accuracy:.1%} of the answers, no more often than the "
                f"better baseline ({self.baseline:.1%}).{unused}" + ("" if found else f" {self._advice}")
            )
        elif gain <= self.noise:
            found["within_noise"] = (
                f"The gain of {100 * gain:.1f} points over the better baseline is not more than two standard "
                f"errors ({100 * self.noise:.1f} points) of {self.scores.examples} answers. Record more answers."
            )
        if self.latency_p99_ms > LATE_MS:
            found["slow"] = (
                f"One prediction takes up to {self.latency_p99_ms:.0f} ms (p99), longer than the service's default "
                f"deadline of {LATE_MS:.0f} ms. On a CPU the service reads fewer tokens and computes in int8."
            )
        return [Finding(code, text) for code, text in found.items()]

    @property
    def _advice(self) -> str:
        if self.suggested is None:
            return "No granularity can teach more: the answers hardly differ in length. Use other prompts."
        if self.suggested.width_tokens == self.buckets.width_tokens:
            return "Record more answers; prompts may also say little about the lengths of their answers."
        return (
            f"--granularity auto would select {self.suggested.width_tokens} tokens, with at most "
            f"{self.suggested_share:.0%} of the training answers in one bucket."
        )


def evaluate(
    classifier: TextClassifier, train: Sequence[Example], examples: Sequence[Example], on_progress: OnProgress = silent
) -> Evaluation:
    """Predict each example alone, as the service does; the baselines learn from `train`.

    Raises InvalidRequest where there are no examples, or none that the baselines can learn from.
    """
    for name, some in (("to train on", train), ("to judge by", examples)):
        if not some:
            raise InvalidRequest(f"the data has no answers {name}: record more (train, val and test get 80, 10, 10 %)")
    buckets = classifier.meta.buckets
    known, lengths = [each.output_tokens for each in train], [each.output_tokens for each in examples]
    rows: list[list[float]] = []
    latencies_ms = []
    for number, example in enumerate(examples, start=1):
        started_mono = perf_counter()
        rows += classifier.batch([classifier.encode(example.text)])
        latencies_ms.append((perf_counter() - started_mono) * 1000)
        on_progress("judging", number, len(examples))
    observed, means = by_prompt_length(train, buckets), bucket_means(known, buckets)
    always = [commonest(train, buckets)] * len(examples)
    alone = [observed.probabilities(example.prompt_tokens) for example in examples]
    majority, prompt_length = (score(lengths, baseline, buckets, means) for baseline in (always, alone))
    better = alone if prompt_length.accuracy > majority.accuracy else always
    suggested = choose_buckets(known)
    suggested_share = largest_share(known, suggested)
    return Evaluation(
        buckets=buckets,
        scores=score(lengths, rows, buckets, means),
        majority=majority,
        prompt_length=prompt_length,
        ceiling=ceiling(examples, buckets),
        latency_p50_ms=median(latencies_ms),
        latency_p99_ms=quantiles(latencies_ms, n=100, method="inclusive")[-1] if len(rows) > 1 else latencies_ms[0],
        trained=counts(known, buckets),
        judged=counts(lengths, buckets),
        noise=2 * _standard_error(labels(examples, buckets), rows, better),
        suggested=suggested if suggested_share <= ONE_BUCKET else None,
        suggested_share=suggested_share,
    )


def _standard_error(truth: Sequence[int], rows: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    """Of the difference of two accuracies on the same examples, from the examples on which they differ."""
    pairs = zip(truth, map(likeliest, rows), map(likeliest, others), strict=True)
    unlike = sum((own == label) != (other == label) for label, own, other in pairs)
    return math.sqrt(unlike) / len(truth)


def print_evaluation(console: Console, title: str, found: Evaluation) -> None:
    console.print(f"\n{title}", style="bold", markup=False, highlight=False)
    table = _table(f"on {found.scores.examples} answers", "right", "within one bucket", "mean error")
    common = max(range(found.buckets.count), key=lambda at: (found.trained[at], -at))
    table.add_row("this classifier", *_scores(found.scores), style="bold")
    table.add_row(f"commonest bucket ({name_of(found.buckets, common)})", *_scores(found.majority))
    table.add_row("prompt length alone", *_scores(found.prompt_length))
    console.print(table)
    console.print(_noise_ceiling(found.ceiling), highlight=False)
    latency = f"{found.latency_p50_ms:.1f} ms (p50), {found.latency_p99_ms:.1f} ms (p99)"
    console.print(f"One prediction takes {latency}.\n", highlight=False)
    console.print(_per_bucket(found))
    print_findings(console, found.findings())


def print_granularities(console: Console, by_width: Mapping[int, Evaluation]) -> None:
    """Classifiers of one dataset, beside each other."""
    title = "\nShares that are right, beside the commonest bucket and the prompt's length alone"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for name in ("tokens", "buckets", "right", "within 1", "error", "commonest", "by length", "ceiling"):
        table.add_column(name, justify="right")
    for width, found in by_width.items():
        limit = "–" if found.ceiling is None else f"{found.ceiling.lower:.0%} to {found.ceiling.upper:.0%}"
        own = (
            f"{found.scores.accuracy:.1%}",
            f"{found.scores.within_one:.1%}",
            f"{found.scores.mean_error_tokens:.0f}",
        )
        baselines = (f"{found.majority.accuracy:.1%}", f"{found.prompt_length.accuracy:.1%}")
        table.add_row(str(width), str(found.buckets.count), *own, *baselines, limit)
    console.print(table)
    for width, found in by_width.items():
        print_findings(console, [Finding(each.code, f"{width} tokens: {each.text}") for each in found.findings()])


def print_findings(console: Console, findings: list[Finding]) -> None:
    for finding in findings:
        console.print(f"Warning: {finding.text}", style="yellow", markup=False, highlight=False)


def name_of(buckets: Buckets, at: int) -> str:
    """The range of a bucket, in tokens."""
    return _range(buckets, at, at + 1)


def _range(buckets: Buckets, start: int, end: int) -> str:
    """The range of the buckets from `start` to before `end`."""
    lower, upper = buckets.bounds(start)[0], buckets.bounds(end - 1)[1]
    return f"{lower} and more" if end == buckets.count else f"{lower} to {upper - 1}"


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2))
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _scores(scores: Scores) -> tuple[str, str, str]:
    return f"{scores.accuracy:.1%}", f"{scores.within_one:.1%}", f"{scores.mean_error_tokens:.0f} tokens"


def _noise_ceiling(found: Ceiling | None) -> str:
    if found is None:
        return "Noise ceiling: not measured, every prompt has one answer (`dataset --held-out-samples 3`)."
    return (
        f"Noise ceiling: between {found.lower:.1%} and {found.upper:.1%} can be right at most "
        f"({found.prompts} prompts with several answers)."
    )


def _per_bucket(found: Evaluation) -> Table:
    """A row for each bucket; adjacent empty buckets share a row."""
    table = _table("answers of", "to train on", "judged", "of these right")
    at = 0
    while at < found.buckets.count:
        end = at
        while end < found.buckets.count and not (found.trained[end] or found.judged[end]):
            end += 1
        if end > at:
            table.add_row(f"{_range(found.buckets, at, end)} tokens", "0", "0", "–")
            at = end
            continue
        judged = found.judged[at]
        right = f"{found.scores.confusion[at][at] / judged:.1%}" if judged else "–"
        table.add_row(f"{name_of(found.buckets, at)} tokens", str(found.trained[at]), str(judged), right)
        at += 1
    return table


def write_files(folder: Path, found: Evaluation) -> None:
    """`evaluation.html`: confusion and reliability; `prediction.yaml`: for `polyphase simulate --prediction` or a
    simulation's cluster file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PREDICTION).write_text(yaml.safe_dump({"prediction": _prediction(found)}), encoding="utf-8")
    _page(found).write_html(folder / PAGE, include_plotlyjs=True)


def _prediction(found: Evaluation) -> dict[str, Any]:
    """Shares by actual bucket; a bucket without examples gets the predictions of all others together."""
    confusion, count = found.scores.confusion, found.buckets.count
    totals = [sum(row[at] for row in confusion) for at in range(count)]
    shares = [[value / sum(row) for value in row] for row in (row if any(row) else totals for row in confusion)]
    prior = [sum(row) / found.scores.examples for row in confusion]
    return {"width_tokens": found.buckets.width_tokens, "buckets": count, "confusion": shares, "prior": prior}


def _page(found: Evaluation) -> Any:
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    names, confusion = [name_of(found.buckets, at) for at in range(found.buckets.count)], found.scores.confusion
    page = make_subplots(cols=2, subplot_titles=("Confusion: examples by actual and predicted tokens", "Reliability"))
    cells = {"text": confusion, "texttemplate": "%{text}", "colorscale": "Blues", "showscale": False}
    page.add_trace(go.Heatmap(z=confusion, x=names, y=names, **cells), row=1, col=1)
    bins = found.scores.calibration
    confidence, right = [each.mean_confidence for each in bins], [each.accuracy for each in bins]
    texts = [f"{each.count} examples" for each in bins]
    page.add_trace(go.Scatter(x=[0, 1], y=[0, 1], mode="lines", name="perfect", line={"dash": "dot"}), row=1, col=2)
    points = go.Scatter(x=confidence, y=right, text=texts, mode="lines+markers", name="classifier")
    page.add_trace(points, row=1, col=2)
    page.update_xaxes(title_text="predicted", type="category", row=1, col=1)
    page.update_yaxes(title_text="actual", type="category", autorange="reversed", row=1, col=1)
    page.update_xaxes(title_text="confidence", range=[0, 1], row=1, col=2)
    page.update_yaxes(title_text="share that was right", range=[0, 1], row=1, col=2)
    base = f"commonest bucket {found.majority.accuracy:.1%}, prompt length alone {found.prompt_length.accuracy:.1%}"
    page.update_layout(title=f"{found.scores.examples} examples: {found.scores.accuracy:.1%} right; {base}")
    return page
