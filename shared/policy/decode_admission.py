"""Admission of decodes: whether a decode instance starts a job now or lets it wait, by its KV memory.

Three parts: the predicted length of answers, the admission policies, and `kv_ahead`, the KV memory that the jobs of an
instance will hold over the steps to come.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import ClassVar, Protocol

from shared.domain.instance import InstanceView
from shared.domain.job import JobView
from shared.domain.route import Reason
from shared.errors import InvalidRequest

HEAVY_TOKENS = 128  # a decode with more predicted output tokens counts as heavy
UNPREDICTED_TOKENS = 128  # output of a job without a prediction


class PredictedEnd(StrEnum):
    """Which predicted length counts: an end of the likeliest range [lower, upper), or a figure of the distribution."""

    LOWER = "lower"
    MIDDLE = "middle"
    UPPER = "upper"
    MEAN = "mean"
    P50 = "p50"
    P90 = "p90"


_QUANTILES = {PredictedEnd.P50: 0.5, PredictedEnd.P90: 0.9}


def predicted_tokens(job: JobView, end: PredictedEnd, unpredicted_tokens: int) -> int:
    """Output tokens to expect of `job`, at most its max_tokens.

    Without a prediction, or with one of no confidence, it is `unpredicted_tokens`.
    Source: TetriInfer 3.3.4 uses the lower end; the other ends are F. The figures of the distribution are ours: p90
    where memory must suffice, the mean for a sum over many jobs.
    """
    prediction = job.prediction
    if prediction is None or prediction.confidence <= 0.0:
        return min(job.max_tokens, unpredicted_tokens)
    if end is PredictedEnd.MEAN or end in _QUANTILES:
        tokens = prediction.mean if end is PredictedEnd.MEAN else prediction.quantile(_QUANTILES[end])
        return min(job.max_tokens, ceil(tokens - 1e-6))  # a sum of shares is off by as much
    lower, upper = prediction.lower_tokens, prediction.upper_tokens
    middle = (lower + upper) // 2
    return min(job.max_tokens, lower if end is PredictedEnd.LOWER else upper if end is PredictedEnd.UPPER else middle)


def is_heavy(job: JobView) -> bool:
    """Whether `job` counts as a heavy decode: more than `HEAVY_TOKENS` output tokens.

    Source: TetriInfer 5.1 for the bound. F: the predicted median is compared (the middle of a mere range), and without
    a prediction max_tokens, so that unpredicted jobs are spread by their number.
    """
    has_shares = job.prediction is not None and bool(job.prediction.shares)
    return predicted_tokens(job, PredictedEnd.P50 if has_shares else PredictedEnd.MIDDLE, job.max_tokens) > HEAVY_TOKENS


def check_unpredicted(name: str, unpredicted_tokens: int) -> None:
    """Raises InvalidRequest for a parameter `unpredicted_tokens` below 0."""
    if unpredicted_tokens < 0:
        raise InvalidRequest(f"{name}: unpredicted_tokens must not be negative")


@dataclass(frozen=True, slots=True)
class RunningDecode:
    """A running job: its context now, and how many more tokens it is predicted to produce, at least 0."""

    context_tokens: int
    predicted_remaining_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeMemory:
    """KV memory of an instance at one moment."""

    free_blocks: int
    block_size: int  # tokens
    total_blocks: int
    reserved_tokens: int = 0  # prompt + predicted tokens of the running jobs
    running: tuple[RunningDecode, ...] = ()  # the running jobs, for policies with `needs_running`

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether the job may start, and why."""

    admitted: bool
    reasons: tuple[Reason, ...] = ()


class DecodeAdmission(Protocol):
    """Decides on one job against the memory of its instance; `now` is unix seconds.

    `needs_running` says whether the caller has to list the running jobs.
    """

    name: ClassVar[str]
    needs_running: ClassVar[bool]

    def admit(self, job: JobView, memory: DecodeMemory, now: float) -> Admission: ...


