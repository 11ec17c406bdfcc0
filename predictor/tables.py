"""What `train` and `evaluate` print for people: scores beside the baselines, answers per bucket, warnings."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from predictor.buckets import Buckets
from predictor.evaluate import Evaluation, Finding
from predictor.scores import Scores


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
