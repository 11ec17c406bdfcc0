from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.instance import InstanceView
from shared.errors import InvalidRequest, Unavailable
from shared.policy import registry
from shared.policy.assignment import Assignment
from shared.policy.decode_admission import PredictedEnd
from shared.policy.dispatch import (
    DispatchPolicy,
    LeastInterference,
    PowerOfTwo,
    RandomDispatch,
    Spread,
    WorstCase,
    choose_decode,
    free_tokens,
    interference,
)
from tests.shared.policy.views import decode, index, job, predicted

HEAVY, LIGHT = predicted(200, 400), predicted(0, 200)

# Two instances as (decoding, heavy, free blocks of 16 tokens); the job's prediction; the winner.
EXAMPLES: list[tuple[str, list[tuple[int, int, int]], Any, str]] = [
    ("heavy goes where heavies are few", [(4, 3, 99), (4, 1, 99)], HEAVY, "d1"),
    ("light goes where it dilutes", [(4, 3, 99), (4, 1, 99)], LIGHT, "d1"),
    ("heavy avoids the instance with few lights", [(2, 1, 99), (9, 1, 99)], HEAVY, "d1"),
    ("no heavies anywhere: fewer decodes", [(9, 0, 99), (2, 0, 99)], LIGHT, "d1"),
    ("all alike: more free memory", [(2, 1, 50), (2, 1, 99)], LIGHT, "d1"),
    ("memory filters before interference", [(0, 0, 5), (9, 9, 99)], HEAVY, "d1"),
    ("no memory anywhere: the most free", [(0, 0, 3), (9, 9, 5)], HEAVY, "d1"),
]


@pytest.mark.parametrize(("what", "loads", "prediction", "winner"), EXAMPLES, ids=[e[0] for e in EXAMPLES])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("policy", [PowerOfTwo(), LeastInterference()], ids=lambda policy: policy.name)
def test_the_less_disturbed_of_two_by_example(
    what: str, loads: list[tuple[int, int, int]], prediction: Any, winner: str, policy: DispatchPolicy, seed: int
) -> None:
    views = [
        decode(f"d{at}", decoding=decoding, heavy_decodes=heavy, free_blocks=free)
        for at, (decoding, heavy, free) in enumerate(loads)
    ]
    choice = policy.choose(job(100, 1000, prediction=prediction), views, (), 0.0, Random(seed))
    assert choice is not None
    assert choice.instance.instance_id == winner
    assert choice.reasons[0].figures["chosen"] == winner


def test_interference_by_hand() -> None:
    view = decode("d", decoding=5, heavy_decodes=2)
    assert interference(view, heavy=True) == pytest.approx(3 / 4)
    assert interference(view, heavy=False) == pytest.approx(2 / 5)


@pytest.mark.parametrize(
    ("end", "takes"), [(PredictedEnd.LOWER, "small"), (PredictedEnd.MIDDLE, "big"), (PredictedEnd.UPPER, "big")]
)
def test_the_end_of_the_predicted_range_decides_the_need(end: PredictedEnd, takes: str) -> None:
    small = decode("small", free_blocks=20)  # 320 tokens: 100 + 200 fit, 100 + 300 do not
    big = decode("big", free_blocks=50, decoding=9, heavy_decodes=9)
    choice = PowerOfTwo(end).choose(job(100, 1000, prediction=HEAVY), [small, big], (), 0.0, Random(0))
    assert choice is not None
    assert choice.instance.instance_id == takes


def test_excluded_instances_are_never_chosen() -> None:
    views = [decode(f"d{at}") for at in range(20)]
    exclude = {f"d{at}" for at in range(19)}
    for policy in (PowerOfTwo(), RandomDispatch(), Spread(), LeastInterference(), WorstCase()):
        choice = policy.choose(job(), views, exclude, 0.0, Random(3))
        assert choice is not None
        assert choice.instance.instance_id == "d19"
        assert policy.choose(job(), views, exclude | {"d19"}, 0.0, Random(3)) is None


def test_power_of_two_is_not_random_in_disguise() -> None:
    """PEERS: in another router power-of-two silently became random."""
    views = [decode(f"d{at}", decoding=at) for at in range(10)]
    rng = Random(1)
    drawn = Counter(_chosen(PowerOfTwo(), views, rng) for _ in range(3000))
    # The least loaded wins every pair it is in: 2 of 10; the most loaded never wins.
    assert drawn["d0"] == pytest.approx(600, rel=0.15)
    assert drawn["d9"] == 0
    uniform = Counter(_chosen(RandomDispatch(), views, rng) for _ in range(3000))
    assert min(uniform.values()) > 200


def _chosen(policy: PowerOfTwo | RandomDispatch, views: list[InstanceView], rng: Random) -> str:
    choice = policy.choose(job(100, 64), views, (), 0.0, rng)
    assert choice is not None
    return choice.instance.instance_id


