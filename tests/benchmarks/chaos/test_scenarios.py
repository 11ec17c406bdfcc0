"""The list of scenarios, what fails one, draws of the random mode; and two scenarios and a control on a small suite."""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.chaos import run, scenario, testbeds
from benchmarks.chaos.load import HARM, UNCLEAN, Verdict
from benchmarks.chaos.proxy import ZmtpSplitter
from benchmarks.chaos.random_mode import FAULTS, draw
from benchmarks.chaos.recovery import of_run
from benchmarks.chaos.report import as_result, cells_of
from benchmarks.chaos.run import choose
from benchmarks.chaos.scenario import FAMILIES, Outcome, Scenario, calm, run_scenario
from benchmarks.chaos.scenarios import SCENARIOS, TROUBLES
from benchmarks.chaos.scenarios.failover import of_epoch
from benchmarks.chaos.under_test import SuiteUnderTest, running_suite_under_test
from benchmarks.chaos.wires import ports_of
from services.launcher.plan import make_plan
from services.launcher.suite import until
from services.launcher.supervisor import StartFailed
from shared.errors import InvalidRequest, Unavailable
from shared.runtime.wire_version import OURS
from shared.wire.broadcast import opened, sealed
from tests.patient_clusters import patient

EVERY = (*SCENARIOS, *TROUBLES)
BEDS = {scenario.bed.name: scenario.bed for scenario in EVERY}


async def nothing(_: object) -> None:
    pass


def outcome(**changes: object) -> Outcome:
    made = Outcome(Scenario("nothing", "nothing is done", nothing), recovered_s=0.5)
    made.tally.add(Verdict.WHOLE, 0.4, "")
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_scenarios_have_names_of_their_own() -> None:
    assert len(SCENARIOS) >= 112
    assert all(FAMILIES.values())
    for scenarios in (SCENARIOS, TROUBLES):
        assert not [name for name, count in Counter(s.name for s in scenarios).items() if count > 1]
    assert all(scenario.description for scenario in EVERY)
    assert all(scenario.bound_s <= 90 for scenario in SCENARIOS)


def test_names_and_parts_of_names_choose() -> None:
    assert [s.name for s in choose(["kill-decode"])] == ["kill-decode"]  # and not kv-kill-decode
    assert {s.name for s in choose(["database"])} == {s.name for s in FAMILIES["database"]}
    assert choose([]) == SCENARIOS
    with pytest.raises(InvalidRequest, match="kill-decode"):
        choose(["kill-decode", "no-such"])


@pytest.mark.parametrize("verdict", Verdict)
def test_one_bad_answer_fails_a_scenario(verdict: Verdict) -> None:
    made = outcome()
    made.tally.add(verdict, 0.1, "an example")
    assert made.ok == (verdict is Verdict.WHOLE)
    assert as_result([made], 1.0, True)["aims"]["nothing"]["met"] == made.ok
    assert not all(aim["met"] for aim in as_result([made], 1.0, False)["aims"].values())  # interrupted
    if verdict is Verdict.DOUBLED:
        assert cells_of(made)[:5] == ("1", "0", "0", "1", "0")


@pytest.mark.parametrize(
    "changes",
    [
        {"recovered_s": None, "missing": ["decode-0 is dead"]},
        {"left": ["2 open rows"]},
        {"broke": "it did not end"},
        {"died": ["prefill-0 died by itself"]},
    ],
)
def test_what_else_fails_a_scenario(changes: dict[str, object]) -> None:
    assert not outcome(**changes).ok


def test_a_wait_is_measured_against_what_the_scenario_takes_away() -> None:
    made = outcome(outage_s=3.0, calm_gap_s=0.2)
    made.tally.longest_gap_s = 4.1
    assert made.ok
    made.tally.longest_gap_s = 4.3
    assert [fault for fault in made.faults if "a wait of 4.3 s" in fault]


def test_draws_follow_from_seed_and_number() -> None:
    def drawn(seed: int) -> list[tuple[str, float, float]]:
        return [(d.name, d.pause_s, d.seconds) for d in (draw(seed, number) for number in range(300))]

    assert drawn(7) == drawn(7) != drawn(8)
    assert {name for name, _, _ in drawn(7)} == set(FAULTS)


