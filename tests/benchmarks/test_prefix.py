"""`bench prefix`: the oracle, chats, the simulated nodes, and what it makes of its runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import prefix
from benchmarks.prefix import (
    SHARES,
    TRACES,
    Found,
    Oracles,
    Point,
    Request,
    Run,
    Traced,
    cases,
    chats,
    cluster_of,
    imbalance,
    live,
    messages_of,
    oracle_tokens,
    traced,
)
from services.launcher.cluster_file import Cluster
from shared.errors import NotFound, Unavailable


def test_the_oracle_finds_the_longest_run_from_the_start_of_whatever_came_before() -> None:
    prompts = [((1, 2, 3), 35), ((1, 2, 4), 30), ((9, 2, 3), 30), ((1, 2, 4), 31)]
    assert oracle_tokens(prompts, 10) == [0, 20, 0, 30]
    assert oracle_tokens([((1, 2), 20), ((1, 2), 20)], 10) == [0, 19]  # the last token is always computed


def test_an_oracle_of_few_blocks_forgets_the_least_recently_used() -> None:
    prompts = [((1, 2), 25), ((3,), 15), ((1, 2), 25), ((4,), 15), ((3,), 15), ((1, 2), 25)]
    assert oracle_tokens(prompts, 10, 3) == [0, 0, 20, 0, 0, 0]
    assert oracle_tokens(prompts, 10, 4) == oracle_tokens(prompts, 10) == [0, 0, 20, 0, 10, 20]


def test_imbalance_is_the_most_over_the_mean() -> None:
    assert imbalance([2.0, 2.0]) == 1.0
    assert imbalance([3.0, 1.0, 2.0]) == 1.5
    assert imbalance([4.0, 0.0]) == 2.0


def test_each_turn_is_all_that_was_said_and_something_new() -> None:
    made = chats(6, 3, 0.5, seed=1)
    assert made == chats(6, 3, 0.5, seed=1)
    assert made[0].starts_s == 0.0
    assert [one.starts_s for one in made] == sorted(one.starts_s for one in made)
    for chat in made:
        first, second, third = (turn.messages for turn in chat.turns)
        assert [role for role, _ in third] == ["system", "user", "assistant", "user", "assistant", "user"]
        assert (second[:2], third[:4]) == (first, second)
        assert first[0] == made[0].turns[0].messages[0]
        assert [turn.pause_s > 0.0 for turn in chat.turns] == [False, True, True]
    assert len({chat.turns[0].messages[1] for chat in made}) == len(made)
    assert messages_of(made[0].turns[0])[0].keys() == {"role", "content"}


def test_the_live_cluster_serves_whole_requests() -> None:
    cluster = Cluster.model_validate(cluster_of(Path("model")))
    assert cluster.instance_ids == tuple(prefix.names())
    assert {section.role for section in cluster.instances} == {"decode"}


def test_what_a_worker_says_of_its_cache() -> None:
    said = "# HELP x\nvllm:prefix_cache_queries_total 300.0\nvllm:prefix_cache_hits_total 128.0\n"
    assert Found.of(said) == Found(300.0, 128.0)
    with pytest.raises(Unavailable, match="prefix_cache"):
        Found.of(said.replace("hits", "misses"))


def test_traces_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"conversation_trace\.jsonl"):
        list(cases(tmp_path))


@pytest.fixture
def data(tmp_path: Path) -> Path:
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
    for path in TRACES.values():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("\n".join(map(json.dumps, rows)) + "\n")
    return tmp_path


def test_on_the_nodes_adaptive_finds_what_the_oracle_does_and_least_load_little(data: Path) -> None:
    case = next(cases(data))
    oracles = case.oracles()
    assert oracles == Oracles(16 * 8_192, 16 * 8_192)
    assert case.capacity() > 1.0
    rate = case.work().rate
    mine, other = case.point("adaptive", rate), case.point("least_load", rate)
    assert mine.saved_tokens == oracles.unbounded
    assert other.saved_tokens < 0.5 * oracles.unbounded
    assert mine.ttft_mean_s < other.ttft_mean_s
    assert mine.imbalance >= 1.0
    assert mine.attainment == 1.0


def test_the_pooled_oracle_has_the_nodes_memory(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tuple(replace(node, kv_tokens=2 * 512) for node in prefix.instances())
    monkeypatch.setattr(prefix, "instances", lambda: small)
    oracles = next(cases(data)).oracles()
    assert 0 == oracles.pooled < oracles.unbounded


def point(**more: float) -> Point:
    return replace(Point(1.0, 900, 0.5, 0.4, 2.0, 0.02, 1.0, 1.2, 0.3, 0.9), **more)  # type: ignore[arg-type]


def test_aims_of_a_trace() -> None:
    points = {(share, system): point() for share in SHARES for system in prefix.SYSTEMS}
    points |= {(share, "least_load"): point(ttft_mean_s=1.0) for share in SHARES[1:]}
    points[SHARES[-1], "adaptive"] = point(saved_tokens=890, imbalance=1.6)
    result = traced(Traced("t", 4_000, Oracles(1_200, 1_000), points))
    at = [f"t_at_{round(100 * share)}_percent" for share in SHARES]
    met = {name: aim["met"] for name, aim in result["aims"].items()}
    assert [met[f"{one}_ttft_over_least_load"] for one in at] == [False, True, True]
    assert [met[f"{one}_hits_of_oracle"] for one in at] == [True, True, False]
    assert [met[f"{one}_imbalance"] for one in at] == [True, True, False]
    assert result["figures"]["t_oracle_saved_share"] == 0.3
    assert result["figures"][f"{at[0]}_adaptive_saved_share"] == 0.225


def test_aims_of_chats_on_engines() -> None:
    def run(system: str, hit: float, *ttft: float) -> Run:
        requests = [Request(0, turn, float(turn), seconds) for turn, seconds in enumerate(ttft)]
        return Run(system, requests, {"a": 300.0, "b": 100.0}, hit, 100.0)

    result = live([run("adaptive", 95.0, 1.0, 0.2), run("adaptive", 87.0, 1.0, 0.2), run("least_load", 30.0, 1.0, 1.0)])
    assert result["figures"]["live_adaptive_hits_of_oracle"] == 0.91
    assert result["figures"]["live_adaptive_later_turns_ttft_mean_s"] == 0.2
    assert result["aims"]["live_hits_of_oracle"]["met"]
    assert result["aims"]["live_ttft_over_least_load"] == {"want": "<= 0.6", "got": 0.6, "met": True}
    assert result["aims"]["live_imbalance"] == {"want": "<= 1.5", "got": 1.5, "met": True}
