"""TetriInfer (inference without interference): a dispatch to compare with, decode admission and role flips."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from shared.domain.instance import ClusterView, InstanceView, Role
from shared.domain.job import JobView
from shared.domain.route import Reason
from shared.errors import InvalidRequest
from shared.policy.decode_admission import ByPrediction, DecodeMemory
from shared.policy.dispatch import Accept, Figures, MemoryAware, draw
from shared.policy.role_flip import FlipContext, FlipDecision, FlipHistory, draining, load_share, ready_by_role


@dataclass(frozen=True, slots=True)
class WorstCase(MemoryAware):
    """Every heavy decode goes to the same instance, the first by id, until its memory is full, then to the next.

    Source: TetriInfer 5.2.3, "imbalance", a worst case to compare with. Ours: a light decode goes to a random
    instance.
    """

    name: ClassVar[str] = "worst_case"

    def _pick(
        self, candidates: Sequence[InstanceView], has_memory: Accept, heavy: bool, rng: Random, figures: Figures
    ) -> InstanceView | None:
        figures["heavy"] = "yes" if heavy else "no"
        return next(filter(has_memory, candidates) if heavy else iter(draw(candidates, 1, has_memory, rng)), None)


@dataclass(frozen=True, slots=True)
class ReserveStatic(ByPrediction):
    """Admit if and only if the job's predicted full length is less than the memory that is free now.

    reserve_all (ours): admit if and only if all running jobs and this one fit at their predicted full lengths, and the
    prompt fits now, because jobs outgrow their predictions.
    Source: TetriInfer 3.4, reserve-static; 5.2.3 for the lower end of the predicted range. Ours: where no job runs,
    the prompt alone decides, so that no job waits for ever.
    """

    name: ClassVar[str] = "reserve_static"
    needs_running: ClassVar[bool] = False
    reserve_all: bool = False

    def admit(self, job: JobView, memory: DecodeMemory, now: float) -> bool:
        need = self.length_tokens(job)
        if self.reserve_all:
            enough = need <= memory.total_blocks * memory.block_size - memory.reserved_tokens
        else:
            enough = need < memory.free_blocks * memory.block_size
        return memory.fits_now(job) and (enough or memory.reserved_tokens <= 0)


@dataclass(frozen=True, slots=True)
class ReserveDynamic(ByPrediction):
    """Admit if and only if memory is left when the first of the running jobs and this one is predicted to end.

    With k the shortest predicted remaining length, every context grows by k; each is rounded up to whole blocks.
    Source: TetriInfer 3.4, reserve-dynamic; 5.2.3 for the lower end of the predicted range. Ours: the prompt must fit
    now, and it alone decides where no job runs.
    """

    name: ClassVar[str] = "reserve_dynamic"
    needs_running: ClassVar[bool] = True

    def admit(self, job: JobView, memory: DecodeMemory, now: float) -> bool:
        grows = min([self.output_tokens(job), *[one.remaining_tokens for one in memory.running]])
        size, more = memory.block_size, grows + memory.block_size - 1  # to round up
        need = (job.prompt_tokens + more) // size
        need += sum([(one.context_tokens + more) // size for one in memory.running])
        return memory.fits_now(job) and (need <= memory.total_blocks or not memory.running)


@dataclass(frozen=True, slots=True)
class IdleFlip:
    """An instance whose load stayed under `threshold_share` for `for_s` flips, if the other role has work.

    Source: TetriInfer 3.5 (under 10 % for a minute; idle for a minute in 5.1). Ours: the last ready instance of a
    role does not flip, none flips while another drains or while the other role is idle, too.
    """

    name: ClassVar[str] = "idle"
    threshold_share: float = 0.1
    for_s: float = 60.0

    def __post_init__(self) -> None:
        if not (0.0 < self.threshold_share <= 1.0 and self.for_s >= 0.0):
            raise InvalidRequest("idle: threshold_share must lie in 0..1 and for_s must not be negative")

    def propose(self, view: ClusterView, now: float, history: FlipHistory, context: FlipContext) -> FlipDecision | None:
        ready = ready_by_role(view)
        idle = {f"{v.instance_id} as {v.role.value}": v for role in Role for v in ready[role] if self._is_idle(v)}
        since = history.hold(idle, now)
        if draining(view):
            return None
        candidates = context.candidates(ready)
        highest = {role: max(map(load_share, ready[role]), default=0.0) for role in Role}
        for key, chosen in sorted(idle.items(), key=lambda item: (since[item[0]], item[1].instance_id)):
            idle_s, to = now - since[key], chosen.role.other
            if idle_s < self.for_s:
                break
            if chosen not in candidates[chosen.role] or highest[to] < self.threshold_share:
                continue
            history.hold(idle.keys() - {key}, now)
            history.flips.append((now, to))
            figures: dict[str, float | str] = {
                "load_share": round(load_share(chosen), 4),
                "idle_s": round(idle_s, 3),
                "threshold_share": self.threshold_share,
                "highest_load_of_other_role": round(highest[to], 4),
            }
            return FlipDecision(chosen.instance_id, to, (Reason("role_flip:idle", figures),))
        return None

    def _is_idle(self, view: InstanceView) -> bool:
        return load_share(view) < self.threshold_share
