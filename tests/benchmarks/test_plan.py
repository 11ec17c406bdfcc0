"""`polyphase bench plan`: its cases, promises of started plans, and the planner beside a cluster that changes."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks.experiment import shots_of, slower
from benchmarks.plan import PlanBenchOptions, case_impossible, case_zte, run_plan_bench
from benchmarks.plan_live import (
    FOLLOWED_GBPS,
    FOLLOWED_NODES,
    MIN_FACTOR,
    SLO,
    TOKENS_PER_S,
    Followed,
    Kept,
    Planned,
    PromiseFigures,
    Ran,
    answering,
    by_roles,
    compared,
    factor_for,
    file_of,
    followed_story,
    judged,
    kept_promise,
    kept_story,
    no_trace,
    problem_for,
    search_for,
    seen_by_clients,
    settled_shares,
    simulated_file,
    turned,
)
from benchmarks.plan_thunderserve import FILE, LOST, TRACES, cluster, drawn, prefill_share, table_3
from benchmarks.scenarios import Phase
from services.launcher.cluster_file import load_cluster
from shared.cost.step import Batch
from shared.domain.instance import Role
from shared.errors import InvalidRequest
from shared.plan.group import Group, Part
from shared.plan.inventory import read_inventory
from shared.plan.judge import Promise
from shared.plan.plan import Plan
from shared.plan.search import Outcome, Search
from shared.sim.spec import RunSpec
from shared.sim.workload import Workload
from tools.calibrate.target import Sample
from tools.simulate.deployment import load_deployment


@pytest.mark.parametrize("kind", TRACES)
def test_the_papers_plan_uses_its_32_gpus_once(kind: str) -> None:
    inventory = read_inventory(FILE)[0]
    used: Counter[int] = sum((group.uses for group in table_3(kind)), Counter())
    assert [used[pool] for pool in range(len(inventory.pools))] == [pool.count for pool in inventory.pools]
    assert inventory.accelerators == 32
    assert all(sum(part.layers for part in group.parts) == 60 for group in table_3(kind))
    lost = [table_3(kind)[at] for at in LOST[kind]]
    assert {group.role for group in lost} == {Role.DECODE}
    assert sum(group.accelerators for group in lost) == 4


def test_the_papers_plan_prefills_more_for_coding() -> None:
    assert prefill_share(table_3("coding")) > prefill_share(table_3("conversation"))


def test_every_refusal_says_what_is_the_nearest() -> None:
    _, aims, _ = case_impossible()
    assert len(aims) == 4
    assert all(aim["met"] and aim["want"] in aim["got"] for aim in aims.values()), aims


def test_a_part_that_there_is_not_is_named() -> None:
    with pytest.raises(InvalidRequest, match="no part 'luck'; there are thunderserve, sizes"):
        run_plan_bench(PlanBenchOptions(Path(), ("luck",)))


def test_draws_repeat_and_differ() -> None:
    assert drawn(3).words == drawn(3).words
    assert len({drawn(seed).words for seed in range(20)}) > 15
    assert all(drawn(seed).problem.inventory.accelerators <= 8 for seed in range(20))


def test_ztes_scenarios_are_those_of_its_figures() -> None:
    _, aims, _ = case_zte()
    figures = ("256+256 at 2/s", "512+1024 at 3/s", "1024+1024 at 2/s", "1024+1024 at 3/s")  # 7, 9, 10 and 8
    assert set(aims) == {f"ZTE {one}" for one in figures}
    assert all(aim["met"] for aim in aims.values())


FACTOR = 2.0
CHANGED_S = 1_000.0


@cache
def followed(lost: str = "") -> Followed:
    problem = problem_for("conversation", None, cluster(FOLLOWED_NODES, FOLLOWED_GBPS))
    search = search_for(problem)
    layers = problem.shop.geometry.layers
    plan = by_roles(
        tuple(
            Group(Role.DECODE if at == 0 else Role.PREFILL, 1, (Part(at, layers),))
            for at in range(len(problem.inventory.pools))
        )
    )
    one = Planned("conversation", search, Outcome("rescheduled", plan, Promise(9.0, 9.0, 0.9, {}, 0.0), 0.0, 0.0, 0))
    phases = (Phase("conversation", 1.0, 5.0), Phase("code", 1.0, 10.0))
    return Followed("loss" if lost else "shift", one, phases, FACTOR, lost, ("a10-0",), 4.0, 8.0)


def proposal(**more: Any) -> Mapping[str, Any]:
    expected = {"rate": 2.0, "goodput": 1.0, "attainment": 0.3}
    return {
        "cause": "shift",
        "state": "applied",
        "noticed_s": CHANGED_S + 9.0,
        "made_s": CHANGED_S + 9.4,
        "took_s": 0.2,
        "flips": [{"instance_id": "a10-0", "from_role": "prefill", "to_role": "decode"}],
        "now": expected,
        "then": {**expected, "goodput": 3.0, "attainment": 0.95},
        "steps": [{"at_s": CHANGED_S + 12.0, "what": "flip", "ok": True, "text": ""}],
        "error": "",
        **more,
    }


ALONE = Ran((0.98, 0.4), ("refused",), CHANGED_S, 0.1)
MENDED = Ran((0.97, 0.91), (), CHANGED_S, 0.1, (proposal(),))


def test_roles_are_turned_where_groups_do_what_their_roles_say() -> None:
    one = followed().one
    proposal = turned(one.search.estimator, one.plan)
    assert proposal.plan.policies == one.plan.policies
    assert proposal.changes == (proposal.plan.groups != one.plan.groups)
    assert proposal.after.goodput >= proposal.before.goodput
    assert not proposal.after.flows.local.any()


def test_the_last_part_of_each_phase_counts_and_failures_are_misses() -> None:
    """Phases last 10 and 20 seconds here; the last 40 % of them begin at 6 and at 22."""
    workload = Workload("six", np.array([0.0, 7.0, 8.0, 12.0, 24.0, 29.0]), np.full(6, 100), np.full(6, 2))
    soon, late = 0.5 * FACTOR * SLO.ttft_s, 2.0 * FACTOR * SLO.ttft_s
    took = (late, soon, late, late, soon, soon)
    answers: list[Sample | str] = [
        Sample(str(at), shot, 0.0, ttft_s, ttft_s + 0.01)
        for at, (shot, ttft_s) in enumerate(zip(shots_of(workload), took, strict=True))
    ]
    assert settled_shares(answers, workload, followed()) == (0.5, 1.0)
    answers[4] = "the stream ended"
    assert settled_shares(answers, workload, followed()) == (0.5, 0.5)


def test_what_was_applied_for_that_reason_answers_the_change() -> None:
    review, left = proposal(cause="review"), proposal(state="withdrawn", proposal_id="1")
    assert answering(followed(), ()) is None
    assert answering(followed(), (review,)) is review
    assert answering(followed(), (review, left)) is left
    assert answering(followed(), (left, MENDED.proposals[0])) is MENDED.proposals[0]


def test_a_planner_that_mends_meets_every_aim() -> None:
    figures, aims = judged(followed(), MENDED, ALONE)
    assert all(aim["met"] for aim in aims.values()), aims
    assert figures["follow_shift_proposed_after_notice_s"] == pytest.approx(0.4)
    assert figures["follow_shift_applied_after_notice_s"] == pytest.approx(3.0)
    assert figures["follow_shift_after_without_share"] == 0.4
    assert figures["follow_shift_failed_without"] == 1


@pytest.mark.parametrize(
    ("run", "missed"),
    [
        (replace(MENDED, proposals=()), {"proposed"}),
        (replace(MENDED, proposals=(proposal(cause="review"),)), {"proposed"}),
        (replace(MENDED, failed=("500",)), {"failed"}),
        (replace(MENDED, settled=(0.97, 0.6)), {"back"}),
        (replace(MENDED, settled=(0.97, 0.3)), {"back", "better_than_without"}),
        (replace(MENDED, proposals=(proposal(state="failed", error="timeout"),)), {"applied"}),
        (replace(MENDED, proposals=(proposal(made_s=CHANGED_S + 11.0),)), {"proposed_after_notice_s"}),
    ],
)
def test_what_the_planner_does_not_do_is_missed(run: Ran, missed: set[str]) -> None:
    aims = judged(followed(), run, ALONE)[1]
    assert {name.removeprefix("follow_shift_") for name, aim in aims.items() if not aim["met"]} == missed


def test_the_story_has_its_times() -> None:
    told, shares = followed_story(followed(), MENDED, ALONE)
    assert "shift noticed 9.0 s after the change, proposed 0.40 s later (a10-0 to decode" in told
    assert "applied 12.0 s after the change" in told
    assert "0.970, 0.910 with the planner, 0.980, 0.400 without; failed 0 and 1" in shares
    failed = followed_story(followed(), replace(MENDED, failed=("status 503",)), ALONE)
    assert failed[-1] == "shift: a request failed: status 503"


@cache
def pair(rate: float = 2.0, requests: int = 250, longest: int = 2_000) -> Planned:
    """A prefill and a decode instance, as if they had been searched for; `longest`: output tokens at most."""
    problem = problem_for("conversation", None)
    workload = problem.workload.head(requests)
    workload = replace(workload, output_tokens=np.minimum(workload.output_tokens, longest))
    problem = replace(problem, workload=workload, rate=rate)
    layers = problem.shop.geometry.layers
    plan = Plan((Group(Role.PREFILL, 1, (Part(1, layers),)), Group(Role.DECODE, 1, (Part(0, layers),))))
    search = Search(problem, lambda: 0.0, RunSpec(streaming=False, step_budget=True))
    promise = search.judge.promise(plan, rate)
    return Planned("conversation", search, Outcome("by hand", plan, promise, 0.0, 0.0, 1))


def test_the_started_file_is_the_plan_so_many_times_as_slow(tmp_path: Path) -> None:
    one = pair()
    file = file_of(one, 4.0, tmp_path)
    assert load_cluster(file).instance_ids == one.plan.names(one.problem)
    deployment = load_deployment(file)
    assert deployment.run.slo.ttft_s == 4.0 * SLO.ttft_s
    assert deployment.run.patience_s == 40.0
    plain = load_deployment(file_of(one, 1.0, tmp_path))
    path, usual = deployment.run.network.path("a40", "a100"), plain.run.network.path("a40", "a100")
    assert path.bandwidth_bytes_s == pytest.approx(usual.bandwidth_bytes_s / 4.0)
    batch = Batch((), 8, 8_000)
    for slow, usual_one in zip(deployment.instances, plain.instances, strict=True):
        assert slow.model.step_time_s(batch) == pytest.approx(4.0 * usual_one.model.step_time_s(batch))
    assert yaml.safe_load(file.read_text())["predictor"] == {"enabled": False}


def test_further_sections_are_in_the_file(tmp_path: Path) -> None:
    file = file_of(pair(), 4.0, tmp_path, {"monitor": {"drain_timeout_s": 7.0}})
    assert yaml.safe_load(file.read_text())["monitor"] == {"drain_timeout_s": 7.0}


def test_the_file_as_it_is_does_in_the_simulator_what_the_plan_promised(tmp_path: Path) -> None:
    one = pair()
    promise = one.outcome.promise
    said = simulated_file(file_of(one, 1.0, tmp_path), one.promised, SLO, 1.0)
    assert said.ttft_mean_s == pytest.approx(promise.figures["ttft_mean_s"], rel=1e-6)
    assert said.tpot_mean_s == pytest.approx(promise.figures["tpot_mean_s"], rel=1e-6)
    assert said.attainment_share == pytest.approx(promise.attainment)


def test_slowed_it_does_the_same_slowly(tmp_path: Path) -> None:
    one, factor = pair(), 5.0
    promise = one.outcome.promise
    said = simulated_file(file_of(one, factor, tmp_path), slower(one.promised, factor), SLO, factor)
    assert said.ttft_mean_s == pytest.approx(promise.figures["ttft_mean_s"], rel=0.1)
    assert said.tpot_mean_s == pytest.approx(promise.figures["tpot_mean_s"], rel=0.1)
    assert said.attainment_share == pytest.approx(promise.attainment, abs=0.05)


def test_few_tokens_are_slowed_least() -> None:
    assert factor_for(10.0) == MIN_FACTOR
    assert factor_for(7.2 * TOKENS_PER_S) == 8.0


def test_attainment_is_of_those_that_come_once_the_cluster_is_full() -> None:
    workload = Workload("four", np.array([0.0, 1.0, 8.0, 10.0]), np.full(4, 100), np.full(4, 11))
    late, soon = 2.0 * SLO.ttft_s * 3.0, 0.1
    seen = [
        Sample(str(at), shot, 0.0, ttft_s, ttft_s + 10 * 0.03)
        for at, (shot, ttft_s) in enumerate(zip(shots_of(workload), (late, late, soon, late), strict=True))
    ]
    found = seen_by_clients(seen, workload, SLO, 3.0)
    assert found.attainment_share == 0.5
    assert found.tpot_mean_s == pytest.approx(0.01)
    assert found.ttft_mean_s == pytest.approx((3 * late + soon) / 4 / 3.0)


def test_a_promise_that_is_not_kept_is_told_as_missed() -> None:
    kept = Kept(
        PromiseFigures(0.4, 0.03, 0.9), PromiseFigures(0.5, 0.031, 0.85), PromiseFigures(0.41, 0.03, 0.9), 3.0, 0.2
    )
    figures, aims = compared("promise", kept)
    assert figures["promise_ttft_mean_off_percent"] == 25.0
    assert figures["promise_ttft_mean_live_s"] == 0.5
    assert figures["promise_attainment_file_share"] == 0.9
    assert {name: aim["met"] for name, aim in aims.items()} == {
        "promise_ttft_mean": False,
        "promise_tpot_mean": True,
        "promise_attainment": True,
    }
    assert "0.400 s promised, 0.500 s live" in kept_story(pair(), kept)


def test_a_trace_that_is_missing_is_told_of_and_made(tmp_path: Path) -> None:
    (said,) = no_trace("code", tmp_path)
    assert said.startswith("code: no Azure trace below")
    assert problem_for("code", tmp_path).workload.name == "code"


@pytest.mark.slow
def test_a_pair_does_live_what_it_does_in_the_simulator() -> None:
    """Short, and so only nearly; that all of a promise is kept is the bench's to show."""
    kept = kept_promise(pair(rate=4.0, longest=150), 24)
    assert kept.live.ttft_mean_s == pytest.approx(kept.simulated.ttft_mean_s, abs=0.1)
    assert kept.live.tpot_mean_s == pytest.approx(kept.simulated.tpot_mean_s, rel=0.2)
