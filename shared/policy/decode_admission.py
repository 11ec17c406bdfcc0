"""Admission of decodes: whether a decode instance starts a job now or lets it wait, by its KV memory.

Three parts: the predicted length of answers, admission (`may_decode` applies a policy to the jobs inside an engine),
and `kv_ahead`, the KV memory that the jobs of an instance will hold over the steps to come.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import ClassVar, NamedTuple, Protocol

from shared.domain.instance import InstanceView
from shared.domain.job import JobView
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

    Source: TetriInfer 5.1 for the bound. Ours: the predicted median is compared (the middle of a mere range), and
    without a prediction max_tokens, so that unpredicted jobs are spread by their number.
    """
    has_shares = job.prediction is not None and bool(job.prediction.shares)
    return predicted_tokens(job, PredictedEnd.P50 if has_shares else PredictedEnd.MIDDLE, job.max_tokens) > HEAVY_TOKENS


@dataclass(frozen=True, slots=True)
class ByPrediction:
    """Base of policies that count with the predicted length of a job's answer."""

    name: ClassVar[str]
    end: PredictedEnd = PredictedEnd.LOWER
    unpredicted_tokens: int = UNPREDICTED_TOKENS

    def __post_init__(self) -> None:
        if self.unpredicted_tokens < 0:
            raise InvalidRequest(f"{self.name}: unpredicted_tokens must not be negative")

    def output_tokens(self, job: JobView) -> int:
        return predicted_tokens(job, self.end, self.unpredicted_tokens)

    def length_tokens(self, job: JobView) -> int:
        """Prompt and answer."""
        return job.prompt_tokens + self.output_tokens(job)


@dataclass(frozen=True, slots=True)
class RunningDecode:
    """A running job: its context now, and how many more tokens it is predicted to produce, at least 0."""

    context_tokens: int
    remaining_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeMemory:
    """KV memory of an instance at one moment."""

    free_blocks: int
    block_size: int  # tokens
    total_blocks: int
    reserved_tokens: int = 0  # prompt + predicted tokens of the running jobs
    running: tuple[RunningDecode, ...] = ()  # the running jobs, for policies with `needs_running`

    def fits_now(self, job: JobView) -> bool:
        """Whether the free blocks hold the prompt."""
        return -(-job.prompt_tokens // self.block_size) <= self.free_blocks


class DecodeAdmission(Protocol):
    """Decides on one job against the memory of its instance; `now` is unix seconds.

    `needs_running` says whether the caller has to list the running jobs.
    """

    name: ClassVar[str]
    needs_running: ClassVar[bool]

    def admit(self, job: JobView, memory: DecodeMemory, now: float) -> bool: ...


@dataclass(frozen=True, slots=True)
class Greedy:
    """Admit if and only if the prompt fits now. Source: TetriInfer 3.4 (vLLM's own rule)."""

    name: ClassVar[str] = "greedy"
    needs_running: ClassVar[bool] = False

    def admit(self, job: JobView, memory: DecodeMemory, now: float) -> bool:
        return memory.fits_now(job)


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
    """Whether `job` may start beside the jobs `inside` an engine; the same code live and simulated.

    `job`: with all tokens that it has by now as its prompt, and the rest as its max_tokens. Where no job decodes, the
    blocks alone decide, so that no job waits for ever.
    """
    if not inside:
        return True
    by = policy if isinstance(policy, ByPrediction) else ByPrediction()
    lengths = [max(one.context_tokens, one.prompt_tokens + by.output_tokens(one.job)) for one in inside]
    running: tuple[RunningDecode, ...] = ()
    if policy.needs_running:
        running = tuple(
            RunningDecode(one.context_tokens, length - one.context_tokens)
            for one, length in zip(inside, lengths, strict=True)
        )
    memory = DecodeMemory(blocks.free, blocks.size_tokens, blocks.total, sum(lengths), running)
    return policy.admit(job, memory, now)


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
        _add_job(held, whole if part >= 1.0 else ceil(part * whole), left, block_size)
    return tuple(held) if held[0] else ()


def with_job(ahead: Ahead, now: int, left: int, block_size: int, after: int = 0) -> Ahead:
    """With one more job that begins to decode `after` steps from now. The tokens that it holds then count before, too:
    how fast the steps until then are depends on the prompts in them.
    """
    held = list(ahead) if ahead else [0] * COUNT
    _add_job(held, now, left, block_size, after)
    return tuple(held)


def _add_job(held: list[int], now: int, left: int, block_size: int, after: int = 0) -> None:
    for at, end in enumerate(STRETCHES):
        if at and after + left <= STRETCHES[at - 1]:
            break
        given = max(0, end - after)
        held[at] += -(-(now + (left if left < given else given)) // block_size) * block_size


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