@dataclass(frozen=True, slots=True)
class Greedy:
    """Admit if and only if the prompt fits now. Source: TetriInfer 3.4 (vLLM's own rule)."""

    name: ClassVar[str] = "greedy"
    needs_running: ClassVar[bool] = False

    def admit(self, job: JobView, memory: DecodeMemory, now: float) -> Admission:
        need = memory.blocks(job.prompt_tokens)
        reason = Reason("admission:greedy", {"need_blocks": need, "free_blocks": memory.free_blocks})
        return Admission(need <= memory.free_blocks, (reason,))


@dataclass(frozen=True, slots=True)
class ReserveStatic:
    """Admit if and only if the job's predicted full length is less than the memory that is free now.

    reserve_all (ours): admit if and only if all running jobs and this one fit at their predicted full lengths, and the
    prompt fits now, because jobs outgrow their predictions.
    Source: TetriInfer 3.4, reserve-static; 5.2.3 for the lower end of the predicted range. F: where no job runs, the
    prompt alone decides, so that no job waits for ever.
    """

    name: ClassVar[str] = "reserve_static"
    needs_running: ClassVar[bool] = False
    end: PredictedEnd = PredictedEnd.LOWER
    unpredicted_tokens: int = UNPREDICTED_TOKENS
    reserve_all: bool = False

    def __post_init__(self) -> None:
        check_unpredicted(self.name, self.unpredicted_tokens)

    def admit(self, job: JobView, memory: DecodeMemory, now: float) -> Admission:
        need = job.prompt_tokens + predicted_tokens(job, self.end, self.unpredicted_tokens)
        if self.reserve_all:
            room = memory.total_blocks * memory.block_size - memory.reserved_tokens
            enough = need <= room
            reason = Reason("admission:reserve_static, all", {"need_tokens": need, "unreserved_tokens": room})
        else:
            room = memory.free_blocks * memory.block_size
            enough = need < room
            reason = Reason("admission:reserve_static", {"need_tokens": need, "free_tokens": room})
        fits = memory.blocks(job.prompt_tokens) <= memory.free_blocks
        return Admission(fits and (enough or memory.reserved_tokens <= 0), (reason,))


