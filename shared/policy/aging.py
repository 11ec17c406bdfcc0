"""What is left of an instance's prompt queue by now, for predictions: loads are some 100 ms old when a decision uses
them, in which an instance computes several short prompts.
"""

from shared.domain.instance import InstanceView
from shared.domain.rates import UNKNOWN_STEPS

MOST_S = 0.5  # an older load, or one from the future, is of a host with another clock, or the monitor is silent


def prompt_token_s(view: InstanceView) -> float:
    """Seconds for a token of the queued prompts, in full steps beside the decodes that are there."""
    info, load = view.info, view.load
    rates, running = info.rates.step or UNKNOWN_STEPS, max(0, load.decoding - load.coming)
    form = rates.mixed if running else rates.prefill
    budget = max(1, info.chunk_size - running)
    mean = load.queued_prefill_tokens / max(1, load.queued_prefill)
    step_s = form.fixed_s + form.sequence_s * running
    if running:
        step_s += form.context_s * (load.context_tokens - load.coming_tokens)
    return step_s / budget + form.token_s + form.position_s * mean / 2.0


def share_left(view: InstanceView, now: float) -> float:
    """The share of the prompt queue that is not computed by `now` (unix seconds): all of it where the age of the load
    is not known, since it is from the future, or older than `MOST_S`.
    """
    queued = view.load.queued_prefill_tokens
    if queued <= 0:
        return 1.0
    return max(0.0, queued - view.load.done_tokens - _computed(view, now)) / queued


def with_progress(view: InstanceView, now: float) -> tuple[float, int]:
    """The time of a load and its `done_tokens` when a prompt comes behind its queue at `now`: the tokens of this prompt
    are not computed before.
    """
    load = view.load
    if not 0.0 < now - load.time_s <= MOST_S:
        return load.time_s, load.done_tokens
    return now, min(load.queued_prefill_tokens, load.done_tokens + round(_computed(view, now)))


def _computed(view: InstanceView, now: float) -> float:
    """Prompt tokens of its queue that the instance computes between its load and `now`."""
    passed_s, queued = now - view.load.time_s, float(view.load.queued_prefill_tokens)
    if not 0.0 < passed_s <= MOST_S:
        return 0.0
    token_s = prompt_token_s(view)
    return min(queued, passed_s / token_s) if token_s > 0.0 else queued  # an emulated instance may take no time
