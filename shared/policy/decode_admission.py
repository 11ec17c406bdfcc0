"""Whether a decode instance lets a job start now, or lets it wait."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import ClassVar, Protocol

from shared.domain.instance import InstanceView
from shared.domain.job import JobView
from shared.domain.route import Reason
from shared.errors import InvalidRequest

# MERGED lengths.py
# How long an answer will be, for policies that reserve memory or tell heavy decodes from light ones.


HEAVY_TOKENS = 128


class PredictedEnd(StrEnum):
    """Which length counts: an end of the likeliest range [lower, upper), or a figure of the whole distribution."""

    LOWER = "lower"
    MIDDLE = "middle"
    UPPER = "upper"
    MEAN = "mean"
    P50 = "p50"
    P90 = "p90"


_QUANTILES = {PredictedEnd.P50: 0.5, PredictedEnd.P90: 0.9}


def predicted_tokens(job: JobView, end: PredictedEnd, unpredicted_tokens: int) -> int:
    """Output tokens to expect of `job`, never more than its max_tokens.

    Without a prediction, or with one of no confidence, `unpredicted_tokens` is taken.
    Source: TetriInfer 3.3.4 uses the lower end; the other ends are F (FORMULAS 2), those of the distribution ours: what
    must hold asks for p90, a sum over many jobs for the mean.
    """
    said = job.prediction
    if said is None or said.confidence <= 0.0:
        return min(job.max_tokens, unpredicted_tokens)
    if end is PredictedEnd.MEAN:
        return min(job.max_tokens, _whole(said.mean))
    if end in _QUANTILES:
        return min(job.max_tokens, _whole(said.quantile(_QUANTILES[end])))
    lower, upper = said.lower_tokens, said.upper_tokens
    middle = (lower + upper) // 2
    return min(job.max_tokens, lower if end is PredictedEnd.LOWER else upper if end is PredictedEnd.UPPER else middle)


def _whole(tokens: float) -> int:
    return ceil(tokens - 1e-6)  # what a sum of shares is off by


def is_heavy(job: JobView) -> bool:
    """Whether `job` counts as a heavy decode: more than 128 output tokens.

    Source: TetriInfer 5.1 for the bound; F: the median of what is predicted is compared (of a mere range its middle),
    and without a prediction max_tokens, so that unpredicted jobs spread by their number.
    """
    known = job.prediction is not None and bool(job.prediction.shares)
    return predicted_tokens(job, PredictedEnd.P50 if known else PredictedEnd.MIDDLE, job.max_tokens) > HEAVY_TOKENS


UNPREDICTED_TOKENS = 128


@dataclass(frozen=True, slots=True)
class RunningDecode:
    """A job that runs: its context now, and how many more tokens it is predicted to produce, at least 0."""

    context_tokens: int
    predicted_remaining_tokens: int


@dataclass(frozen=True, slots=True)
class DecodeMemory:
    """KV memory of an instance at one moment."""

    free_blocks: int
    block_size: int  # tokens
    total_blocks: int
    reserved_tokens: int = 0  # prompt + predicted tokens of the jobs that run
    running: tuple[RunningDecode, ...] = ()  # the jobs that run, for policies with `needs_running`


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether the job may start, and why."""

    admitted: bool
    reasons: tuple[Reason, ...] = ()


