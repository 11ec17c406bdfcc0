"""The Instances page, the page of one instance, and actions on instances."""

import json
import time
from concurrent.futures import Future
from typing import Any

import httpx
import msgspec
import pytest
from streamlit.testing.v1 import AppTest

from dashboard.actions import ResultState, StartedAction
from dashboard.instance_page import details_html, instance_action, jobs_by_instance, log_line
from dashboard.instances_page import severity
from services.cluster_monitor.edge import FlipIn
from shared.domain.instance import InstanceState, Role
from shared.errors import Conflict, DeadlineExceeded, OutcomeUnknown, PeerLost, Unavailable
from shared.wire.api import Operation, OperationKind
from shared.wire.api.monitor import InstanceRow, LoadByName
from shared.wire.api.worker import MonitoredDetails
from tests.dashboard.pages import LONG_S, button, charts, confirm, finish, has, html, links, opened, shows
from tests.dashboard.sample_data import details, instance, operation


@pytest.fixture
def fleet(page: AppTest) -> AppTest:
    return opened(page, "instances").run()


def test_few_instances_are_cards(fleet: AppTest) -> None:
    assert shows(fleet, "p0", "d1", "EMULATED", "H100", "40 %", "1.5 MB", "vllm 0.32.0")
    assert ("Open", "instances?instance=p0") in links(fleet)
    assert not fleet.error


def test_nothing_is_posted_before_the_confirmation(fleet: AppTest, cluster: Any) -> None:
    button(fleet, "flip-p0").click().run()
    assert "The instance first drains 3 jobs" in fleet.markdown[-1].value
    fleet.run()
    assert has(fleet, "confirm"), "a refresh leaves the dialog open"
    button(fleet, "cancel").click().run()
    assert not has(fleet, "confirm")
    assert cluster.posts == []
    confirm(fleet, "flip-p0")
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


def test_drain_then_resume(fleet: AppTest, cluster: Any) -> None:
    assert button(fleet, "resume-d0").disabled
    confirm(fleet, "drain-d0")
    assert fleet.success[0].value == "d0 is drained and accepts no new work. Drain 1.24 s."
    assert button(fleet, "drain-d0").disabled
    confirm(fleet, "resume-d0")
    assert [what for _, what, *_ in cluster.posts] == ["drain", "resume"]
    assert fleet.success[0].value == "d0 accepts decode work again."


def test_the_page_continues_during_a_drain_and_shows_its_progress(fleet: AppTest, cluster: Any) -> None:
    cluster.go.clear()
    button(fleet, "drain-d0").click().run()
    started_mono = time.monotonic()
    button(fleet, "confirm").click().run()
    assert time.monotonic() - started_mono < LONG_S / 2
    assert fleet.info[0].value.startswith("Drain of d0 has been running for ")
    assert fleet.info[0].value.endswith("3 jobs left to drain.")
    assert not any(each.key and each.key.startswith("dismiss") for each in fleet.button)
    cluster.go.set()
    finish(fleet)
    button(fleet, f"dismiss-{cluster.posts[0][2]['operation_id']}").click().run()
    assert not fleet.success


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (Conflict("p0 is the last ready prefill instance"), "warning", "Drain of p0 was refused: p0 is the last"),
        (DeadlineExceeded("p0 did not drain within 30 s"), "error", "Drain of p0 failed: p0 did not drain within 30 s"),
    ],
)
def test_a_refusal_and_a_failure(fleet: AppTest, cluster: Any, error: Exception, kind: str, text: str) -> None:
    cluster.refusal = error
    confirm(fleet, "drain-p0")
    assert getattr(fleet, kind)[0].value.startswith(text)
    assert not fleet.exception


@pytest.mark.parametrize("what", ["flip", "drain"])
def test_the_last_instance_of_a_role_needs_force(fleet: AppTest, cluster: Any, what: str) -> None:
    cluster.instances = [row for row in cluster.instances if row["instance_id"] != "p1"]
    fleet.run()
    button(fleet, f"{what}-p0").click().run()
    assert "p0 is the last ready prefill instance." in fleet.warning[0].value
    assert f"The monitor refuses this {what} unless it is forced." in fleet.warning[0].value
    fleet.checkbox(key="force").check().run()
    button(fleet, "confirm").click().run()
    finish(fleet)
    assert (cluster.posts[0][1], cluster.posts[0][2]["force"]) == (what, True)


