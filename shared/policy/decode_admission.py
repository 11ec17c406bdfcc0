"""Whether a decode instance lets a job start now, or lets it wait."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

from shared.domain.job import JobView
from shared.domain.route import Reason
from shared.errors import InvalidRequest
from shared.policy.lengths import PredictedEnd, predicted_tokens

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
