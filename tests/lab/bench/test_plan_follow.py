"""Following a change: what counts as settled, what answers the change, and what is told of both runs."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from lab.bench.experiment import shots_of
from lab.bench.plan_live import (
    FOLLOWED_GBPS,
    FOLLOWED_NODES,
    SLO,
    Followed,
    Planned,
    Ran,
    answering,
    by_roles,
    followed_story,
    judged,
    problem_for,
    search_for,
    settled_shares,
    turned,
)
from lab.bench.plan_thunderserve import cluster
from lab.bench.scenarios import Phase
from lab.calibrate.target import Sample
from shared.domain.instance import Role
from shared.plan.group import Group, Part
from shared.plan.judge import Promise
from shared.plan.search import Outcome
from shared.sim.workload import Workload

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
