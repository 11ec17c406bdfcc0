import re
import time
from concurrent.futures import wait
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest
from streamlit.testing.v1.element_tree import Button

from dashboard import look
from services.cluster_monitor.edge import FlipIn
from shared.domain.instance import InstanceState, Role
from shared.errors import Conflict, DeadlineExceeded

LONG_S = 20.0


def html(page: AppTest) -> str:
    return " ".join(element.value for element in page.get("html"))


def button(page: AppTest, key: str) -> Button:
    return page.button(key=key)


def has(page: AppTest, key: str) -> bool:
    return any(b.key == key for b in page.button)


def finish(page: AppTest) -> AppTest:
    """Wait for the confirmed actions and show their results."""
    wait([operation.future for operation in page.session_state["operations"]], LONG_S)
    return page.run()


def test_shows_the_cluster(page: AppTest) -> None:
    page.run()
    assert not page.exception
    shown = html(page)
    for said in ("polyphase-demo", "2 of 2", "p0", "d1", "EMULATED", "H100", "40 %", "1.5 MB", "vllm 0.32.0"):
        assert said in shown, said
    assert "93 %" in shown  # (0.96 * 100 + 0.90 * 100) / 200
    assert "fraction (fraction = 0.5)" in shown
    assert "observed lengths (12 answers seen)" in shown
    assert "60 ms / 110 ms / 900 ms" in shown
    assert not page.error


def test_waterfall_and_reasons_of_the_newest_finished_request(page: AppTest) -> None:
    page.run()
    assert len(page.get("plotly_chart")) == 1
    shown = html(page)
    assert "placement:least_load" in shown
    assert "score 0.0123" in shown
    assert "pulled" in shown
    assert "&lt;i&gt;p1&lt;/i&gt;" in shown
    assert "<i>p1</i>" not in shown


def test_a_request_under_way_has_no_waterfall_yet(page: AppTest) -> None:
    page.run().selectbox(key="chosen_job").select("job-2").run()
    assert not page.exception
    assert "no timeline of job &#x27;job-2&#x27; yet" in html(page)


def test_a_chosen_request_stays_when_it_leaves_the_list(page: AppTest, cluster: Any) -> None:
    page.run().selectbox(key="chosen_job").select("job-1").run()
    cluster.jobs = [job for job in cluster.jobs if job["job_id"] != "job-1"]
    page.run()
    assert page.selectbox(key="chosen_job").value == "job-1"
    assert len(page.get("plotly_chart")) == 1


def test_the_phase_is_asked_of_the_scheduler(page: AppTest, cluster: Any) -> None:
    page.run().selectbox(key="phase").select("decode").run()
    assert cluster.phases[0] == ""
    assert cluster.phases[-1] == "decode"


def test_the_policies_say_who_chose_them_and_who_does_not_follow(page: AppTest) -> None:
    shown = html(page.run())
    assert "fraction (fraction = 0.5), by anna" in shown
    assert "Step budget" in shown
    assert re.search(r"Not followed by.{0,60}d0", shown)


def test_nothing_is_posted_before_the_confirmation(page: AppTest, cluster: Any) -> None:
    page.run()
    button(page, "flip-p0").click().run()
    assert "It first drains 3 jobs" in page.markdown[-1].value
    page.run()  # a refresh of everything leaves the question open
    assert has(page, "confirm")
    assert cluster.posts == []
    button(page, "confirm").click().run()
    finish(page)
    ((instance_id, what, body, who),) = cluster.posts
    assert (instance_id, what, who) == ("p0", "flip", "dashboard")
    assert (body["force"], body["drain_timeout_s"]) == (False, 30.0)
    assert FlipIn.model_validate(body).deadline_s
    assert not has(page, "confirm")
    assert page.success[0].value == "p0 is now decode (was prefill). Drain 1.24 s, flip 0.4 ms."
    assert "flip prefill → decode" in html(page)
    page.run()
    assert len(cluster.posts) == 1


