"""`bench prefix`: the oracle, chats, the simulated nodes, and its figures and aims."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import prefix
from benchmarks.prefix import Played, chats, live, oracles, traced, traces
from benchmarks.scenarios import instances
from shared.errors import NotFound
from shared.sim.traces import read_trace
from shared.sim.workload import oracle_tokens


def test_the_oracle_finds_the_longest_run_from_the_start_of_all_that_came_before() -> None:
    prompts = [((1, 2, 3), 35), ((1, 2, 4), 30), ((9, 2, 3), 30), ((1, 2, 4), 31)]
    assert oracle_tokens(prompts, 10) == [0, 20, 0, 30]
    assert oracle_tokens([((1, 2), 20), ((1, 2), 20)], 10) == [0, 19]  # the last token is always computed


def test_an_oracle_of_few_blocks_forgets_the_least_recently_used() -> None:
    prompts = [((1, 2), 25), ((3,), 15), ((1, 2), 25), ((4,), 15), ((3,), 15), ((1, 2), 25)]
    assert oracle_tokens(prompts, 10, 3) == [0, 0, 20, 0, 0, 0]
    assert oracle_tokens(prompts, 10, 4) == oracle_tokens(prompts, 10) == [0, 0, 20, 0, 10, 20]


def test_each_prompt_is_the_conversation_so_far_and_something_new() -> None:
    made = chats(6, 3, 0.5, seed=1)
    assert made == chats(6, 3, 0.5, seed=1)
    starts_s = [chat[0].pause_s for chat in made]
    assert starts_s[0] == 0.0
    assert starts_s == sorted(starts_s)
    for chat in made:
        first, second, third = (turn.prompt for turn in chat)
        assert second[: len(first)] == first
        assert third[: len(second)] == second
        assert first[: prefix.SYSTEM_TOKENS] == made[0][0].prompt[: prefix.SYSTEM_TOKENS]
    assert len({tuple(chat[0].prompt) for chat in made}) == len(made)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"conversation_trace\.jsonl"):
        traces(tmp_path)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Sixteen chats of two turns each, one every three seconds; second turns come when all first ones are long done."""
    rows = [
        {
            "timestamp": at + 3_000 * number,
            "input_length": length,
            "output_length": 8,
            "hash_ids": list(range(100 * number, 100 * number + blocks)),
        }
        for at, length, blocks in ((0, 8_192, 16), (200_000, 9_000, 18))
        for number in range(16)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return tmp_path / "trace.jsonl"


def test_on_the_nodes_adaptive_finds_what_the_oracle_does(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = read_trace(trace)
    assert oracles(work) == [16 * 8_192, 16 * 8_192]
    monkeypatch.setattr(prefix, "SHARES", (0.05,))
    result = traced("t", trace)
    figures = result["figures"]
    assert figures["t_at_5_percent_adaptive_saved_share"] == figures["t_oracle_saved_share"]
    assert figures["t_at_5_percent_least_load_saved_share"] < 0.5 * figures["t_oracle_saved_share"]
    assert figures["t_at_5_percent_adaptive_ttft_mean_s"] < figures["t_at_5_percent_least_load_ttft_mean_s"]
    assert figures["t_at_5_percent_adaptive_attainment"] == 1.0
    assert result["aims"]["t_at_5_percent_hits_of_oracle"] == {"want": ">= 0.9", "got": 1.0, "met": True}


def test_the_pooled_oracle_has_the_nodes_memory(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tuple(replace(node, kv_tokens=2 * 512) for node in instances("prefix"))
    monkeypatch.setattr(prefix, "instances", lambda _: small)
    unbounded, pooled = oracles(read_trace(trace))
    assert 0 == pooled < unbounded


def test_aims_of_chats_on_engines() -> None:
    def played(hit: float, *ttft: float) -> Played:
        return Played(list(enumerate(ttft)), [300.0, 100.0], hit, 100.0)

    slow = played(30.0, 1.0, 1.0)
    result = live([{"adaptive": played(hit, 1.0, 0.2), "least_load": slow} for hit in (95.0, 87.0)])
    assert result["figures"]["live_adaptive_hits_of_oracle"] == 0.91
    assert result["figures"]["live_adaptive_later_turns_ttft_mean_s"] == 0.2
    assert result["aims"]["live_ttft_over_least_load"] == {"want": "<= 0.6", "got": 0.6, "met": True}
    assert all(aim["met"] for aim in result["aims"].values())
    assert not prefix.aims_of("x", 0.89, 0.61, 1.51)["x_imbalance"]["met"]
