"""Which decodes an instance wants to have elsewhere: before its KV memory is full, and where its steps are too slow.

Source: ours. Llumnix migrates to the same ends; it chooses pairs of instances, of which the scheduler here chooses the
other one for each job.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.policy.decode_admission import COUNT, ahead_of

AHEAD_S = 3.0  # KV memory that lasts for longer is no reason: answers may end sooner than expected
SPARE_SHARE = 0.1  # of the target's KV memory that stays free beside a job which leaves for memory or speed: loads
# are 0.1 s old, and where all instances are full a migration would only move the shortage
KEPT_BUSY = 0.9  # from a prefill instance that spends a larger share of its time on prompts, kept answers leave
AT_ONCE = 4  # jobs that leave for memory within one look
AGAIN_S = 5.0  # between two requests of one job to leave
LOOK_S = 0.25  # between two looks of an instance for jobs that should leave
DRAIN_NEWS_S = 2.0  # between two notices of a drain to a decode that is still here: there may be room for it by then
COPY_ROUNDS = 4  # of copies of a job's KV while it decodes on
REST_TOKENS = 64  # of KV that may be missing at the target when the job leaves
PULLS_AT_ONCE = 2  # copies into one instance: the rest of a job's KV, for which its client waits, comes behind no more
SLOW_EACH_S = 1.0  # between two jobs that leave a slow instance: the next look sees what the last one changed


@dataclass(frozen=True, slots=True)
class Stayer:
    """A decode that could migrate. held: its tokens of KV; left: those that its answer is expected to add. asked_s:
    when it was last asked to leave, by the caller's clock; tpot_s: its target.
    """

    request_id: str
    held: int
    left: int
    weight: float
    tpot_s: float
    asked_s: float = float("-inf")


def leaves_for_memory(
    jobs: Sequence[Stayer], room_tokens: int, free_tokens: int, token_s: float, block_size: int, now: float
) -> list[str]:
    """The jobs that leave an instance whose KV memory will be full within `AHEAD_S` and will not hold all answers:
    lighter classes first, then those whose answers will add most. room_tokens: of all blocks; free_tokens: of those
    that are free; token_s: seconds of a step.
    """
    if not jobs or token_s <= 0.0 or free_tokens >= len(jobs) * AHEAD_S / token_s:
        return []
    chosen: list[str] = []
    ahead, staying = _ahead(jobs, block_size), len(jobs)
    for job in sorted(jobs, key=lambda each: (each.weight, -each.left)):
        if len(chosen) == AT_ONCE or staying < 2 or max(ahead) <= room_tokens:
            break
        staying -= 1
        ahead = [held - own for held, own in zip(ahead, _ahead([job], block_size), strict=True)]
        if now - job.asked_s >= AGAIN_S:
            chosen.append(job.request_id)
    return chosen


def leaves_for_speed(jobs: Sequence[Stayer], token_s: float, now: float) -> str | None:
    """The job that leaves an instance which takes `token_s` for a token, longer than the job's target: that with the
    longest context, which makes the steps long. None where no job does, or one was asked just now.
    """
    if any(now - job.asked_s < SLOW_EACH_S for job in jobs):
        return None
    missing = [job for job in jobs if token_s > job.tpot_s and now - job.asked_s >= AGAIN_S]
    chosen = max(missing, key=lambda job: job.held, default=None)
    return chosen.request_id if chosen is not None else None


def leaves_kept(given: int, keep_tokens: int, busy_share: float, asked_s: float, now: float) -> bool:
    """Whether a decode leaves a prefill instance, which was to decode its first `keep_tokens` tokens and spends
    `busy_share` of its time on prompts. given: tokens that it has decoded; asked_s: as in `Stayer`.
    """
    return (given >= keep_tokens or busy_share > KEPT_BUSY) and now - asked_s >= AGAIN_S


def _ahead(jobs: Sequence[Stayer], block_size: int) -> Sequence[int]:
    """The KV that the jobs will hold, by stretches of steps."""
    return ahead_of(((job.held, job.left) for job in jobs), block_size) or (0,) * COUNT
