"""The workload of a simulation, from what the command line says."""

from dataclasses import dataclass, replace
from pathlib import Path

from shared.errors import InvalidRequest
from shared.sim.arrivals import ARRIVALS, Tetri, bursts, synthetic, tetri
from shared.sim.traces import read_trace
from shared.sim.workload import Workload

DEFAULT_REQUESTS = 1000
# Log-normal lengths with the means and variations of the public Azure traces of 2023 (all rows; CC-BY-4.0, Patel et
# al., Splitwise, ISCA 2024): prompt, output, and their coefficients of variation.
_LIKE = {"azure-conv": (1155.0, 211.0, 0.96, 0.77), "azure-code": (2048.0, 28.0, 0.96, 2.15)}
_KEYS = ("prompt", "output", "prompt_cv", "output_cv", "longest")


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """What to simulate. `source`: a trace's path, or the name or lengths of a made workload.

    requests: the first so many of a trace, or how many to make; None for all, or the default. rate: requests a second;
    None keeps a trace's own times (a made workload comes at once). arrivals: a name of `ARRIVALS`; "" for the trace's
    pattern, Poisson where it has none. cv: of the gaps of "bursts". lengths: a token-count table for TetriInfer's.
    """

    source: str
    requests: int | None = None
    rate: float | None = None
    arrivals: str = ""
    cv: float | None = None
    seed: int = 0
    format: str = ""
    sort: bool = False
    skip_empty: bool = False
    lengths: Path | None = None


def make_workload(options: WorkloadOptions) -> Workload:
    """The requests, at the rate that the options say. Raises InvalidRequest that names what is wrong."""
    workload = _requests(options)
    return workload if options.rate is None else at_rate(workload, options, options.rate)


def at_rate(workload: Workload, options: WorkloadOptions, rate: float) -> Workload:
    """The same requests at another rate."""
    name = options.arrivals or ("trace" if workload.arrival_s[-1] > workload.arrival_s[0] else "poisson")
    if name not in ARRIVALS:
        raise InvalidRequest(f"unknown arrivals {name!r}; known: {', '.join(ARRIVALS)}")
    if options.cv is not None:
        if name != "bursts":
            raise InvalidRequest(f"a coefficient of variation is for arrivals 'bursts', not {name!r}")
        return bursts(workload, rate, options.seed, options.cv)
    return ARRIVALS[name](workload, rate, options.seed)


def _requests(options: WorkloadOptions) -> Workload:
    if options.requests is not None and options.requests < 1:
        raise InvalidRequest(f"requests must be at least 1, not {options.requests}")
    if Path(options.source).is_file():
        read = read_trace(Path(options.source), options.format, sort=options.sort, skip_empty=options.skip_empty)
        return read if options.requests is None else read.head(options.requests)
    count = options.requests or DEFAULT_REQUESTS
    if options.source in _LIKE:
        prompt, output, prompt_cv, output_cv = _LIKE[options.source]
        made = synthetic(count, prompt, output, prompt_cv=prompt_cv, output_cv=output_cv, seed=options.seed)
        return replace(made, name=options.source)
    if options.source in list(Tetri):
        table = read_trace(options.lengths, skip_empty=options.skip_empty) if options.lengths else None
        return tetri(options.source, count, options.seed, table)
    if "=" in options.source:
        return _made(options.source, count, options.seed)
    raise InvalidRequest(
        f"no trace file {options.source!r}; made workloads are {', '.join((*_LIKE, *Tetri))}, "
        "or lengths such as prompt=1000,output=200"
    )


def _made(source: str, count: int, seed: int) -> Workload:
    values: dict[str, float] = {}
    for item in source.split(","):
        key, _, value = item.partition("=")
        key = key.strip()
        if key not in _KEYS:
            raise InvalidRequest(f"workload {source!r}: no key {key!r}; known: {', '.join(_KEYS)}")
        try:
            values[key] = float(value)
        except ValueError as error:
            raise InvalidRequest(f"workload {source!r}: {key} must be a number, not {value!r}") from error
    missing = [key for key in ("prompt", "output") if key not in values]
    if missing:
        raise InvalidRequest(f"workload {source!r}: {missing[0]} is missing")
    return synthetic(
        count,
        values["prompt"],
        values["output"],
        prompt_cv=values.get("prompt_cv", 0.0),
        output_cv=values.get("output_cv", 0.0),
        longest_tokens=int(values["longest"]) if "longest" in values else None,
        seed=seed,
    )
