"""The admission queue of vLLM's engine, with the worker's ledger of exports, beside the queue of the simulator."""

from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from services.worker.engines.admission_queue import AdmissionQueue
from services.worker.engines.base import EnginePolicies, EngineRequest
from services.worker.kv.port import ExportLedger
from shared.domain.job import Generation, JobView
from shared.policy.decode_admission import Blocks, Greedy
from shared.policy.prefill_order import Fcfs, Ljf, PrefillOrder, Sjf
from shared.sim.group import DecodeGroup
from shared.sim.memory import ExportRoom, KvMemory
from shared.sim.request import Leg, SimRequest
from shared.sim.scheduler import Scheduler, SchedulerEvents
from shared.sim.spec import EngineLimits

# "add" with a prompt's length, and "stream", whose KV is imported, with its context; "enter": the next enters, if it
# may; "end", "send", "cancel" with a number that picks a request; "preempt": of the request that entered last.
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "stream", "enter", "enter", "end", "send", "cancel", "preempt"]),
        st.integers(1, 50),
    ),
    max_size=40,
)


class Both:
    """The queue of a worker's vLLM engine and the simulator's scheduler with the same requests."""

    def __init__(self, order: PrefillOrder, room: int) -> None:
        self.ledger, self.requests = ExportLedger(room, 1), dict[int, EngineRequest]()
        self.queue = AdmissionQueue[int](
            EnginePolicies(order), self.requests.__getitem__, lambda number: 0, list, lambda: Blocks(0, 0, 1)
        )
        self.room, limits = ExportRoom(room), EngineLimits()
        self.scheduler: Scheduler[Leg] = Scheduler(
            limits,
            KvMemory(limits, 1600),
            DecodeGroup(limits.block_tokens),
            cast(SchedulerEvents[Leg], None),  # no step is planned
            order,
            Greedy(),
            reserve_export=self.room.reserve,
        )
        self.legs = dict[int, Leg]()

    def add(self, number: int, tokens: int, *, stream: bool) -> None:
        name, job = str(number), JobView(str(number), tokens, 2, started=stream)
        self.legs[number] = Leg(
            SimRequest(number, job, 2, ()),
            tokens=tokens,
            output_left=1,
            decodes=stream,
            exports=not stream,
            last_token_s=1.0 if stream else -1.0,
        )
        if not stream:
            self.ledger.announce(name, tokens, b"")
        self.requests[number] = EngineRequest(
            name,
            job,
            [1] * tokens,
            Generation(b"", float(number)),
            1,
            first_token_only=not stream,
            export_to="" if stream else name,
            has_room=lambda: self.ledger.reserve(name),
        )
        self.queue.add(number)
        self.scheduler.add(self.legs[number])

    def enter(self) -> int | None:
        """The number of the request that enters, by both."""
        number, leg = self.queue.next(), self.scheduler.next_waiting()
        assert number == (leg.request.row if leg is not None else None)
        if number is not None:
            assert self.queue.pop() == self.scheduler.waiting.pop().request.row
        return number

    def preempt(self, number: int) -> None:
        self.queue.put_back(number)
        leg = self.legs[number]
        self.scheduler.waiting.put_back(leg, started=leg.is_stream)

    def send(self, number: int) -> None:
        self.ledger.end(str(number))
        self.room.free(self.legs[number])

    def cancel(self, number: int) -> None:
        self.queue.remove(number)
        self.scheduler.waiting.remove(self.legs[number])
        self.send(number)


def course(order: PrefillOrder, room: int, actions: list[tuple[str, int]]) -> list[int]:
    """The requests that enter, in order, by both."""
    both = Both(order, room)
    waiting, inside, staged, entered = list[int](), list[int](), list[int](), list[int]()
    for number, (action, value) in enumerate(actions):
        if action in ("add", "stream"):
            both.add(number, value, stream=action == "stream")
            waiting.append(number)
        elif action == "enter" and (next_number := both.enter()) is not None:
            waiting.remove(next_number)
            inside.append(next_number)
            entered.append(next_number)
        elif action == "preempt" and inside:
            both.preempt(inside[-1])
            waiting.append(inside.pop())
        elif action == "end" and inside:
            staged.append(inside.pop(value % len(inside)))
        elif action == "send" and staged:
            both.send(staged.pop(value % len(staged)))
        elif action == "cancel" and waiting:
            both.cancel(waiting.pop(value % len(waiting)))
    return entered


@given(st.sampled_from([Fcfs(), Sjf(window=3), Ljf(window=2), Sjf()]), st.sampled_from([40, 100, 10_000]), ACTIONS)
def test_prompts_enter_as_in_the_simulator(order: PrefillOrder, room: int, actions: list[tuple[str, int]]) -> None:
    course(order, room, actions)


@given(
    st.integers(1, 2),
    st.sampled_from([60, 10_000]),
    st.lists(st.tuples(st.sampled_from(["add", "enter", "enter", "end", "send"]), st.integers(1, 50)), min_size=40),
)
def test_a_request_that_waits_for_room_is_not_starved(window: int, room: int, actions: list[tuple[str, int]]) -> None:
    """The bound holds over the wait for room and the wait for the engine together."""
    entered = course(Sjf(window), room, actions)
    for number in (number for number, (action, _) in enumerate(actions) if action == "add"):
        before = entered[: entered.index(number)] if number in entered else entered
        assert sum(later > number for later in before) <= window
