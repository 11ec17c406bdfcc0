"""Placement by what is not to be computed: worked examples, and that it stays least_load without knowledge."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.instance import InstanceView, Role
from shared.domain.prompt import block_hashes
from shared.errors import InvalidRequest
from shared.policy import registry
from shared.policy.index import ClusterIndex
from shared.policy.prefix_index import wants_prefixes
from tests.shared.policy import views

PROMPT = block_hashes(range(1024))
RATE, BASE = 0.001, 0.01


def choose(
    cluster: list[InstanceView], held: dict[str, int], name: str = "prefix", exclude: tuple[str, ...] = ()
) -> tuple[str, float]:
    index = ClusterIndex(views.view(*cluster), rng=Random(0))
    for instance_id, blocks in held.items():
        index.prefixes.replace(instance_id, 1, PROMPT[:blocks])
    job = views.job(1024, prefix=PROMPT)
    choice = registry.placement(name).choose(job, index, exclude, 0.0, Random(0))
    assert choice is not None
    return choice.instance.instance_id, float(choice.reasons[0].figures["score"])


def cluster(*queued: int, rate: float = RATE) -> list[InstanceView]:
    return [
        views.prefill(f"p{at}", rate=rate, base=BASE, queued_prefill_tokens=tokens, queued_prefill=bool(tokens))
        for at, tokens in enumerate(queued)
    ]


@pytest.mark.parametrize(
    ("queued", "held", "chosen", "score"),
    [
        ((0, 0, 0, 0), {"p3": 10}, "p3", 0.384 + 0.01),  # no work anywhere: 640 tokens are saved
        ((0, 0, 0, 400), {"p3": 10}, "p3", 0.41 + 0.384 + 0.01),
        ((0, 0, 0, 700), {"p3": 10}, None, 1.024 + 0.01),  # what waits there takes longer than what is saved
        ((0, 0, 0, 300), {"p3": 10, "p2": 4}, "p3", 0.31 + 0.384 + 0.01),
        ((0, 0, 0, 500), {"p3": 10, "p2": 4}, "p2", 0.768 + 0.01),
        ((0, 0, 0, 0), {"p3": 16}, "p3", 0.016 + 0.01),  # all of it: its last block of 16 is computed
        ((0, 0, 0, 0), {}, None, 1.034),
    ],
)
def test_worked_examples(queued: tuple[int, ...], held: dict[str, int], chosen: str | None, score: float) -> None:
    found = choose(cluster(*queued), held)
    assert found[1] == pytest.approx(score)
    if chosen is not None:
        assert found[0] == chosen
    elif held:
        assert found[0] not in held  # any of the idle ones


def test_who_is_excluded_or_too_small_is_not_chosen() -> None:
    some = [*cluster(0, 0), views.prefill("p9", rate=RATE, max_model_len=1000)]
    assert choose(some, {"p1": 9, "p0": 3}, exclude=("p1",))[0] == "p0"
    assert choose(some, {"p9": 9, "p0": 3})[0] == "p0"


def test_in_a_coupled_cluster_it_chooses_among_all() -> None:
    some = [views.instance(f"d{at}", Role.DECODE, rate=RATE, base=BASE) for at in range(3)]
    assert choose(some, {"d2": 5})[0] == "d2"


def test_the_decode_instances_prefixes_are_no_reason_for_a_prefill_instance() -> None:
    some = [*cluster(0, 0), views.decode("d0", rate=RATE)]
    assert choose(some, {"d0": 10})[1] == pytest.approx(1.034)


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=12), st.integers(0, 11), st.integers(0, 16))
def test_it_never_finishes_later_than_least_load_would(queued: list[int], holder: int, blocks: int) -> None:
    some = cluster(*queued)
    held = {f"p{holder}": blocks} if blocks else {}
    assert choose(some, held)[1] <= choose(some, {}, "least_load")[1] + 1e-9
    assert choose(some, {}) == choose(some, {}, "least_load")


def test_it_is_known_by_name_and_strict() -> None:
    policy = registry.placement("prefix", {"holders": 2})
    assert wants_prefixes(policy)
    assert not wants_prefixes(registry.placement("least_load"))
    with pytest.raises(InvalidRequest, match="at least 1"):
        registry.placement("prefix", {"holders": 0})
