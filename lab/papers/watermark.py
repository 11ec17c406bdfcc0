"""How vLLM's engines of the papers' time (V0) let a request start: some blocks always stay free for those that run."""

from dataclasses import dataclass
from typing import ClassVar

from shared.domain.job import JobView
from shared.policy.decode_admission import Admission, DecodeAdmission, DecodeMemory


@dataclass(frozen=True, slots=True)
class Watermark:
    """Admit iff `share` of all blocks is left free beside the whole prompt. Fewer requests are preempted so.

    Source: vLLM's block manager up to 0.8, `watermark` = 0.01. An empty instance takes anything.
    """

    name: ClassVar[str] = "watermark"
    needs_running: ClassVar[bool] = False
    share: float = 0.01

    def admit(self, job: JobView, memory: DecodeMemory, now: float) -> Admission:
        """See `DecodeAdmission`."""
        need = -(-job.prompt_tokens // memory.block_size)
        left = memory.free_blocks - need
        empty = memory.free_blocks == memory.total_blocks and left >= 0
        return Admission(empty or left >= self.share * memory.total_blocks)


@dataclass(frozen=True, slots=True)
class AtopWatermark:
    """Another policy in such an engine: both must admit."""

    name: ClassVar[str] = "atop_watermark"
    needs_running: ClassVar[bool] = True
    inner: DecodeAdmission

    def admit(self, job: JobView, memory: DecodeMemory, now: float) -> Admission:
        """See `DecodeAdmission`."""
        by_engine = Watermark().admit(job, memory, now)
        return self.inner.admit(job, memory, now) if by_engine.admitted else by_engine