def test_stale_instances_have_no_actions(fleet: AppTest, cluster: Any) -> None:
    cluster.broken.add("monitor")
    fleet.run()
    assert shows(fleet, 'class="pp pp-stale"')
    assert button(fleet, "flip-p0").disabled


def test_a_monitor_that_goes_away_during_the_confirmation(
    fleet: AppTest, monkeypatch: pytest.MonkeyPatch, refusing_url: str
) -> None:
    button(fleet, "drain-p0").click().run()
    monkeypatch.setenv("POLYPHASE_DASHBOARD_MONITOR_URL", refusing_url)
    fleet.run()
    button(fleet, "confirm").click().run()
    finish(fleet)
    assert not fleet.exception
    assert any(error.value.startswith("Drain of p0 failed") for error in fleet.error)


def test_many_instances_are_a_table_with_the_worst_first(fleet: AppTest, cluster: Any) -> None:
    roles, states = list(Role), list(InstanceState)
    cluster.instances = []
    for n in range(200):
        cluster.add(f"i{n:03}", roles[n % 2], states[n % 5 and 1])
    cluster.add("dead", Role.DECODE, InstanceState.DEAD)
    fleet.run()
    assert not fleet.exception
    table = fleet.dataframe[0].value
    assert len(table) == 201
    assert (table["instance"][0], table["state"][0]) == ("dead", "✕ dead: connection lost")
    assert not any(each.key and each.key.startswith("flip-") for each in fleet.button)
    fleet.button_group(key="role").set_value("decode").run()
    assert len(fleet.dataframe[0].value) == 101
    fleet.button_group(key="state").set_value("starting").run()
    assert len(fleet.dataframe[0].value) == 20


def test_the_page_of_one_instance(page: AppTest, cluster: Any) -> None:
    one = opened(page, "instances", instance="d1").run()
    assert not one.error
    assert shows(
        one,
        "EMULATED",
        "512 tokens",
        "measured 1.0",
        "measured 1.5",
        "1.1 GB/s",
        "cached prompt tokens",
        "337 k",
        "0.9.0",
    )
    assert charts(one) == 7
    assert "d1 step 59" in html(one)
    assert ("Requests", "requests?instance=d1") in links(one)
    confirm(one, "flip-d1")
    assert cluster.posts[0][:2] == ("d1", "flip")


def test_an_unknown_instance(page: AppTest) -> None:
    one = opened(page, "instances", instance="<b>").run()
    assert shows(one, "The monitor knows no instance &#x27;&lt;b&gt;&#x27;")


def row(state: InstanceState = InstanceState.READY, **load: Any) -> InstanceRow:
    made = msgspec.convert(instance("p0", state=state), InstanceRow)
    return msgspec.structs.replace(made, load=LoadByName(time_s=1.0, **load))


def test_the_order_of_severity() -> None:
    idle, busy = row(free_blocks=1000), row(free_blocks=500, running=4)
    full = row(free_blocks=10, running=4, waiting=9)
    dead, silent = row(InstanceState.DEAD), row(InstanceState.UNRESPONSIVE)
    assert sorted([idle, dead, busy, full, silent], key=severity, reverse=True) == [dead, silent, full, busy, idle]


def test_details_are_shown_as_text() -> None:
    shown = details_html(
        msgspec.convert({**details("p0"), "versions": {"vllm": "<b>"}, "link": None}, MonitoredDetails)
    )
    for part in ("int8", "encodes 2.1 GB/s", "&lt;b&gt;", "prefill, at the start", "0.1 ms"):
        assert part in shown, part
    assert "latency" not in shown


def test_what_speculative_decoding_gains_is_shown_where_there_is_any() -> None:
    plain = msgspec.convert(details("p0"), MonitoredDetails)
    assert plain.rates.at_start is not None
    assert "drafted" not in details_html(plain)
    rates = msgspec.structs.replace(plain.rates, learned=msgspec.structs.replace(plain.rates.at_start, gain=2.5))
    shown = details_html(msgspec.structs.replace(plain, drafted_tokens=300, accepted_tokens=210, rates=rates))
    for part in ("accepted drafted tokens", "210 of 300", "tokens of a decode step", "2.50"):
        assert part in shown, part


