"""Evaluates a checkpoint on labelled examples: scores, latency, findings and the tables that the commands print.
The module also chooses the width and number of buckets that a dataset supports.

TetriInfer uses 200 tokens per bucket, found by trial for ShareGPT's answers; other models and prompts need other
widths.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from predictor.buckets import Buckets
from predictor.checkpoint import Ceiling, Scores, bucket_means, by_prompt_length, ceiling, commonest, likeliest, score
from predictor.data.examples import Example, labels
from predictor.loading import TextClassifier
from predictor.progress import OnProgress, silent
from shared.errors import InvalidRequest

WIDTHS = (5, 10, 25, 50, 100, 200, 400, 800, 1600, 3200)  # tokens; one of them is chosen
LARGEST_SHARE = 0.5  # of the answers, that one bucket may hold
LAST_FROM = 0.95  # the last bucket begins at or below this quantile of the lengths
MAX_BUCKETS = 64


def choose_buckets(lengths: Sequence[int], count: int | None = None) -> Buckets:
    """The largest of WIDTHS at which no bucket holds more than LARGEST_SHARE of these answers; where every one has such
    a bucket, the width whose commonest bucket is the smallest. Equal for equal lengths.

    count: None chooses the number of buckets, too, so that about one answer in twenty falls into the last one.
    """
    candidates = [Buckets(width, count or _count(lengths, width)) for width in reversed(WIDTHS)]
    fitting = (buckets for buckets in candidates if largest_share(lengths, buckets) <= LARGEST_SHARE)
    return next(fitting, None) or min(candidates, key=lambda buckets: largest_share(lengths, buckets))


def largest_share(lengths: Sequence[int], buckets: Buckets) -> float:
    """The share of the answers that the commonest bucket holds."""
    return max(Counter(map(buckets.of, lengths)).values()) / len(lengths)


def counts(lengths: Sequence[int], buckets: Buckets) -> list[int]:
    """How many answers each bucket holds."""
    seen = Counter(map(buckets.of, lengths))
    return [seen[bucket] for bucket in range(buckets.count)]


def _count(lengths: Sequence[int], width: int) -> int:
    ordered = sorted(lengths)
    last = ordered[min(int(LAST_FROM * len(ordered)), len(ordered) - 1)] // width
    return min(max(last + 1, 2), MAX_BUCKETS)


ONE_BUCKET = 0.95  # of the answers in one bucket: a classifier that always names it is right so often
LATE_MS = 250.0  # the service's default deadline


class Finding(msgspec.Struct, frozen=True):
    """Why the figures mean less than they seem to. code: one_bucket, no_gain, within_noise or slow."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores on the same examples of the classifier and of both baselines, and the classifier's latencies in ms.

    trained, judged: answers that each bucket holds. noise: twice the standard error of the gain over the better
    baseline. suggested: what `--granularity auto` would take for the training answers, of which its commonest bucket
    holds suggested_share; None where they hardly differ at any granularity.
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
        """The share of the training answers that the commonest bucket holds."""
        return max(self.trained) / sum(self.trained)

    def report(self, aim_accuracy: float | None, aim_p99_ms: float | None) -> dict[str, Any]:
        """`{"ok", "figures", "aims", "findings"}`. Without an accuracy to aim at, the classifier has to be right more
        often than the better baseline, on answers of which no bucket holds nearly all.
        """
        got, late = self.scores, self.latency_p99_ms
        if aim_accuracy is None:
            aims: dict[str, Any] = {
                "accuracy": {"want": self.baseline, "got": got.accuracy, "met": got.accuracy > self.baseline},
                "largest_bucket": {
                    "want": ONE_BUCKET,
                    "got": self.largest_share,
                    "met": self.largest_share <= ONE_BUCKET,
                },
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
        return {
            "ok": all(aim["met"] for aim in aims.values()),
            "figures": figures,
            "aims": aims,
            "findings": msgspec.to_builtins(self.findings()),
        }

    def findings(self) -> list[Finding]:
        """What a reader of the accuracy has to know; empty for a classifier that has learnt something."""
        found = []
        if self.largest_share > ONE_BUCKET:
            found.append(
                Finding(
                    "one_bucket",
                    f"{self.largest_share:.1%} of the training answers fall into one bucket: at this granularity the "
                    f"data teaches nothing, and {self.scores.accuracy:.1%} right answers mean nothing. {self._advice}",
                )
            )
        gain = self.scores.accuracy - self.baseline
        if gain <= 0:
            unused = "" if self.scores.accuracy > self.majority.accuracy else " The service would not use it."
            advice = "" if found else f" {self._advice}"
            found.append(
                Finding(
                    "no_gain",
                    f"The classifier is right for {self.scores.accuracy:.1%} of the answers, no more often than the "
                    f"better baseline ({self.baseline:.1%}).{unused}{advice}",
                )
            )
        elif gain <= self.noise:
            found.append(
                Finding(
                    "within_noise",
                    f"The gain of {100 * gain:.1f} points over the better baseline is not more than two standard "
                    f"errors ({100 * self.noise:.1f} points) of {self.scores.examples} answers. Record more answers.",
                )
            )
        if self.latency_p99_ms > LATE_MS:
            found.append(
                Finding(
                    "slow",
                    f"One prediction takes up to {self.latency_p99_ms:.0f} ms (p99), longer than the service's default "
                    f"deadline of {LATE_MS:.0f} ms: on a CPU the service looks at fewer tokens and computes in int8.",
                )
            )
        return found

    @property
    def _advice(self) -> str:
        if self.suggested is None:
            return "No granularity can teach more: the answers hardly differ in length. Use other prompts."
        if self.suggested.width_tokens == self.buckets.width_tokens:
            return "Record more answers; prompts may also say little about how long their answers get."
        return (
            f"--granularity auto would take {self.suggested.width_tokens} tokens, with at most "
            f"{self.suggested_share:.0%} of the training answers in one bucket."
        )


def evaluate(
    classifier: TextClassifier, train: Sequence[Example], examples: Sequence[Example], on_progress: OnProgress = silent
) -> Evaluation:
    """Predict each example alone, as the service does; the baselines learn from `train`.

    Raises InvalidRequest where there are no examples, or none to learn the baselines from.
    """
    for name, some in (("to train on", train), ("to judge by", examples)):
        if not some:
            raise InvalidRequest(f"the data has no answers {name}: record more (train, val and test get 80, 10, 10 %)")
    buckets = classifier.meta.buckets
    known, lengths = [one.output_tokens for one in train], [one.output_tokens for one in examples]
    means = bucket_means(known, buckets)
    rows: list[list[float]] = []
    latencies_ms = []
    for number, example in enumerate(examples, start=1):
        started_s = perf_counter()
        rows += classifier.batch([classifier.encode(example.text)])
        latencies_ms.append((perf_counter() - started_s) * 1000)
        on_progress("judging", number, len(examples))
    observed, shares = by_prompt_length(train, buckets), commonest(train, buckets)
    always, alone = [shares] * len(examples), [observed.probabilities(example.prompt_tokens) for example in examples]
    truth, suggested = labels(examples, buckets), choose_buckets(known)
    suggested_share = largest_share(known, suggested)
    majority, prompt_length = (score(lengths, one, buckets, means) for one in (always, alone))
    better = alone if prompt_length.accuracy > majority.accuracy else always
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
        noise=2 * _standard_error(truth, rows, better),
        suggested=suggested if suggested_share <= ONE_BUCKET else None,
        suggested_share=suggested_share,
    )


