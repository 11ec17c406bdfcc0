"""Results of a simulation as tables and CSV.

Also: the requests that no instance of the cluster could serve, usually a mistake in the cluster file or the trace.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shared.domain.instance import Role
from shared.errors import InvalidRequest
from shared.sim.metrics import Goodput
from shared.sim.outcomes import InstanceUse, Outcomes, SimResult, Status
from shared.sim.spec import InstanceSpec, RunSpec
from shared.sim.workload import Workload
from tools.simulate.deployment import Deployment

Impossible = tuple[str, str]  # sentences: how many requests cannot be served and why; the first such request


def impossible_of(workload: Workload, instances: Sequence[InstanceSpec]) -> Impossible | None:
    """Requests of a workload that exceed all instances; None without any."""
    total = workload.prompt_tokens + workload.output_tokens
    return _impossible(total > _longest(instances), workload.prompt_tokens, workload.output_tokens, instances)


def impossible_in(outcomes: Outcomes, instances: Sequence[InstanceSpec]) -> Impossible | None:
    """Requests that the simulation could not place on any instance; None without any."""
    chosen: NDArray[np.bool_] = outcomes.status == int(Status.IMPOSSIBLE)
    return _impossible(chosen, outcomes.prompt_tokens, outcomes.output_tokens, instances)


def _impossible(
    chosen: NDArray[np.bool_],
    prompt_tokens: NDArray[np.int64],
    output_tokens: NDArray[np.int64],
    instances: Sequence[InstanceSpec],
) -> Impossible | None:
    if not chosen.any():
        return None
    holders = [spec for spec in instances if spec.role is Role.DECODE] or instances  # they hold all of a request's KV
    model_tokens = max(spec.limits.max_model_len for spec in holders)
    count, row = int(chosen.sum()), int(np.argmax(chosen))
    too_long = int((chosen & (prompt_tokens + output_tokens > model_tokens)).sum())
    why = {
        f"longer than max_model_len, {model_tokens:,} tokens": too_long,
        f"longer than the KV memory of any instance, {_longest(holders):,} tokens": count - too_long,
    }
    causes = [text if number == count else f"{number:,} {text}" for text, number in why.items() if number]
    percent = 100 * count / len(chosen)
    share = f"{percent:.1f} %" if percent >= 0.1 else "under 0.1 %"
    first = f"{prompt_tokens[row]:,} + {output_tokens[row]:,} tokens"
    return (
        f"{count:,} of {len(chosen):,} requests ({share}) can never be served: {'; '.join(causes)}.",
        f"The first is request {row:,}: {first}. They miss the SLO, and have no latency.",
    )


def impossible_by_label(deployment: Deployment, runs: Sequence["Run"]) -> dict[Impossible, list[str]]:
    """Impossible requests of the runs, with the labels of the runs that have them."""
    labels: dict[Impossible, list[str]] = {}
    for run in runs:
        if (impossible := impossible_in(run.result.outcomes, deployment.instances)) is not None:
            labels.setdefault(impossible, []).append(run.label)
    return labels


def _longest(instances: Sequence[InstanceSpec]) -> int:
    return max(min(spec.limits.max_model_len, spec.kv_tokens // spec.lanes) for spec in instances)


# Rows of the table: title, figure, factor, unit.
_ROWS: tuple[tuple[str, str, float, str], ...] = (
    ("completed", "completed", 1.0, ""),
    ("refused", "refused", 1.0, ""),
    ("impossible", "impossible", 1.0, ""),
    ("unfinished", "unfinished", 1.0, ""),
    ("timed out", "timed_out", 1.0, ""),
    *(
        (f"{name.upper()} {part}", f"{name}_{part}_s", 1000.0 if name in ("tpot", "itl") else 1.0, unit)
        for name, unit in (("ttft", "s"), ("tpot", "ms"), ("itl", "ms"), ("jct", "s"))
        for part in ("mean", "p50", "p90", "p99")
    ),
    *((f"longest gap {part}", f"longest_gap_{part}_s", 1000.0, "ms") for part in ("p50", "p90", "p99", "max")),
    ("SLO attainment, TTFT", "attainment_ttft", 100.0, "%"),
    ("SLO attainment, TPOT", "attainment_tpot", 100.0, "%"),
    ("SLO attainment, ITL", "attainment_itl", 100.0, "%"),
    ("SLO attainment", "attainment", 100.0, "%"),
    ("goodput", "goodput_requests_per_s", 1.0, "requests/s"),
    ("throughput", "requests_per_s", 1.0, "requests/s"),
    ("output", "output_tokens_per_s", 1.0, "tokens/s"),
    ("mean utilisation", "utilisation_mean", 100.0, "%"),
    ("KV moved", "kv_gb", 1.0, "GB"),
    ("preemptions", "preemptions", 1.0, ""),
    ("cost", "cost_usd", 1.0, "USD"),
    ("cost of a million output tokens", "usd_per_million_output_tokens", 1.0, "USD"),
    ("requests per USD", "requests_per_usd", 1.0, ""),
    ("duration", "duration_s", 1.0, "s"),
)
_IF_ANY = {"refused", "impossible", "unfinished", "timed_out", "preemptions"}  # left out of the table when all are 0


@dataclass(frozen=True, slots=True)
class Run:
    """A simulated run. figures: see `shared.sim.metrics.summary`. wall_s: duration of the simulation itself."""

    spec: RunSpec
    result: SimResult
    figures: dict[str, float]
    wall_s: float
    goodput: Goodput | None = None

    @property
    def label(self) -> str:
        """The policies as written on the command line."""
        return self.spec.label


def show(console: Console, deployment: Deployment, workload: Workload, runs: Sequence[Run]) -> None:
    """Print cluster and workload, the figures of all policies side by side, and the instances of each."""
    cluster, traffic = summary_lines(deployment, workload, runs)
    console.print(f"{deployment.name}: {cluster}", markup=False)
    console.print(traffic, markup=False)
    console.print(figures_table(runs))
    for run in runs:
        console.print(instances_table(run))
    for impossible, labels in impossible_by_label(deployment, runs).items():
        warn(console, impossible, labels if len(labels) < len(runs) else ())
    for run in runs:
        if run.goodput is not None and (note := _goodput_note(run.goodput)):
            console.print(f"{run.label}: {note}", markup=False)
    took = ", ".join(f"{run.wall_s:.2f} s" for run in runs)
    console.print(f"simulated in {took}", style="dim", markup=False)


def summary_lines(deployment: Deployment, workload: Workload, runs: Sequence[Run]) -> tuple[str, str]:
    """A line about the cluster, and one about the workload with its SLO."""
    kinds = Counter(f"{spec.accelerator} {spec.role.value}" for spec in deployment.instances)
    listed = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    rate = "all at once" if np.isinf(workload.rate) else f"{workload.rate:,.3g} requests/s"
    slo = runs[0].spec.slo
    traffic = (
        f"{workload.name}: {len(workload):,} requests, {workload.prompt_tokens.mean():,.0f} + "
        f"{workload.output_tokens.mean():,.0f} tokens on average, {rate}; SLO: TTFT {slo.ttft_s:g} s, "
        f"TPOT {1000 * slo.tpot_s:g} ms, ITL {1000 * slo.itl_s:g} ms"
    )
    return f"{Path(deployment.model).name} on {listed}", traffic


def warn(console: Console, impossible: Impossible, labels: Sequence[str] = ()) -> None:
    headline, details = impossible
    text = Text(headline, "bold red").append(f"\n{details}", "default")
    title = "Impossible requests" + (f": {', '.join(labels)}" if labels else "")
    console.print(Panel(text, title=Text(title), title_align="left", border_style="red"))


def _goodput_note(found: Goodput) -> str:
    """The meaning of a goodput at either end of the search."""
    if not found.bounded:
        return "no rate misses the SLO: too few requests to tell the goodput"
    if found.rate == 0.0:
        rate, attained = found.tried[0]
        return f"even {rate:g} requests/s miss the target: SLO attainment {100 * attained:.1f} %"
    return ""


def write_csv(folder: Path, runs: Sequence[Run]) -> None:
    """Write `summary.csv` (a row per policy) and `requests-POLICY.csv` (a row per request). Raises InvalidRequest."""
    with writing(folder):
        rows = [{"policy": run.label, **run.figures} for run in runs]
        pd.DataFrame(rows).to_csv(folder / "summary.csv", index=False)
        for run in runs:
            outcomes_table(run.result).to_csv(folder / f"requests-{file_word(run.label)}.csv", index=False)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Create the folder if needed for the block that writes into it. Raises InvalidRequest."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise InvalidRequest(f"cannot write {error.filename or folder}: {error.strerror}") from error


_OUTCOMES = (
    *("arrival_s", "first_token_s", "last_token_s", "ttft_s", "tpot_s", "jct_s", "longest_gap_s", "gaps_over"),
    *("prompt_tokens", "output_tokens", "prefill_instance", "decode_instance", "split_tokens", "transfer_s"),
    *("attempts", "preemptions"),
)


def outcomes_table(result: SimResult) -> pd.DataFrame:
    """A row per request, in the order of the workload; empty cells for times and instances that do not exist."""
    o = result.outcomes
    names = np.array([*(use.instance_id for use in result.instances), ""], dtype=object)  # -1: none
    columns: dict[str, Any] = {
        "request": np.arange(len(o)),
        "status": np.array([status.name.lower() for status in Status], dtype=object)[o.status],
    }
    columns |= {name: getattr(o, name) for name in _OUTCOMES}
    columns |= {name: names[columns[name]] for name in ("prefill_instance", "decode_instance")}
    return pd.DataFrame(columns)


def file_word(label: str) -> str:
    """A label as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9_.=+-]+", "-", label).strip("-") or "run"


