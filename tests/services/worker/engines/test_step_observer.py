"""What vLLM's scheduler planned, as a batch of the cost model; and the record of a turn of the loop."""

from types import SimpleNamespace
from typing import Any

from services.worker.engines.step_log import StepLog
from services.worker.engines.step_observer import StepObserver, batch_of


def plan(scheduled: dict[str, int], known: dict[str, int] | None = None, new: dict[str, int] | None = None) -> Any:
    """A SchedulerOutput: tokens by request; computed tokens of requests known before, and of new ones."""
    known, new = known or {}, new or {}
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(known), num_computed_tokens=list(known.values())),
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=done) for name, done in new.items()],
    )


def test_decodes_alone() -> None:
    assert batch_of(plan({"a": 1, "b": 1}, {"a": 100, "b": 28})) == ((), 2, 128)


def test_chunks_beside_decodes() -> None:
    mixed = plan({"a": 1, "b": 200, "c": 300}, {"a": 50, "b": 512}, {"c": 0})
    assert batch_of(mixed) == (((200, 512), (300, 0)), 1, 50)


def test_the_last_token_of_an_imported_prompt_is_a_decode() -> None:
    assert batch_of(plan({"a": 1}, new={"a": 99})) == ((), 1, 99)


def test_a_prompt_of_one_token_is_a_prefill() -> None:
    assert batch_of(plan({"a": 1}, new={"a": 0})) == (((1, 0),), 0, 0)


def test_requests_that_are_not_scheduled_do_not_count() -> None:
    assert batch_of(plan({"a": 1}, {"a": 10, "b": 20})) == ((), 1, 10)


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


def test_cpu_time_of_work_done_elsewhere_is_not_claimed() -> None:
    log = StepLog()
    scheduler = Scheduler(plan({"a": 8}, new={"a": 0}))
    observer = StepObserver(scheduler, log, own_cpu=False)
    observer.began()
    assert scheduler.update_from_output(scheduler.schedule(), "tokens") == "tokens"
    observer.ended()
    assert log.page("p0", 1, 0, 10).steps[0].cpu_s == 0.0


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
