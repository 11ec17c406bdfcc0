"""What waits at an engine: prompts as a worker's prefill queue lets them in, decodes in order of arrival."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.jobs.prefill_queue import PrefillQueue
from services.worker.kv.ledger import ExportLedger
from shared.domain.instance import Role
from shared.domain.job import JobView
from shared.errors import InvalidRequest
from shared.policy.prefill_order import Fcfs, Ljf, PrefillOrder, Sjf
from shared.sim.cluster import simulate
from shared.sim.outcomes import SimResult
from shared.sim.request import Leg, SimRequest
from shared.sim.spec import InstanceSpec, RunSpec
from shared.sim.waiting import WaitingLegs
from tests.shared.sim.clusters import instance
from tests.shared.sim.test_time import workload

Step = tuple[str, int]  # "come" with a prompt's length; "end", "send" or "leave" with a number that picks who


def leg(number: int, prompt: int, *, decodes: bool = False) -> Leg:
    request = SimRequest(number, JobView(str(number), prompt, 2), 2, ())
    made = Leg(request, prompt, 1)
    if decodes:
        request.decode_leg = made
    else:
        request.prefill_leg = made
    return made


def simulated(order: PrefillOrder, batch: int, staging: int, steps: list[Step]) -> list[int]:
    """Who enters the engine, in order."""
    queue = WaitingLegs(order, batch, staging)
    waiting: list[Leg] = []
    inside: list[Leg] = []
    staged: list[Leg] = []
    entered: list[int] = []
    for number, (what, value) in enumerate(steps):
        if what == "come":
            waiting.append(leg(number, value))
            queue.push(waiting[-1], 0.0)
        elif what == "end" and inside:
            staged.append(inside.pop(value % len(inside)))
            queue.gone(staged[-1], 0.0)
        elif what == "send" and staged:
            queue.sent(staged.pop(value % len(staged)), 0.0)
        elif what == "leave" and waiting:
            left = waiting.pop(value % len(waiting))
            queue.remove(left)
            queue.gone(left, 0.0)
        while queue.peek(0.0) is not None:
            inside.append(queue.pop())
            waiting.remove(inside[-1])
            entered.append(inside[-1].request.row)
    return entered


async def live(order: PrefillOrder, batch: int, staging: int, steps: list[Step]) -> list[int]:
    """The same through the worker's queue: a job that waits is a task, one that is in the engine holds its turn."""
    queue = PrefillQueue(order, batch)
    ledger = ExportLedger(staging, 1)
    ledger.when_room(queue.admit)
    waiting: list[int] = []
    inside: list[int] = []
    staged: list[int] = []
    entered: list[int] = []
    over = {number: asyncio.Event() for number, _ in enumerate(steps)}
    tasks: dict[int, asyncio.Task[None]] = {}

    async def job(number: int, prompt: int) -> None:
        view = JobView(str(number), prompt, 2)
        async with queue.turn(view, lambda: ledger.reserve(str(number), prompt, b"")):
            waiting.remove(number)
            inside.append(number)
            entered.append(number)
            await over[number].wait()

    async def settle() -> None:
        for _ in range(8):  # enough for a turn to pass from one task to the next
            await asyncio.sleep(0)

    for number, (what, value) in enumerate(steps):
        if what == "come":
            waiting.append(number)
            tasks[number] = asyncio.create_task(job(number, value))
        elif what == "end" and inside:
            staged.append(inside.pop(value % len(inside)))
            over[staged[-1]].set()
        elif what == "send" and staged:
            ledger.end(str(staged.pop(value % len(staged))))
        elif what == "leave" and waiting:
            tasks[waiting.pop(value % len(waiting))].cancel()
        await settle()
    async with AsyncExitStack() as stack:
        for task in tasks.values():
            task.cancel()
            stack.push_async_callback(asyncio.wait, [task])
    return entered


@given(
    st.sampled_from([Fcfs(), Sjf(window=3), Ljf(window=2), Sjf()]),
    st.integers(1, 4),
    st.sampled_from([40, 100, 10_000]),
    st.lists(st.tuples(st.sampled_from(["come", "come", "end", "send", "leave"]), st.integers(1, 50)), max_size=30),
)
def test_prompts_enter_the_engine_as_a_workers_queue_lets_them_in(
    order: PrefillOrder, batch: int, staging: int, steps: list[Step]
) -> None:
    assert simulated(order, batch, staging, steps) == asyncio.run(live(order, batch, staging, steps))


