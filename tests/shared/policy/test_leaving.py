"""Which decodes an instance wants to have elsewhere."""

from dataclasses import replace

from shared.policy.leaving import AGAIN_S, AT_ONCE, KEPT_BUSY, Stayer, leaves_for_memory, leaves_for_speed, leaves_kept

BLOCK = 16


def stayer(name: str, held: int = 160, left: int = 320, weight: float = 1.0, tpot_s: float = 0.1) -> Stayer:
    return Stayer(name, held, left, weight, tpot_s)


def for_memory(jobs: list[Stayer], room: int, free: int, now: float = 100.0) -> list[str]:
    return leaves_for_memory(jobs, room, free, 0.05, BLOCK, now)


def test_all_stay_while_memory_lasts() -> None:
    jobs = [stayer("a"), stayer("b"), stayer("c")]
    assert for_memory(jobs, room=3 * 480, free=0) == []
    assert for_memory(jobs, room=600, free=180) == []  # three tokens a step of 50 ms: 3 s
    assert leaves_for_memory(jobs, 600, 0, 0.0, BLOCK, 100.0) == []
    assert for_memory([], room=600, free=0) == []


def test_as_many_leave_as_the_others_need_lighter_classes_first() -> None:
    jobs = [stayer("light", weight=0.1), stayer("short", left=32), stayer("long", left=640), stayer("last")]
    assert for_memory(jobs, room=5 * 480, free=0) == []
    assert for_memory(jobs, room=900, free=0) == ["light", "long"]
    assert for_memory(jobs, room=1400, free=0) == ["light"]


def test_one_stays_and_few_leave_at_once() -> None:
    jobs = [stayer(f"{number}") for number in range(8)]
    assert len(for_memory(jobs, room=100, free=0)) == AT_ONCE
    assert for_memory([stayer("alone")], room=100, free=0) == []
    assert len(for_memory(jobs[:2], room=100, free=0)) == 1


def test_a_job_is_asked_again_only_after_a_while() -> None:
    asked = replace(stayer("asked", left=640), asked_s=100.0 - AGAIN_S / 2)
    assert for_memory([asked, stayer("other")], room=500, free=0) == []  # one is enough, and it has been asked
    assert for_memory([asked, stayer("other")], room=500, free=0, now=100.0 + AGAIN_S) == ["asked"]


def test_the_longest_of_those_that_miss_their_target_leaves_a_slow_instance() -> None:
    jobs = [stayer("short", held=100), stayer("long", held=900), stayer("patient", held=5000, tpot_s=1.0)]
    assert leaves_for_speed(jobs, 0.2, 100.0) == "long"
    assert leaves_for_speed(jobs, 0.1, 100.0) is None
    assert leaves_for_speed([replace(jobs[0], asked_s=99.5), *jobs[1:]], 0.2, 100.0) is None
    assert leaves_for_speed([jobs[0], replace(jobs[1], asked_s=98.0)], 0.2, 100.0) == "short"


def test_a_kept_answer_leaves_after_its_tokens_or_when_prompts_come() -> None:
    long_ago = float("-inf")
    assert not leaves_kept(49, 50, KEPT_BUSY, long_ago, 100.0)
    assert leaves_kept(50, 50, 0.0, long_ago, 100.0)
    assert leaves_kept(1, 50, KEPT_BUSY + 0.01, long_ago, 100.0)
    assert not leaves_kept(50, 50, 1.0, 100.0 - AGAIN_S / 2, 100.0)
