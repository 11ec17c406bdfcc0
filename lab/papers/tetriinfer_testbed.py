"""TetriInfer's testbed: OPT-13B on pairs of V100, a coupled instance against a prefill and a decode instance.

Baseline (5, 5.2.1): vLLM as it ran in 2023: prefill before any decode, whole prompts, a fixed batch of 16. TetriInfer:
chunks of 512, shortest first in batches of 16, reserve-dynamic, power of two, buckets of 200 tokens of which 74.9 % are
right. Requests come at once; their lengths are `tetri`'s, of whose medians only one is the paper's.
"""

from dataclasses import replace

from lab.papers.clusters import Kind, instances
from lab.papers.testbed import Testbed
from lab.papers.tetriinfer_micro import ACCELERATOR, DEGREE, MODEL
from lab.papers.watermark import AtopWatermark, Watermark
from shared.cost.network import Link
from shared.domain.instance import Role
from shared.policy.decode_admission import ReserveDynamic
from shared.policy.dispatch import PowerOfTwo
from shared.policy.placement import LeastLoad, Policies
from shared.policy.prefill_order import Sjf
from shared.policy.split import FullSplit
from shared.sim.cluster import simulate
from shared.sim.outcomes import SimResult
from shared.sim.prediction import Prediction
from shared.sim.spec import EngineLimits, RunSpec
from shared.sim.workload import Workload

ROCE = Link(25e9, latency_s=1e-5, efficiency=1.0)  # 200 Gb/s, as the paper's own emulation counts it
PREDICTOR_COST = 1.1  # the predictor runs beside the model: prefill takes 10 % longer (Fig 17)
PREDICTOR = Prediction(width_tokens=200, buckets=10, accuracy=0.749)
COUPLED = Kind(ACCELERATOR, MODEL, DEGREE, EngineLimits(batched_tokens=32768, sequences=16, prefill_first=True))
PREFILL = Kind(ACCELERATOR, MODEL, DEGREE, EngineLimits(batched_tokens=512), ROCE, slowed=PREDICTOR_COST)
DECODE = Kind(ACCELERATOR, MODEL, DEGREE, EngineLimits(batched_tokens=2048), ROCE)
TETRI = RunSpec(
    label="TetriInfer",
    policies=Policies(placement=LeastLoad(), split=FullSplit(), dispatch=PowerOfTwo()),
    prefill_order=Sjf(16),
    decode_admission=AtopWatermark(ReserveDynamic()),
    prediction=PREDICTOR,
    streaming=False,  # KV leaves a request at a time (3.3.4)
)
SEEDS = (0, 1, 2)
# For studies of decode alone: prompts take no time, as the paper's emulation has their KV at hand (section 4).
INSTANT = replace(PREFILL, slowed=1e-3, link=Link(1e12, latency_s=0.0, efficiency=1.0))


def coupled(testbed: Testbed, workload: Workload) -> SimResult:
    """The baseline."""
    run = RunSpec(label="vLLM 2023", decode_admission=Watermark())
    return simulate(workload, instances(testbed, COUPLED, Role.DECODE), run)


def disaggregated(
    testbed: Testbed,
    workload: Workload,
    run: RunSpec = TETRI,
    *,
    prefill: Kind = PREFILL,
    decodes: int = 1,
    seed: int = 0,
) -> SimResult:
    """One prefill instance and that many decode instances."""
    cluster = (*instances(testbed, prefill, Role.PREFILL), *instances(testbed, DECODE, Role.DECODE, decodes))
    return simulate(workload, cluster, replace(run, seed=seed))
