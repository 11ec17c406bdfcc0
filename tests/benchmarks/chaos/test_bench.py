"""A small suite, two scenarios, and a control that must not pass."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.chaos.arena import Arena, running_arena
from benchmarks.chaos.clusters import KEYED
from benchmarks.chaos.load import HARM, UNCLEAN, Verdict
from benchmarks.chaos.run import choose
from benchmarks.chaos.scenario import Outcome, Scenario, calm, of_run, run_scenario
from services.launcher.suite import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
BED = replace(KEYED, name="small", curve=False, host_key=False)


async def answers_come_again(arena: Arena) -> None:
    """Old answers on the way to a gateway: without keys nothing but TCP keeps them out, and this is not TCP."""
    wires = arena.wires.between("gateway", purpose="rpc")
    assert arena.load is not None
    doubled = arena.load.tally.counts
    async with asyncio.timeout(30.0):
        while not doubled[Verdict.DOUBLED]:
            for wire in wires:
                wire.proxy.replay()
            await asyncio.sleep(0.1)


def said(outcome: Outcome) -> str:
    return f"{outcome.faults} {outcome.tally.examples}"


async def test_scenarios_on_a_small_suite(tmp_path: Path) -> None:
    async with running_arena(BED, tmp_path, Console(stderr=True), seed=1) as arena:
        before = await calm(arena, seed=1)
        for scenario in (*choose(["kill-decode"]), *choose(["corrupt-state"])):
            outcome = await run_scenario(arena, replace(scenario, bed=BED), before, seed=1)
            assert outcome.tally.count(Verdict.WHOLE), said(outcome)
            assert not outcome.tally.count(*HARM, *UNCLEAN), said(outcome)
            assert not outcome.broke, said(outcome)
            assert not outcome.died, said(outcome)
        control = Scenario("control", "old answers come again, without keys", answers_come_again, BED)
        outcome = await run_scenario(arena, control, before, seed=1)
        assert not outcome.broke, said(outcome)
        assert outcome.tally.count(Verdict.DOUBLED), "a doubled answer went unnoticed"
        run = arena.run
    await until(lambda: not of_run(run), 10.0, "every process of the run to end")
