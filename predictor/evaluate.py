"""Score a checkpoint: accuracy, error, calibration, latency, beside the baselines that it has to beat and the noise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import msgspec

from predictor.baselines import Ceiling, by_prompt_length, ceiling, commonest
from predictor.buckets import Buckets
from predictor.data.examples import Example, labels
from predictor.granularity import choose_buckets, counts, largest_share
from predictor.loading import TextClassifier
from predictor.progress import OnProgress, silent
from predictor.scores import Scores, bucket_means, likeliest, score
from shared.errors import InvalidRequest

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
