"""Score a checkpoint: accuracy, error, calibration, latency, beside the baselines that it has to beat and the noise."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter
from typing import Any

from predictor.baselines import Ceiling, by_prompt_length, ceiling, commonest
from predictor.data.examples import Example
from predictor.loading import TextClassifier
from predictor.scores import Scores, bucket_means, score


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores on the same examples of the classifier and of both baselines, and the classifier's latencies in ms."""

    scores: Scores
    majority: Scores
    prompt_length: Scores
    ceiling: Ceiling | None
    latency_p50_ms: float
    latency_p99_ms: float

    def report(self, aim_accuracy: float | None, aim_p99_ms: float) -> dict[str, Any]:
        """`{"ok", "figures", "aims"}`; the accuracy wanted by default is that of the better baseline."""
        got = self.scores
        want = max(self.majority.accuracy, self.prompt_length.accuracy) if aim_accuracy is None else aim_accuracy
        late = self.latency_p99_ms
        aims = {
            "accuracy": {"want": want, "got": got.accuracy, "met": got.accuracy >= want},
            "latency_p99_ms": {"want": aim_p99_ms, "got": late, "met": late <= aim_p99_ms},
        }
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
        return {"ok": all(aim["met"] for aim in aims.values()), "figures": figures, "aims": aims}


def evaluate(classifier: TextClassifier, train: Sequence[Example], examples: Sequence[Example]) -> Evaluation:
    """Predict each example alone, as the service does; the baselines learn from `train`."""
    buckets = classifier.meta.buckets
    lengths, means = (
        [one.output_tokens for one in examples],
        bucket_means([one.output_tokens for one in train], buckets),
    )
    rows, latencies_ms = [], []
    for example in examples:
        started_s = perf_counter()
        rows += classifier.batch([classifier.encode(example.text)])
        latencies_ms.append((perf_counter() - started_s) * 1000)
    observed, shares = by_prompt_length(train, buckets), commonest(train, buckets)
    alone = [observed.probabilities(example.prompt_tokens) for example in examples]
    return Evaluation(
        scores=score(lengths, rows, buckets, means),
        majority=score(lengths, [shares] * len(examples), buckets, means),
        prompt_length=score(lengths, alone, buckets, means),
        ceiling=ceiling(examples, buckets),
        latency_p50_ms=median(latencies_ms),
        latency_p99_ms=quantiles(latencies_ms, n=100, method="inclusive")[-1] if len(rows) > 1 else latencies_ms[0],
    )
