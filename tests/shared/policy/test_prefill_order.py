"""Orders of prompts, the queue against a model that looks at every job, and the share of steps with prompts."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.job import JobView, Slo
from shared.errors import InvalidRequest
from shared.policy.prefill_order import (
    CLASS_WINDOW,
    Fcfs,
    Ljf,
    PrefillOrder,
    PrefillQueue,
    PrefillShare,
    Rank,
    Sjf,
    WaitingJob,
    heaviest_first,
    victim,
)


def job(tokens: int) -> WaitingJob:
    return WaitingJob(JobView("j", tokens, 8), tokens)


@pytest.mark.parametrize(("order", "first"), [(Fcfs(), [0, 1, 2, 3]), (Sjf(), [1, 3, 2, 0]), (Ljf(), [0, 2, 1, 3])])
def test_order_by_example(order: PrefillOrder, first: list[int]) -> None:
    tokens = [300, 100, 200, 100]
    assert sorted(range(4), key=lambda at: order.key(job(tokens[at]))) == first


@pytest.mark.parametrize("order", [Sjf, Ljf])
def test_somebody_may_always_overtake(order: type[Sjf]) -> None:
    with pytest.raises(InvalidRequest, match=rf"{order.name}: window must be at least 1, not 0"):
        order(window=0)


# The decaying share of steps with prompts in them


def test_it_is_the_share_of_steps() -> None:
    share = PrefillShare()
    assert share.after() == 0.0
    for _ in range(2000):
        share.mixed()
        share.plain(3)
    assert share.after() == pytest.approx(0.25, abs=0.01)
    assert share.after(64) < 0.12


def test_many_steps_at_once_are_as_many_one_by_one() -> None:
    one, many = PrefillShare(), PrefillShare()
    for share in (one, many):
        share.mixed()
        share.mixed()
    for _ in range(37):
        one.plain()
    assert many.after(37) == pytest.approx(one.after())
    many.plain(37)
    assert many.after() == pytest.approx(one.after())
    one.mixed()
    many.mixed()
    assert many.after() == pytest.approx(one.after())


ORDERS: list[PrefillOrder] = [Fcfs(), Sjf(1, True), Sjf(3, True), Ljf(2, True), Sjf(3), Ljf(2), Sjf()]
Step = tuple[str, int]  # what, and a number that says how long the prompt is, or who


@dataclass
class Model:
    """Everybody who waits, in order of arrival: number, length, and by how many later ones it was overtaken."""

    order: PrefillOrder
    here: list[list[int]] = field(default_factory=list)
    front: list[int] = field(default_factory=list)
    batch: set[int] = field(default_factory=set)

    def next(self) -> int:
        if self.front:
            return self.front[0]
        if self.order.batches:
            self.batch &= {one[0] for one in self.here}
            self.batch = self.batch or {one[0] for one in self.here[: self.order.window]}
            batch = [one for one in self.here if one[0] in self.batch]
            return min(batch, key=lambda one: (self.order.key(job(one[1])), one[0]))[0]
        for number, _, overtaken in self.here:
            if overtaken >= self.order.window:
                return number
        return min(self.here, key=lambda one: (self.order.key(job(one[1])), one[0]))[0]

    def pop(self) -> int:
        number = self.next()
        if self.front:
            return self.front.pop(0)
        self.here = [one for one in self.here if one[0] != number]
        for one in self.here:
            one[2] += one[0] < number
        return number

    def remove(self, number: int) -> None:
        self.here = [one for one in self.here if one[0] != number]
        self.front = [one for one in self.front if one != number]


STEPS = st.lists(
    st.tuples(st.sampled_from(["come", "come", "pop", "pop", "leave", "back", "hold", "order"]), st.integers(0, 40)),
    max_size=80,
)


@given(st.sampled_from(ORDERS), STEPS)
def test_the_next_is_the_models_next_whatever_happens(order: PrefillOrder, steps: list[Step]) -> None:
    line, model, out = PrefillQueue[int](order), Model(order), list[int]()
    for number, (what, value) in enumerate(steps):
        waiting = [*model.front, *(one[0] for one in model.here)]
        if what == "come":
            line.push(number, job(value))
            model.here.append([number, value, 0])
        elif what == "pop" and waiting:
            out.append(line.pop())
            assert out[-1] == model.pop()
        elif what == "leave" and waiting:
            assert line.remove(waiting[value % len(waiting)])
            model.remove(waiting[value % len(waiting)])
        elif what == "back" and out:
            line.put_back(out[-1])
            model.front.insert(0, out.pop())
        elif what == "hold" and waiting:
            if not model.front:
                model.front.append(model.pop())
            assert line.hold() == model.front[0]
        elif what == "order":
            model.order, model.batch = ORDERS[value % len(ORDERS)], set()
            line.reorder(model.order)
        assert len(line) == len(model.front) + len(model.here)
        assert sorted(line) == sorted([*model.front, *(one[0] for one in model.here)])
        if len(line):
            assert line.peek() == model.next()
    while len(line):
        assert line.pop() == model.pop()
    with pytest.raises(IndexError):
        line.pop()


@pytest.mark.parametrize("overtake", [False, True])
def test_long_waits_and_many_who_give_up_leave_nothing_behind(overtake: bool) -> None:
    line = PrefillQueue[int](Sjf(window=10_000, overtake=overtake))
    line.push(-1, job(10**6))
    for number in range(5_000):
        line.push(number, job(1))
        assert line.remove(number)
    assert len(line) == 1
    assert len(line._lines[False, 1.0]._heap) + len(line._lines[False, 1.0]._raw) < 200
    assert line.pop() == -1
    assert not line._lines[False, 1.0]._came


def of_weight(weight: float) -> WaitingJob:
    return WaitingJob(JobView("j", 10, 8, Slo(weight=weight)), 10)


def test_heavier_classes_go_first_and_lighter_ones_are_not_starved() -> None:
    line = PrefillQueue[str](Fcfs())
    line.push("light", of_weight(0.1))
    taken = 0
    while True:
        line.push(f"heavy{taken}", of_weight(1.0))
        if line.pop() == "light":
            break
        taken += 1
    assert taken == CLASS_WINDOW * 10
    assert len(line) == 1


def test_what_is_put_back_is_the_next_of_its_class_only() -> None:
    line = PrefillQueue[str](Fcfs())
    line.push("light", of_weight(0.1))
    line.push("light2", of_weight(0.1))
    assert line.pop() == "light"
    line.push("heavy", of_weight(1.0))
    line.put_back("light", 0.1)
    assert list(line) == ["heavy", "light", "light2"]
    assert [line.pop() for _ in range(3)] == ["heavy", "light", "light2"]


def stream(tokens: int = 1, weight: float = 1.0) -> WaitingJob:
    return WaitingJob(JobView("j", 10, 8, Slo(weight=weight), started=True), tokens, started=True)


def test_streams_go_before_prompts_of_heavier_classes_and_heavier_streams_first() -> None:
    line = PrefillQueue[str](Sjf())
    assert line.stream is None
    line.push("heavy prompt", of_weight(8.0))
    assert line.stream is None
    line.push("light, computed again", stream(500, 0.1))
    line.push("light", stream(weight=0.1))
    line.push("light too", stream(weight=0.1))
    line.push("heavy", stream(weight=2.0))
    assert line.stream == "heavy"
    line.reorder(Ljf())
    assert list(line) == ["heavy", "light", "light too", "light, computed again", "heavy prompt"]
    assert [line.pop() for _ in range(5)] == ["heavy", "light", "light too", "light, computed again", "heavy prompt"]


def test_a_preempted_stream_is_the_next_of_all_and_a_preempted_prompt_is_not() -> None:
    line = PrefillQueue[str](Fcfs())
    line.push("prompt", of_weight(1.0))
    line.push("stream", stream())
    line.put_back("preempted prompt")
    line.put_back("preempted stream", started=True)
    assert line.stream == "preempted stream"
    assert list(line) == ["preempted stream", "stream", "preempted prompt", "prompt"]


def test_one_that_gives_up_elsewhere_does_not_end_a_hold() -> None:
    line = PrefillQueue[str](Fcfs())
    line.push("held", of_weight(0.1))
    assert line.hold() == "held"
    line.push("other", of_weight(1.0))
    line.push("gives up", of_weight(1.0))
    assert line.remove("gives up")
    assert [line.pop(), line.pop()] == ["held", "other"]


def test_nobody_comes_before_the_one_that_is_held() -> None:
    line = PrefillQueue[str](Fcfs())
    line.push("light", of_weight(0.1))
    assert line.hold() == "light"
    line.push("heavy", of_weight(1.0))
    assert line.peek() == "light"
    assert line.remove("light")
    assert line.peek() == line.pop() == "heavy"


RUNNING: dict[str, Rank] = {
    "old stream": (1.0, True),
    "light stream": (0.5, True),
    "old prompt": (1.0, False),
    "young prompt": (1.0, False),
    "young stream": (1.0, True),
}


def test_who_goes_first_and_who_gives_its_blocks_up() -> None:
    left, order = list(RUNNING), []
    while left:
        order.append(victim(left, RUNNING.__getitem__))
        left.remove(order[-1])
    assert order == ["light stream", "young prompt", "old prompt", "young stream", "old stream"]
    assert heaviest_first(RUNNING, RUNNING.__getitem__) == order[::-1]
