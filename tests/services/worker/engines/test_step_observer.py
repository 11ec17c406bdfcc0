"""What vLLM's scheduler planned, as a batch of the cost model; and the record of a turn of the loop."""

from types import SimpleNamespace
from typing import Any

import pytest

from services.worker.engines import vllm_observers
from services.worker.engines.base import StepLog
from services.worker.engines.vllm_observers import StepObserver, batch_of


def plan(
    scheduled: dict[str, int],
    known: dict[str, int] | None = None,
    new: dict[str, int] | None = None,
    drafts: dict[str, list[int]] | None = None,
) -> Any:
    """A SchedulerOutput: tokens by request, drafted ones included; computed tokens of requests known before, and of new
    ones; drafted tokens by request.
    """
    known, new = known or {}, new or {}
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(known), num_computed_tokens=list(known.values())),
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=done) for name, done in new.items()],
        scheduled_spec_decode_tokens=drafts or {},
    )


@pytest.mark.parametrize(
    ("planned", "batch"),
    [
        pytest.param(plan({"a": 1, "b": 1}, {"a": 100, "b": 28}), ((), 2, 128), id="decodes"),
        pytest.param(
            plan({"a": 1, "b": 200, "c": 300}, {"a": 50, "b": 512}, {"c": 0}),
            (((200, 512), (300, 0)), 1, 50),
            id="chunks beside a decode",
        ),
        pytest.param(plan({"a": 1}, new={"a": 99}), ((), 1, 99), id="the last token of an imported prompt"),
        pytest.param(plan({"a": 1}, new={"a": 0}), (((1, 0),), 0, 0), id="a prompt of one token"),
        pytest.param(
            plan({"a": 4, "b": 1, "c": 3}, {"a": 100, "b": 28, "c": 5}, drafts={"a": [7, 8, 9], "c": [7, 8]}),
            ((), 3, 133),
            id="decodes with drafts",
        ),
        pytest.param(
            plan({"a": 4, "b": 200}, {"a": 50, "b": 512}, drafts={"a": [-1, -1, -1]}),
            (((200, 512),), 1, 50),
            id="a chunk beside a decode with drafts",
        ),
        pytest.param(plan({"a": 1}, {"a": 10, "b": 20}), ((), 1, 10), id="a request that is not scheduled"),
    ],
)
def test_a_plan_is_a_batch_of_the_cost_model(planned: Any, batch: Any) -> None:
    assert batch_of(planned) == batch


class Scheduler:
    """Gives out the plans that it is given, and takes what came of them."""

    def __init__(self, *plans: Any) -> None:
        self.plans = list(plans)

    def schedule(self, throttle: bool = False) -> Any:
        return self.plans.pop(0)

    def update_from_output(self, plan: Any, output: Any) -> Any:
        return output


def test_a_turn_is_recorded_iff_something_was_computed() -> None:
    log = StepLog()
    scheduler = Scheduler(plan({"a": 8}, new={"a": 0}), plan({}), plan({"a": 1}, {"a": 8}))
    observer = StepObserver(scheduler, log, own_cpu=True)
    for _ in range(3):
        observer.began()
        scheduler.update_from_output(scheduler.schedule(False), "tokens")
        observer.ended()
    observer.began()
    observer.ended()  # a turn without a step
    first, second = log.page("p0", 1, 0, 10).steps
    assert (first.prefill, first.decode_count) == (((8, 0),), 0)
    assert (second.prefill, second.decode_count, second.decode_context_tokens) == ((), 1, 8)
    assert 0 < first.seconds < 1
    assert first.cpu_s >= 0


def test_with_pipeline_stages_a_step_ends_some_turns_after_it_began() -> None:
    log = StepLog()
    first, second = plan({"a": 8}, new={"a": 0}), plan({"b": 4}, new={"b": 0})
    scheduler = Scheduler(first, second, plan({}), plan({}))
    observer = StepObserver(scheduler, log, own_cpu=False)

    def turn(ends: Any) -> tuple[int, bool]:
        """What is recorded by its end, and whether it was idle."""
        observer.began()
        if scheduler.plans:
            scheduler.schedule()
        if ends is not None:
            scheduler.update_from_output(ends, None)
        observer.ended()
        return len(log.page("p0", 1, 0, 10).steps), observer.idle

    assert turn(None) == (0, False)
    assert turn(first) == (1, False)
    assert turn(second) == (2, False)
    assert turn(plan({})) == (2, True)
    one, other = log.page("p0", 1, 0, 10).steps
    assert (one.prefill, other.prefill) == (((8, 0),), ((4, 0),))
    assert (one.cpu_s, other.cpu_s) == (0.0, 0.0)  # the engine's thread did not compute them


class Clock:
    """Stands in for `time`, in a module under test."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s

    def thread_time(self) -> float:
        return self.now_s


def overlapping(monkeypatch: pytest.MonkeyPatch, *, own_cpu: bool) -> list[float]:
    """Times recorded of two steps of 8 and 2 s, the second of which is scheduled while the first one computes. A turn
    ends with the tokens of the step before.
    """
    clock = Clock()
    monkeypatch.setattr(vllm_observers, "time", clock)
    log, first, second = StepLog(), plan({"a": 8}, new={"a": 0}), plan({"a": 1}, {"a": 8})
    scheduler = Scheduler(first, second)
    observer = StepObserver(scheduler, log, own_cpu=own_cpu)
    turns: list[tuple[float, Any]] = [(8.0, None), (2.0, first), (0.0, second)]  # computed at once, in the turn
    if not own_cpu:
        turns = [(0.0, None), (8.0, first), (2.0, second)]  # beside the turns, that wait for it
    for seconds, ends in turns:
        observer.began()
        if scheduler.plans:
            scheduler.schedule()
        clock.now_s += seconds
        if ends is not None:
            scheduler.update_from_output(ends, None)
        observer.ended()
        assert not observer.idle
    observer.began()
    observer.ended()
    assert observer.idle
    return [step.seconds for step in log.page("p0", 1, 0, 10).steps]


@pytest.mark.parametrize("own_cpu", [False, True])
def test_of_steps_that_overlap_each_lasts_from_the_end_of_the_one_before(
    own_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the engine's thread computes itself is done in its turn, whenever it is fetched."""
    assert overlapping(monkeypatch, own_cpu=own_cpu) == [8.0, 2.0]