def test_log_records_are_shortened() -> None:
    record = {"instance_id": "d0", "event": "ready", "service": "worker", "level": "info"}
    line = json.dumps({**record, "timestamp": "2026-11-25T07:10:13.8061Z"})
    assert log_line(line) == "07:10:13.806 info     ready  instance_id=d0"
    assert log_line("Traceback (most recent call last):") == "Traceback (most recent call last):"
    assert log_line("[1]") == "[1]"


@pytest.mark.parametrize(
    ("kind", "inflight", "question", "consequences"),
    [
        ("flip", 1, "Flip p0 from prefill to decode?", "The instance first drains 1 job (at most 30 s). It then"),
        ("flip", 0, "Flip p0 from prefill to decode?", "The instance has no jobs to drain. It then changes"),
        ("drain", 2, "Drain p0?", "The instance accepts no new prefill work and finishes 2 jobs"),
        ("resume", 2, "Resume p0?", "The instance accepts new prefill work again."),
    ],
)
def test_the_confirmation_of_an_action(kind: str, inflight: int, question: str, consequences: str) -> None:
    action = instance_action(OperationKind(kind), row(inflight=inflight), [], 30.0)
    assert action.question == question
    assert action.consequences.startswith(consequences)


def test_an_action_is_of_all_data_parallel_ranks() -> None:
    one = row(inflight=2)
    infos = [msgspec.structs.replace(one.info, instance_id=f"p.{at}", rank_of="p") for at in (0, 1)]
    ranks = [msgspec.structs.replace(one, instance_id=info.instance_id, info=info) for info in infos]
    action = instance_action(OperationKind.FLIP, ranks[0], ranks, 30.0)
    assert action.question == "Flip p from prefill to decode?"
    assert "drains 4 jobs" in action.consequences
    assert action.consequences.endswith("It has 2 data-parallel ranks, all of which do so.")
    assert action.force_warning.startswith("p is the last ready prefill instance")
    assert jobs_by_instance(ranks) == {"p": 4}


def unanswered() -> Exception:
    error = DeadlineExceeded("no answer in 2 s")
    error.__cause__ = httpx.ReadTimeout("")
    return error


@pytest.mark.parametrize(
    ("error", "state", "text"),
    [
        (None, ResultState.SUCCEEDED, "p0 is now decode (was prefill). Drain 1.24 s, flip 0.4 ms."),
        (Conflict("it drains"), ResultState.REFUSED, "Flip of p0 was refused: it drains"),
        (unanswered(), ResultState.UNKNOWN, "outcome of this action is unknown: Flip of p0. no answer in 2 s"),
        (OutcomeUnknown("no answer", operation_id="4f"), ResultState.UNKNOWN, "polyphase operation 4f"),
        (PeerLost("p0 is gone"), ResultState.FAILED, "Flip of p0 failed: p0 is gone"),
        (Unavailable("gone"), ResultState.FAILED, "Flip of p0 failed: gone"),
        (RuntimeError("odd"), ResultState.FAILED, "Flip of p0 failed: RuntimeError: odd"),
    ],
)
def test_the_result_of_an_action(error: Exception | None, state: ResultState, text: str) -> None:
    future: Future[Operation] = Future()
    started = StartedAction(instance_action(OperationKind.FLIP, row(), [], 30.0), future, "4f", started_s=100.0)
    assert started.result(103.0).text == "Flip of p0 has been running for 3 s."
    assert started.result(103.0, {"p0": 0}).text.endswith("No jobs left to drain.")
    if error is None:
        future.set_result(msgspec.convert(operation("4f", "flip", "p0", "dashboard"), Operation))
    else:
        future.set_exception(error)
    assert started.result(104.0).state is state
    assert text in started.result(104.0).text


def test_how_far_predictions_were_off(fleet: AppTest, page: AppTest, cluster: Any) -> None:
    figures = {"count": 20, "bias": -0.1, "median": 0.12, "p90": 0.3}
    cluster.predictions = {"instances": [{"instance_id": "d1", "ttft": None, "tpot": figures}], "kinds": []}
    one = opened(page, "instances", instance="d1").run()
    assert not one.exception
    assert shows(one, "predictions off by: TPOT 12 % (p90 30 %)")
