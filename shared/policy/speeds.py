"""How fast an instance is, in seconds, from the rates it reports."""

from shared.domain.instance import InstanceView
from shared.domain.rates import Rates

UNKNOWN_S_PER_TOKEN = 1e-4  # of a prefill, where nothing was measured: 10,000 tokens a second


def prefill_rate(rates: Rates) -> tuple[float, float]:
    """Seconds a prompt token, and seconds a prompt, on an instance that only prefills; (0, 0) when not measured.

    Source: Cronus eq. 2, k_p and b_p.
    """
    cost = rates.prefill
    if cost is None or cost.k_p <= 0:
        return 0.0, 0.0
    return cost.k_p, max(0.0, cost.b_p)


def chunked_rate(view: InstanceView) -> tuple[float, float]:
    """The same beside the decodes that run there: a step takes as long as they make it, and has room for so much less.

    Source: Cronus eq. 3 at a prefill context of 0, over the tokens of a step that decodes leave. Without a measured
    chunked cost it is `prefill_rate`.
    """
    cost, load = view.info.rates.chunked, view.load
    step_s = cost.time_s(0.0, load.context_tokens) if cost else 0.0
    if step_s <= 0:
        return prefill_rate(view.info.rates)
    return step_s / max(1, view.info.chunk_size - load.decoding), 0.0


def queued_prefill_s(view: InstanceView, unknown_s_per_token: float = UNKNOWN_S_PER_TOKEN) -> float:
    """Seconds of prefill that wait at a prefill instance."""
    load = view.load
    per_token_s, per_job_s = prefill_rate(view.info.rates)
    return (per_token_s or unknown_s_per_token) * load.queued_prefill_tokens + per_job_s * load.queued_prefill
