"""ThunderServe, Figs 6 and 14: which ratio of prefill to decode instances serves coding and conversation best."""

from collections.abc import Mapping
from pathlib import Path

from lab.papers.chart import Chart
from lab.papers.clusters import Kind, instances, tokens_per_s
from lab.papers.lengths import CODING, CONVERSATION, azure
from lab.papers.rows import Row, order
from lab.papers.testbed import Testbed
from lab.papers.watermark import Watermark
from shared.cost.network import Link
from shared.domain.instance import Role
from shared.domain.kv import Codec
from shared.sim.cluster import simulate
from shared.sim.spec import EngineLimits, RunSpec
from shared.sim.workload import Workload

NETWORK = Link(5e9)  # 40 Gb/s, of which `Link` reaches 58 % as the paper measured
CONTEXT_TOKENS = 2048  # the model's
RUN = RunSpec(label="ThunderServe", codec=Codec.INT4, decode_admission=Watermark())
_KIND = Kind("RTX-A5000", "Llama-2-13B", 2, EngineLimits(batched_tokens=2048), NETWORK)
_INSTANCES = 8
_REQUESTS = 800


def ratio_rows(testbed: Testbed, data: Path) -> tuple[tuple[Row, ...], Chart]:
    """The best ratio for each workload, and a chart of all."""
    found = {
        name: throughputs(testbed, azure(data, trace, _REQUESTS, CONTEXT_TOKENS).at_once())
        for name, trace in (("coding", CODING), ("conversation", CONVERSATION))
    }
    best = {name: max(by, key=lambda prefills: by[prefills]) for name, by in found.items()}
    rows = [
        order(
            f"ratio_{name}",
            "Figs 6, 14",
            f"best P:D of 8 instances, {name}",
            _shown(paper),
            _told(found[name]),
            best[name] == paper,
        )
        for name, paper in (("coding", 5), ("conversation", 3))
    ]
    rows.append(
        order(
            "ratio_sides",
            "Figs 6, 14",
            "more prefill than decode for coding, less for conversation",
            "yes",
            f"{_shown(best['coding'])} and {_shown(best['conversation'])}",
            best["coding"] > _INSTANCES / 2 > best["conversation"],
        )
    )
    chart = Chart(
        "thunderserve_ratio",
        "ThunderServe, Fig 6: throughput by P:D, 16 A5000, LLaMA-13B",
        "tokens/s",
        tuple(_shown(prefills) for prefills in found["coding"]),
        {name: list(by.values()) for name, by in found.items()},
    )
    return tuple(rows), chart


def throughputs(testbed: Testbed, workload: Workload) -> dict[int, float]:
    """Tokens a second by the number of prefill instances."""
    return {
        prefills: tokens_per_s(
            simulate(
                workload,
                (
                    *instances(testbed, _KIND, Role.PREFILL, prefills),
                    *instances(testbed, _KIND, Role.DECODE, _INSTANCES - prefills),
                ),
                RUN,
            )
        )
        for prefills in range(1, _INSTANCES)
    }


def _told(by: Mapping[int, float]) -> str:
    ranked = sorted(by, key=lambda prefills: -by[prefills])[:3]
    return ", ".join(f"{_shown(prefills)} {by[prefills]:,.0f}" for prefills in ranked)


def _shown(prefills: int) -> str:
    return f"{prefills}:{_INSTANCES - prefills}"
