"""A run of `polyphase simulate`: reads the files, simulates each policy, and reports."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from time import perf_counter

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from services.launcher.cli_common import Result
from shared.domain.job import Slo, default_itl_s, tight_gaps
from shared.errors import InvalidRequest
from shared.sim.cluster import simulate
from shared.sim.metrics import goodput, summary
from shared.sim.outcomes import SimResult
from shared.sim.prediction import Prediction
from shared.sim.spec import RunSpec, with_words
from shared.sim.workload import Workload
from tools.simulate import report
from tools.simulate.deployment import Deployment, load_deployment
from tools.simulate.report import Run, show, write_csv
from tools.simulate.sim_file import load_prediction
from tools.simulate.workloads import WorkloadOptions, at_rate, make_workload

_SAMPLES = 400  # of a load timeline


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """Options of the command line. None: as in the file. Times in seconds."""

    cluster: Path
    workload: WorkloadOptions
    policies: tuple[str, ...] = ()
    slo: Mapping[str, float | None] = field(default_factory=dict)  # targets by ttft, tpot and itl
    accuracy: float | None = None
    prediction: Path | None = None
    calibration: Path | None = None
    goodput: bool = False
    target: float = 0.9
    csv: Path | None = None
    plots: Path | None = None


def run_simulation(options: SimulateOptions, console: Console) -> Result:
    """Simulate and report. Returns {"figures": {name_unit: number}}; with several policies as POLICY/name_unit.

    Raises InvalidRequest, NotFound or Incompatible before the first simulation.
    """
    deployment = load_deployment(options.cluster, options.calibration)
    workload = make_workload(options.workload)
    specs = run_specs(options, deployment, workload)
    impossible = report.impossible_of(workload, deployment.instances)
    if impossible is not None:  # before the simulation, which may take long
        console.print(Text(impossible[0], "bold red"))
    with _progress() as progress:
        runs = tuple(_run(options, deployment, workload, spec, progress) for spec in specs)
    show(console, deployment, workload, runs)
    if options.csv is not None:
        write_csv(options.csv, runs)
    if options.plots is not None:
        from tools.simulate.page import write_page  # plotly takes long to import

        console.print(f"report: {write_page(options.plots, deployment, workload, runs)}", markup=False, soft_wrap=True)
    return {"figures": _figures(runs)}


def run_specs(options: SimulateOptions, deployment: Deployment, workload: Workload) -> tuple[RunSpec, ...]:
    """A run for each policy of the options, or for the file's. Raises InvalidRequest."""
    if len(set(options.policies)) < len(options.policies):
        raise InvalidRequest("--policy: the same policies are given twice")
    if not 0.0 < options.target <= 1.0:
        raise InvalidRequest(f"--target must be above 0 and at most 1, got {options.target}")
    base = replace(deployment.run, seed=options.workload.seed, slo=_slo(options.slo, deployment.run.slo))
    if options.prediction is not None:
        base = replace(base, prediction=Prediction(**load_prediction(options.prediction).model_dump()))
    if options.accuracy is not None:
        prediction = base.prediction or Prediction()
        base = replace(base, prediction=replace(prediction, accuracy=options.accuracy, confusion=None))
    if options.plots is not None:
        span = float(workload.arrival_s[-1] - workload.arrival_s[0])
        base = replace(base, sample_s=max(span / _SAMPLES, 0.05))
    return tuple(with_words(base, words) for words in options.policies) or (base,)


def _slo(targets: Mapping[str, float | None], file_slo: Slo) -> Slo:
    given = {f"{name}_s": value for name, value in targets.items() if value is not None}
    for name, value in given.items():
        if not value > 0:
            raise InvalidRequest(f"--slo-{name.removesuffix('_s')} must be positive, got {value}")
    if "tpot_s" in given and file_slo.itl_s == default_itl_s(file_slo.tpot_s):
        given.setdefault("itl_s", default_itl_s(given["tpot_s"]))
    slo = msgspec.structs.replace(file_slo, **given)
    if wrong := tight_gaps(slo.itl_s, slo.tpot_s):
        raise InvalidRequest(f"--slo-itl: {wrong}")
    return slo


def _run(
    options: SimulateOptions, deployment: Deployment, workload: Workload, spec: RunSpec, progress: Progress
) -> Run:
    started = perf_counter()
    result = _tracked(deployment, workload, spec, progress, spec.label)
    wall_s = perf_counter() - started
    figures = summary(result, spec.slo)
    found = None
    if options.goodput:
        plain = replace(spec, sample_s=0.0)

        def at(rate: float) -> SimResult:
            label = f"{spec.label}, {rate:.3g} requests/s"
            return _tracked(deployment, at_rate(workload, options.workload, rate), plain, progress, label)

        found = goodput(at, spec.slo, options.target)
        figures |= {"goodput_requests_per_s": found.rate, "goodput_attainment": found.attainment}
    return Run(spec, result, figures, wall_s, found)


def _tracked(deployment: Deployment, workload: Workload, spec: RunSpec, progress: Progress, label: str) -> SimResult:
    task = progress.add_task(label, total=len(workload))

    def advance(ended: int) -> None:
        progress.update(task, completed=ended)

    result = simulate(workload, deployment.instances, spec, advance)
    progress.remove_task(task)
    return result


def _progress() -> Progress:
    """Progress on stderr, so that stdout can be piped; removed at the end."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _figures(runs: tuple[Run, ...]) -> dict[str, float]:
    """The finite figures: JSON has no NaN."""
    return {
        f"{run.label}/{name}" if len(runs) > 1 else name: value
        for run in runs
        for name, value in run.figures.items()
        if isfinite(value)
    }