class DecodeAdmission(Protocol):
    """Decides for one job against the memory of its instance.

    `needs_running` says whether the driver has to list the jobs that run.
    """

    name: ClassVar[str]
    needs_running: ClassVar[bool]

    def admit(self, job: JobView, memory: DecodeMemory, now: float) -> Admission:
        """Decide. `now` is unix seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Greedy:
    """Admit iff the prompt fits now. Source: TetriInfer 3.4 (vLLM's own rule)."""

    name: ClassVar[str] = "greedy"
    needs_running: ClassVar[bool] = False

    def admit(self, job: JobView, memory: DecodeMemory, now: float) -> Admission:
        """See `DecodeAdmission`."""
        need = _blocks(job.prompt_tokens, memory)
        figures: dict[str, float | str] = {"need_blocks": need, "free_blocks": memory.free_blocks}
        return Admission(need <= memory.free_blocks, (Reason("admission:greedy", figures),))


@dataclass(frozen=True, slots=True)
class ReserveStatic:
    """Admit iff the job's predicted full length is less than the memory that is free now.

    reserve_all (ours): admit iff all that runs and the job fit at their predicted full lengths, and the prompt fits
    now, because jobs outgrow their predictions.
    Source: TetriInfer 3.4, reserve-static; 5.2.3 for the lower end of the predicted range. F: where nothing runs the
    prompt alone decides, so that no job waits for ever.
    """

    name: ClassVar[str] = "reserve_static"
    needs_running: ClassVar[bool] = False
    end: PredictedEnd = PredictedEnd.LOWER
    unpredicted_tokens: int = UNPREDICTED_TOKENS
    reserve_all: bool = False

    def __post_init__(self) -> None:
        _check(self.name, self.unpredicted_tokens)

    def admit(self, job: JobView, memory: DecodeMemory, now: float) -> Admission:
        """See `DecodeAdmission`."""
        need = job.prompt_tokens + predicted_tokens(job, self.end, self.unpredicted_tokens)
        fits = _blocks(job.prompt_tokens, memory) <= memory.free_blocks
        if self.reserve_all:
            room = memory.total_blocks * memory.block_size - memory.reserved_tokens
            enough, why = (
                need <= room,
                Reason("admission:reserve_static, all", {"need_tokens": need, "unreserved_tokens": room}),
            )
        else:
            room = memory.free_blocks * memory.block_size
            enough, why = need < room, Reason("admission:reserve_static", {"need_tokens": need, "free_tokens": room})
        return Admission(fits and (enough or memory.reserved_tokens <= 0), (why,))


@dataclass(frozen=True, slots=True)
class ReserveDynamic:
    """Admit iff memory is left when the first of the batch is predicted to end, the job included.

    With k the shortest predicted remaining length, every context grows by k; each is rounded up to whole blocks.
    Source: TetriInfer 3.4, reserve-dynamic; 5.2.3 for the lower end of the predicted range. F: the prompt must fit now;
    it alone decides where nothing runs.
    """

    name: ClassVar[str] = "reserve_dynamic"
    needs_running: ClassVar[bool] = True
    end: PredictedEnd = PredictedEnd.LOWER
    unpredicted_tokens: int = UNPREDICTED_TOKENS

    def __post_init__(self) -> None:
        _check(self.name, self.unpredicted_tokens)

    def admit(self, job: JobView, memory: DecodeMemory, now: float) -> Admission:
        """See `DecodeAdmission`."""
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
        fits = _blocks(job.prompt_tokens, memory) <= memory.free_blocks
        return Admission(
            fits and (need <= memory.total_blocks or not memory.running),
            (Reason("admission:reserve_dynamic", figures),),
        )


def _blocks(tokens: int, memory: DecodeMemory) -> int:
    return -(-tokens // memory.block_size)


def _check(name: str, unpredicted_tokens: int) -> None:
    if unpredicted_tokens < 0:
        raise InvalidRequest(f"{name}: unpredicted_tokens must not be negative")


# MERGED kv_ahead.py
# KV memory of a decode instance over the steps to come: what its jobs will hold, and whether one more fits to its end.
#
# A job that decodes holds one token more with each step until its answer ends, and then nothing. A sum over all
# jobs at a few stretches of steps is enough to see the peak that they come to together, and is short enough for a
# heartbeat. Source: ours; the peak of future memory as in LightLLM's past-future scheduler (arXiv 2507.10150), on a
# grid.


# Ends of the stretches, in steps; the last stretch has none. A job counts as there by a quarter too long at most.
STRETCHES = (
    *range(16, 129, 16),
    *range(160, 257, 32),
    *range(320, 1025, 64),
    *(1280, 1536, 2048, 2560, 3072, 4096, 6144, 8192),
)
COUNT = len(STRETCHES)

Ahead = tuple[int, ...]  # the most tokens held in each stretch; empty where no job decodes

OVERDUE_TOKENS = 16  # that an answer longer than expected is taken to go on for, at least
OVERDUE_SHARE = 0.25  # and of what it has given


def remaining_tokens(given: int, expected: int, most: int) -> int:
    """Tokens to come of an answer that has given so many. expected: in all. most: its max_tokens."""
    left = expected - given
    if left <= 0:
        left = max(OVERDUE_TOKENS, int(OVERDUE_SHARE * given))
    return max(1, min(left, most - given))


def own_part(used_tokens: int, held_tokens: int) -> float:
    """Of the tokens that an instance's jobs hold together, the part that takes blocks: where all blocks in use are
    less, jobs share those of a common prefix, and each counts for its part.
    """
    return min(1.0, used_tokens / held_tokens) if held_tokens > 0 and used_tokens > 0 else 1.0


def shared_each(used_tokens: int, held_tokens: int, jobs: int) -> float:
    """Of the tokens that each of an instance's jobs holds, those in blocks that others hold, too, on average."""
    return max(0, held_tokens - used_tokens) / jobs if jobs > 0 else 0.0


def takes_tokens(view: InstanceView, prompt: int, saved: int) -> int:
    """Tokens of KV that a job's prompt takes where the instance is known to hold `saved` of them: all but those in
    blocks that are in use, as far as those that decode there share blocks. An unused cached block counts as
    free until the job takes it.
    """
    load, info = view.load, view.info
    if saved <= 0:
        return prompt
    used = (info.total_blocks - load.free_blocks) * info.block_size
    held = load.context_tokens - load.queued_prefill_tokens - load.waiting_tokens
    return max(1, prompt - min(saved, int(shared_each(used, held, load.decoding))))


def ahead_of(jobs: Iterable[tuple[int, int]], block_size: int, part: float = 1.0) -> Ahead:
    """Of jobs with (tokens held now, tokens to come); each holds whole blocks. part: see `own_part`."""
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
    """With one more that begins to decode `after` steps from now. What it holds then is kept for it before, too: how
    fast the steps before that are depends on the prompts in them.
    """
    held = list(ahead) if ahead else [0] * COUNT
    for at in range(COUNT):
        if at and after + left <= STRETCHES[at - 1]:
            break
        gone = max(0, STRETCHES[at] - after)
        held[at] += -(-(now + (left if left < gone else gone)) // block_size) * block_size
    return tuple(held)


def fits_after(ahead: Ahead, room_tokens: int, now: int, left: int, block_size: int) -> float:
    """Steps until a job that then holds `now` tokens, with `left` to come, fits in `room_tokens` to its end.

    0: it fits at once. Where no job decodes it always does.
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
        start = at + 1  # not before what is in the way is over
    return float(STRETCHES[last - 1]) if last else 0.0
