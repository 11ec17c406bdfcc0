"""At which instances `adaptive` looks, and what it makes of those that hold some of the prompt."""

from random import Random

import pytest

from shared.domain.instance import InstanceView
from shared.domain.job import JobView
from shared.policy.adaptive import HOLDERS_LOOKED_UP, HOLDERS_PER_ROLE, RANDOM_DECODES
from shared.policy.index import ClusterIndex
from shared.policy.placement import place
from shared.policy.prefix_index import PrefixIndex
from tests.shared.policy.adaptive_cases import ALL, asked, busy, d, p, route, way
from tests.shared.policy.views import view


def test_a_prefix_draws_the_job_to_who_holds_it_unless_that_one_is_much_busier() -> None:
    prefixes = PrefixIndex()
    blocks = tuple(range(1, 11))  # 640 tokens of the 800
    prefixes.replace("q", 1, blocks)
    one = asked(prefix=blocks)

    def chosen(*views: InstanceView) -> str:
        found = ClusterIndex(view(*views), rng=Random(0), prefixes=prefixes)
        routed = place(one, found, ALL, 0.0, Random(0))
        return routed.prefill.instance_id if routed.prefill else ""

    stalled = d(**busy(64))
    assert chosen(p("p"), p("q"), stalled) == "q"
    assert chosen(p("p"), p("q", queued_prefill_tokens=60_000, queued_prefill=60), stalled) == "p"


@pytest.mark.parametrize("seed", range(8))
def test_where_all_serve_whole_jobs_the_one_that_would_be_through_first_is_looked_at(seed: int) -> None:
    """It decodes a little more than the others: by its pressure it would be the last."""
    queue = {"queued_prefill": 10, "queued_prefill_tokens": 20_000}
    others = [d(f"{at:02}", **busy(3), **queue) for at in range(12)]
    assert way(route(asked(), *others, d("short", **busy(4)), seed=seed)) == ("", "short", "none")


def test_beside_those_that_hold_the_prompt_none_are_looked_at_at_random() -> None:
    prefixes, blocks = PrefixIndex(), tuple(range(1, 11))
    views = [p(), d("least", **busy(4)), *(d(f"{at:02}", **busy(8)) for at in range(12))]
    found = ClusterIndex(view(*views), rng=Random(0), prefixes=prefixes)

    def looked_at(asked_for: JobView, seed: int) -> float:
        reasons = place(asked_for, found, ALL, 0.0, Random(seed)).reasons
        figures = next(one for one in reasons if one.what == "placement:adaptive").figures
        return float(figures["decode_candidates"])

    assert max(looked_at(asked(), seed) for seed in range(8)) == 1 + RANDOM_DECODES
    for name in ("03", "07"):
        prefixes.replace(name, 1, blocks)
    assert {looked_at(asked(prefix=blocks), seed) for seed in range(8)} == {1 + HOLDERS_PER_ROLE}


def test_with_more_holders_than_are_looked_up_each_is_still_known_for_what_it_holds() -> None:
    prefixes, blocks = PrefixIndex(), tuple(range(1, 11))
    for at in range(HOLDERS_LOOKED_UP + 1):
        prefixes.replace(f"{at:02}", 1, blocks)
    last = f"{HOLDERS_LOOKED_UP:02}"
    found = ClusterIndex(view(d("-"), d(last)), rng=Random(0), prefixes=prefixes)
    assert way(place(asked(prefix=blocks), found, ALL, 0.0, Random(0))) == ("", last, "none")


@pytest.mark.parametrize(("known", "chosen"), [(42, "holder"), (2, "other-0")])
def test_where_all_serve_whole_jobs_a_holder_is_not_held_to_the_prompt_that_it_has_just_computed(
    known: int, chosen: str
) -> None:
    """Nine in ten of its last steps computed prompts, of the others' four; a little that it holds is not worth that."""
    prefixes, blocks = PrefixIndex(), tuple(range(1, 43))
    prefixes.replace("holder", 1, blocks[:known])
    others = [d(f"other-{at}", prefill_share=0.4, **busy(8)) for at in range(3)]
    views = view(*others, d("holder", prefill_share=0.9, **busy(8)))
    coupled = ClusterIndex(views, rng=Random(0), prefixes=prefixes)
    assert way(place(asked(2_800, prefix=blocks), coupled, ALL, 0.0, Random(0))) == ("", chosen, "none")