@dataclass(frozen=True, slots=True)
class ReserveDynamic:
    """Admit if and only if memory is left when the first of the running jobs and this one is predicted to end.

    With k the shortest predicted remaining length, every context grows by k; each is rounded up to whole blocks.
    Source: TetriInfer 3.4, reserve-dynamic; 5.2.3 for the lower end of the predicted range. F: the prompt must fit now,
    and it alone decides where no job runs.
    """

    name: ClassVar[str] = "reserve_dynamic"
    needs_running: ClassVar[bool] = True
    end: PredictedEnd = PredictedEnd.LOWER
    unpredicted_tokens: int = UNPREDICTED_TOKENS

    def __post_init__(self) -> None:
        check_unpredicted(self.name, self.unpredicted_tokens)

    def admit(self, job: JobView, memory: DecodeMemory, now: float) -> Admission:
        length = predicted_tokens(job, self.end, self.unpredicted_tokens)
        grows = min([length, *[one.predicted_remaining_tokens for one in memory.running]])
        size, more = memory.block_size, grows + memory.block_size - 1  # to round up
        need = (job.prompt_tokens + more) // size
        need += sum([(one.context_tokens + more) // size for one in memory.running])
        figures: dict[str, float | str] = {
            "grows_tokens": grows,
            "need_blocks": need,
            "total_blocks": memory.total_blocks,
        }
        fits = memory.blocks(job.prompt_tokens) <= memory.free_blocks
        enough = need <= memory.total_blocks or not memory.running
        return Admission(fits and enough, (Reason("admission:reserve_dynamic", figures),))


# KV memory of a decode instance over the steps to come. A job that decodes holds one token more with each step until
# its answer ends, and then none. The sum over all jobs in a few stretches of steps shows the peak of their memory, and
# is short enough for a heartbeat. Source: ours; the peak of future memory as in LightLLM's past-future scheduler (arXiv
# 2507.10150), on a grid.

# Ends of the stretches, in steps; the last stretch has none. A job counts for at most a quarter too long.
STRETCHES = (
    *range(16, 129, 16),
    *range(160, 257, 32),
    *range(320, 1025, 64),
    *(1280, 1536, 2048, 2560, 3072, 4096, 6144, 8192),
)
COUNT = len(STRETCHES)

Ahead = tuple[int, ...]  # the most tokens held in each stretch; empty when no job decodes

OVERDUE_TOKENS = 16  # to come, at least, of an answer that is longer than expected
OVERDUE_SHARE = 0.25  # and of the tokens that it has produced


def remaining_tokens(given: int, expected: int, most: int) -> int:
    """Tokens to come of an answer that has produced `given`. expected: in all. most: its max_tokens."""
    left = expected - given
    if left <= 0:
        left = max(OVERDUE_TOKENS, int(OVERDUE_SHARE * given))
    return max(1, min(left, most - given))


def own_part(used_tokens: int, held_tokens: int) -> float:
    """The share of the tokens held by an instance's jobs that takes blocks of its own: jobs with a common prefix share
    its blocks, so that the blocks in use may hold fewer tokens than the jobs together.
    """
    return min(1.0, used_tokens / held_tokens) if held_tokens > 0 and used_tokens > 0 else 1.0


def shared_each(used_tokens: int, held_tokens: int, jobs: int) -> float:
    """The mean number of a job's tokens that are in blocks which other jobs hold, too."""
    return max(0, held_tokens - used_tokens) / jobs if jobs > 0 else 0.0


def takes_tokens(view: InstanceView, prompt: int, saved: int) -> int:
    """Tokens of KV that a job's prompt takes on an instance that holds `saved` of them: all but those in blocks in use,
    as far as the decodes there share blocks. An unused cached block counts as free until a job uses it.
    """
    load, info = view.load, view.info
    if saved <= 0:
        return prompt
    used = (info.total_blocks - load.free_blocks) * info.block_size
    held = load.context_tokens - load.queued_prefill_tokens - load.waiting_tokens
    return max(1, prompt - min(saved, int(shared_each(used, held, load.decoding))))


def ahead_of(jobs: Iterable[tuple[int, int]], block_size: int, part: float = 1.0) -> Ahead:
    """The memory of jobs with (tokens held now, tokens to come); each holds whole blocks. part: see `own_part`."""
    held = [0] * COUNT
    for whole, left in jobs:
        now = whole if part >= 1.0 else ceil(part * whole)
        for at in range(COUNT):
            if at and left <= STRETCHES[at - 1]:
                break
            end = STRETCHES[at]
            held[at] += -(-(now + (left if left < end else end)) // block_size) * block_size
    return tuple(held) if held[0] else ()


def with_job(ahead: Ahead, now: int, left: int, block_size: int, after: int = 0) -> Ahead:
    """With one more job that begins to decode `after` steps from now. The tokens that it holds then count before, too:
    how fast the steps until then are depends on the prompts in them.
    """
    held = list(ahead) if ahead else [0] * COUNT
    for at in range(COUNT):
        if at and after + left <= STRETCHES[at - 1]:
            break
        gone = max(0, STRETCHES[at] - after)
        held[at] += -(-(now + (left if left < gone else gone)) // block_size) * block_size
    return tuple(held)


def fits_after(ahead: Ahead, room_tokens: int, now: int, left: int, block_size: int) -> float:
    """Steps until a job of `now` tokens, with `left` to come, fits in `room_tokens` to its end; 0: it fits at once. It
    always does when no job decodes.
    """
    whole = -(-(now + left) // block_size) * block_size
    if not ahead or max(ahead) + whole <= room_tokens:
        return 0.0
    start = 0
    last = COUNT
    while last and not ahead[last - 1]:
        last -= 1
    while start < last:
        begins = STRETCHES[start - 1] if start else 0
        ends = begins + left
        at = start
        while at < last and (at == start or STRETCHES[at - 1] < ends):
            most = min(left, STRETCHES[at] - begins)
            if ahead[at] + -(-(now + most) // block_size) * block_size > room_tokens:
                break
            at += 1
        else:
            return float(begins)
        start = at + 1  # it fits only after the stretch that has no room for it
    return float(STRETCHES[last - 1]) if last else 0.0