def _standard_error(truth: Sequence[int], rows: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    """Of the difference of two accuracies on the same examples: only those count that one of both is right about."""
    pairs = zip(truth, map(likeliest, rows), map(likeliest, others), strict=True)
    unlike = sum((own == label) != (other == label) for label, own, other in pairs)
    return math.sqrt(unlike) / len(truth)


def print_evaluation(console: Console, title: str, found: Evaluation) -> None:
    """Of one classifier."""
    console.print(f"\n{title}", style="bold", markup=False, highlight=False)
    console.print(_scores(found))
    console.print(_noise_ceiling(found), highlight=False)
    console.print(
        f"One prediction takes {found.latency_p50_ms:.1f} ms (p50), {found.latency_p99_ms:.1f} ms (p99).\n",
        highlight=False,
    )
    console.print(_per_bucket(found))
    print_findings(console, found.findings())


def print_granularities(console: Console, by_width: Mapping[int, Evaluation]) -> None:
    """Classifiers of one dataset, beside each other."""
    title = "\nShares that are right, beside the commonest bucket and the prompt's length alone"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1))
    for name in ("tokens", "buckets", "right", "within 1", "error", "commonest", "by length", "ceiling"):
        table.add_column(name, justify="right")
    for width, found in by_width.items():
        ceiling = "–" if found.ceiling is None else f"{found.ceiling.lower:.0%} to {found.ceiling.upper:.0%}"
        table.add_row(
            str(width),
            str(found.buckets.count),
            f"{found.scores.accuracy:.1%}",
            f"{found.scores.within_one:.1%}",
            f"{found.scores.mean_error_tokens:.0f}",
            f"{found.majority.accuracy:.1%}",
            f"{found.prompt_length.accuracy:.1%}",
            ceiling,
        )
    console.print(table)
    for width, found in by_width.items():
        findings = [Finding(one.code, f"{width} tokens: {one.text}") for one in found.findings()]
        print_findings(console, findings)