def test_booked_jobs_show_in_the_next_decision() -> None:
    cluster = index(decode("a", free_blocks=20), decode("b", free_blocks=20, decoding=1))
    rng, counts = Random(0), Counter[str]()
    for _ in range(10):
        choice = choose_decode(PowerOfTwo(), job(16, 64), cluster, (), 0.0, rng)
        counts[choice.instance.instance_id] += 1
        cluster.book(Assignment(choice.instance.instance_id, 0.0, decode_tokens=16))
    assert counts["a"] in (5, 6)
    assert sum(view.load.decoding for view in cluster.decode.views) == 11


def test_choose_decode_says_why_there_is_none() -> None:
    with pytest.raises(Unavailable, match="no decode instance is ready"):
        choose_decode(PowerOfTwo(), job(), index(), (), 0.0, Random(0))


@pytest.mark.parametrize("made", [PowerOfTwo, Spread, LeastInterference, WorstCase])
def test_a_negative_parameter_is_refused(made: Any) -> None:
    with pytest.raises(InvalidRequest, match="unpredicted_tokens"):
        made(unpredicted_tokens=-1)


def test_least_interference_looks_at_all() -> None:
    views = [decode(f"d{at:02}", decoding=4, heavy_decodes=4 - (at == 37)) for at in range(50)]
    choice = LeastInterference().choose(job(100, 64), views, (), 0.0, Random(0))
    assert choice is not None
    assert choice.instance.instance_id == "d37"
    assert choice.reasons[0].figures["looked_at"] == 50


def test_the_worst_case_piles_heavy_decodes_up_and_scatters_light_ones() -> None:
    cluster, rng, policy = index(*(decode(f"d{at}", free_blocks=40) for at in range(4))), Random(0), WorstCase()
    heavies: list[str] = []
    for _ in range(6):  # 100 prompt tokens and at least 200 more: 19 blocks of memory, 7 of them taken at once
        chosen = choose_decode(policy, job(100, 1000, prediction=HEAVY), cluster, (), 0.0, rng).instance.instance_id
        cluster.book(Assignment(chosen, 0.0, decode_tokens=100, heavy=True))
        heavies.append(chosen)
    assert heavies == ["d0", "d0", "d0", "d0", "d1", "d1"]
    lights = Counter(
        choose_decode(policy, job(100, 1000, prediction=LIGHT), cluster, (), 0.0, rng).instance.instance_id
        for _ in range(400)
    )
    assert set(lights) == {"d0", "d1", "d2", "d3"}
    assert min(lights.values()) > 60


@given(
    st.sampled_from(sorted(registry.DISPATCH)),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60), st.sampled_from([90, 4096])), max_size=12),
    st.sets(st.sampled_from(["d0", "d1", "d2"])),
    st.integers(1, 400),
    st.sampled_from([None, HEAVY, LIGHT]),
    st.integers(0, 1000),
)
def test_any_choice_is_a_candidate_that_fits(
    name: str, loads: list[tuple[int, int, int]], exclude: set[str], prompt: int, prediction: Any, seed: int
) -> None:
    views = [
        decode(f"d{at}", decoding=n, free_blocks=free, max_model_len=longest)
        for at, (n, free, longest) in enumerate(loads)
    ]
    asked, policy = job(prompt, 64, prediction=prediction), registry.dispatch(name)
    choice = policy.choose(asked, views, exclude, 0.0, Random(seed))
    assert choice == policy.choose(asked, views, exclude, 0.0, Random(seed))
    fitting = [v for v in views if v.instance_id not in exclude and v.info.max_model_len >= prompt + 64]
    assert (choice is None) == (not fitting)
    if choice is not None:
        assert choice.instance in fitting
        assert choice.reasons[0].figures["chosen"] == choice.instance.instance_id


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 60)), max_size=15),
    st.integers(1, 400),
    st.integers(0, 1000),
)
def test_memory_is_respected_when_any_instance_has_it(
    loads: list[tuple[int, int, int]], prompt: int, seed: int
) -> None:
    views = [
        decode(f"d{at}", decoding=max(n, heavy), heavy_decodes=heavy, free_blocks=free)
        for at, (n, heavy, free) in enumerate(loads)
    ]
    asked = job(prompt, 64)
    choice = PowerOfTwo().choose(asked, views, (), 0.0, Random(seed))
    again = PowerOfTwo().choose(asked, views, (), 0.0, Random(seed))
    assert choice == again
    if choice is None:
        assert not views
        return
    need = prompt + 64
    if any(free_tokens(view) >= need for view in views):
        assert free_tokens(choice.instance) >= need
    else:
        assert free_tokens(choice.instance) == max(free_tokens(view) for view in views)


def test_spread_sends_heavy_decodes_where_fewer_are_and_light_ones_where_fewer_decode() -> None:
    views = [decode("a", decoding=9, heavy_decodes=1), decode("b", decoding=3, heavy_decodes=3)]
    heavy, light = job(100, 600), job(100, 64)
    assert {Spread().choose(heavy, views, (), 0.0, Random(seed)).instance.instance_id for seed in range(5)} == {"a"}  # type: ignore[union-attr]
    assert {Spread().choose(light, views, (), 0.0, Random(seed)).instance.instance_id for seed in range(5)} == {"b"}  # type: ignore[union-attr]
