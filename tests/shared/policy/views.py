"""Instances, jobs and routes for tests of policies."""

from random import Random
from typing import Any

from shared.domain.instance import (
    ClusterView,
    Compatibility,
    InstanceInfo,
    InstanceLoad,
    InstanceState,
    InstanceView,
    KvGeometry,
    Role,
)
from shared.domain.job import JobView, LengthPrediction, Slo
from shared.domain.policies import PolicySet
from shared.domain.rates import UNKNOWN_STEPS, LinkRate, Rates, StepForm, StepRates
from shared.domain.route import PolicySpec, Route
from shared.policy.adaptive import Adaptive, AdaptiveDispatch, AdaptiveSplit
from shared.policy.index import ClusterIndex
from shared.policy.ledger import WorkloadLedger
from shared.policy.placement import Policies, place

FIT = Compatibility("fp", "emulated", "1", 1, KvGeometry(2, 2, 64))


def instance(
    instance_id: str,
    role: Role = Role.PREFILL,
    state: InstanceState = InstanceState.READY,
    *,
    rate: float = 0.0,
    base: float = 0.0,
    rates: Rates | None = None,
    max_model_len: int = 4096,
    block_size: int = 16,
    total_blocks: int = 1000,
    chunk_size: int = 512,
    max_seqs: int = 0,
    adapters: dict[str, str] | None = None,
    precision: str = "",
    media: tuple[str, ...] = (),
    **load: Any,
) -> InstanceView:
    info = InstanceInfo(
        instance_id=instance_id,
        generation=1,
        model="m",
        compatibility=FIT,
        accelerator="cpu",
        dtype="bfloat16",
        tensor_parallel=1,
        block_size=block_size,
        total_blocks=total_blocks,
        max_model_len=max_model_len,
        chunk_size=chunk_size,
        rpc=f"tcp://127.0.0.1:{1000 + sum(map(ord, instance_id))}",
        http="http://h:1",
        kv_endpoints=(),
        max_seqs=max_seqs,
        rates=rates or (prompt_rates(rate, base, chunk_size) if rate else Rates()),
        adapters=adapters or {},
        precision=precision,
        media=media,
    )
    return InstanceView(info, role, state, InstanceLoad(**{"free_blocks": total_blocks, **load}))


def prompt_rates(per_token_s: float, per_prompt_s: float = 0.0, chunk: int = 512) -> Rates:
    """Rates with these k_p and b_p of Cronus in chunks of that many tokens; decodes are of unknown speed."""
    fixed_s = 2.0 * per_prompt_s
    form = StepForm(fixed_s, per_token_s - fixed_s / chunk)
    return Rates(StepRates(form, UNKNOWN_STEPS.decode, form))


def chunked_rates(k_ctxp: float, k_ctxd: float, b_c: float, chunk: int = 512) -> Rates:
    """Rates with these k_ctxp, k_ctxd and b_c of Cronus in chunks of that many tokens."""
    position_s = k_ctxp / chunk
    form = StepForm(b_c - chunk * position_s * chunk / 2.0, 0.0, position_s, 0.0, k_ctxd)
    return Rates(StepRates(form, form, form))


def prefill(instance_id: str, **more: Any) -> InstanceView:
    return instance(instance_id, Role.PREFILL, **more)


def decode(instance_id: str, **more: Any) -> InstanceView:
    return instance(instance_id, Role.DECODE, **more)


def view(*instances: InstanceView, sequence: int = 1, time_s: float = 0.0) -> ClusterView:
    return ClusterView(sequence, time_s, instances, PolicySet(step_budget=PolicySpec("off")))


def index(*instances: InstanceView, seed: int = 0) -> ClusterIndex:
    return ClusterIndex(view(*instances), rng=Random(seed))


def job(prompt: int = 100, output: int = 50, job_id: str = "j", **more: Any) -> JobView:
    return JobView(job_id, prompt, output, **more)


def predicted(lower: int, upper: int) -> LengthPrediction:
    return LengthPrediction(lower // 200, lower, upper, 0.9, "classifier")


ALL = Policies(Adaptive(), AdaptiveSplit(), AdaptiveDispatch())
TARGETS = Slo("default", ttft_s=2.0, tpot_s=0.1)


def rates(speed: float = 1.0, link: LinkRate | None = LinkRate(10e9, 1e-3)) -> Rates:
    """An instance `speed` times as fast as one with steps of 20 ms and 0.1 ms a prompt token."""
    decodes = {"sequence_s": 1e-4 / speed, "context_s": 2e-7 / speed}
    step = StepRates(
        StepForm(0.02 / speed, 1e-4 / speed, 1e-9 / speed),
        StepForm(0.02 / speed, **decodes),
        StepForm(0.02 / speed, 1e-4 / speed, 1e-9 / speed, **decodes),
    )
    return Rates(step=step, link=link)


def p(name: str = "p", speed: float = 1.0, **load: object) -> InstanceView:
    return prefill(name, rates=rates(speed), total_blocks=4000, **load)


def d(name: str = "d", speed: float = 1.0, **load: object) -> InstanceView:
    return decode(name, **{"rates": rates(speed), "total_blocks": 4000, **load})


def busy(decodes: int, context: int = 600, **more: object) -> dict[str, object]:
    return {"decoding": decodes, "running": decodes, "context_tokens": decodes * context, **more}


def asked(prompt: int = 800, **more: object) -> JobView:
    return job(prompt, 1000, slo=TARGETS, prediction=LengthPrediction(0, 100, 200, 0.9, "classifier"), **more)


def route(asked_for: JobView, *views: InstanceView, policies: Policies = ALL, seed: int = 0) -> Route:
    return place(asked_for, index(*views), policies, 0.0, Random(seed)).route


def way(found: Route) -> tuple[str, str, str]:
    """Prefill instance, decode instance, and how much of the prompt the first one computes."""
    names = (found.prefill.instance_id if found.prefill else "", found.decode.instance_id if found.decode else "")
    return *names, "none" if not found.split else "all" if found.split >= 800 else "part"


def score(ledger: WorkloadLedger, instance_id: str) -> float:
    """Sum of the unfinished jobs' scores on the instance."""
    return float(ledger.scores[ledger.slot(instance_id)])


def tokens_at(ledger: WorkloadLedger, instance_id: str) -> int:
    """Sum of the unfinished jobs' prompt and predicted tokens on the instance."""
    return int(ledger.tokens[ledger.slot(instance_id)])
