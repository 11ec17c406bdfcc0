"""A decode-admission policy at an engine's door."""

from collections.abc import Sequence

import msgspec

from shared.policy.decode_admission import (
    UNPREDICTED_TOKENS,
    DecodeAdmission,
    DecodeMemory,
    ReserveDynamic,
    ReserveStatic,
    RunningDecode,
)
from shared.policy.lengths import PredictedEnd, predicted_tokens
from shared.sim.entry import Entry
from shared.sim.group import DecodeGroup
from shared.sim.memory import KvMemory


class AdmissionGate:
    """Asks the policy about entries that are to decode here; prompts that are only computed here pass."""

    def __init__(self, policy: DecodeAdmission, memory: KvMemory, group: DecodeGroup, block_tokens: int) -> None:
        self._policy = policy
        self._memory = memory
        self._group = group
        self._block = block_tokens
        self._end, self._unpredicted = PredictedEnd.LOWER, UNPREDICTED_TOKENS
        if isinstance(policy, ReserveStatic | ReserveDynamic):
            self._end, self._unpredicted = policy.end, policy.unpredicted_tokens

    def opens(self, entry: Entry, now: float, inside: Sequence[Entry]) -> bool:
        """Whether `entry` may start beside those `inside`, which run or whose KV is under way."""
        if entry is entry.flight.prefill_entry:
            return True
        job = entry.flight.job
        if entry.given:  # preempted: what it has given is prompt now
            job = msgspec.structs.replace(job, prompt_tokens=entry.tokens, max_tokens=entry.left)
        decoding = [other for other in inside if other is not other.flight.prefill_entry]
        memory = DecodeMemory(
            free_blocks=self._memory.free - self._memory.reserved,
            block_size=self._block,
            total_blocks=self._memory.total,
            reserved_tokens=sum(self._full_length(other) for other in decoding),
            running=tuple(map(self._running, decoding)) if self._policy.needs_running else (),
        )
        return self._policy.admit(job, memory, now).admitted

    def _full_length(self, entry: Entry) -> int:
        """Prompt and predicted output, or what it has come to if that is more."""
        job = entry.flight.job
        return max(self._context(entry), job.prompt_tokens + predicted_tokens(job, self._end, self._unpredicted))

    def _running(self, entry: Entry) -> RunningDecode:
        context = self._context(entry)
        return RunningDecode(context, max(0, self._full_length(entry) - context))

    def _context(self, entry: Entry) -> int:
        if entry.finish_step > self._group.steps:
            return entry.base + self._group.steps
        return entry.tokens
