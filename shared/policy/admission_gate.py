"""The decode admission policy of an engine, applied to the jobs inside it; the same code live and simulated."""

from collections.abc import Sequence
from typing import NamedTuple

from shared.domain.job import JobView
from shared.policy.decode_admission import (
    UNPREDICTED_TOKENS,
    DecodeAdmission,
    DecodeMemory,
    PredictedEnd,
    ReserveDynamic,
    ReserveStatic,
    RunningDecode,
    predicted_tokens,
)


class Decoding(NamedTuple):
    """A job that runs, or whose KV is on its way, and that decodes here. context_tokens: its prompt and its output."""

    job: JobView
    prompt_tokens: int
    context_tokens: int


class Blocks(NamedTuple):
    """KV memory of an engine now. free: without the blocks that the next step takes."""

    free: int
    total: int
    size_tokens: int


def may_decode(policy: DecodeAdmission, job: JobView, inside: Sequence[Decoding], blocks: Blocks, now: float) -> bool:
    """Whether `job` may start beside the jobs `inside`.

    `job`: with all tokens that it has by now as its prompt, and the rest as its max_tokens. Where no job decodes, the
    blocks alone decide, so that no job waits for ever.
    """
    if not inside:
        return True
    end, unpredicted = PredictedEnd.LOWER, UNPREDICTED_TOKENS
    if isinstance(policy, ReserveStatic | ReserveDynamic):
        end, unpredicted = policy.end, policy.unpredicted_tokens
    lengths = [
        max(one.context_tokens, one.prompt_tokens + predicted_tokens(one.job, end, unpredicted)) for one in inside
    ]
    running: tuple[RunningDecode, ...] = ()
    if policy.needs_running:
        running = tuple(
            RunningDecode(one.context_tokens, length - one.context_tokens)
            for one, length in zip(inside, lengths, strict=True)
        )
    memory = DecodeMemory(blocks.free, blocks.size_tokens, blocks.total, sum(lengths), running)
    return policy.admit(job, memory, now).admitted