def test_cancel_posts_nothing(page: AppTest, cluster: Any) -> None:
    page.run()
    button(page, "drain-p0").click().run()
    button(page, "cancel").click().run()
    assert not has(page, "confirm")
    assert cluster.posts == []


def test_drain_then_resume(page: AppTest, cluster: Any) -> None:
    page.run()
    assert button(page, "resume-d0").disabled
    button(page, "drain-d0").click().run()
    button(page, "confirm").click().run()
    finish(page)
    assert page.success[0].value == "d0 is drained and takes no new work. Drain 1.24 s."
    assert button(page, "drain-d0").disabled
    button(page, "resume-d0").click().run()
    button(page, "confirm").click().run()
    finish(page)
    assert [what for _, what, *_ in cluster.posts] == ["drain", "resume"]
    assert page.success[0].value == "d0 takes decode work again."


def test_the_page_goes_on_while_an_instance_drains(page: AppTest, cluster: Any) -> None:
    cluster.go.clear()
    page.run()
    button(page, "drain-d0").click().run()
    started_s = time.monotonic()
    button(page, "confirm").click().run()
    assert time.monotonic() - started_s < LONG_S / 2
    assert page.info[0].value.startswith("Draining d0:")
    assert not has(page, "dismiss")
    cluster.go.set()
    finish(page)
    assert page.success
    key = page.session_state["operations"][0].key
    button(page, f"dismiss-{key}").click().run()
    assert not page.success


def test_a_refusal_is_shown_with_its_reason(page: AppTest, cluster: Any, refusal: Conflict) -> None:
    cluster.refusal = refusal
    page.run()
    button(page, "flip-p0").click().run()
    button(page, "confirm").click().run()
    finish(page)
    assert page.warning[0].value == f"Flip of p0 was refused: {refusal.message}"
    assert not page.exception


def test_a_failure_is_told_apart_from_a_refusal(page: AppTest, cluster: Any) -> None:
    cluster.refusal = DeadlineExceeded("p0 did not drain within 30 s: 2 jobs remain")
    page.run()
    button(page, "drain-p0").click().run()
    button(page, "confirm").click().run()
    finish(page)
    assert page.error[0].value == "Drain of p0 failed: p0 did not drain within 30 s: 2 jobs remain"


@pytest.mark.parametrize("what", ["flip", "drain"])
def test_the_last_of_a_role_needs_force(page: AppTest, cluster: Any, what: str) -> None:
    cluster.instances = [row for row in cluster.instances if row["instance_id"] != "p1"]
    page.run()
    button(page, f"{what}-p0").click().run()
    assert "last ready prefill instance" in page.warning[0].value
    assert f"refuses to {what} it unless forced" in page.warning[0].value
    page.checkbox(key="force").check().run()
    button(page, "confirm").click().run()
    finish(page)
    assert (cluster.posts[0][1], cluster.posts[0][2]["force"]) == (what, True)


@pytest.mark.parametrize("name", ["MONITOR", "SCHEDULER", "GATEWAY", "PREDICTOR"])
def test_one_service_unreachable(page: AppTest, monkeypatch: pytest.MonkeyPatch, nobody: str, name: str) -> None:
    monkeypatch.setenv(f"POLYPHASE_DASHBOARD_{name}_URL", nobody)
    page.run()
    assert not page.exception
    assert len(page.error) == 1
    assert nobody in page.error[0].value
    assert name.lower() in page.error[0].value
    if name != "MONITOR":
        assert has(page, "flip-p0")


def test_all_services_unreachable(page: AppTest, monkeypatch: pytest.MonkeyPatch, nobody: str) -> None:
    for name in ("MONITOR", "SCHEDULER", "GATEWAY", "PREDICTOR"):
        monkeypatch.setenv(f"POLYPHASE_DASHBOARD_{name}_URL", nobody)
    page.run()
    assert not page.exception
    assert len(page.error) == 4
    assert "Nothing to show while the cluster monitor does not answer" in html(page)


