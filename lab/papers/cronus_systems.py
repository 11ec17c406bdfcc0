"""The five systems of Cronus' evaluation (5.1), on an A100 and an A10 or A30 in different hosts."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from lab.papers.clusters import Kind, instances, weighed
from lab.papers.cronus_stages import CHUNKED, HIGH, INFINIBAND, WHOLE
from lab.papers.stages import Stage, in_turn, staged
from lab.papers.testbed import Testbed
from lab.papers.watermark import Watermark
from shared.domain.instance import Role
from shared.policy.dispatch import PowerOfTwo
from shared.policy.placement import LeastLoad, Placement, Policies, Weighted
from shared.policy.split import CronusSplit, FullSplit, NoSplit, Split
from shared.sim.cluster import simulate
from shared.sim.outcomes import SimResult
from shared.sim.spec import EngineLimits, FirstToken, InstanceSpec, RunSpec
from shared.sim.workload import Workload

SYSTEMS = ("DP", "PP", "Disagg H-L", "Disagg L-H", "Cronus")
_LOW_CHUNKED = EngineLimits(batched_tokens=256, sequences=256)
# Layers on the A100 and on the other, by the paper's split after BF16 rates.
_LAYERS = {
    ("A10", "Llama-3-8B"): (23, 9),
    ("A30", "Llama-3-8B"): (21, 11),
    ("A10", "Qwen2-7B"): (20, 8),
    ("A30", "Qwen2-7B"): (18, 10),
}


@dataclass(frozen=True, slots=True)
class Column:
    """A hardware pair with a model."""

    low: str
    model: str

    @property
    def name(self) -> str:
        """Short."""
        return f"A100+{self.low} {self.model}"


def run_system(testbed: Testbed, column: Column, system: str, workload: Workload) -> SimResult:
    """The workload through one of `SYSTEMS`."""
    return _BUILDERS[system](testbed, column, workload)


def _dp(testbed: Testbed, column: Column, workload: Workload) -> SimResult:
    """Weights 3 and 1; 3 and 1 requests may wait, beside the one whose prompt is being computed."""
    high, low = (
        instances(testbed, Kind(accelerator, column.model, limits=limits, link=INFINIBAND), Role.DECODE, 1, prefix)[0]
        for accelerator, limits, prefix in ((HIGH, CHUNKED, "high"), (column.low, _LOW_CHUNKED, "low"))
    )
    cluster = (replace(weighed(high, 3.0), max_prefills=4), replace(weighed(low, 1.0), max_prefills=2))
    return _simulate(workload, cluster, Weighted(), NoSplit())


def _pp(testbed: Testbed, column: Column, workload: Workload) -> SimResult:
    """Two micro-batches that take turns, each with half of the KV: the stages do not overlap (see `prose.yaml`)."""
    layers = _LAYERS[column.low, column.model]
    stages = (Stage(HIGH, layers[0]), Stage(column.low, layers[1]))
    spec = staged(testbed, "pp", column.model, stages, Role.DECODE, CHUNKED, INFINIBAND, INFINIBAND)
    return _simulate(workload, (in_turn(spec),), LeastLoad(), NoSplit())


def _disaggregated(first: str | None, second: str | None) -> "Builder":
    """Prefill on one GPU, decode on the other; None is the column's low-end one."""

    def build(testbed: Testbed, column: Column, workload: Workload) -> SimResult:
        cluster = _pair(testbed, column, first or column.low, second or column.low)
        return _simulate(workload, cluster, LeastLoad(), FullSplit())

    return build


def _cronus(testbed: Testbed, column: Column, workload: Workload) -> SimResult:
    """The policy as it is; the prefill instance's own limit (`_pair`) is what `max_prefills` of the split does live."""
    split = CronusSplit(max_prefills=0)
    return _simulate(workload, _pair(testbed, column, column.low, HIGH), LeastLoad(), split)


def _pair(testbed: Testbed, column: Column, first: str, second: str) -> tuple[InstanceSpec, ...]:
    """At most two requests are in the prefill instance, so that each split rests on fresh loads (4.2)."""
    prefill = Kind(first, column.model, limits=WHOLE, link=INFINIBAND)
    decode = Kind(second, column.model, limits=CHUNKED, link=INFINIBAND)
    return (
        *(replace(spec, max_prefills=2) for spec in instances(testbed, prefill, Role.PREFILL)),
        *instances(testbed, decode, Role.DECODE),
    )


def _simulate(workload: Workload, cluster: tuple[InstanceSpec, ...], placement: Placement, split: Split) -> SimResult:
    run = RunSpec(
        policies=Policies(placement, split, PowerOfTwo()),
        decode_admission=Watermark(),
        first_token=FirstToken.DECODE,
        streaming=False,
        broadcast_s=0.0,
    )
    return simulate(workload, cluster, run)


Builder = Callable[[Testbed, Column, Workload], SimResult]
_BUILDERS: dict[str, Builder] = {
    "DP": _dp,
    "PP": _pp,
    "Disagg H-L": _disaggregated(HIGH, None),
    "Disagg L-H": _disaggregated(None, HIGH),
    "Cronus": _cronus,
}
