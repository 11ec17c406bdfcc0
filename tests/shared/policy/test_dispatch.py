from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.instance import InstanceView
from shared.policy import registry
from shared.policy.dispatch import DispatchPolicy, PowerOfTwo, RandomDispatch, Spread, choose_decode
from shared.policy.ledger import Assignment
from shared.policy.papers.tetriinfer import WorstCase
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
@pytest.mark.parametrize("policy", [PowerOfTwo()], ids=lambda policy: policy.name)
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


def test_power_of_two_is_not_random_in_disguise() -> None:
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


def test_spread_sends_heavy_decodes_where_fewer_are_and_light_ones_where_fewer_decode() -> None:
    views = [decode("a", decoding=9, heavy_decodes=1), decode("b", decoding=3, heavy_decodes=3)]
    heavy, light = job(100, 600), job(100, 64)
    assert {Spread().choose(heavy, views, (), 0.0, Random(seed)).instance.instance_id for seed in range(5)} == {"a"}  # type: ignore[union-attr]
    assert {Spread().choose(light, views, (), 0.0, Random(seed)).instance.instance_id for seed in range(5)} == {"b"}  # type: ignore[union-attr]
