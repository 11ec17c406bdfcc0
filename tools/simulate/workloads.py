"""The workload of a simulation, from command-line options."""

from dataclasses import dataclass
from pathlib import Path

from shared.errors import InvalidRequest
from shared.sim.traces import BLOCK_TOKENS, read_trace
from shared.sim.workload import (
    ARRIVALS,
    CHATS,
    CHOICES,
    TURNS_A_CHAT,
    Tetri,
    Workload,
    bursts,
    conversations,
    is_made,
    made,
)

DEFAULT_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """source: the path of a trace, or the name or lengths of a synthetic workload.

    requests: the number taken from a trace, or generated; None for all, or the default. rate: requests per second; None
    keeps a trace's times (requests of a synthetic workload arrive at once). arrivals: a name of `ARRIVALS`; "" for the
    trace's pattern, or Poisson where it has none. cv: of the gaps of "bursts". lengths: a token-count table for
    TetriInfer's workloads. time_unit, block_tokens: see `read_trace`.
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
    time_unit: str = ""
    block_tokens: int = BLOCK_TOKENS


def make_workload(options: WorkloadOptions) -> Workload:
    """The requests, at the rate of the options. Raises InvalidRequest."""
    workload = _requests(options)
    return workload if options.rate is None else at_rate(workload, options, options.rate)


def at_rate(workload: Workload, options: WorkloadOptions, rate: float) -> Workload:
    """The same requests at another rate; of synthetic chats as many as come to it, with their own pauses."""
    if options.source == CHATS and not options.arrivals and options.cv is None:
        return conversations(len(workload), options.seed, rate / TURNS_A_CHAT)
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
        read = read_trace(
            Path(options.source),
            options.format,
            sort=options.sort,
            skip_empty=options.skip_empty,
            time_unit=options.time_unit,
            block_tokens=options.block_tokens,
        )
        return read if options.requests is None else read.head(options.requests)
    if not is_made(options.source):
        raise InvalidRequest(f"no trace file {options.source!r}; synthetic workloads are {CHOICES}")
    drawn_from = options.lengths if options.source in list(Tetri) else None
    table = read_trace(drawn_from, skip_empty=options.skip_empty) if drawn_from else None
    return made(options.source, options.requests or DEFAULT_REQUESTS, options.seed, table)
