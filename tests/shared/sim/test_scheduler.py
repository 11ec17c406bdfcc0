"""Legs that wait at one engine, as at a worker's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engines.admission_queue import AdmissionQueue
from services.worker.engines.base import EnginePolicies, EngineRequest
from services.worker.kv.port import ExportLedger
from shared.domain.instance import Role
from shared.domain.job import Generation, JobView
from shared.domain.kv import KvHandle
from shared.policy.decode_admission import Blocks
from shared.policy.prefill_order import Fcfs, Ljf, PrefillOrder, Sjf
from shared.sim.cluster import simulate
from shared.sim.outcomes import SimResult
from shared.sim.request import Leg, SimRequest
from shared.sim.scheduler import WaitingLegs
from shared.sim.spec import InstanceSpec, RunSpec
from tests.shared.sim.clusters import instance
from tests.shared.sim.test_time import workload

# "come" with a prompt's length; "stream": one whose KV comes, with its context; "enter": one who may; "end", "send" or
# "leave" with a number that picks who; "back": the last that entered is preempted.
Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["come", "come", "stream", "enter", "enter", "end", "send", "leave", "back"]),
        st.integers(1, 50),
    ),
    max_size=40,
)


def leg(number: int, prompt: int, *, decodes: bool = False, stream: bool = False) -> Leg:
    request = SimRequest(number, JobView(str(number), prompt, 2), 2, (), float(number))
    made = Leg(request, prompt, 1, prompt - 1 if stream else 0, last_token_s=1.0 if stream else -1.0)
    if decodes:
        request.decode_leg = made
    else:
        request.prefill_leg = made
    return made


def simulated(order: PrefillOrder, staging: int, steps: list[Step]) -> list[int]:
    """Who enters the engine, in order; -1 for each time that nobody may."""
    queue = WaitingLegs(order, staging)
    waiting, inside, staged = list[Leg](), list[Leg](), list[Leg]()
    entered = list[int]()
    for number, (what, value) in enumerate(steps):
        if what == "come":
            waiting.append(leg(number, value))
            queue.push(waiting[-1])
        elif what == "stream":
            waiting.append(leg(number, value, decodes=True, stream=True))
            queue.push(waiting[-1])
        elif what == "back" and inside:
            waiting.append(inside.pop())
            queue.push_front(waiting[-1])
        elif what == "enter":
            if queue.next() is None:
                entered.append(-1)
                continue
            inside.append(queue.pop())
            waiting.remove(inside[-1])
            entered.append(inside[-1].request.row)
        elif what == "end" and inside:
            staged.append(inside.pop(value % len(inside)))
        elif what == "send" and staged:
            queue.sent(staged.pop(value % len(staged)))
        elif what == "leave" and waiting:
            left = waiting.pop(value % len(waiting))
            queue.remove(left)
            queue.sent(left)
    return entered


def live(order: PrefillOrder, staging: int, steps: list[Step]) -> list[int]:
    """The same at the door of a worker's engine, with its ledger."""
    ledger, asked = ExportLedger(staging, 1), dict[int, EngineRequest]()
    queue = AdmissionQueue[int](
        EnginePolicies(order), asked.__getitem__, lambda number: 0, list, lambda: Blocks(0, 0, 1)
    )
    waiting, inside, staged = list[int](), list[int](), list[int]()
    entered = list[int]()

    def come(number: int, prompt: int) -> None:
        name = str(number)
        ledger.announce(name, prompt, b"")
        asked[number] = EngineRequest(
            name,
            JobView(name, prompt, 2),
            [1] * prompt,
            Generation(b"", float(number)),
            1,
            first_token_only=True,
            export_to=name,
            has_room=lambda: ledger.reserve(name),
        )
        waiting.append(number)
        queue.add(number)

    def stream(number: int, prompt: int) -> None:
        view = JobView(str(number), prompt, 2, started=True)
        kv = KvHandle(str(number), "p", 1, "f", (), prompt, "bfloat16")
        asked[number] = EngineRequest(
            str(number), view, [1] * prompt, Generation(b"", float(number)), 1, import_from=kv
        )
        waiting.append(number)
        queue.add(number)

    for number, (what, value) in enumerate(steps):
        if what == "come":
            come(number, value)
        elif what == "stream":
            stream(number, value)
        elif what == "back" and inside:
            waiting.append(inside.pop())
            queue.put_back(waiting[-1])
        elif what == "enter":
            if queue.next() is None:
                entered.append(-1)
                continue
            inside.append(queue.pop())
            waiting.remove(inside[-1])
            entered.append(inside[-1])
        elif what == "end" and inside:
            staged.append(inside.pop(value % len(inside)))
        elif what == "send" and staged:
            ledger.end(str(staged.pop(value % len(staged))))
        elif what == "leave" and waiting:
            left = waiting.pop(value % len(waiting))
            queue.remove(left)
            ledger.end(str(left))
    return entered


