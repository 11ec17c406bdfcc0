"""`polyphase bench plan`: the papers' cases, beside the oracle and every other method, large, and plans started."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.bench.plan_limits import case_impossible
from lab.bench.plan_live import case_live
from lab.bench.plan_papers import case_huawei, case_zte
from lab.bench.plan_random import case_beside, case_oracle, case_scale
from lab.bench.plan_thunderserve import Part, case_32, case_bandwidth, case_loss, case_sizes
from shared.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class PlanBenchOptions:
    """parts: names of `PARTS`; all without any. processes: that search, where there are many inventories."""

    data: Path
    parts: tuple[str, ...] = ()
    processes: int = 2


PARTS: dict[str, Callable[[PlanBenchOptions], Part]] = {
    "thunderserve": lambda options: case_32(options.data),
    "sizes": lambda options: case_sizes(options.data),
    "bandwidth": lambda _: case_bandwidth(),
    "loss": lambda options: case_loss(options.data),
    "oracle": lambda options: case_oracle(options.processes),
    "huawei": lambda options: case_huawei(options.data),
    "zte": lambda _: case_zte(),
    "scale": lambda _: case_scale(),
    "beside": lambda options: case_beside(options.processes),
    "impossible": lambda _: case_impossible(),
    "live": lambda options: case_live(options.data),
}


def run_plan_bench(options: PlanBenchOptions) -> dict[str, Any]:
    """Each part in turn. Raises InvalidRequest for a part that there is not."""
    for name in options.parts:
        if name not in PARTS:
            raise InvalidRequest(f"no part {name!r}; there are {', '.join(PARTS)}")
    figures: dict[str, float] = {}
    aims: dict[str, Any] = {}
    notes: list[str] = []
    for name in options.parts or PARTS:
        found, met, said = PARTS[name](options)
        figures |= found
        aims |= met
        notes += said
    return {"figures": figures, "aims": aims, "notes": notes}