def print_findings(console: Console, findings: list[Finding]) -> None:
    """Each as a warning."""
    for one in findings:
        console.print(f"Warning: {one.text}", style="yellow", markup=False, highlight=False)


def name_of(buckets: Buckets, at: int) -> str:
    """The range of a bucket, in tokens."""
    lower, upper = buckets.bounds(at)
    return f"{lower} and more" if at == buckets.count - 1 else f"{lower} to {upper - 1}"


def _scores(found: Evaluation) -> Table:
    table = Table(box=None, padding=(0, 2))
    table.add_column(f"on {found.scores.examples} answers")
    for name in ("right", "within one bucket", "mean error"):
        table.add_column(name, justify="right")
    commonest = max(range(found.buckets.count), key=lambda at: (found.trained[at], -at))
    table.add_row("this classifier", *_row(found.scores), style="bold")
    table.add_row(f"commonest bucket ({name_of(found.buckets, commonest)})", *_row(found.majority))
    table.add_row("prompt length alone", *_row(found.prompt_length))
    return table


def _row(scores: Scores) -> tuple[str, str, str]:
    return f"{scores.accuracy:.1%}", f"{scores.within_one:.1%}", f"{scores.mean_error_tokens:.0f} tokens"


def _noise_ceiling(found: Evaluation) -> str:
    if found.ceiling is None:
        return "Noise ceiling: not measured, every prompt has one answer (`dataset --held-out-samples 3`)."
    return (
        f"Noise ceiling: between {found.ceiling.lower:.1%} and {found.ceiling.upper:.1%} can be right at most "
        f"({found.ceiling.prompts} prompts with several answers)."
    )


def _per_bucket(found: Evaluation) -> Table:
    """Empty buckets side by side share a row."""
    table = Table(box=None, padding=(0, 2))
    table.add_column("answers of")
    for name in ("to train on", "judged", "of these right"):
        table.add_column(name, justify="right")
    buckets, at = found.buckets, 0
    while at < buckets.count:
        end = at
        while end < buckets.count and not (found.trained[end] or found.judged[end]):
            end += 1
        if end > at:
            lower, upper = buckets.bounds(at)[0], buckets.bounds(end - 1)[1]
            name = f"{lower} and more" if end == buckets.count else f"{lower} to {upper - 1}"
            table.add_row(f"{name} tokens", "0", "0", "–")
            at = end
            continue
        judged = found.judged[at]
        right = f"{found.scores.confusion[at][at] / judged:.1%}" if judged else "–"
        table.add_row(f"{name_of(buckets, at)} tokens", str(found.trained[at]), str(judged), right)
        at += 1
    return table
