"""What `bench mixed` makes of its runs: medians, gains beside the paper's, the simulator beside the engines."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from lab.bench.mixed_load import METRICS, Load, Seen
from lab.bench.mixed_pair import ADAPTIVE, BALANCED, DATA_PARALLEL, HIGH_LOW, LOW_HIGH, SYSTEMS, System
from lab.bench.mixed_sim import Means
from lab.bench.replayed import Result

OVER_DATA_PARALLEL, OVER_DISAGGREGATED = 1.05, 1.8
TBT_SHARE, JCT_SHARE, TTFT_SHARE = 0.5, 0.7, 1.0  # of data-parallel's, at most
NOISE = 1.03  # what counts as not behind
MEANS_PERCENT = 15.0
TOLD_APART = 0.15  # systems that differ by less have no order
# Cronus 5.2 to 5.4: over Disagg L-H and H-L, and below data-parallel.
PAPER = {
    "paper_throughput_over_low_high_up_to": 1.9,
    "paper_throughput_over_high_low_up_to": 5.64,
    "paper_ttft_p99_below_data_parallel_percent_up_to": 55.0,
    "paper_tbt_p99_below_data_parallel_percent_up_to": 63.0,
}


@dataclass(frozen=True, slots=True)
class Run:
    """One replay on the engines. throttled: by instance, the share of periods in which it used its quota up.

    sent: where each request went, of systems that take turns.
    """

    system: System
    load: Load
    seen: Seen
    throttled: Mapping[str, float]
    foreign_cores: float
    sent: tuple[str, ...] = ()


@dataclass(slots=True)
class Table:
    """Medians over the rounds, by load, system and metric."""

    runs: Sequence[Run]
    found: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        groups: defaultdict[tuple[str, str], list[Run]] = defaultdict(list)
        for run in self.runs:
            groups[run.load.label, run.system.label].append(run)
        for key, several in groups.items():
            rows = {name: median(getattr(run.seen, name) for run in several) for name in METRICS}
            for instance in several[0].throttled:
                rows[f"{instance}_throttled_share"] = median(run.throttled[instance] for run in several)
            rows["foreign_cores"] = median(run.foreign_cores for run in several)
            self.found[key] = rows

    def get(self, load: str, system: System, metric: str) -> float | None:
        """None where that system was not put under that load."""
        rows = self.found.get((load, system.label))
        return rows[metric] if rows is not None else None

    @property
    def loads(self) -> list[str]:
        """In the order in which they ran."""
        return list(dict.fromkeys(load for load, _ in self.found))

    def figures(self) -> dict[str, float]:
        """All of them."""
        return {
            f"{load}_{system}_{name}": value
            for (load, system), rows in self.found.items()
            for name, value in rows.items()
        }


def report(runs: Sequence[Run], said: Mapping[tuple[str, str], Means], notes: Iterable[str] = ()) -> Result:
    """Figures, aims and notes. said: the simulator's means, by load and system."""
    table = Table(runs)
    figures, aims = table.figures() | PAPER, dict[str, dict[str, Any]]()
    for more, wanted in (_throughput(table), *map(_at_rate(table), table.loads), _simulated(table, said)):
        figures |= more
        aims |= wanted
    words = [f"{system.label}: {system.words}" for system in SYSTEMS]
    return {"figures": figures, "aims": aims, "notes": [*words, *notes]}


def _throughput(table: Table) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    def ours(other: System) -> float | None:
        got, base = (table.get("burst", system, "requests_per_s") for system in (ADAPTIVE, other))
        return got / base if got is not None and base else None

    ratios = {other.label: ours(other) for other in SYSTEMS if other is not ADAPTIVE}
    figures = {f"throughput_over_{label}": ratio for label, ratio in ratios.items() if ratio is not None}
    disaggregated = [ratio for label in (LOW_HIGH.label, HIGH_LOW.label) if (ratio := ratios[label]) is not None]
    aims = {
        "throughput_over_data_parallel": at_least(OVER_DATA_PARALLEL, ratios[DATA_PARALLEL.label]),
        "throughput_over_better_disaggregation": at_least(OVER_DISAGGREGATED, min(disaggregated, default=None)),
        "throughput_over_balanced": at_least(1.0 / NOISE, ratios[BALANCED.label]),
    }
    return figures, aims


def _at_rate(table: Table) -> Any:
    """A function of the load: adaptive over data-parallel and over `balanced` there."""

    def of(load: str) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
        if load == "burst":
            return {}, {}
        figures: dict[str, float] = {}
        aims: dict[str, dict[str, Any]] = {}
        wanted = {"tbt_p99": TBT_SHARE, "jct_mean": JCT_SHARE, "ttft_p99": TTFT_SHARE}
        for metric, most in wanted.items():
            for other, bound in ((DATA_PARALLEL, most), (BALANCED, NOISE)):
                got, base = (table.get(load, system, f"{metric}_s") for system in (ADAPTIVE, other))
                name = f"{load}_{metric}_over_{other.label}"
                ratio = got / base if got is not None and base else None
                if ratio is not None:
                    figures[name] = ratio
                aims[name] = at_most(bound, ratio)
        return figures, aims

    return of


def _simulated(
    table: Table, said: Mapping[tuple[str, str], Means]
) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    figures: dict[str, float] = {}
    worst: dict[str, float] = {}
    for (load, system), means in said.items():
        for name, value in means._asdict().items():
            figures[f"{load}_{system}_{name}_simulated"] = value
            rows = table.found.get((load, system))
            at_rate = name == "requests_per_s" and load != "burst"  # what arrives, and how long the last answer takes
            if rows is not None and rows[name] and not at_rate:
                off = 100.0 * (value / rows[name] - 1.0)
                figures[f"{load}_{system}_{name}_off_percent"] = off
                worst[name] = max(worst.get(name, 0.0), abs(off))
    aims = {f"simulated_{name}_off_percent": at_most(MEANS_PERCENT, off) for name, off in worst.items()}
    wrong = [*_wrong_order(table, said)]
    aims["simulated_pairs_in_wrong_order"] = {"want": 0, "got": ", ".join(wrong) or 0, "met": not wrong}
    return figures, aims


def _wrong_order(table: Table, said: Mapping[tuple[str, str], Means]) -> Iterable[str]:
    """Pairs of systems that really differ under a load, and the other way round in the simulator."""
    for load in table.loads:
        name = "requests_per_s" if load == "burst" else "jct_mean_s"
        labels = [system.label for system in SYSTEMS if (load, system.label) in table.found.keys() & said.keys()]
        for at, one in enumerate(labels):
            for other in labels[at + 1 :]:
                live = table.found[load, other][name] / table.found[load, one][name]
                simulated = getattr(said[load, other], name) / getattr(said[load, one], name)
                if max(live, 1.0 / live) >= 1.0 + TOLD_APART and (live - 1.0) * (simulated - 1.0) <= 0.0:
                    yield f"{load}: {one} and {other}"


def at_least(want: float, got: float | None) -> dict[str, Any]:
    """An aim; what was not measured misses it."""
    return {"want": f">= {want:.3g}", "got": _rounded(got), "met": got is not None and got >= want}


def at_most(want: float, got: float | None) -> dict[str, Any]:
    """The same the other way."""
    return {"want": f"<= {want:.3g}", "got": _rounded(got), "met": got is not None and got <= want}


def _rounded(got: float | None) -> float | str:
    return "not measured" if got is None else round(got, 3)
