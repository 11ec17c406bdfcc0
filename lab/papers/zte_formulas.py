"""ZTE eqs 1–6: first-token time, time per output token and memory of an instance, with the paper's discount factors."""

from dataclasses import dataclass

from shared.cost.catalogue import Accelerator
from shared.cost.geometry import ModelGeometry


@dataclass(frozen=True, slots=True)
class Discounts:
    """Shares of the peaks: λ of compute, β of the link, α of the memory bandwidth. The paper leaves them open."""

    compute: float
    link: float
    memory: float


def first_token_s(
    device: Accelerator, model: ModelGeometry, prompt: int, discounts: Discounts, ranks: int = 1
) -> float:
    """l_p = c_p/(λR_p) + e_p/(βB_p): compute, then the all-reduces of tensor parallelism (none on one rank)."""
    attention = 2.0 * model.layers * model.hidden * prompt * prompt  # causal: half of QKᵀ and of PV
    work = model.matmul_flops_per_token() * prompt + attention
    moved = 2.0 * model.layers * prompt * model.hidden * 2.0 * 2.0 * (ranks - 1) / ranks
    return work / ranks / (discounts.compute * device.flops("fp16")) + moved / (discounts.link * device.links.scale_up)


def output_token_s(
    device: Accelerator, model: ModelGeometry, batch: int, context: float, discounts: Discounts
) -> float:
    """l_d = e_vram/(αB_vram): weights once, KV of every request; computation hides behind it. One rank."""
    moved = model.weight_bytes(2.0) + batch * context * model.kv_bytes_per_token(2.0)
    return moved / (discounts.memory * device.bandwidth_bytes_s)


def prefill_memory_bytes(model: ModelGeometry, prompts_in_flight_tokens: int) -> float:
    """m_p = weights + activations (eq. 3; F: + KV of the prompts in flight)."""
    activations = prompts_in_flight_tokens * model.hidden * 2.0 * 2.0
    return model.weight_bytes(2.0) + activations + prompts_in_flight_tokens * model.kv_bytes_per_token(2.0)


def decode_memory_bytes(model: ModelGeometry, batch: int, context: float) -> float:
    """m_d = weights + activations + KV (eq. 6)."""
    return model.weight_bytes(2.0) + batch * (model.hidden * 4.0 + context * model.kv_bytes_per_token(2.0))
