"""Staged troubles, each named with its cause; and what holds of every verdict."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cluster_monitor.verdict import judge
from shared.domain.instance import InstanceState, Role
from shared.domain.verdict import (
    ClassSeen,
    Level,
    Peer,
    Problem,
    Situation,
    Stage,
    StageSeen,
    Standing,
    Thresholds,
    Verdict,
)

LIMITS = Thresholds()


def prefill(number: int, **what: Any) -> Standing:
    return msgspec.structs.replace(Standing(f"prefill-{number}", Role.PREFILL, InstanceState.READY, 0.2), **what)


def decode(number: int, **what: Any) -> Standing:
    return msgspec.structs.replace(
        Standing(f"decode-{number}", Role.DECODE, InstanceState.READY, 0.4, running=8, inflight=8), **what
    )


def chat(**what: Any) -> ClassSeen:
    return msgspec.structs.replace(ClassSeen("chat", 200, 0.99, 0.98, 1.0, 0.06), **what)


def healthy(**what: Any) -> Situation:
    base = Situation(
        1_000.0,
        60.0,
        3_600.0,
        (prefill(0), prefill(1), *(decode(n) for n in range(4))),
        classes=(chat(),),
        completed=200,
        placed=210,
        stages={
            Stage.QUEUE: StageSeen(200, 10.0, 0.05, 0.1),
            Stage.PREFILL: StageSeen(200, 40.0, 0.2, 0.4),
            Stage.TRANSFER: StageSeen(200, 4.0, 0.02, 0.1),
            Stage.DECODE_QUEUE: StageSeen(200, 2.0, 0.01, 0.1),
            Stage.DECODE: StageSeen(200, 400.0, 2.0, 4.0),
        },
        spent_s=500.0,
        transfers=200,
        gateways=(Peer("gateway-0", 0.5),),
        schedulers=(Peer("scheduler-0", 0.5),),
        predictions={"classifier": 200},
    )
    return msgspec.structs.replace(base, **what)


def longest(stage: Stage, base: Situation, seconds: float = 2_000.0) -> dict[Stage, StageSeen]:
    return base.stages | {stage: StageSeen(200, seconds, seconds / 200, seconds / 100)}


def only(verdict: Verdict, what: str) -> Problem:
    found = [problem for problem in verdict.problems if problem.what == what]
    assert len(found) == 1, verdict.headline
    return found[0]


def test_a_healthy_cluster() -> None:
    verdict = judge(healthy(), LIMITS)
    assert (verdict.level, verdict.problems, verdict.requests) == (Level.GOOD, (), 200)
    assert verdict.headline == (
        "Good: 200 requests ended in the last 60 s, TTFT met by 99 %, TPOT by 98 %, ITL by 100 %; "
        "2 prefill, 4 decode ready"
    )
    assert [link.stage for link in verdict.chain] == list(Stage)
    last = verdict.chain[-1]
    assert (last.requests, last.p50_s, last.p99_s, last.share, last.now) == (200, 2.0, 4.0, 0.8, 32)


def test_an_idle_cluster() -> None:
    instances = (prefill(0), decode(0, running=0, inflight=0))
    verdict = judge(Situation(1_000.0, 60.0, 3_600.0, instances), LIMITS)
    assert (verdict.level, verdict.problems) == (Level.IDLE, ())
    assert verdict.headline == "Idle: nothing asked for in the last 60 s; 1 prefill, 1 decode ready"
    assert {link.level for link in verdict.chain} == {Level.IDLE}


def test_the_sentence_of_a_cluster_with_several_troubles() -> None:
    dead = [decode(n, state=InstanceState.DEAD, running=0, inflight=0) for n in (14, 15)]
    full = [decode(n, kv_used=0.98, waiting=24 + (n < 8)) for n in range(14)]
    base = healthy(instances=(prefill(0), *full, *dead), classes=(chat(tpot_met=0.26),))
    verdict = judge(base, LIMITS)
    assert verdict.headline == (
        "Degraded: TPOT met by 26 % (target 60 ms); decode KV 98 %, 344 waiting; 2 of 16 decode instances dead"
    )
    missed = only(verdict, "tpot_missed")
    assert missed.stage is Stage.DECODE_QUEUE
    assert "requests wait for room to decode" in missed.cause
    assert "decode KV 98 %" in missed.cause
    assert missed.instances == only(verdict, "kv_full").instances
    assert only(verdict, "instances_dead").instances == ("decode-14", "decode-15")
    count = verdict.counts[Role.DECODE]
    assert (count.ready, count.expected, count.dead) == (14, 16, 2)


def test_first_tokens_are_late_behind_a_queue() -> None:
    base = healthy()
    queued = tuple(prefill(n, queue_s=3.0, queued_prefill=20, running=2) for n in range(2))
    instances = (*queued, *base.instances[2:])
    stages = longest(Stage.QUEUE, base)
    verdict = judge(healthy(instances=instances, stages=stages, classes=(chat(ttft_met=0.4),)), LIMITS)
    missed, long = only(verdict, "ttft_missed"), only(verdict, "queue_long")
    assert missed.text == "TTFT met by 40 % (target 1 s)"
    assert missed.stage is Stage.QUEUE
    assert missed.cause.startswith("requests wait for prefill (queue: 10 s in the middle, 20 s at the 99th")
    assert "; 40 prompts wait for up to 3 s at 2 of 2 prefill instances (prefill-0, prefill-1)" in missed.cause
    assert missed.instances == long.instances == ("prefill-0", "prefill-1")
    assert (long.value, long.limit) == (3.0, 0.5)
    queue, computing = verdict.chain[0], verdict.chain[1]
    assert (queue.now, computing.now, queue.level, computing.level) == (36, 4, Level.DEGRADED, Level.GOOD)


def test_first_tokens_are_late_because_prefill_instances_died() -> None:
    base = healthy()
    instances = (prefill(0, queue_s=0.9), prefill(1, state=InstanceState.DEAD), *base.instances[2:])
    stages = longest(Stage.QUEUE, base)
    verdict = judge(healthy(instances=instances, stages=stages, classes=(chat(ttft_met=0.6),)), LIMITS)
    assert "1 of 2 prefill instances dead (prefill-1)" in only(verdict, "ttft_missed").cause
    assert "prefill-1" in only(verdict, "instances_dead").cause


def test_late_tokens_of_crowded_decode_steps() -> None:
    verdict = judge(healthy(classes=(chat(tpot_met=0.5),)), LIMITS)
    missed = only(verdict, "tpot_missed")
    assert missed.stage is Stage.DECODE
    assert "decode steps are slow" in missed.cause
    assert verdict.chain[-1].level is Level.DEGRADED


def test_late_tokens_behind_slow_transfers() -> None:
    base = healthy()
    stages = longest(Stage.TRANSFER, base)
    moved = {"transfers": 200, "transfer_bytes": 400_000_000}
    verdict = judge(healthy(stages=stages, classes=(chat(tpot_met=0.3),), **moved), LIMITS)
    missed, slow = only(verdict, "tpot_missed"), only(verdict, "transfers_slow")
    assert missed.stage is Stage.TRANSFER
    assert slow.text in missed.cause
    assert slow.cause == "2 MB each on average, at 200 kB/s"
    assert (slow.value, slow.limit) == (10.0, 0.25)


def test_failing_transfers() -> None:
    found = only(judge(healthy(transfers_failed=30), LIMITS), "transfers_failing")
    assert found.text == "15 % of KV transfers failed (30 of 200)"
    assert found.cause == "decode instances compute these prompts again"
    faults = {"timeout": 4, "unreachable": 26}
    found = only(judge(healthy(transfers_failed=30, transfer_faults=faults), LIMITS), "transfers_failing")
    assert found.cause.startswith("prefill instances cannot be reached for KV (26 unreachable); decode instances")


def test_the_worst_class_is_named() -> None:
    verdict = judge(healthy(classes=(chat(), chat(slo="batch", tpot_met=0.1, requests=50))), LIMITS)
    assert only(verdict, "tpot_missed").text == "TPOT met by 10 % (target 60 ms, class batch)"


def test_errors_name_the_most_common_one() -> None:
    found = only(judge(healthy(failed={"peer_lost": 12, "engine_failed": 2}), LIMITS), "errors")
    assert found.text == "7 % of requests failed (14 of 214)"
    assert found.cause == "their instances were lost (12 peer_lost)"


def test_refusals_name_the_most_common_one_and_what_is_full() -> None:
    base = healthy()
    instances = (*base.instances[:2], *(decode(n, kv_used=1.0, waiting=9) for n in range(4)))
    found = only(judge(healthy(instances=instances, refused={"overloaded": 100}), LIMITS), "refusals")
    assert found.text == "33 % of requests refused (100 of 300)"
    assert found.cause.startswith("the cluster is too full for the targets of their class (100 overloaded); decode KV")
    assert found.instances == tuple(f"decode-{n}" for n in range(4))


def test_no_decode_instance_is_down() -> None:
    instances = (prefill(0), decode(0, state=InstanceState.DEAD), decode(1, state=InstanceState.DRAINING))
    verdict = judge(healthy(instances=instances, completed=0, failed={"unavailable": 40}), LIMITS)
    assert verdict.level is Level.DOWN
    assert verdict.headline.startswith(
        "Down: none of 40 requests was served in the last 60 s; no decode instance is ready"
    )
    assert only(verdict, "role_empty").cause == "1 dead, 1 draining"
    assert only(verdict, "nothing_served").cause == "most of them: unavailable"


def test_without_prefill_instances_decode_instances_go_on() -> None:
    base = healthy()
    instances = (prefill(0, state=InstanceState.DEAD), *base.instances[2:])
    verdict = judge(healthy(instances=instances), LIMITS)
    assert verdict.level is Level.DEGRADED
    assert only(verdict, "role_empty").cause == "decode instances compute prompts, too"


def test_a_cluster_of_one_role_misses_nobody() -> None:
    assert judge(healthy(instances=tuple(decode(n) for n in range(4))), LIMITS).level is Level.GOOD


def test_placed_and_not_computed() -> None:
    instances = (prefill(0), decode(0, running=0))
    verdict = judge(healthy(instances=instances, completed=0, classes=(), placed=40, stages={}), LIMITS)
    assert verdict.level is Level.DOWN
    assert only(verdict, "nothing_served").text.startswith("40 requests were placed")


def test_unresponsive_instances() -> None:
    base = healthy()
    instances = (*base.instances[:-1], decode(3, state=InstanceState.UNRESPONSIVE))
    found = only(judge(healthy(instances=instances), LIMITS), "instances_unresponsive")
    assert (found.text, found.instances) == ("1 of 4 decode instances unresponsive", ("decode-3",))


@pytest.mark.parametrize(("up_s", "missing", "starting"), [(10.0, 0, 1), (120.0, 1, 0)])
def test_who_never_came_is_missing_after_a_while(up_s: float, missing: int, starting: int) -> None:
    base = healthy()
    expected = {one.instance_id: one.role for one in base.instances} | {"decode-4": Role.DECODE}
    verdict = judge(healthy(expected=expected, up_s=up_s), LIMITS)
    count = verdict.counts[Role.DECODE]
    assert (count.expected, count.missing, count.starting) == (5, missing, starting)
    whats = [problem.what for problem in verdict.problems]
    assert whats == (["instances_missing"] if missing else [])


def test_flipped_instances_are_not_missing() -> None:
    base = healthy()
    expected = {one.instance_id: Role.PREFILL for one in base.instances}
    assert judge(healthy(expected=expected), LIMITS).counts[Role.PREFILL].expected == 2


@pytest.mark.parametrize(("others", "level"), [((), Level.DOWN), ((Peer("other-1", 1.0),), Level.DEGRADED)])
def test_silent_gateways_and_schedulers(others: tuple[Peer, ...], level: Level) -> None:
    silent = (Peer("it-0", 42.0), *others)
    for what, words in (("gateway_gone", "gateway"), ("scheduler_gone", "scheduler")):
        found = only(judge(healthy(**{f"{words}s": silent}), LIMITS), what)
        plural = "s" if others else ""
        assert (found.level, found.text) == (level, f"1 of {len(silent)} {words}{plural} silent for 42 s")


def test_gateways_are_not_blamed_while_no_scheduler_could_tell_of_them() -> None:
    verdict = judge(healthy(gateways=(Peer("gateway-0", 60.0),), schedulers=(Peer("scheduler-0", 60.0),)), LIMITS)
    assert [problem.what for problem in verdict.problems] == ["scheduler_gone"]


def test_a_predictor_that_only_guesses() -> None:
    found = only(
        judge(healthy(predictions={"classifier": 10, "observed": 20, "none": 70}), LIMITS), "predictor_fallback"
    )
    assert (found.text, found.cause) == (
        "90 % of output lengths not predicted by the classifier",
        "no predictor answers",
    )


def test_policies_that_somebody_does_not_follow() -> None:
    base = healthy()
    instances = (*base.instances[:-1], decode(3, trouble="no policy named 'x'"))
    peers = (Peer("scheduler-0", 0.5, behind_s=30.0),)
    found = only(judge(healthy(instances=instances, schedulers=peers), LIMITS), "policies_not_followed")
    assert found.text == "policies not followed by scheduler-0, decode-3"
    assert found.cause == "no policy named 'x'"


def test_few_requests_say_nothing() -> None:
    few = healthy(completed=2, classes=(chat(requests=2, ttft_met=0.0, tpot_met=0.0),), failed={"unavailable": 1})
    assert judge(few, LIMITS).problems == ()


def test_a_dead_instance_is_a_trouble_of_an_idle_cluster_too() -> None:
    instances = (prefill(0), decode(0, running=0, inflight=0), decode(1, state=InstanceState.DEAD, inflight=0))
    verdict = judge(Situation(1_000.0, 60.0, 3_600.0, instances), LIMITS)
    assert verdict.headline == "Degraded: 1 of 2 decode instances dead"


@given(
    st.lists(
        st.builds(
            Standing,
            st.text("ab", min_size=1, max_size=3),
            st.sampled_from(Role),
            st.sampled_from(InstanceState),
            st.none() | st.floats(0, 1),
            st.integers(0, 50),
            st.integers(0, 50),
            st.integers(0, 10),
            st.integers(0, 50),
            st.floats(0, 10),
            st.integers(0, 50),
        ),
        max_size=6,
        unique_by=lambda one: one.instance_id,
    ),
    st.dictionaries(st.sampled_from(["busy", "unavailable"]), st.integers(0, 50)),
    st.integers(0, 50),
)
def test_every_verdict_adds_up(instances: list[Standing], failed: dict[str, int], completed: int) -> None:
    situation = Situation(1.0, 60.0, 100.0, tuple(instances), completed=completed, failed=failed, placed=completed)
    verdict = judge(situation, LIMITS)
    assert verdict == judge(situation, LIMITS)
    for role, count in verdict.counts.items():
        parts = count.ready + count.dead + count.unresponsive + count.draining + count.starting + count.missing
        assert parts == count.expected == sum(one.role is role for one in instances)
    assert (not verdict.problems) == (verdict.level in (Level.GOOD, Level.IDLE))
    levels = [problem.level for problem in verdict.problems]
    assert levels == sorted(levels, key=[Level.DOWN, Level.DEGRADED].index)
    assert all(link.now >= 0 for link in verdict.chain)
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=Verdict) == verdict


def test_why_a_class_missed_is_read_from_that_class() -> None:
    patient = chat(
        slo="batch", ttft_target_s=600.0, stages=longest(Stage.QUEUE, healthy()), before_first={"queue": 2_000.0}
    )
    own = {Stage.QUEUE: StageSeen(50, 1.0, 0.02, 0.1), Stage.PREFILL: StageSeen(50, 60.0, 1.2, 2.0)}
    missed = chat(ttft_met=0.2, requests=50, stages=own, before_first={"queue": 1.0, "prefill": 60.0})
    verdict = judge(healthy(stages=longest(Stage.QUEUE, healthy()), classes=(patient, missed)), LIMITS)
    found = only(verdict, "ttft_missed")
    assert found.stage is Stage.PREFILL
    assert found.cause == "prompts take long to compute (prefill: 1.2 s in the middle, 2 s at the 99th percentile)"


def test_what_comes_after_the_first_token_does_not_delay_it() -> None:
    waits = longest(Stage.DECODE_QUEUE, healthy())
    missed = chat(ttft_met=0.2, tpot_met=0.5, stages=waits, before_first={"queue": 10.0, "prefill": 40.0})
    verdict = judge(healthy(stages=waits, classes=(missed,)), LIMITS)
    assert only(verdict, "ttft_missed").stage is Stage.PREFILL
    assert only(verdict, "tpot_missed").stage is Stage.DECODE_QUEUE


@pytest.mark.parametrize("span", ["intake", "placement", "handover", "reply", "lost"])
def test_time_at_no_instance_is_no_stage_s_fault(span: str) -> None:
    missed = chat(ttft_met=0.2, stages=healthy().stages, before_first={"queue": 10.0, "prefill": 40.0, span: 150.0})
    found = only(judge(healthy(classes=(missed,)), LIMITS), "ttft_missed")
    assert found.stage is None
    assert found.cause.endswith("(75 % of the time)")


def test_an_instance_that_does_not_hear_of_policies_does_not_follow_them() -> None:
    instances = (prefill(0, behind_s=9.0), prefill(1, behind_s=11.0), decode(0), decode(1))
    found = only(judge(healthy(instances=instances), LIMITS), "policies_not_followed")
    assert (found.text, found.cause) == ("policies not followed by prefill-1", "they go by older ones")
    assert found.instances == ("prefill-1",)


def test_a_target_that_is_just_missed_is_not_rounded_to_one_that_is_met() -> None:
    assert only(judge(healthy(classes=(chat(ttft_met=0.8967),)), LIMITS), "ttft_missed").text == (
        "TTFT met by 89.67 % (target 1 s)"
    )


def test_one_prompt_waits_and_two_wait() -> None:
    for number, said in ((1, "1 prompt waits"), (2, "2 prompts wait")):
        instances = (prefill(0, queue_s=3.0, queued_prefill=number), decode(0))
        found = only(judge(healthy(instances=instances), LIMITS), "queue_long")
        assert found.text == f"{said} for up to 3 s at 1 of 1 prefill instance"


def test_where_nobody_predicts_no_classifier_is_blamed() -> None:
    found = only(judge(healthy(predictions={"none": 100}), LIMITS), "predictor_fallback")
    assert (found.text, found.cause) == ("100 % of output lengths not predicted", "no predictor answers")
