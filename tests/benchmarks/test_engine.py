"""`bench engine`: its cluster, its loads and its report."""

from typing import Any

import pytest

from benchmarks.engine import (
    KINDS,
    KV_TOKENS,
    MAX_MODEL_LEN,
    PRESSING,
    Request,
    Run,
    Served,
    different_tokens,
    overtaken,
    pressing,
    report,
)


def test_the_cluster_has_less_kv_than_the_answers_need() -> None:
    whole = [len(one.prompt) + one.output_tokens for one in pressing(1)]
    assert len(whole) == PRESSING
    assert sum(len(one.prompt) for one in pressing(1)) < KV_TOKENS < sum(whole) / 2
    assert max(whole) < MAX_MODEL_LEN
    for one in pressing(3):
        outputs = [output for prompt, output in KINDS if prompt[0] <= len(one.prompt) <= prompt[1]]
        assert [low <= one.output_tokens <= high for low, high in outputs] == [True]


def served(at_s: float, ttft_s: float, jct_s: float = 9.0, tokens: tuple[int, ...] = (1,)) -> Served:
    return Served(Request((7,), len(tokens)), at_s, ttft_s, jct_s, tokens)


def test_requests_that_overtook_are_counted() -> None:
    assert overtaken([served(0.0, 5.0), served(1.0, 1.0), served(2.0, 1.0), served(3.0, 3.0)]) == [2, 0, 0, 0]


def test_tokens_are_compared_within_a_round() -> None:
    alone, same, other, later = (Run([served(0, 1, tokens=t)]) for t in ((1, 2), (1, 2), (1, 3), (5,)))
    rounds = [{"a": same, "b": same}, {"a": later, "b": later}]
    assert different_tokens(rounds, alone) == []
    assert different_tokens([{"a": same, "b": other}, rounds[1]], alone) == ["round 0: alone and b, request 0"]


def after(passes: int, others_s: float = 1.0, token: int = 1) -> Run:
    """A first request of 3 s that so many of 19 others overtake."""
    others = (served(0.01 * at, others_s if at <= passes else 4.0) for at in range(1, 20))
    return Run([served(0.0, 3.0, tokens=(token,)), *others])


def orders(sjf_s: float = 1.0, passes: int = 16, token: int = 1) -> list[dict[str, Run]]:
    return [{"fcfs": after(0), "sjf": after(passes, sjf_s), "ljf": after(16, token=token)}] * 3


def admissions(dynamic: int = 2, dynamic_s: float = 9.0) -> list[dict[str, Run]]:
    rows = (("greedy", 10, 9.0), ("reserve_static", 0, 11.0), ("reserve_dynamic", dynamic, dynamic_s))
    return [{name: Run([served(0.0, 1.0, jct_s)], count) for name, count, jct_s in rows}] * 3


def test_figures_are_medians_of_rounds() -> None:
    found = report(orders(), admissions())
    assert all(aim["met"] for aim in found["aims"].values())
    assert found["figures"]["sjf_ttft_mean_over_fcfs"] == pytest.approx((3 + 16 + 3 * 4) / (3 + 19 * 4), abs=1e-4)
    assert found["figures"]["order_sjf_passed_by_at_most"] == 16
    assert found["figures"]["admission_greedy_preemptions"] == 10
    assert found["figures"]["admission_reserve_static_jct_mean_over_greedy"] == pytest.approx(11 / 9, abs=1e-4)


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        (report(orders(sjf_s=5.0), admissions()), "sjf_ttft_mean_over_fcfs"),
        (report(orders(passes=17), admissions()), "passed_by_at_most"),
        (report(orders(), admissions(dynamic=10)), "reserve_dynamic_fewer_preemptions"),
        (report(orders(), admissions(dynamic_s=9.3)), "reserve_dynamic_jct_mean_over_greedy"),
        (report(orders(token=2), admissions()), "answers_with_other_tokens"),
    ],
)
def test_each_aim_can_be_missed(found: dict[str, Any], missed: str) -> None:
    assert [name for name, aim in found["aims"].items() if not aim["met"]] == [missed]
