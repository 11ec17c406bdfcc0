"""Cronus' stage capacities: what each GPU does alone as prefill or decode stage, measured (derived) and modelled.

They are all that the coefficients are fitted to. Table 2 over Table 3 gives twelve: prefill and decode of three GPUs
and two models (FORMULAS section 6). Eight numbers are fitted: of each GPU the share of predicted compute (from its
prefill) and of predicted bandwidth (from its decode), shared by both models; and what a step and a sequence cost the
engine. Those two follow from the decodes: 25 to 256 sequences run at once, and the models differ in the bytes that they
read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lab.papers.clusters import Kind, instances, requests_per_s
from lab.papers.lengths import CONVERSATION, azure
from lab.papers.testbed import Testbed
from lab.papers.watermark import Watermark
from shared.cost.network import Link
from shared.domain.instance import Role
from shared.sim.cluster import simulate
from shared.sim.spec import EngineLimits, FirstToken, RunSpec
from shared.sim.workload import Workload

HIGH, LOWS = "A100-SXM-80", ("A10", "A30")
MODELS = ("Llama-3-8B", "Qwen2-7B")
REQUESTS = 1000
INFINIBAND = Link(12.5e9, latency_s=1e-4, efficiency=0.8)  # 100 Gb/s
WHOLE = EngineLimits(batched_tokens=8192, sequences=1)  # the prefill instance computes one prompt at a time (4.4)
CHUNKED = EngineLimits(batched_tokens=512, sequences=256)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Requests a second of one GPU with one model in one role."""

    accelerator: str
    model: str
    role: Role
    measured: float


# Means where two hardware columns give the A100's figure.
CAPACITIES = (
    Capacity(HIGH, MODELS[0], Role.PREFILL, 11.82),
    Capacity(HIGH, MODELS[0], Role.DECODE, 12.95),
    Capacity(HIGH, MODELS[1], Role.PREFILL, 12.40),
    Capacity(HIGH, MODELS[1], Role.DECODE, 17.37),
    Capacity("A10", MODELS[0], Role.PREFILL, 4.15),
    Capacity("A10", MODELS[0], Role.DECODE, 1.35),
    Capacity("A10", MODELS[1], Role.PREFILL, 4.18),
    Capacity("A10", MODELS[1], Role.DECODE, 3.42),
    Capacity("A30", MODELS[0], Role.PREFILL, 6.27),
    Capacity("A30", MODELS[0], Role.DECODE, 3.05),
    Capacity("A30", MODELS[1], Role.PREFILL, 6.66),
    Capacity("A30", MODELS[1], Role.DECODE, 6.74),
)


def requests(data: Path) -> Workload:
    """The paper's: the first 1000 of the conversation trace, 1014 tokens in and 247 out on average."""
    return azure(data, CONVERSATION, REQUESTS)


def modelled(testbed: Testbed, workload: Workload, capacity: Capacity) -> float:
    """The same of the model: prompts one after the other; or decodes whose KV is at hand."""
    if capacity.role is Role.PREFILL:
        model = testbed.model(capacity.accelerator, capacity.model)
        return len(workload) / sum(model.prefill_time_s(int(tokens)) for tokens in workload.prompt_tokens)
    anything = replace(WHOLE, sequences=256)
    feed = Kind(HIGH, capacity.model, limits=anything, link=Link(1e12, 0.0, 1.0), slowed=1e-3)
    cluster = (
        *instances(testbed, feed, Role.PREFILL),
        *instances(testbed, Kind(capacity.accelerator, capacity.model, limits=CHUNKED, link=feed.link), Role.DECODE),
    )
    run = RunSpec(label="decode alone", first_token=FirstToken.DECODE, streaming=False, decode_admission=Watermark())
    return requests_per_s(simulate(workload.at_once(), cluster, run))


def capacities(testbed: Testbed, workload: Workload) -> Mapping[Capacity, float]:
    """All twelve."""
    return {capacity: modelled(testbed, workload, capacity) for capacity in CAPACITIES}