def test_what_is_known_stays_when_the_monitor_goes(page: AppTest, cluster: Any) -> None:
    page.run()
    cluster.monitor_broken = True
    page.run()
    assert not page.exception
    assert "In grey: what it said" in page.error[0].value
    shown = html(page)
    for said in ("2 of 2", "p0", "d1", "93 %", 'class="pp pp-stale"'):
        assert said in shown, said
    assert button(page, "flip-p0").disabled
    cluster.monitor_broken = False
    page.run()
    assert not page.error
    assert 'class="pp pp-stale"' not in html(page)
    assert not button(page, "flip-p0").disabled


def test_attainment_below_the_goal_is_said_in_words_and_in_red(page: AppTest, cluster: Any) -> None:
    for row in cluster.slo:
        row["attainment"] = row["tpot_attainment"] = 0.02
    page.run()
    shown = html(page)
    assert "the goal is 90 %" in shown
    assert "2 %, below 90 %" in shown
    assert f"--c:{look.BAD};background" in shown


def test_the_dead_are_missing_not_gone(page: AppTest, cluster: Any) -> None:
    for n in range(3):
        cluster.add(f"x{n}", Role.DECODE, InstanceState.DEAD)
    page.run()
    shown = html(page)
    assert "2 of 5" in shown
    assert "3 dead" in shown


def test_deaths_and_refusals_leave_a_trace(page: AppTest, cluster: Any) -> None:
    for kind, text in (("operation_refused", "drain of d0: the last ready one"), ("death", "connection lost")):
        cluster.events.insert(0, {"time_s": 1.0, "kind": kind, "instance_id": "d0", "role": "decode", "text": text})
    page.run()
    assert not page.exception
    shown = html(page)
    for said in ("operation refused", "the last ready one", "death", "connection lost"):
        assert said in shown, said


def test_a_monitor_that_goes_away_while_asked(page: AppTest, monkeypatch: pytest.MonkeyPatch, nobody: str) -> None:
    page.run()
    button(page, "drain-p0").click().run()
    monkeypatch.setenv("POLYPHASE_DASHBOARD_MONITOR_URL", nobody)
    page.run()
    button(page, "confirm").click().run()
    finish(page)
    assert not page.exception
    assert any(error.value.startswith("Drain of p0 failed") for error in page.error)


def test_answers_that_make_no_sense(page: AppTest, cluster: Any) -> None:
    cluster.instances[0]["state"] = "juggling"
    cluster.jobs = [{"phase": "decode"}]
    page.run()
    assert not page.exception
    assert len(page.error) == 2
    assert "juggling" in page.error[0].value


def test_settings_that_cannot_work(page: AppTest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYPHASE_DASHBOARD_MONITER_URL", "http://127.0.0.1:1")
    page.run()
    assert not page.exception
    assert "POLYPHASE_DASHBOARD_MONITER_URL" in page.error[0].value


def test_two_hundred_instances(page: AppTest, cluster: Any) -> None:
    roles, states = list(Role), list(InstanceState)
    cluster.instances = []
    for n in range(200):
        cluster.add(f"i{n:03}", roles[n % 2], states[n % 5 and 1])
    page.run()
    assert not page.exception
    assert len(page.dataframe[0].value) == 200
    assert len([b for b in page.button if b.key and b.key.startswith("flip-")]) == 1
    page.selectbox(key="chosen_instance").select("i042").run()
    button(page, "flip-i042").click().run()
    button(page, "confirm").click().run()
    finish(page)
    assert cluster.posts[0][:2] == ("i042", "flip")
    page.button_group(key="role").set_value("decode").run()
    assert len(page.dataframe[0].value) == 101
    page.button_group(key="state").set_value("starting").run()
    assert len(page.dataframe[0].value) == 20


def test_an_empty_cluster(page: AppTest, cluster: Any) -> None:
    cluster.instances, cluster.jobs, cluster.slo = [], [], []
    page.run()
    assert not page.exception
    assert "No instance has registered yet" in html(page)
    assert "The waterfall appears" in html(page)
