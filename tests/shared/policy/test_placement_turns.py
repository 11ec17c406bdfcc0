from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.domain.instance import InstanceView
from shared.domain.rates import Rates
from shared.policy import registry
from shared.policy.assignment import assignments
from shared.policy.index import ClusterIndex
from shared.policy.ledger import WorkloadLedger
from shared.policy.placement import Policies, Single, place
from tests.shared.policy.views import decode, index, job, prefill, view


def run(name: str, views: list[InstanceView], jobs: int, exclude: tuple[str, ...] = (), each: int = 5) -> list[str]:
    """Who gets `jobs` jobs, with a broadcast after every `each` of them."""
    policies = Policies(registry.placement(name), registry.split("full"), registry.dispatch("random"))
    ledger, rng, seen, turn = WorkloadLedger(), Random(0), [], 0
    for number in range(jobs):
        if number % each == 0:
            cluster = ClusterIndex(view(*views), rng=rng, turn=turn, ledger=ledger)
        asked = job(10, 5, job_id=f"j{number}")
        route = place(asked, cluster, policies, 0.0, rng, exclude)
        for assignment in assignments(asked, route, 0.0):
            cluster.book(assignment)
        turn = cluster.turn
        ledger.add(asked, route)
        placed = route.prefill or route.decode
        assert placed is not None
        seen.append(placed.instance_id)
    return seen


def weighing(instance_id: str, weight: float) -> InstanceView:
    return decode(instance_id, rates=Rates(weight=weight))


def test_round_robin_goes_on_over_broadcasts() -> None:
    assert run("round_robin", [prefill("b"), prefill("a"), prefill("c"), decode("d")], 7, each=2) == list("abcabca")


def test_weights_of_four_and_one() -> None:
    # Huawei 5.2, WRR on two instances.
    assert run("weighted", [weighing("a", 4), weighing("b", 1)], 10, each=3) == list("aabaaaabaa")


def test_an_excluded_instance_loses_its_turns_to_the_next() -> None:
    assert run("weighted", [weighing("a", 4), weighing("b", 1), weighing("c", 1)], 4, ("a",)) == list("bcbc")


def test_without_weights_it_is_a_plain_round() -> None:
    counts = Counter(run("weighted", [decode(f"d{at}") for at in range(7)], 70))
    assert set(counts.values()) == {10}


def test_single_is_the_first_or_the_named_one_while_it_can() -> None:
    views = [decode("b"), decode("a", max_model_len=50), decode("c")]

    def chosen(policy: Single, prompt: int, exclude: tuple[str, ...] = ()) -> str:
        choice = policy.choose(job(prompt, 10), index(*views), exclude, 0.0, Random(0))
        assert choice is not None
        return choice.instance.instance_id

    assert chosen(Single(), 20) == "a"
    assert chosen(Single(), 100) == "b"
    assert chosen(Single("c"), 20) == "c"
    assert chosen(Single("c"), 20, ("c",)) == "a"
    assert chosen(Single("gone"), 20) == "a"
    assert Single().choose(job(9999), index(*views), (), 0.0, Random(0)) is None


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from([0.5, 1, 2, 3, 4.5]), min_size=1),
    st.integers(1, 120),
    st.integers(1, 30),
)
def test_shares_keep_to_the_weights_whenever_broadcasts_come(weights: dict[str, float], jobs: int, each: int) -> None:
    counts = Counter(run("weighted", [weighing(*pair) for pair in weights.items()], jobs, each=each))
    total = sum(weights.values())
    for instance_id, weight in weights.items():
        assert abs(counts[instance_id] - jobs * weight / total) <= len(weights) / 2 + 1e-6
