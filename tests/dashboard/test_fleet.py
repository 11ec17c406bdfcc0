"""The page Instances, and the page of one."""

import json
import time
from concurrent.futures import wait
from typing import Any

import msgspec
import pytest
from streamlit.testing.v1 import AppTest

from dashboard.instance_details import plain, section
from dashboard.instances_page import trouble
from dashboard.records import InstanceRow, Load
from services.cluster_monitor.edge import FlipIn
from shared.domain.instance import InstanceState, Role
from shared.errors import Conflict, DeadlineExceeded
from tests.dashboard.pages import LONG_S, button, finish, has, html, links, opened
from tests.dashboard.rows import instance


@pytest.fixture
def fleet(page: AppTest) -> AppTest:
    return opened(page, "instances")


def test_few_are_cards(fleet: AppTest) -> None:
    fleet.run()
    assert not fleet.exception
    shown = html(fleet)
    for said in ("p0", "d1", "EMULATED", "H100", "40 %", "1.5 MB", "vllm 0.32.0"):
        assert said in shown, said
    assert ("Open", "instances?instance=p0") in links(fleet)
    assert not fleet.error


def test_nothing_is_posted_before_the_confirmation(fleet: AppTest, cluster: Any) -> None:
    fleet.run()
    button(fleet, "flip-p0").click().run()
    assert "It first drains 3 jobs" in fleet.markdown[-1].value
    fleet.run()  # a refresh of everything leaves the question open
    assert has(fleet, "confirm")
    assert cluster.posts == []
    button(fleet, "confirm").click().run()
    finish(fleet)
    ((instance_id, what, body, who),) = cluster.posts
    assert (instance_id, what, who) == ("p0", "flip", "dashboard")
    assert (body["force"], body["drain_timeout_s"]) == (False, 30.0)
    assert FlipIn.model_validate(body).deadline_s
    assert not has(fleet, "confirm")
    assert fleet.success[0].value == "p0 is now decode (was prefill). Drain 1.24 s, flip 0.4 ms."
    operation_id = body["operation_id"]
    assert (f"operation {operation_id[:8]}", f"events?operation={operation_id}") in links(fleet)
    fleet.run()
    assert len(cluster.posts) == 1


def test_cancel_posts_nothing(fleet: AppTest, cluster: Any) -> None:
    fleet.run()
    button(fleet, "drain-p0").click().run()
    button(fleet, "cancel").click().run()
    assert not has(fleet, "confirm")
    assert cluster.posts == []


def test_drain_then_resume(fleet: AppTest, cluster: Any) -> None:
    fleet.run()
    assert button(fleet, "resume-d0").disabled
    button(fleet, "drain-d0").click().run()
    button(fleet, "confirm").click().run()
    finish(fleet)
    assert fleet.success[0].value == "d0 is drained and takes no new work. Drain 1.24 s."
    assert button(fleet, "drain-d0").disabled
    button(fleet, "resume-d0").click().run()
    button(fleet, "confirm").click().run()
    finish(fleet)
    assert [what for _, what, *_ in cluster.posts] == ["drain", "resume"]
    assert fleet.success[0].value == "d0 takes decode work again."


def test_the_page_goes_on_while_an_instance_drains_and_says_how_far_it_is(fleet: AppTest, cluster: Any) -> None:
    cluster.go.clear()
    fleet.run()
    button(fleet, "drain-d0").click().run()
    started_s = time.monotonic()
    button(fleet, "confirm").click().run()
    assert time.monotonic() - started_s < LONG_S / 2
    assert fleet.info[0].value.startswith("Draining d0:")
    assert fleet.info[0].value.endswith("3 jobs left to drain.")
    assert not any(b.key and b.key.startswith("dismiss") for b in fleet.button)
    cluster.go.set()
    finish(fleet)
    key = fleet.session_state["operations"][0].key
    button(fleet, f"dismiss-{key}").click().run()
    assert not fleet.success


def test_a_refusal_is_shown_with_its_reason(fleet: AppTest, cluster: Any, refusal: Conflict) -> None:
    cluster.refusal = refusal
    fleet.run()
    button(fleet, "flip-p0").click().run()
    button(fleet, "confirm").click().run()
    finish(fleet)
    assert fleet.warning[0].value == f"Flip of p0 was refused: {refusal.message}"
    assert not fleet.exception


def test_a_failure_is_told_apart_from_a_refusal(fleet: AppTest, cluster: Any) -> None:
    cluster.refusal = DeadlineExceeded("p0 did not drain within 30 s: 2 jobs remain")
    fleet.run()
    button(fleet, "drain-p0").click().run()
    button(fleet, "confirm").click().run()
    finish(fleet)
    assert fleet.error[0].value == "Drain of p0 failed: p0 did not drain within 30 s: 2 jobs remain"