@given(st.sampled_from([Fcfs(), Sjf(window=3), Ljf(window=2), Sjf()]), st.sampled_from([40, 100, 10_000]), STEPS)
def test_prompts_enter_as_a_workers_engine_lets_them_in(order: PrefillOrder, staging: int, steps: list[Step]) -> None:
    assert simulated(order, staging, steps) == live(order, staging, steps)


@given(
    st.integers(1, 2),
    st.sampled_from([60, 10_000]),
    st.lists(st.tuples(st.sampled_from(["come", "enter", "enter", "end", "send"]), st.integers(1, 50)), min_size=40),
)
def test_who_waits_for_room_is_not_starved_either(window: int, staging: int, steps: list[Step]) -> None:
    """The bound holds over the wait for room and the wait for the engine together."""
    entered = [number for number in live(Sjf(window), staging, steps) if number >= 0]
    came = [number for number, (what, _) in enumerate(steps) if what == "come"]
    for number in came:
        before = entered[: entered.index(number)] if number in entered else entered
        assert sum(later > number for later in before) <= window


def test_the_order_applies_to_all_that_wait_whatever_they_wait_for() -> None:
    queue = WaitingLegs(Sjf())
    legs = [leg(0, 90), leg(1, 50, decodes=True), leg(2, 70), leg(3, 10, decodes=True)]
    for one in legs:
        queue.push(one)
    assert [queue.pop() for _ in legs if queue.next()] == [legs[at] for at in (3, 1, 2, 0)]


def test_preempted_ones_come_first() -> None:
    queue = WaitingLegs(Sjf())
    first, second = leg(0, 50), leg(1, 10)
    queue.push(first)
    assert queue.pop() is first
    queue.push(second)
    queue.push_front(first)
    assert queue.next() is first
    assert [queue.pop(), queue.pop()] == [first, second]


def test_nobody_takes_the_place_of_one_that_has_its_room() -> None:
    queue = WaitingLegs(Sjf(), 100)
    long, short = leg(0, 90), leg(1, 20)
    queue.push(long)
    assert queue.next() is long  # it has room, and waits for something else
    queue.push(short)
    assert queue.next() is long
    assert queue.pop() is long
    assert queue.next() is None
    assert queue.sent(long)
    assert queue.next() is short


def of_prompts(order: PrefillOrder, *, role: Role = Role.PREFILL) -> SimResult:
    """Prompts of 200, 200, 150 and 50 tokens, all at once, through chunks of 256."""
    work = workload((0.0, 200, 1), (0.0, 200, 1), (0.0, 150, 1), (0.0, 50, 1))
    specs: list[InstanceSpec] = [instance("i", role), instance("d", Role.DECODE)]
    return simulate(work, specs if role is Role.PREFILL else specs[:1], RunSpec(prefill_order=order))


@pytest.mark.parametrize("role", Role)
def test_prompts_are_computed_in_the_policys_order_on_instances_of_either_role(role: Role) -> None:
    # As many as fit beside what is left of the one before: steps of 200, 256 and 144 tokens.
    assert of_prompts(Fcfs(), role=role).outcomes.ttft_s == pytest.approx([0.21, 0.476, 0.63, 0.63])
    # The first is taken when it comes. Then 50, 150 and 56 of 200 in one step.
    assert of_prompts(Sjf(), role=role).outcomes.ttft_s == pytest.approx([0.21, 0.63, 0.476, 0.476])


def test_a_prompt_waits_for_room_for_its_kv() -> None:
    # KV of 100 tokens takes 10 ms; the second's begins only when the first's is sent, at 120 ms.
    work = workload((0.0, 100, 5), (0.0, 100, 5))
    specs = [instance("p", Role.PREFILL, staging_tokens=150), instance("d", Role.DECODE)]
    assert simulate(work, specs).outcomes.ttft_s == pytest.approx([0.11, 0.23])
    # Longer than all the room there is: it is let in all the same.
    specs = [instance("p", Role.PREFILL, staging_tokens=50), instance("d", Role.DECODE)]
    assert simulate(work, specs).outcomes.ttft_s == pytest.approx([0.11, 0.22])