def test_only_prompts_beyond_the_batch_are_ordered() -> None:
    queue = WaitingLegs(Sjf(), 2)
    legs = [leg(number, prompt) for number, prompt in enumerate((90, 50, 70, 10))]
    for one in legs:
        queue.push(one, 0.0)
    assert [queue.pop() for _ in range(2)] == legs[:2]
    assert queue.peek(0.0) is None
    assert queue.count == 2
    queue.gone(legs[0], 0.0)
    assert queue.peek(0.0) is legs[3]


def test_decodes_come_first_come_first_served() -> None:
    queue = WaitingLegs(Sjf())
    legs = [leg(number, prompt, decodes=True) for number, prompt in enumerate((90, 50, 70))]
    for one in legs:
        queue.push(one, 0.0)
    assert [queue.pop() for _ in legs if queue.peek(0.0)] == legs


def test_preempted_ones_come_first_and_keep_their_place_in_the_batch() -> None:
    queue = WaitingLegs(Fcfs(), 1)
    first, second = leg(0, 10), leg(1, 10)
    queue.push(first, 0.0)
    queue.push(second, 0.0)
    assert queue.pop() is first
    queue.push_front(first)
    assert queue.pop() is first
    assert queue.peek(0.0) is None
    queue.gone(first, 0.0)
    assert queue.pop() is second


def of_prompts(order: PrefillOrder, batch: int | None, *, role: Role = Role.PREFILL) -> SimResult:
    """Prompts of 200, 200, 150 and 50 tokens, all at once, through chunks of 256."""
    work = workload((0.0, 200, 1), (0.0, 200, 1), (0.0, 150, 1), (0.0, 50, 1))
    specs: list[InstanceSpec] = [instance("i", role, prefill_batch=batch), instance("d", Role.DECODE)]
    return simulate(work, specs if role is Role.PREFILL else specs[:1], RunSpec(prefill_order=order))


def test_a_batch_bounds_what_a_step_computes() -> None:
    # One at a time: steps of 210, 210, 160 and 60 ms.
    alone = of_prompts(Fcfs(), 1).outcomes.ttft_s
    assert alone == pytest.approx([0.21, 0.42, 0.58, 0.64])
    # As many as fit beside what is left of the one before: 200, 256 and 144 tokens a step.
    free = of_prompts(Fcfs(), None).outcomes.ttft_s
    assert free == pytest.approx([0.21, 0.476, 0.63, 0.63])


def test_the_order_applies_beyond_the_batch_of_a_prefill_instance() -> None:
    # The first two are in the engine; of the others the shorter one enters it when the first is computed.
    ordered = of_prompts(Sjf(), 2).outcomes.ttft_s
    assert ordered == pytest.approx([0.21, 0.47, 0.63, 0.47])


def test_a_prompt_waits_for_room_for_its_kv() -> None:
    # KV of 100 tokens takes 10 ms; the second's begins only when the first's is sent, at 120 ms.
    work = workload((0.0, 100, 5), (0.0, 100, 5))
    specs = [instance("p", Role.PREFILL, prefill_batch=16, staging_tokens=150), instance("d", Role.DECODE)]
    assert simulate(work, specs).outcomes.ttft_s == pytest.approx([0.11, 0.23])
    # Longer than all the room there is: it is let in all the same.
    specs = [instance("p", Role.PREFILL, prefill_batch=16, staging_tokens=50), instance("d", Role.DECODE)]
    assert simulate(work, specs).outcomes.ttft_s == pytest.approx([0.11, 0.22])


def test_an_instance_that_decodes_orders_nothing() -> None:
    sjf, fcfs = (of_prompts(order, None, role=Role.DECODE).outcomes.ttft_s for order in (Sjf(), Fcfs()))
    assert sjf.tolist() == fcfs.tolist()


def test_a_batch_of_none_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="i: room for staged KV is given to a prefill_batch"):
        instance("i", Role.PREFILL, staging_tokens=100)
    with pytest.raises(InvalidRequest, match="i: prefill_batch must be at least 1, not 0"):
        instance("i", Role.PREFILL, prefill_batch=0)
