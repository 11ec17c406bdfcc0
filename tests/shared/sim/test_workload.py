"""Synthetic workloads: arrivals, lengths, and their names."""

from pathlib import Path
from time import perf_counter

import numpy as np
import pytest

from shared.errors import InvalidRequest
from shared.sim.traces import read_trace
from shared.sim.workload import (
    ARRIVALS,
    Tetri,
    Workload,
    bursts,
    evenly,
    is_made,
    made,
    on_off,
    poisson,
    synthetic,
    tetri,
)

MANY = synthetic(50_000, 1000, 200)


def gaps(workload: Workload) -> np.ndarray:
    return np.diff(workload.arrival_s)


def test_evenly() -> None:
    assert evenly(MANY.head(4), 2.0).arrival_s.tolist() == [0.0, 0.5, 1.0, 1.5]


@pytest.mark.parametrize("name", ARRIVALS)
def test_rate_start_and_determinism(name: str) -> None:
    workload = ARRIVALS[name](MANY, 8.0, 3)
    assert workload.arrival_s[0] == 0.0
    assert workload.rate == pytest.approx(8.0, rel=0.05)
    assert np.array_equal(workload.arrival_s, ARRIVALS[name](MANY, 8.0, 3).arrival_s)
    assert workload.prompt_tokens is MANY.prompt_tokens
    assert ARRIVALS[name](MANY.head(1), 8.0, 3).arrival_s.tolist() == [0.0]


def test_poisson_gaps_are_exponential() -> None:
    between = gaps(poisson(MANY, 4.0, seed=1))
    assert between.mean() == pytest.approx(0.25, rel=0.02)
    assert between.std() / between.mean() == pytest.approx(1.0, rel=0.02)
    assert np.mean(between > 0.25) == pytest.approx(np.exp(-1.0), abs=0.01)


@pytest.mark.parametrize("cv", [0.3, 1.0, 3.0])
def test_bursts_have_the_variation_asked_for(cv: float) -> None:
    between = gaps(bursts(MANY, 4.0, seed=2, cv=cv))
    assert between.mean() == pytest.approx(0.25, rel=0.05)
    assert between.std() / between.mean() == pytest.approx(cv, rel=0.06)


def test_on_off_keeps_silent_in_between() -> None:
    workload = on_off(MANY, 5.0, seed=3, on_s=4.0, off_s=6.0)
    assert np.all(workload.arrival_s % 10.0 <= 4.0 + 1e-9)
    assert workload.rate == pytest.approx(5.0, rel=0.05)


def test_fixed_lengths() -> None:
    workload = synthetic(5, 512, 1)
    assert workload.name == "synthetic 512/1"
    assert workload.prompt_tokens.tolist() == [512] * 5
    assert workload.output_tokens.tolist() == [1] * 5
    assert workload.arrival_s.tolist() == [0.0] * 5


def test_log_normal_lengths_have_that_mean_and_variation() -> None:
    workload = synthetic(200_000, 1155, 211, prompt_cv=0.96, output_cv=0.77, seed=4)
    for lengths, mean, cv in ((workload.prompt_tokens, 1155, 0.96), (workload.output_tokens, 211, 0.77)):
        assert lengths.mean() == pytest.approx(mean, rel=0.02)
        assert lengths.std() / lengths.mean() == pytest.approx(cv, rel=0.03)
        assert lengths.min() >= 1


def test_longest_tokens_bounds_the_sum() -> None:
    workload = synthetic(50_000, 1500, 500, prompt_cv=2.0, output_cv=2.0, longest_tokens=2048, seed=5)
    assert (workload.prompt_tokens + workload.output_tokens).max() <= 2048
    assert workload.prompt_tokens.min() >= 1
    assert workload.output_tokens.min() >= 1


@pytest.mark.parametrize("kind", [kind for kind in Tetri if kind is not Tetri.MIXED])
def test_stand_ins_are_of_their_kind(kind: Tetri) -> None:
    workload = tetri(kind, 5000, seed=6)
    assert np.all((workload.prompt_tokens > 512) == (kind[0] == "H"))
    assert np.all((workload.output_tokens > 128) == (kind[2] == "H"))
    assert (workload.prompt_tokens + workload.output_tokens).max() <= 2048
    assert workload.output_tokens.min() >= 1


def test_light_prompts_have_the_papers_median() -> None:
    assert np.median(tetri("LPLD", 20_000, seed=7).prompt_tokens) == pytest.approx(18, abs=2)


def test_mixed_stand_ins_are_a_quarter_each() -> None:
    workload = tetri("Mixed", 20_000, seed=8)
    heavy_prefill, heavy_decode = workload.prompt_tokens > 512, workload.output_tokens > 128
    for prefill in (heavy_prefill, ~heavy_prefill):
        for decode in (heavy_decode, ~heavy_decode):
            assert np.mean(prefill & decode) == pytest.approx(0.25, abs=0.02)