def figures_table(runs: Sequence[Run]) -> Table:
    """A row per figure, a column per policy."""
    table = Table(title="Figures", title_justify="left", box=None, padding=(0, 1))
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True)
    for run in runs:
        table.add_column(run.label.replace("+", "\n+ "), justify="right", overflow="fold")
    for title, name, factor, unit in _ROWS:
        values = [run.figures.get(name, float("nan")) for run in runs]
        if all(isnan(value) for value in values) or (name in _IF_ANY and not any(values)):
            continue
        table.add_row(title, unit, *("–" if isnan(value) else _number(factor * value) for value in values))
    return table


def _number(value: float) -> str:
    whole = value == int(value) if abs(value) < 1e15 else False
    return f"{int(value):,}" if whole else f"{value:,.1f}" if abs(value) >= 100 else f"{value:,.3g}"


def instances_table(run: Run) -> Table:
    """A row per group of instances whose names differ only in the number at the end."""
    table = Table(title=f"Instances: {run.label}", title_justify="left", box=None, padding=(0, 1))
    table.add_column("", no_wrap=True)
    table.add_column("accelerator", no_wrap=True)
    flips = any(use.flips for use in run.result.instances)
    for column in ("busy", "peak KV", "prefill", "decode", *(("in prefill", "flips") if flips else ())):
        table.add_column(column, justify="right", no_wrap=True)
    groups: dict[tuple[str, str], list[InstanceUse]] = {}
    for use in run.result.instances:
        groups.setdefault((re.sub(r"-\d+$", "", use.instance_id), use.accelerator), []).append(use)
    for (name, accelerator), uses in groups.items():
        total_s = sum(seconds for use in uses for seconds in use.role_s.values())
        in_prefill = _share(sum(use.role_s.get("prefill", 0.0) for use in uses), total_s)
        table.add_row(
            name if len(uses) == 1 else f"{name} x {len(uses)}",
            accelerator,
            _share(sum(use.busy_s for use in uses), run.result.duration_s * len(uses)),
            _share(max(use.peak_kv_share for use in uses), 1.0),
            _tokens(sum(use.prefill_tokens for use in uses)),
            _tokens(sum(use.decode_tokens for use in uses)),
            *((in_prefill, str(sum(use.flips for use in uses))) if flips else ()),
        )
    return table


def _tokens(count: int) -> str:
    return f"{count / 1e6:,.3g} M" if count >= 1_000_000 else f"{count:,}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole > 0 else "–"
