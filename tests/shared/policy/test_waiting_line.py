"""The line before an engine against a model of it that looks at everybody, and its bound against starvation."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.job import JobView, Slo
from shared.policy.preemption import Rank, heaviest_first, victim
from shared.policy.prefill_order import Fcfs, LeastSlack, Ljf, PrefillOrder, Sjf, WaitingJob
from shared.policy.waiting_line import CLASS_WINDOW, WaitingLine

ORDERS: list[PrefillOrder] = [Fcfs(), Sjf(1, True), Sjf(3, True), Ljf(2, True), LeastSlack(), Sjf(3), Ljf(2), Sjf()]
Step = tuple[str, int]  # what, and a number that says how long the prompt is, or who


def job(tokens: int) -> WaitingJob:
    return WaitingJob(JobView("j", tokens, 8), tokens)


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
            return min(batch, key=lambda one: (self.order.key(job(one[1]), None), one[0]))[0]
        for number, _, overtaken in self.here:
            if overtaken >= self.order.window:
                return number
        return min(self.here, key=lambda one: (self.order.key(job(one[1]), None), one[0]))[0]

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
    line, model, out = WaitingLine[int](order), Model(order), list[int]()
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


@given(
    st.integers(1, 3),
    st.sampled_from([Sjf, Ljf]),
    st.booleans(),
    st.lists(st.tuples(st.booleans(), st.integers(1, 99)), min_size=30, max_size=120),
)
def test_nobody_is_overtaken_by_more_than_window_later_ones(
    window: int, kind: type[Sjf], overtake: bool, steps: list[tuple[bool, int]]
) -> None:
    line, came, taken = WaitingLine[int](kind(window, overtake)), 0, list[int]()
    for come, tokens in steps:
        if come:
            line.push(came, job(tokens))
            came += 1
        elif len(line):
            taken.append(line.pop())
    for number in range(came):
        before = taken[: taken.index(number)] if number in taken else taken
        assert sum(later > number for later in before) <= window


def test_batches_are_sorted_one_after_the_other() -> None:
    # TetriInfer 3.3.1: "If we set the batch size to ten, we will schedule twice, each with ten requests sorted".
    lengths = [7, 3, 9, 1, 8, 2, 6, 4, 5, 10, 5, 9, 1, 4, 2, 10, 3, 8, 6, 7]
    line = WaitingLine[tuple[int, int]](Sjf(window=10))
    for number, tokens in enumerate(lengths):
        line.push((number, tokens), job(tokens))
    first, second = list(enumerate(lengths))[:10], list(enumerate(lengths))[10:]
    expected = [*sorted(first, key=lambda one: one[1]), *sorted(second, key=lambda one: one[1])]
    assert list(line) == expected
    assert [line.pop() for _ in range(20)] == expected


def test_none_joins_a_batch_that_is_formed() -> None:
    line = WaitingLine[str](Sjf())
    line.push("long", job(900))
    line.push("longer", job(1000))
    assert line.pop() == "long"
    line.push("short", job(1))
    assert [line.pop(), line.pop()] == ["longer", "short"]


def test_the_bound_is_reached_and_no_more() -> None:
    line = WaitingLine[str](Sjf(window=4, overtake=True))
    line.push("long", job(10_000))
    served = []
    for number in range(8):
        line.push(f"short-{number}", job(1))
        served.append(line.pop())
    assert served.index("long") == 4


def test_without_overtaking_it_is_the_keys_order_and_arrival_breaks_ties() -> None:
    line = WaitingLine[str](Ljf())
    for name, tokens in (("a", 5), ("b", 9), ("c", 5), ("d", 9)):
        line.push(name, job(tokens))
    assert list(line) == [line.pop() for _ in range(4)] == ["b", "d", "a", "c"]


@pytest.mark.parametrize("overtake", [False, True])
def test_long_waits_and_many_who_give_up_leave_nothing_behind(overtake: bool) -> None:
    line = WaitingLine[int](Sjf(window=10_000, overtake=overtake))
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
    line = WaitingLine[str](Fcfs())
    line.push("light", of_weight(0.1))
    taken = 0
    while True:
        line.push(f"heavy{taken}", of_weight(1.0))
        if line.pop() == "light":
            break
        taken += 1
    assert taken == CLASS_WINDOW * 10
    assert len(line) == 1


def test_classes_that_always_wait_get_on_in_proportion() -> None:
    line = WaitingLine[tuple[str, int]](Fcfs())
    for number in range(2000):
        line.push(("heavy", number), of_weight(1.0))
        line.push(("light", number), of_weight(0.5))
    first = [line.pop() for _ in range(660)]
    assert [one for one in first if one[0] == "light"] == [("light", number) for number in range(20)]


def test_what_is_put_back_is_the_next_of_its_class_only() -> None:
    line = WaitingLine[str](Fcfs())
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
    line = WaitingLine[str](Sjf())
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
    line = WaitingLine[str](Fcfs())
    line.push("prompt", of_weight(1.0))
    line.push("stream", stream())
    line.put_back("preempted prompt")
    line.put_back("preempted stream", started=True)
    assert line.stream == "preempted stream"
    assert list(line) == ["preempted stream", "stream", "preempted prompt", "prompt"]


def test_one_that_gives_up_elsewhere_does_not_end_a_hold() -> None:
    line = WaitingLine[str](Fcfs())
    line.push("held", of_weight(0.1))
    assert line.hold() == "held"
    line.push("other", of_weight(1.0))
    line.push("gives up", of_weight(1.0))
    assert line.remove("gives up")
    assert [line.pop(), line.pop()] == ["held", "other"]


def test_nobody_comes_before_the_one_that_is_held() -> None:
    line = WaitingLine[str](Fcfs())
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