def test_drawn_from_a_table_each_once_while_there_are_enough() -> None:
    table = Workload("t", np.zeros(6), np.array([10, 20, 600, 700, 30, 9000]), np.array([100, 100, 100, 500, 129, 5]))
    assert sorted(tetri("LPLD", 2, lengths=table).prompt_tokens.tolist()) == [10, 20]
    assert set(tetri("LPLD", 9, lengths=table).prompt_tokens.tolist()) == {10, 20}
    assert sorted(tetri("Mixed", 5, lengths=table).prompt_tokens.tolist()) == [10, 20, 30, 600, 700]  # 9000: too long
    with pytest.raises(InvalidRequest, match="no request of HPHD with at most 1000 tokens"):
        tetri("HPHD", 2, lengths=table, longest_tokens=1000)


def test_drawn_requests_keep_their_prefixes() -> None:
    table = Workload("t", np.zeros(2), np.array([10, 20]), np.array([1, 1]), prefixes=((1,), (2,)))
    drawn = tetri("Mixed", 4, seed=1, lengths=table)
    assert drawn.prefixes == tuple((tokens // 10,) for tokens in drawn.prompt_tokens.tolist())


def test_drawn_from_sharegpt(traces: Path) -> None:
    table = read_trace(traces / "token_counts" / "sharegpt_8k_filtered_stats_llama2_tokenizer.csv")
    for kind in Tetri:
        workload = tetri(kind, 128, seed=9, lengths=table)
        assert len(workload) == 128
        if kind is not Tetri.MIXED:
            assert np.all((workload.prompt_tokens > 512) == (kind[0] == "H"))
            assert np.all((workload.output_tokens > 128) == (kind[2] == "H"))


def test_a_million_requests_take_seconds() -> None:
    started = perf_counter()
    poisson(tetri("Mixed", 1_000_000, seed=1), 100.0, 1)
    bursts(synthetic(1_000_000, 1000, 200, prompt_cv=1.0, output_cv=1.0), 100.0, 1)
    assert perf_counter() - started < 5.0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: poisson(MANY, 0.0), "rate must be positive"),
        (lambda: evenly(MANY, float("nan")), "rate must be positive"),
        (lambda: bursts(MANY, 1.0, cv=-1.0), "cv must be positive"),
        (lambda: on_off(MANY, 1.0, off_s=-1.0), "off_s"),
        (lambda: synthetic(0, 1, 1), "count must be positive"),
        (lambda: synthetic(1, 1, 1, prompt_cv=-0.1), "coefficient of variation"),
        (lambda: synthetic(1, 1, 1, longest_tokens=1), "longest_tokens"),
        (lambda: tetri("HP", 3), "unknown workload 'HP'; known: LPLD, LPHD, HPLD, HPHD, Mixed"),
        (lambda: tetri("LPLD", 3, longest_tokens=600), "must be at least 704"),
    ],
)
def test_errors(make, says: str) -> None:  # noqa: ANN001
    with pytest.raises(InvalidRequest, match=says):
        make()


@pytest.mark.parametrize(
    "words", ["azure-conv", "LPHD", "Mixed", "prompt=100,output=20", "prompt=9,output=9,longest=12"]
)
def test_words_and_a_seed_say_it_all(words: str) -> None:
    one, other = made(words, 30, 7), made(words, 30, 7)
    assert is_made(words)
    assert len(one) == 30
    assert not one.arrival_s.any()
    assert (one.prompt_tokens == other.prompt_tokens).all()


def test_a_turn_of_a_chat_repeats_all_that_was_said() -> None:
    made_chats = made("chats", 300, 7)
    assert is_made("chats")
    assert len(made_chats) == 300
    assert (np.diff(made_chats.arrival_s) >= 0).all()
    assert made_chats.prefixes is not None
    assert made_chats.answers is not None
    size = made_chats.prefix_block_tokens
    shared, later = made_chats.prefixes[0][: 1024 // size], 0
    first_with: dict[int, int] = {}
    for row, (ids, tokens) in enumerate(zip(made_chats.prefixes, made_chats.prompt_tokens.tolist(), strict=True)):
        assert len(ids) == -(-tokens // size)
        assert ids[: len(shared)] == shared
        answer, filled = made_chats.answers[row], (tokens + int(made_chats.output_tokens[row]) - 1) // size
        assert len(answer) == filled - tokens // size
        before = [first_with[block] for block in ids if block in first_with]
        if before:  # the turn before this one: its whole blocks and its answer come first
            turn = max(before)
            said = (
                *made_chats.prefixes[turn][: int(made_chats.prompt_tokens[turn]) // size],
                *made_chats.answers[turn],
            )
            assert ids[: len(said)] == said
            later += 1
        for block in (*ids[len(shared) :], *answer):
            first_with.setdefault(block, row)
    assert later > 50
    same = made("chats", 300, 7)
    assert (same.prefixes, same.answers) == (made_chats.prefixes, made_chats.answers)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("/etc/passwd", "no synthetic workload '/etc/passwd'; known: azure-conv"),
        ("prompt=1e300,output=1", "prompt must be at most 1e\\+07"),
        ("prompt=nan,output=1", "prompt must be at most 1e\\+07, not nan"),
        ("prompt=1,output=1,prompt_cv=inf", "prompt_cv must be at most 100"),
        ("prompt=1,output=1,longest=-inf", "longest_tokens must be at least 2"),
    ],
)
def test_what_nobody_can_make(words: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        made(words, 30, 1)
