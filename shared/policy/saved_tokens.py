"""The prompt tokens that an instance need not compute, since its prefix cache holds them."""

from shared.domain.instance import InstanceView
from shared.domain.job import JobView
from shared.policy.prefix_index import PrefixIndex


def saved_tokens(prefixes: PrefixIndex, view: InstanceView, job: JobView, computed_tokens: int | None = None) -> int:
    """Of the first `computed_tokens` (default: all) prompt tokens, those that an instance need not compute or pull."""
    tokens = job.prompt_tokens if computed_tokens is None else computed_tokens
    return saved_of(prefixes.held_tokens(view.info.instance_id, job.prefix), view, tokens)


def loaded_tokens(prefixes: PrefixIndex, view: InstanceView, job: JobView, saved: int) -> int:
    """Of the `saved` prompt tokens, those that the instance loads from its host memory."""
    instance_id = view.info.instance_id
    return min(saved, prefixes.hosted_tokens(instance_id, job.prefix, prefixes.held_tokens(instance_id, job.prefix)))


def saved_of(held_tokens: int, view: InstanceView, tokens: int) -> int:
    """Of the first `tokens`, those that a run of `held_tokens` saves an instance.

    Engines find whole blocks of their own size, and compute the last token in any case.
    """
    if not held_tokens:
        return 0
    held = min(held_tokens, tokens - 1)
    return max(0, held - held % max(1, view.info.block_size))
