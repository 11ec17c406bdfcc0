"""A real engine, all that is asked of it, and what it does at its door."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from services.worker.engines.base import EnginePolicies
from services.worker.engines.vllm import VllmEngine
from services.worker.kv.rank_events import KvEvents
from services.worker.kv.rank_messages import PullEnded
from services.worker.settings import WorkerSettings
from shared.domain.job import JobView, LengthPrediction, Slo
from shared.policy.decode_admission import DecodeAdmission, Greedy
from shared.policy.prefill_order import Fcfs, PrefillOrder
from tests.services.worker.engines.engine_run import Run

DEFAULT = Slo()


class WatchedEngine(Run):
    """Requests of one engine, by name, and what the engine's scheduler did with them."""

    def __init__(self, engine: VllmEngine, settings: WorkerSettings) -> None:
        super().__init__(engine)
        self.settings = settings
        self.entered: list[str] = []
        self.paused: list[str] = []  # each time that one lost its blocks
        self.beside: dict[str, list[str]] = {}  # who was inside when it entered
        self.pulls: list[PullEnded] = []
        self.partly: list[int] = []  # of a prompt, its tokens that were computed before each step
        self.preemptions = self.turns = 0
        self._stops: list[tuple[str, int, threading.Event, threading.Event]] = []
        self._watch()

    def _watch(self) -> None:
        scheduler = self.engine._scheduler
        preempt, schedule = scheduler._preempt_request, scheduler.schedule

        def preempted(*given: Any, **more: Any) -> Any:
            self.preemptions += 1
            return preempt(*given, **more)

        def turned(*given: Any, **more: Any) -> Any:
            self.turns += 1
            self.partly += self.engine.stats().partly.values()
            self._stop()
            return schedule(*given, **more)

        scheduler._preempt_request, scheduler.schedule = preempted, turned

    def _stop(self) -> None:  # on the engine's thread, before each step is planned
        for stop in list(self._stops):
            name, tokens, reached, go_on = stop
            request = self.engine._scheduler.requests.get(name)
            if name in self.entered and request is not None and request.num_output_tokens >= tokens:
                self._stops.remove(stop)
                reached.set()
                go_on.wait(60)

    async def follow_events(self, events: KvEvents) -> None:
        async for event in events:
            if isinstance(event, PullEnded):
                self.pulls.append(event)

    def submit(
        self,
        name: str,
        prompt: list[int],
        tokens: int = 1,
        sampling: Any = None,
        salt: str = "",
        job: JobView | None = None,
        *,
        slo: Slo = DEFAULT,
        started: bool = False,
        **more: Any,
    ) -> None:
        """As long an answer is predicted as it will be: a better prediction would change nothing."""
        said = LengthPrediction(0, tokens, tokens, 1.0, "observed")
        job = job or JobView(name, len(prompt), tokens, slo, prediction=said, started=started)
        more |= {"entered": partial(self._entered, name), "preempted": partial(self.paused.append, name)}
        super().submit(name, prompt, tokens, sampling, salt, job, **more)

    def _entered(self, name: str) -> None:  # on the engine's thread, between two looks at the gate
        self.entered.append(name)
        self.beside[name] = [one.job.job_id for one in self.engine._scheduling._decoding() if one.job.job_id != name]

    async def ends_of(self, *names: str) -> None:
        await asyncio.gather(*(self.end(name) for name in names))

    async def until(self, what: Any) -> None:
        async with asyncio.timeout(60):
            while not what():
                await asyncio.sleep(0.005)

    @asynccontextmanager
    async def stopped_at(self, name: str, tokens: int) -> AsyncIterator[None]:
        """The engine stands still within the block, from the moment at which a request is inside with so many tokens:
        it cannot end while the machine pauses this thread.
        """
        reached, go_on = threading.Event(), threading.Event()
        self._stops.append((name, tokens, reached, go_on))
        try:
            await self.until(reached.is_set)
            yield
        finally:
            go_on.set()

    def ended_before(self, first: str, second: str) -> bool:
        """Whether that is the order of their ends, or only the first has ended."""
        return first in self.ended and second not in self.ended[: self.ended.index(first)]

    @asynccontextmanager
    async def at_once(self) -> AsyncIterator[None]:
        """All that is submitted in the block is there before the engine looks."""
        done = threading.Event()
        self.engine._post(lambda: done.wait(60))
        try:
            yield
        finally:
            done.set()

    def follow(self, order: PrefillOrder | None = None, admission: DecodeAdmission | None = None) -> None:
        self.engine.set_policies(EnginePolicies(order or Fcfs(), admission or Greedy()))


def make_prompt(tokens: int, seed: int = 0) -> list[int]:
    return [5 + (seed * 131 + at * 7) % 4000 for at in range(tokens)]
