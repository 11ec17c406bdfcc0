"""`polyphase bench plan`: its cases are what they say, and a part that misses is told as missed."""

from collections import Counter
from pathlib import Path

import pytest

from lab.bench.plan import PlanBenchOptions, case_impossible, case_zte, run_plan_bench
from lab.bench.plan_thunderserve import FILE, LOST, TRACES, drawn, prefill_share, table_3
from shared.domain.instance import Role
from shared.errors import InvalidRequest
from shared.plan.inventory import read_inventory


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