@pytest.mark.parametrize("what", ["flip", "drain"])
def test_the_last_of_a_role_needs_force(fleet: AppTest, cluster: Any, what: str) -> None:
    cluster.instances = [row for row in cluster.instances if row["instance_id"] != "p1"]
    fleet.run()
    button(fleet, f"{what}-p0").click().run()
    assert "last ready prefill instance" in fleet.warning[0].value
    assert f"refuses to {what} it unless forced" in fleet.warning[0].value
    fleet.checkbox(key="force").check().run()
    button(fleet, "confirm").click().run()
    finish(fleet)
    assert (cluster.posts[0][1], cluster.posts[0][2]["force"]) == (what, True)


def test_what_is_known_stays_when_the_monitor_goes(fleet: AppTest, cluster: Any) -> None:
    fleet.run()
    cluster.monitor_broken = True
    fleet.run()
    assert not fleet.exception
    assert "In grey: what it said" in fleet.error[0].value
    assert 'class="pp pp-stale"' in html(fleet)
    assert button(fleet, "flip-p0").disabled


def test_a_monitor_that_goes_away_while_asked(fleet: AppTest, monkeypatch: pytest.MonkeyPatch, nobody: str) -> None:
    fleet.run()
    button(fleet, "drain-p0").click().run()
    monkeypatch.setenv("POLYPHASE_DASHBOARD_MONITOR_URL", nobody)
    fleet.run()
    button(fleet, "confirm").click().run()
    wait([operation.future for operation in fleet.session_state["operations"]], LONG_S)
    fleet.run()
    assert not fleet.exception
    assert any(error.value.startswith("Drain of p0 failed") for error in fleet.error)


def test_many_are_a_table_that_begins_with_trouble(fleet: AppTest, cluster: Any) -> None:
    roles, states = list(Role), list(InstanceState)
    cluster.instances = []
    for n in range(200):
        cluster.add(f"i{n:03}", roles[n % 2], states[n % 5 and 1])
    cluster.add("dead", Role.DECODE, InstanceState.DEAD)
    fleet.run()
    assert not fleet.exception
    table = fleet.dataframe[0].value
    assert len(table) == 201
    assert list(table["instance"][:1]) == ["dead"]
    assert table["state"][0] == "✕ dead: connection lost"
    assert not any(b.key and b.key.startswith("flip-") for b in fleet.button)
    fleet.button_group(key="role").set_value("decode").run()
    assert len(fleet.dataframe[0].value) == 101
    fleet.button_group(key="state").set_value("starting").run()
    assert len(fleet.dataframe[0].value) == 20


def test_one_has_a_page_of_its_own(page: AppTest, cluster: Any) -> None:
    one = opened(page, "instances", instance="d1").run()
    assert not one.exception
    assert not one.error
    shown = html(one)
    for said in ("EMULATED", "512 tokens", "took 1.0", "took 1.5", "1.1 GB/s", "Hit tokens", "337 k", "0.9.0"):
        assert said in shown, said
    assert len(one.get("plotly_chart")) == 2
    assert "d1 step 59" in one.code[0].value
    assert ("Its requests", "requests?instance=d1") in links(one)
    button(one, "flip-d1").click().run()
    button(one, "confirm").click().run()
    finish(one)
    assert cluster.posts[0][:2] == ("d1", "flip")


def test_one_that_is_not_there(page: AppTest) -> None:
    one = opened(page, "instances", instance="<b>").run()
    assert not one.exception
    assert "The monitor knows of no instance &#x27;&lt;b&gt;&#x27;" in html(one)


def test_those_that_are_gone_come_before_those_that_are_full() -> None:
    def row(state: InstanceState, **load: Any) -> InstanceRow:
        made = msgspec.convert(instance("i", state=state), InstanceRow)
        return msgspec.structs.replace(made, load=Load(time_s=1.0, **load))

    idle = row(InstanceState.READY, free_blocks=1000)
    busy = row(InstanceState.READY, free_blocks=500, running=4)
    full = row(InstanceState.READY, free_blocks=10, running=4, waiting=9)
    dead, silent = row(InstanceState.DEAD), row(InstanceState.UNRESPONSIVE)
    assert sorted([idle, dead, busy, full, silent], key=trouble, reverse=True) == [dead, silent, full, busy, idle]


def test_what_an_instance_tells_is_shown_whatever_it_is() -> None:
    shown = section({"codecs": {"int8": {"encode_bytes_per_s": 2e9}}, "names": ["a", "<b>"], "none": None})
    for said in ("int8", "2 GB/s", "a, &lt;b&gt;", "–"):
        assert said in shown, said


def test_lines_of_our_log_are_told_plainly() -> None:
    record = {"instance_id": "d0", "event": "ready", "service": "worker", "level": "info"}
    line = json.dumps({**record, "timestamp": "2026-11-25T07:10:13.8061Z"})
    assert plain(line) == "07:10:13.806 info     ready  instance_id=d0"
    assert plain("Traceback (most recent call last):") == "Traceback (most recent call last):"
    assert plain("[1]") == "[1]"
