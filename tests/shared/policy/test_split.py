from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.policy.papers.costs import ChunkedCost, PartialPrefillCost
from shared.policy.papers.cronus import CANDIDATES, Balance, CronusSplit, best_split
from shared.policy.split import FractionSplit, FullSplit, NoSplit, RandomSplit, Split, freedom
from tests.shared.policy.views import chunked_rates, decode, job, prefill, prompt_rates

EXAMPLES: list[tuple[Split, int, int]] = [
    (FullSplit(), 10, 10),
    (NoSplit(), 10, 0),
    (FractionSplit(0.5), 10, 5),
    (FractionSplit(0.5), 11, 6),
    (FractionSplit(0.01), 10, 1),
    (FractionSplit(0.0), 10, 0),
    (FractionSplit(1.0), 10, 10),
]


@pytest.mark.parametrize(("policy", "prompt", "tokens"), EXAMPLES)
def test_split_by_example(policy: Split, prompt: int, tokens: int) -> None:
    choice = policy.choose(job(prompt), prefill("p"), decode("d"), Random(0))
    assert choice.tokens == tokens
    assert choice.reasons[0].figures == {"tokens": tokens, "prompt_tokens": prompt}


CHUNKED = ChunkedCost(1e-6, 0.0, 0.05)
PARTIAL = PartialPrefillCost(2e-4, 0.01)
# 1024 tokens, 512 a step: T_chunked = 0.100512 + 2e-6 L below L = 512, then 0.05 + 1e-6 L, and 0 at the end.
OURS = CronusSplit(include_zero=True, queue_aware=True)
CRONUS_EXAMPLES: list[tuple[str, PartialPrefillCost, dict[str, Any], dict[str, Any], CronusSplit, int]] = [
    ("0.01 + 2e-4 L = 0.100512 + 2e-6 L at 457.1", PARTIAL, {}, {}, OURS, 458),
    ("a weak prefill instance takes little", PartialPrefillCost(1e-2, 0.01), {}, {}, OURS, 10),
    ("one that is slow to start takes nothing", PartialPrefillCost(1e-2, 1.0), {}, {}, OURS, 0),
    ("the paper has no such candidate", PartialPrefillCost(1e-2, 1.0), {}, {}, CronusSplit(queue_aware=True), 2),
    ("a strong one takes all", PartialPrefillCost(1e-6, 0.0), {}, {}, OURS, 1024),
    ("no free blocks: all, as in the paper", PARTIAL, {}, {"free_blocks": 63}, OURS, 1024),
    ("enough free blocks", PARTIAL, {}, {"free_blocks": 64}, OURS, 458),
    ("decodes fill the budget: all", PARTIAL, {}, {"decoding": 512}, OURS, 1024),
    (
        "steps of 256: the jump where 512 saves the third lies across 0",
        PARTIAL,
        {},
        {},
        CronusSplit(True, 256, True),
        512,
    ),
    ("0.11 s of prefill wait already", PARTIAL, {"queued_prefill_tokens": 500, "queued_prefill": 1}, {}, OURS, 0),
    (
        "and are not looked at",
        PARTIAL,
        {"queued_prefill_tokens": 500, "queued_prefill": 1},
        {},
        CronusSplit(include_zero=True),
        458,
    ),
    (
        "two steps of prefill wait at the other: 0.01 + 2e-4 L = 0.15 + 1e-6 L",
        PARTIAL,
        {},
        {"queued_prefill_tokens": 600},
        OURS,
        704,
    ),
]


@pytest.mark.parametrize(
    ("what", "partial", "waits", "load", "policy", "tokens"),
    CRONUS_EXAMPLES,
    ids=[example[0] for example in CRONUS_EXAMPLES],
)
def test_cronus_by_example(
    what: str,
    partial: PartialPrefillCost,
    waits: dict[str, Any],
    load: dict[str, Any],
    policy: CronusSplit,
    tokens: int,
) -> None:
    low = prefill("low", rates=prompt_rates(*partial), **waits)
    high = decode("high", rates=chunked_rates(*CHUNKED), **load)
    choice = policy.choose(job(1024), low, high, Random(0))
    assert choice.tokens == tokens
    assert choice.reasons[0].figures["tokens"] == tokens


def test_without_rates_the_prefill_instance_does_it_all_and_says_why() -> None:
    low, high = prefill("low", rates=prompt_rates(*PARTIAL)), decode("high", rates=chunked_rates(*CHUNKED))
    for pair, missing in (((prefill("low"), high), "low"), ((low, decode("high")), "high")):
        choice = OURS.choose(job(77), *pair, Random(0))
        assert choice.tokens == 77
        assert choice.reasons[0].figures["why"] == f"no measured rates of {missing}"
    assert OURS.choose(job(77), low, None, Random(0)).tokens == 77


def test_times_by_hand() -> None:
    balance = Balance(1024, PARTIAL, ChunkedCost(1e-6, 1e-7, 0.05), 400, 10_000)
    # 624 tokens remain: iterations at contexts 400 and 800, each with 10,000 tokens of decodes.
    assert balance.chunked_s(400) == pytest.approx((4e-4 + 1e-3 + 0.05) + (8e-4 + 1e-3 + 0.05))
    assert balance.prefill_s(400) == pytest.approx(0.09)
    assert (balance.chunked_s(1024), balance.prefill_s(0)) == (0.0, 0.0)
    # 800 tokens remain: divisible, so two iterations and not three.
    assert balance.chunked_s(224) == pytest.approx((2.24e-4 + 1e-3 + 0.05) + (6.24e-4 + 1e-3 + 0.05))


small = st.integers(0, 1000)


@st.composite
def balances(draw: st.DrawFn) -> Balance:
    k_p = draw(st.integers(-5, 3000)) * 1e-6
    b_p = draw(st.integers(-20, 200)) * 1e-4
    chunked = ChunkedCost(draw(st.integers(-2, 300)) * 1e-7, draw(small) * 1e-9, draw(st.integers(-1, 100)) * 1e-3)
    return Balance(
        draw(st.one_of(st.integers(1, 700), st.integers(1, 40_000))),
        PartialPrefillCost(k_p, b_p),
        chunked,
        draw(st.integers(1, 2048)),
        draw(st.integers(0, 200_000)),
        draw(small) * 1e-3,
        draw(small) * 1e-3,
    )


@settings(deadline=None)
@given(balances(), st.sampled_from([0, 1]))
def test_the_search_finds_what_looking_at_all_finds(balance: Balance, least: int) -> None:
    candidates = {-(-j * balance.prompt // CANDIDATES) for j in range(least, CANDIDATES + 1)}
    best = min(candidates, key=lambda split: (abs(balance.gap_s(split)), -split))
    found = best_split(balance, least)
    assert found in candidates
    assert found == best or abs(balance.gap_s(found)) == pytest.approx(abs(balance.gap_s(best)), rel=1e-9, abs=1e-12)


def test_the_range_of_shares() -> None:
    splits = FullSplit(), NoSplit(), FractionSplit(0.25), RandomSplit(), OURS
    assert [freedom(one) for one in splits] == [(1.0, 1.0), (0.0, 0.0), (0.25, 0.25), (0.0, 1.0), (0.0, 1.0)]
