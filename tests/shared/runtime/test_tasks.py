"""Steps that fail: tried again, and the end of the process once they fail again and again."""

import asyncio
import signal

import pytest

from shared.runtime import tasks as runner
from shared.runtime.tasks import FAILURES, background


class Step:
    """Fails at the calls that `fails` names, and tells of its `enough`-th."""

    def __init__(self, fails: set[int], enough: int) -> None:
        self.calls = 0
        self.done = asyncio.Event()
        self._fails, self._enough = fails, enough

    async def __call__(self) -> None:
        self.calls += 1
        if self.calls == self._enough:
            self.done.set()
        if self.calls in self._fails:
            raise ValueError("out of range")


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Signals that the runner has sent to the process."""
    sent: list[int] = []
    monkeypatch.setattr(runner.os, "kill", lambda _, number: sent.append(number))
    return sent


async def test_a_step_that_fails_is_tried_again(ended: list[int]) -> None:
    step = Step(set(range(1, FAILURES)) | set(range(FAILURES + 1, 2 * FAILURES)), 2 * FAILURES)
    async with background() as tasks:
        tasks.every("often", 0.001, step)
        await asyncio.wait_for(step.done.wait(), 10)
    assert not ended


async def test_failures_in_a_row_end_the_process(ended: list[int]) -> None:
    step = Step(set(range(100)), FAILURES)
    async with background() as tasks:
        tasks.every("often", 0.001, step)
        await asyncio.wait_for(step.done.wait(), 10)
        async with asyncio.timeout(10):
            while not ended:
                await asyncio.sleep(0.001)
    assert (step.calls, ended) == (FAILURES, [signal.SIGTERM])
