"""`bench engine`: its suite, its loads, and what it makes of its runs."""

from collections import Counter
from pathlib import Path

import pytest

from lab.bench.engine import (
    ALONE,
    BURST,
    CHUNK,
    KV_TOKENS,
    MAX_MODEL_LEN,
    PATIENT,
    PRESSING,
    PROMPTS,
    SEATS,
    SORTS,
    Run,
    Served,
    Wanted,
    burst,
    cluster_of,
    counted,
    passed,
    predicted_in_time,
    pressing,
    report,
    unlike,
)
from services.launcher.cluster_file import Cluster
from shared.errors import Unavailable
from shared.policy.prefill_order import WINDOW
from shared.timeline import Decision, RequestTimeline


def served(at_s: float, ttft_s: float, jct_s: float = 9.0, tokens: tuple[int, ...] = (1,), slo: str = "") -> Served:
    return Served(Wanted((7,), len(tokens), slo), "r", at_s, ttft_s, jct_s, tokens)


def test_the_cluster_is_valid_and_pressed_by_what_is_sent() -> None:
    assert Cluster.model_validate(cluster_of(Path("model"))).instance_ids == ("engine",)
    whole = [len(one.prompt) + one.output_tokens for one in pressing(1)]
    assert len(whole) == PRESSING
    assert sum(len(one.prompt) for one in pressing(1)) < KV_TOKENS < sum(whole) / 2  # all may come in, and outgrow it
    assert max(whole) < MAX_MODEL_LEN


def test_a_burst_has_every_length_for_either_class_and_more_than_may_overtake() -> None:
    found = burst(1)
    assert Counter(len(one.prompt) for one in found) == dict.fromkeys(PROMPTS, BURST // len(PROMPTS))
    assert [one.slo for one in found[:2]] == ["", PATIENT]
    assert found != burst(2)
    assert found == burst(1)
    assert WINDOW < BURST - 1
    assert max(PROMPTS) > CHUNK
    assert BURST > SEATS


def test_an_answer_is_as_long_as_its_prompt_tells() -> None:
    for one in pressing(3):
        fits = [
            output[0] <= one.output_tokens <= output[1]
            for prompt, output in SORTS
            if prompt[0] <= len(one.prompt) <= prompt[1]
        ]
        assert fits == [True]


def test_who_was_passed_by_how_many() -> None:
    runs = [served(0.0, 5.0), served(1.0, 1.0), served(2.0, 1.0), served(3.0, 3.0)]
    assert passed(runs) == [2, 0, 0, 0]


def test_other_tokens_are_found_in_the_same_round_only() -> None:
    first = Run(0, ALONE, [served(0, 1, tokens=(1, 2))])
    same, other = (Run(0, name, [served(0, 1, tokens=tokens)]) for name, tokens in (("a", (1, 2)), ("b", (1, 3))))
    later = Run(1, "a", [served(0, 1, tokens=(5,))])
    assert unlike([first, same, later]) == []
    assert unlike([first, same, other, later]) == ["round 0: alone and b, request 0"]


def after(passes: int, others_s: float = 1.0, token: int = 1) -> list[Served]:
    """A first request of 3 s that so many of 19 others overtake."""
    first = served(0.0, 3.0, tokens=(token,))
    return [first, *(served(0.01 * at, others_s if at <= passes else 4.0) for at in range(1, 20))]


def orders(sjf_s: float = 1.0, passes: int = 16) -> list[Run]:
    rows = (("fcfs", 0, 1.0), ("sjf", passes, sjf_s))
    return [
        Run(number, policy, after(passed_by, others_s)) for number in range(3) for policy, passed_by, others_s in rows
    ]


def admissions(dynamic: int = 2, dynamic_s: float = 9.0) -> list[Run]:
    rows = (("greedy", 10, 9.0), ("reserve_static", 0, 11.0), ("reserve_dynamic", dynamic, dynamic_s))
    return [
        Run(number, policy, [served(0.0, 1.0, jct_s)], count, 0.75)
        for number in range(3)
        for policy, count, jct_s in rows
    ]


def met(result: dict[str, dict[str, dict[str, object]]]) -> dict[str, object]:
    return {name: aim["met"] for name, aim in result["aims"].items()}


def test_what_is_wanted_is_met() -> None:
    result = report([Run(0, ALONE, orders()[0].served), *orders()], admissions())
    assert all(met(result).values())
    assert result["figures"]["sjf_ttft_mean_over_fcfs"] == pytest.approx((3 + 16 + 3 * 4) / (3 + 19 * 4))
    assert result["figures"]["sjf_passed_by_at_most"] == 16
    assert result["figures"]["greedy_preemptions"] == 10
    assert result["figures"]["reserve_static_jct_mean_over_greedy"] == pytest.approx(11 / 9)
    assert "alone_ttft_mean_s" not in result["figures"]


@pytest.mark.parametrize(
    ("result", "missed"),
    [
        (report(orders(sjf_s=5.0), admissions()), "sjf_ttft_mean_over_fcfs"),
        (report(orders(passes=17), admissions()), "passed_by_at_most"),
        (report(orders(), admissions(dynamic=10)), "reserve_dynamic_fewer_preemptions"),
        (report(orders(), admissions(dynamic_s=9.3)), "reserve_dynamic_jct_mean_over_greedy"),
        (report([*orders(), Run(2, "ljf", after(16, token=2))], admissions()), "answers_with_other_tokens"),
    ],
)
def test_what_is_not_met_is_told(result: dict[str, dict[str, dict[str, object]]], missed: str) -> None:
    assert [name for name, is_met in met(result).items() if not is_met] == [missed]


def test_a_prediction_counts_when_it_was_there_before_the_first_token() -> None:
    def timeline(said_s: float | None) -> RequestTimeline:
        decisions = [] if said_s is None else [Decision(said_s, "prediction", "32 tokens or more")]
        return RequestTimeline("j", 1.0, first_token_s=2.0, decisions=decisions)

    assert [predicted_in_time(timeline(said_s)) for said_s in (1.5, 2.5, None)] == [True, False, False]


def test_preemptions_are_read_from_metrics() -> None:
    text = "# TYPE vllm:num_preemptions_total counter\nvllm:num_preemptions_total 7.0\nother 3.0\n"
    assert counted(text) == 7
    with pytest.raises(Unavailable, match="does not report"):
        counted("other 3.0\n")