def test_the_random_mode_ends_with_an_error_when_no_suite_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[int] = []

    def refused(*_: object) -> object:
        raise StartFailed("the port is taken")

    def pause_s(failed_starts: int) -> float:
        pauses.append(failed_starts)
        return 0.0

    monkeypatch.setattr(run, "running_suite_under_test", refused)
    monkeypatch.setattr(run, "start_pause_s", pause_s)
    with pytest.raises(Unavailable, match=f"{run.MAX_STARTS} times in a row: the suite: the port is taken"):
        run.run_chaos_bench(run.ChaosOptions(random_minutes=60.0), Console(quiet=True))
    assert pauses == list(range(1, run.MAX_STARTS))


def test_the_pause_after_a_failed_start_grows_up_to_a_bound() -> None:
    pauses = [run.start_pause_s(failed) for failed in range(1, 12)]
    assert pauses == sorted(pauses)
    assert pauses[0] == run.FIRST_PAUSE_S < pauses[1]
    assert pauses[-1] == run.MAX_PAUSE_S


@pytest.mark.parametrize("bed", BEDS.values(), ids=list(BEDS))
@pytest.mark.parametrize("transport", ["tcp", "nixl"])
def test_all_ports_of_a_testbed_are_known_and_kv_ports_have_their_scheme(
    bed: testbeds.Testbed, transport: str, tmp_path: Path
) -> None:
    plan = make_plan(replace(bed, kv_transport=transport).build(), tmp_path, where="test")
    ports = ports_of(plan)
    assert {port.scheme for port in ports if port.purpose == "kv"} == {"kv"}
    assert len(ports) == sum(len(spec.ports) for spec in plan.processes)


def test_a_broadcast_under_another_epoch_is_sealed_as_well() -> None:
    body = sealed(OURS.header + (7).to_bytes(8, "big") + b"news")
    message = b"\x01\x07changes" + bytes((0, len(body))) + body
    topic, changed = ZmtpSplitter(0).feed(of_epoch(message, 3))
    assert topic.encode() == b"\x01\x07changes"
    assert bytes(opened(changed.body) or b"") == OURS.header + (3).to_bytes(8, "big") + b"news"
    assert of_epoch(b"\x00\x03abc", 3) == b"\x00\x03abc"


async def answers_come_again(suite: SuiteUnderTest) -> None:
    """Old answers on the way to a gateway: without keys nothing but TCP keeps them out, and this is not TCP."""
    assert suite.load is not None
    async with asyncio.timeout(90.0):
        while not suite.load.tally.count(Verdict.DOUBLED):
            for wire in suite.wires.between("gateway", "", "rpc"):
                wire.proxy.replay()
            await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_two_scenarios_and_a_control_on_a_small_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenario, "WARM_S", 120.0)
    limits, cluster = replace(testbeds.LIMITS, hang_s=60.0), patient(testbeds.KEYED.cluster)
    bed = replace(testbeds.KEYED, name="small", curve=False, host_key=False, cluster=cluster, limits=limits)
    async with running_suite_under_test(bed, tmp_path, Console(stderr=True), seed=1) as suite:
        before, run = await calm(suite, seed=1), suite.run
        for each in (*choose(["kill-decode"]), *choose(["corrupt-state"])):
            got = await run_scenario(suite, replace(each, bed=bed, bound_s=120.0), before, seed=1)
            assert got.tally.count(Verdict.WHOLE), got
            assert not got.tally.count(*HARM, *UNCLEAN), got
            assert (got.broke, got.died) == ("", []), got
        control = Scenario("control", "old answers come again", answers_come_again, bed, bound_s=120.0)
        got = await run_scenario(suite, control, before, seed=1)
        assert not got.broke, got
        assert got.tally.count(Verdict.DOUBLED), "a doubled answer went unnoticed"
    await until(lambda: not of_run(run), 60.0, "every process of the run to end")
