"""Whether a decode instance lets a job start now, or lets it wait."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

from shared.domain.job import JobView
from shared.domain.route import Reason


@dataclass(frozen=True, slots=True)
class DecodeMemory:
    """KV memory of an instance at one moment."""

    free_blocks: int
    block_size: int  # tokens
    total_blocks: int
    reserved_tokens: int = 0  # prompt + predicted tokens of the jobs that run, for policies that reserve


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether the job may start, and why."""

    admitted: bool
    reasons: tuple[Reason, ...] = ()


class DecodeAdmission(Protocol):
    """Decides for one job against the memory of its instance."""

    name: ClassVar[str]

    def admit(self, job: JobView, memory: DecodeMemory, now: float) -> Admission:
        """Decide. `now` is unix seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Greedy:
    """Admit iff the prompt fits now. Source: TetriInfer 3.4 (vLLM's own rule)."""

    name: ClassVar[str] = "greedy"

    def admit(self, job: JobView, memory: DecodeMemory, now: float) -> Admission:
        """See `DecodeAdmission`."""
        need = -(-job.prompt_tokens // memory.block_size)
        figures: dict[str, float | str] = {"need_blocks": need, "free_blocks": memory.free_blocks}
        return Admission(need <= memory.free_blocks, (Reason("admission:greedy", figures),))
