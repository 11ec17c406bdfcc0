"""What clients ask for, as the page shows it, and how each class fares."""

import time
from typing import Any

from streamlit.testing.v1 import AppTest

from tests.dashboard.pages import html

PROFILE = {
    "rate": 12.5,
    "burstiness": 1.0,
    "prompt_tokens": 1500.0,
    "fresh_tokens": 1500.0,
    "fresh_squares": 1.0,
    "output_tokens": 40.0,
    "ttft_s": 1.0,
    "tpot_s": 0.1,
    "age_s": 30.0,
}


def asked(now_s: float, **more: Any) -> dict[str, Any]:
    seconds = [
        {"second": int(now_s) - ago, "requests": 12, "prompt_tokens": 1500.0, "output_tokens": 40.0}
        for ago in range(20, 0, -1)
    ]
    shift = {"what": "prompts", "before": 400.0, "after": 1500.0, "noticed_s": 4.0, "deviations": 9.0}
    return {"demand": PROFILE, "seconds": seconds, "shifts": [{**shift, "at_s": now_s - 30.0}], "roles": None, **more}


def charts(page: AppTest) -> int:
    return len(page.get("vega_lite_chart"))


def test_the_profile_its_shift_and_the_roles_that_it_would_need(page: AppTest, cluster: Any) -> None:
    cluster.demand = asked(time.time(), roles={"prefill": 3, "decode": 1, "harm": 0.31, "harm_then": 0.02})
    page.run()
    assert not page.exception
    shown = html(page)
    assert "12.5 requests/s" in shown
    assert "1 500 prompt tokens, 40 expected, for 30 s" in shown
    assert "prompts: 400 → 1 500" in shown
    assert "noticed after 4 s" in shown
    assert "2 : 2" in shown  # two instances of either role are ready
    assert "3 : 1 would be better: harm 0.02 instead of 0.31" in shown
    assert charts(page) == 2


def test_roles_that_are_best_as_they_are(page: AppTest, cluster: Any) -> None:
    cluster.demand = asked(time.time(), roles={"prefill": 2, "decode": 2, "harm": 0.04, "harm_then": 0.04})
    assert "none is better by enough; harm 0.04" in html(page.run())
    cluster.demand = asked(time.time())
    assert "which would be best is not known" in html(page.run())


def test_before_there_is_a_profile(page: AppTest, cluster: Any) -> None:
    cluster.demand = {**asked(time.time()), "demand": None, "shifts": []}
    page.run()
    assert not page.exception
    assert "too few requests for a profile" in html(page)
    cluster.demand = {"demand": None, "seconds": [], "shifts": [], "roles": None}
    page.run()
    assert "Nothing was asked for in the last minutes." in html(page)
    assert not charts(page)


def test_what_the_gateway_holds_back_and_refuses(page: AppTest, cluster: Any) -> None:
    assert "Had to wait" not in html(page.run())
    cluster.metrics = (
        'polyphase_refused_total{cause="overloaded",slo="chat"} 41.0\n'
        'polyphase_delayed_total{slo="batch"} 1234.0\n'
        'polyphase_gateway_delayed_jobs{slo="batch"} 77.0\n'
        'vllm:prompt_tokens_total{model_name="demo"} 3.0\n'
    )
    page.run()
    assert not page.exception
    shown = html(page)
    for said in ("Had to wait", "<b>batch</b>", "77", "1 234", "<b>chat</b>", "41"):
        assert said in shown, said
    assert "2 s / 200 ms" in shown  # the targets, in the table above


def test_without_a_monitor_the_last_profile_is_grey(page: AppTest, cluster: Any) -> None:
    cluster.demand = asked(time.time())
    page.run()
    cluster.monitor_broken = True
    page.run()
    assert not page.exception
    assert "12.5 requests/s" in html(page)
    assert "pp-stale" in html(page)
