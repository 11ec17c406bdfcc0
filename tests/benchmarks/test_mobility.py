"""`bench mobility`: its sections, figures and aims, on a small trace."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import mobility
from benchmarks.goodput import Meets
from benchmarks.mobility import (
    Chats,
    compared_chats,
    compared_goodput,
    compared_trace,
    pooled_tokens,
    run_mobility_bench,
)
from benchmarks.policies import Runs
from benchmarks.scenarios import Scenario, all_scenarios, chat_scenarios, slo_scenarios
from shared.domain.job import Slo
from shared.errors import InvalidRequest, NotFound


def test_sections_are_chosen_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no part nothing; known: chats, goodput"):
        run_mobility_bench(tmp_path, ("nothing",))
    with pytest.raises(NotFound, match="conversation_trace"):
        run_mobility_bench(tmp_path, ("chats",))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Sixteen chats of two turns each. The second one repeats the answer to the first, which fills a block."""
    rows = [
        {"timestamp": at + 500 * number, "input_length": length, "output_length": 600, "hash_ids": ids}
        for at, length, blocks in ((0, 8_192, 16), (60_000, 9_300, 19))
        for number in range(16)
        for ids in [list(range(100 * number, 100 * number + blocks))]
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return tmp_path / "trace.jsonl"


@pytest.mark.parametrize("cluster", list(mobility.LEAST_LOAD))
def test_hits_are_compared_with_an_oracles_and_ttft_with_least_load(
    cluster: str, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mobility, "SHARES", (0.5,))
    case = Chats(cluster, "conversation", trace)
    work = case.workload()
    assert work.answers is not None
    assert sum(map(len, work.answers)) == 16
    assert pooled_tokens(cluster, work) == 16 * 17 * 512  # a prompt of 16 blocks, and one of its answer
    found = compared_chats(case)
    assert found["aims"].keys() == {
        f"{cluster}_conversation_at_50_percent_{name}" for name in ("hits_of_oracle", "ttft_over_least_load")
    }
    rows = found["tables"][mobility.TABLE]
    assert [row["system"] for row in rows] == ["pull", "no_pull", "least_load"]
    assert rows[0]["hits_of_oracle"] >= rows[1]["hits_of_oracle"] > rows[2]["hits_of_oracle"]
    assert rows[1]["pulls"] == rows[2]["pulls"] == 0


def test_the_scenarios_of_goodput_are_those_of_bench_policies_and_chats() -> None:
    names = [case.name for case in (*all_scenarios(), *chat_scenarios())]
    assert len(set(names)) == len(names) == 16
    assert names[-1] == "mixed_32_chats"


def test_targets_are_tightened_and_loosened_together() -> None:
    cases = list(slo_scenarios())
    assert len({case.name for case in cases}) == len(cases) == 8
    tight = cases[0]
    assert (tight.name, tight.slo.ttft_s, tight.slo.tpot_s) == ("fast_slow_conversation_slo_0.5", 1.0, 0.05)
    attained = [replace(tight, slower=slower).attained(mobility.WITH, 12.0, 100) for slower in (0.1, 0.5, 2.0)]
    assert attained == sorted(attained)
    assert attained[0] < attained[2] == 1.0


def test_a_trace_is_served_within_tighter_and_looser_targets(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slos = {"tight": Slo("default", 0.9, 0.1), "loose": Slo("default", 1.8, 0.1)}  # it is short
    monkeypatch.setattr(mobility, "TRACED_SLOS", slos)
    found = {name: compared_trace("conversation", trace, name) for name in ("tight", "loose")}
    served = [one["figures"][f"goodput_conversation_{name}_mobile_per_s"] for name, one in found.items()]
    assert 0 < served[0] <= served[1]
    assert [len(one["figures"]) for one in found.values()] == [len(mobility.ARMS)] * 2


class Served(Runs):
    """Rates that are served, by policy."""

    def meets(self, case: Scenario, policy: str, requests: int, lasts_s: float = 0.0) -> Meets:
        return lambda rate: rate <= (22.0 if policy == mobility.WITH else 20.0)


@pytest.mark.parametrize(("kind", "arms"), [("chats", mobility.CHAT_ARMS), ("code", mobility.ARMS)])
def test_goodput_with_mobility_and_without(kind: str, arms: dict[str, str]) -> None:
    found = compared_goodput(Served(), Scenario("equal", kind))
    served = {name: found["figures"][f"goodput_equal_{kind}_{name}_per_s"] for name in arms}
    assert len(found["figures"]) == len(arms)
    assert served == {name: pytest.approx(22.0 if name == "mobile" else 20.0, rel=0.02) for name in arms}
    (aim,) = found["aims"].values()
    assert aim["met"]


def test_aggregated_instances_serve_whole_requests() -> None:
    result = Scenario("equal", "code", aggregated=True).result(mobility.NEITHER, 10.0, 60)
    assert result.outcomes.completed.all()
    assert result.kv_bytes == 0
    assert all(use.decode_tokens for use in result.instances)


def test_chats_are_served_with_prefix_caches() -> None:
    result = Scenario("equal", "chats").result(mobility.WITH, 10.0, 60)
    computed = sum(use.prefill_tokens for use in result.instances)
    assert result.outcomes.completed.all()
    assert computed < 0.8 * result.outcomes.prompt_tokens.sum()
