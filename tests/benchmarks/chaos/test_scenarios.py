from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chaos import clusters
from benchmarks.chaos.clusters import TESTBEDS
from benchmarks.chaos.framing import Part, ZmtpSplitter
from benchmarks.chaos.load import Verdict
from benchmarks.chaos.monkey import FAULTS, draw
from benchmarks.chaos.proxy import ports_of
from benchmarks.chaos.run import as_result, cells_of, choose
from benchmarks.chaos.scenario import Outcome, Recovery, Scenario
from benchmarks.chaos.scenarios import FAMILIES, SCENARIOS
from benchmarks.chaos.scenarios.failover import of_epoch
from services.launcher.plan import make_plan
from shared.errors import InvalidRequest
from shared.runtime.wire_version import OURS
from shared.wire.broadcast import opened, sealed


async def nothing(_: object) -> None:
    pass


SCENARIO = Scenario("nothing", "nothing is done", nothing)


def outcome(**changes: object) -> Outcome:
    made = Outcome(SCENARIO, 1, recovery=Recovery(0.5))
    made.tally.add(Verdict.WHOLE, 0.4, "")
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_scenarios_have_names_of_their_own_and_a_testbed() -> None:
    assert len(SCENARIOS) >= 112
    assert all(FAMILIES.values())
    assert not [name for name, count in Counter(s.name for s in SCENARIOS).items() if count > 1]
    assert all(scenario.bed is TESTBEDS[scenario.bed.name] for scenario in SCENARIOS)
    assert all(scenario.does and scenario.bound_s <= 90 for scenario in SCENARIOS)


def test_names_and_parts_of_names_choose() -> None:
    assert [s.name for s in choose(["kill-decode"])] == ["kill-decode"]  # and not kv-kill-decode
    assert {s.name for s in choose(["database"])} == {s.name for s in FAMILIES["database"]}
    assert choose([]) == SCENARIOS
    with pytest.raises(InvalidRequest, match="kill-decode"):
        choose(["no-such"])


def test_an_undisturbed_outcome_passes() -> None:
    assert outcome().ok


@pytest.mark.parametrize("verdict", [verdict for verdict in Verdict if verdict is not Verdict.WHOLE])
def test_each_bad_verdict_fails_a_scenario(verdict: Verdict) -> None:
    made = outcome()
    made.tally.add(verdict, 0.1, "an example")
    assert not made.ok
    assert not as_result([made], 1.0, True)["aims"]["nothing"]["met"]


@pytest.mark.parametrize(
    "changes",
    [
        {"recovery": Recovery(None, ["decode-0 is dead"])},
        {"recovery": Recovery(1.0, left=["2 open rows"])},
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


def test_a_row_has_what_clients_saw() -> None:
    made = outcome()
    made.tally.add(Verdict.DOUBLED, 0.1, "")
    assert cells_of(made)[:5] == ("1", "0", "0", "1", "0")


def test_an_interrupted_run_is_not_ok() -> None:
    assert not all(aim["met"] for aim in as_result([outcome()], 1.0, False)["aims"].values())


def test_draws_follow_from_seed_and_number() -> None:
    def drawn(seed: int) -> list[tuple[str, float, float]]:
        return [(d.name, d.pause_s, d.seconds) for d in (draw(seed, number) for number in range(300))]

    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)
    assert {name for name, _, _ in drawn(7)} == {name for name, _, _, _ in FAULTS}


@pytest.mark.parametrize("bed", TESTBEDS.values(), ids=list(TESTBEDS))
@pytest.mark.parametrize("transport", ["tcp", "nixl"])
def test_all_ports_of_a_testbed_are_known_and_kv_ports_have_their_scheme(
    bed: clusters.Testbed, transport: str, tmp_path: Path
) -> None:
    plan = make_plan(replace(bed, kv_transport=transport).build(), tmp_path, where="test")
    ports = ports_of(plan)
    assert {port.scheme for port in ports if port.purpose == "kv"} == {"kv"}
    assert len(ports) == sum(len(spec.ports) for spec in plan.processes)


def test_a_broadcast_under_another_epoch_is_sealed_as_well() -> None:
    body = OURS.header + (7).to_bytes(8, "big") + b"news"
    message = Part(1, b"changes").encode() + Part(0, sealed(body)).encode()
    topic, changed = ZmtpSplitter(0).feed(of_epoch(message, 3))[1]
    assert isinstance(changed, Part)
    assert topic.encode() == Part(1, b"changes").encode()
    assert bytes(opened(changed.body) or b"") == OURS.header + (3).to_bytes(8, "big") + b"news"
    assert of_epoch(b"\x00\x03abc", 3) == b"\x00\x03abc"
