from shared.domain.job import JobView, LengthPrediction
from shared.policy.admission_gate import Blocks, Decoding, may_decode
from shared.policy.decode_admission import Greedy, PredictedEnd, ReserveDynamic, ReserveStatic


def job(prompt: int, lower: int) -> JobView:
    return JobView("j", prompt, 500, prediction=LengthPrediction(0, lower, 2 * lower, 1.0, "observed"))


RUNNING = Decoding(job(100, 50), 100, 120)  # 30 more to come


def test_what_runs_is_counted_at_its_predicted_end_or_at_what_it_has_come_to() -> None:
    beside, room = job(40, 10), Blocks(free=100, total=20, size_tokens=10)
    policy = ReserveStatic(reserve_all=True)
    assert may_decode(policy, beside, [RUNNING], room, 0.0)  # 150 + 50 of 200 tokens
    assert not may_decode(policy, job(41, 10), [RUNNING], room, 0.0)
    outgrown = RUNNING._replace(context_tokens=151)
    assert not may_decode(policy, beside, [outgrown], room, 0.0)
    assert not may_decode(ReserveStatic(PredictedEnd.UPPER, reserve_all=True), beside, [RUNNING], room, 0.0)


def test_static_as_printed_counts_what_is_free_now() -> None:
    beside = job(40, 10)
    assert may_decode(ReserveStatic(), beside, [RUNNING], Blocks(free=6, total=20, size_tokens=10), 0.0)
    assert not may_decode(ReserveStatic(), beside, [RUNNING], Blocks(free=5, total=20, size_tokens=10), 0.0)


def test_dynamic_looks_ahead_to_the_first_end() -> None:
    room = Blocks(free=100, total=20, size_tokens=10)
    # In 30 steps RUNNING ends at 150 tokens; 50 + 30 beside it do not fit into 200.
    assert not may_decode(ReserveDynamic(), job(50, 100), [RUNNING], room, 0.0)
    assert may_decode(ReserveDynamic(), job(20, 100), [RUNNING], room, 0.0)
    assert may_decode(ReserveDynamic(), job(50, 10), [RUNNING], room, 0.0)  # itself the first, in 10 steps


def test_where_nobody_decodes_the_blocks_alone_decide() -> None:
    full = Blocks(free=0, total=20, size_tokens=10)
    for policy in (Greedy(), ReserveStatic(), ReserveDynamic()):
        assert may_decode(policy, job(1_000, 1_000), [], full, 0.0)
        assert not may_decode(policy, job(10, 0), [RUNNING], full, 0.0)
