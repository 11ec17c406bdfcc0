"""Command line of `polyphase simulate`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.launcher import cli_common

_Trace = Annotated[
    str,
    typer.Option(
        "--trace",
        help="A trace file, or a synthetic workload: azure-conv, azure-code, LPLD, LPHD, HPLD, HPHD, Mixed, or lengths "
        "such as prompt=1000,output=200,prompt_cv=1,output_cv=0.8.",
    ),
]
_Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help="Policies joined by +, such as least_load+cronus+power_of_two or "
        "dispatch=random+fraction:fraction=0.5; repeat to compare several. Default: the file's.",
    ),
]


def simulate_command(
    cluster: Annotated[Path, typer.Argument(help="A cluster file, a simulation file, or the name of a shipped one.")],
    trace: _Trace,
    rate: Annotated[float | None, typer.Option(help="Requests per second. Default: the times of the trace.")] = None,
    requests: Annotated[
        int | None, typer.Option(help="Number of requests to take from the trace or to generate.")
    ] = None,
    policy: _Policies = None,
    arrivals: Annotated[str, typer.Option(help="Arrival process: trace, poisson, even, bursts or on_off.")] = "",
    cv: Annotated[
        float | None, typer.Option(help="Coefficient of variation of the gaps with --arrivals bursts.")
    ] = None,
    slo_ttft: Annotated[float | None, typer.Option(help="Target of TTFT in seconds. Default: the file's.")] = None,
    slo_tpot: Annotated[float | None, typer.Option(help="Target of TPOT in seconds. Default: the file's.")] = None,
    slo_itl: Annotated[float | None, typer.Option(help="Target of ITL in seconds. Default: the file's.")] = None,
    accuracy: Annotated[
        float | None, typer.Option(help="Give policies length predictions that are right with this probability.")
    ] = None,
    prediction: Annotated[
        Path | None, typer.Option(help="Give policies length predictions with the errors in this evaluation file.")
    ] = None,
    goodput: Annotated[bool, typer.Option("--goodput", help="Search for the highest rate within the SLO.")] = False,
    target: Annotated[float, typer.Option(help="SLO attainment that --goodput requires.")] = 0.9,
    seed: Annotated[int, typer.Option(help="Seed of arrivals, lengths and policies.")] = 0,
    lengths: Annotated[
        Path | None, typer.Option(help="File of token counts from which LPLD … Mixed are drawn.")
    ] = None,
    trace_format: Annotated[
        str, typer.Option("--format", help="Format of the trace. Default: detected from its keys.")
    ] = "",
    sort: Annotated[bool, typer.Option("--sort", help="Sort requests by time if the trace is not in order.")] = False,
    skip_empty: Annotated[bool, typer.Option("--skip-empty", help="Skip requests without tokens.")] = False,
    time_unit: Annotated[
        str, typer.Option(help="Unit of the trace's times, s or ms. Default: that of its format.")
    ] = "",
    block_tokens: Annotated[int, typer.Option(help="Tokens of each block named by hash_ids.", min=1)] = 512,
    calibration: Annotated[
        Path | None, typer.Option(help="Efficiencies file (YAML) in place of the built-in one.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Folder for CSV files of figures and requests.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for report.html with figures and plots.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; the last line is one object.")] = False,
) -> None:
    """Simulate a workload on a cluster in virtual time: latency, SLO attainment, goodput, cost."""
    from tools.simulate.session import SimulateOptions, run_simulation
    from tools.simulate.workloads import WorkloadOptions

    workload = WorkloadOptions(
        source=trace,
        requests=requests,
        rate=rate,
        arrivals=arrivals,
        cv=cv,
        seed=seed,
        format=trace_format,
        sort=sort,
        skip_empty=skip_empty,
        lengths=lengths,
        time_unit=time_unit,
        block_tokens=block_tokens,
    )
    slo = {"ttft": slo_ttft, "tpot": slo_tpot, "itl": slo_itl}
    options = SimulateOptions(
        cluster=cluster,
        workload=workload,
        policies=tuple(policy or ()),
        slo=slo,
        accuracy=accuracy,
        prediction=prediction,
        calibration=calibration,
        goodput=goodput,
        target=target,
        csv=csv,
        plots=plots,
    )
    result = run_simulation(options, Console())
    if as_json:
        cli_common.print_json(cli_common.summary(result))
