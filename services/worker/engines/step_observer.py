"""Watches the steps of vLLM's engine core: what was scheduled, and how long it took."""

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from services.worker.engines.step_log import Chunks, StepLog


@dataclass(slots=True)
class _Batch:
    """What was scheduled in a turn that began then."""

    plan: Any
    began_s: float
    cpu_s: float


class StepObserver:
    """`began` and `ended` around each turn of the engine's loop, on the engine's thread; costs some microseconds.

    What a step computes is known to the scheduler alone, so its `schedule` is wrapped to see what it returns, and its
    `update_from_output` to see when that is done: with pipeline stages or asynchronous scheduling some turns later, as
    others are under way. A step lasts until the end of the turn that has its tokens: from the beginning of the turn
    that scheduled it, or, where that was while all stages had work, from the end of the step that made room for it.
    Where the engine's thread computes by itself, a step is done in the turn that schedules it, whenever its tokens are
    fetched.
    """

    def __init__(self, scheduler: Any, log: StepLog, *, own_cpu: bool, stages: int = 1) -> None:
        """own_cpu: the calling thread computes, rather than processes or a device elsewhere. stages: so many steps are
        computed at once, others wait.
        """
        self._log = log
        self._own_cpu = own_cpu
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        self._under_way: deque[_Batch] = deque()  # without those that compute nothing
        self._done: list[_Batch] = []
        self._ends_s: deque[float] = deque([0.0] * stages, maxlen=stages)  # of the last steps
        self._fetched = False
        self._began_s = self._cpu_s = 0.0
        scheduler.schedule, scheduler.update_from_output = self._scheduled, self._updated

    def _scheduled(self, *args: Any, **kwargs: Any) -> Any:
        plan = self._schedule(*args, **kwargs)
        if plan.total_num_scheduled_tokens:
            self._under_way.append(batch := _Batch(plan, self._began_s, self._cpu_s))
            if self._own_cpu:
                self._done.append(batch)
        return plan

    def _updated(self, plan: Any, *args: Any, **kwargs: Any) -> Any:
        if self._under_way and self._under_way[0].plan is plan:  # they end in the order in which they began
            self._fetched = True
            batch = self._under_way.popleft()
            if not self._own_cpu:
                self._done.append(batch)
        return self._update(plan, *args, **kwargs)

    @property
    def idle(self) -> bool:
        """Whether nothing was computed in the last turn."""
        return not self._under_way and not self._fetched

    def began(self) -> None:
        """A turn of the loop begins."""
        self._done.clear()
        self._fetched = False
        self._cpu_s = time.thread_time() if self._own_cpu else 0.0
        self._began_s = time.perf_counter()

    def ended(self) -> None:
        """The turn's tokens are on their way; a turn in which nothing was computed leaves no record."""
        for batch in self._done:
            now = time.perf_counter()
            seconds = now - max(batch.began_s, self._ends_s[0])
            self._ends_s.append(now)
            cpu_s = time.thread_time() - batch.cpu_s if self._own_cpu else 0.0
            self._log.add(seconds, cpu_s, *batch_of(batch.plan))


def batch_of(plan: Any) -> tuple[Chunks, int, int]:
    """Prefill chunks, number of decodes and their total context, of a vLLM SchedulerOutput.

    One token after some context is a decode to the engine, whatever it is to the request: the last token of a
    prompt whose KV was imported costs the same.
    """
    cached, new, scheduled = plan.scheduled_cached_reqs, plan.scheduled_new_reqs, plan.num_scheduled_tokens
    if not new and plan.total_num_scheduled_tokens == len(scheduled) == len(cached.req_ids):
        return (), len(scheduled), sum(cached.num_computed_tokens)  # the usual step: nothing but decodes
    chunks, decodes, context = [], 0, 0
    known = [(request.req_id, request.num_computed_tokens) for request in new]
    for name, computed in (*zip(cached.req_ids, cached.num_computed_tokens, strict=True), *known):
        tokens = scheduled.get(name, 0)
        if tokens == 1 and computed:
            decodes += 1
            context += computed
        elif tokens:
            chunks.append((tokens, computed))
    return tuple(chunks), decodes, context
