from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.domain.instance import InstanceState
from shared.domain.route import InstanceRef, Route, Work
from shared.policy.ledger import FORGET_S, SETTLE_S, Rotation, WorkloadLedger, pair_key
from tests.shared.policy.views import decode, job, view


def route(instance_id: str, score: float = 1.0, tokens: int = 10) -> Route:
    return Route(None, InstanceRef(instance_id, 1, ""), 0, "workload", work=Work(score, tokens))


def test_what_is_added_is_what_is_taken_off() -> None:
    ledger = WorkloadLedger()
    ledger.add(job(job_id="a"), route("d", 0.1, 5))
    ledger.add(job(job_id="b"), route("d", 0.2, 7))
    assert ledger.score("d") == pytest.approx(0.3)
    assert ledger.tokens_at("d") == 12
    ledger.complete("a")
    assert ledger.score("d") == pytest.approx(0.2)
    ledger.complete("b")
    assert (ledger.score("d"), ledger.tokens_at("d"), len(ledger)) == (0.0, 0, 0)


def test_a_job_that_is_placed_again_moves() -> None:
    ledger = WorkloadLedger()
    ledger.add(job(job_id="a"), route("d", 3.0))
    ledger.add(job(job_id="a"), route("e", 4.0))
    assert (ledger.score("d"), ledger.score("e")) == (0.0, 4.0)
    ledger.add(job(job_id="a"), Route(None, InstanceRef("f", 1, ""), 0, "least_load"))
    assert len(ledger) == 0


def test_unknown_jobs_and_instances_are_nothing() -> None:
    ledger = WorkloadLedger()
    ledger.complete("nobody")
    assert (ledger.score("nowhere"), ledger.tokens_at("nowhere")) == (0.0, 0)


@pytest.mark.parametrize(
    ("age_s", "instances", "left"),
    [
        (0.5, [decode("d", inflight=0)], 1),  # on its way: no load shows it yet
        (SETTLE_S + 1, [decode("d", inflight=1)], 1),
        (SETTLE_S + 1, [decode("d", inflight=0)], 0),  # the instance has none: its end was told to somebody else
        (0.5, [decode("e", inflight=1)], 0),  # the instance is gone
        (0.5, [decode("d", state=InstanceState.DEAD, inflight=1)], 0),
        (FORGET_S + 1, [decode("d", inflight=1)], 0),
    ],
)
def test_settling_forgets_what_cannot_be_there(age_s: float, instances: list, left: int) -> None:  # type: ignore[type-arg]
    ledger = WorkloadLedger()
    ledger.add(job(job_id="a"), route("d"), 100.0)
    ledger.settle(view(*instances), 100.0 + age_s)
    assert len(ledger) == left
    assert (ledger.score("d") > 0) is (left > 0)


def test_what_stays_is_not_looked_at_again() -> None:
    """A scheduler settles ten times a second: work whose end is never told must not be read each time."""

    class Watched(dict[str, object]):
        reads = 0

        def items(self) -> Any:
            self.reads += len(self)
            return super().items()

    ledger = WorkloadLedger()
    for number in range(1000):
        ledger.add(job(job_id=f"j{number}"), route("d"), 100.0)
    ledger._work = watched = Watched(ledger._work)  # type: ignore[assignment, arg-type]
    ledger.settle(view(decode("d", inflight=1)), 200.0)
    assert (len(ledger), watched.reads) == (1000, 0)
    ledger.settle(view(decode("d", inflight=0)), 200.0)
    assert len(ledger) == 0


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 39), st.floats(1e-9, 1e9), st.integers(0, 10**6)), max_size=60)
)
def test_it_returns_to_zero(steps: list[tuple[int, int, float, int]]) -> None:
    ledger, open_jobs = WorkloadLedger(), set()
    for number, instance, score, tokens in steps:
        if number % 3 == 2:
            ledger.complete(f"j{number - 1}")
            open_jobs.discard(f"j{number - 1}")
        else:
            ledger.add(job(job_id=f"j{number}"), route(f"d{instance}", score, tokens))
            open_jobs.add(f"j{number}")
    assert len(ledger) == len(open_jobs)
    for job_id in open_jobs:
        ledger.complete(job_id)
    assert not ledger.scores.any()
    assert not ledger.tokens.any()


def turns(rotation: Rotation, count: int) -> str:
    taken = ""
    for _ in range(count):
        key = next(rotation.order())
        rotation.took(key)
        taken += key
    return taken


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"a": 1.0, "b": 1.0, "c": 1.0}, "abcabc"),
        ({"a": 4.0, "b": 1.0}, "aabaaaabaa"),  # Huawei 5.2: weights 4 and 1
        ({"a": 3.0, "b": 1.0}, "aabaaaba"),  # Cronus 5.1: weights 3 and 1
        ({"a": 1.0, "b": 0.0}, "aaa"),
    ],
)
def test_turns_by_example(weights: dict[str, float], expected: str) -> None:
    assert turns(Rotation(weights), len(expected)) == expected


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(0.1, 10), min_size=1), st.integers(1, 300))
def test_turns_keep_to_the_weights(weights: dict[str, float], count: int) -> None:
    taken = Counter(turns(Rotation(weights), count))
    total = sum(weights.values())
    for key, weight in weights.items():
        assert abs(taken[key] - count * weight / total) <= len(weights) / 2 + 1e-6


def test_a_rotation_counts_placements_and_starts_anew_with_other_members() -> None:
    ledger = WorkloadLedger()
    rotation = ledger.rotation("weighted", {"a": 1.0, "b": 1.0})
    ledger.add(job(job_id="j"), route("a"))
    assert list(ledger.rotation("weighted", {"a": 1.0, "b": 1.0}).order()) == ["b", "a"]
    assert ledger.rotation("weighted", {"a": 1.0, "b": 1.0}) is rotation
    assert list(ledger.rotation("weighted", {"a": 1.0, "b": 1.0, "c": 1.0}).order()) == ["a", "b", "c"]


def test_pairs_have_turns_of_their_own() -> None:
    ledger = WorkloadLedger()
    weights = {pair_key("p", "d"): 1.0, pair_key("p", "e"): 1.0}
    ledger.rotation("plan", weights)
    ledger.add(job(job_id="j"), Route(InstanceRef("p", 1, ""), InstanceRef("d", 1, ""), 5, "plan"))
    assert next(ledger.rotation("plan", weights).order()) == pair_key("p", "e")


def test_instances_that_come_under_new_names_take_the_slots_of_those_that_are_gone() -> None:
    ledger = WorkloadLedger()
    for number in range(500):
        name = f"d{number}"
        ledger.add(job(job_id=name), route(name, 2.0, 5), float(number))
        assert (ledger.score(name), ledger.tokens_at(name)) == (2.0, 5)
        ledger.settle(view(decode(name, inflight=1)), float(number))
    assert (len(ledger._slots), len(ledger._jobs), len(ledger)) == (1, 2, 1)
    assert ledger.scores.sum() == 2.0
