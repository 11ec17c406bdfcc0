import pytest
import torch

from services.worker.kv import KvError, KvFault
from services.worker.kv.staging import Segment, StagingPool


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def stage(
    pool: StagingPool, name: str, start: int, end: int, size: int = 100, last: bool = True, whole: int = 0
) -> int:
    pool.admit(name, size, whole)
    return pool.commit(name, [Segment(start, end, torch.zeros(1))], size, last)


def fault_of(pool: StagingPool, name: str) -> KvFault:
    with pytest.raises(KvError) as raised:
        pool.open(name)
    return raised.value.fault


def test_chunks_add_up_until_the_last() -> None:
    changes: list[int] = []
    pool = StagingPool(1000, 10, on_change=lambda: changes.append(1))
    assert pool.open("t") is None
    assert stage(pool, "t", 0, 5, last=False) == 100
    assert stage(pool, "t", 5, 9) == 200
    transfer = pool.open("t")
    assert transfer is not None
    assert (transfer.token_end, transfer.complete, len(transfer.segments)) == (9, True, 2)
    assert len(changes) == 2


def test_the_bound_refuses_and_marks_the_transfer_failed() -> None:
    pool = StagingPool(250, 10)
    stage(pool, "a", 0, 5)
    stage(pool, "b", 0, 5, last=False)
    with pytest.raises(KvError) as raised:
        stage(pool, "b", 5, 9)
    assert raised.value.fault is KvFault.REFUSED
    assert fault_of(pool, "b") is KvFault.REFUSED
    assert (pool.staged_bytes, pool.stats.staging_failed) == (100, 1)
    with pytest.raises(KvError):
        stage(pool, "b", 5, 9)  # for good, also when there is room again


def test_a_transfer_that_can_never_fit_is_refused_at_its_first_chunk() -> None:
    pool = StagingPool(250, 10)
    with pytest.raises(KvError, match="100 of 300 bytes"):
        stage(pool, "a", 0, 5, last=False, whole=300)
    assert fault_of(pool, "a") is KvFault.REFUSED
    assert pool.staged_bytes == 0


def test_the_end_of_a_transfer_is_told_once_whatever_ended_it() -> None:
    clock, ends = Clock(), []
    pool = StagingPool(350, 10, clock=clock, on_end=lambda name, left: ends.append((name, left)))
    for name in ("released", "confirmed", "expired"):
        stage(pool, name, 0, 5)
    pool.release("released")
    pool.release("released")
    pool.confirm("confirmed", 0, 1)
    clock.now += 11
    pool.expire()
    with pytest.raises(KvError):
        stage(pool, "refused", 0, 5, 400)
    assert ends == [("released", 200), ("confirmed", 100), ("expired", 0), ("refused", 0)]


def test_confirmations_of_unknown_transfers_are_bounded() -> None:
    pool = StagingPool(1000, 10)
    for number in range(10_000):
        pool.confirm(f"t{number}", 0, 2)
    assert len(pool) < 5000


def test_leases_end_and_are_renewed_by_readers() -> None:
    clock = Clock()
    pool = StagingPool(1000, 10, clock=clock)
    stage(pool, "a", 0, 5)
    stage(pool, "b", 0, 5)
    clock.now += 8
    pool.open("b")
    clock.now += 8
    assert pool.expire() == ["a"]
    assert fault_of(pool, "a") is KvFault.EXPIRED
    assert pool.open("b") is not None
    assert (pool.staged_bytes, pool.stats.leases_expired) == (100, 1)


def test_a_later_chunk_of_a_transfer_whose_failure_is_forgotten_is_never_pulled_as_its_first() -> None:
    pool = StagingPool(250, 10)
    with pytest.raises(KvError):
        stage(pool, "a", 0, 5, 300, last=False)
    for number in range(10_000):
        pool.release(f"somebody else's {number}")
    with pytest.raises(KvError, match="before token 5"):
        stage(pool, "a", 5, 9)
    assert fault_of(pool, "a") is KvFault.INTERNAL
    assert (pool.staged_bytes, len(pool)) == (0, 0)


def test_an_importer_that_waits_renews_a_lease_a_bounded_number_of_times() -> None:
    clock = Clock()
    pool = StagingPool(1000, 10, clock=clock, renewals=3)
    stage(pool, "a", 0, 5)
    for _ in range(3):
        clock.now += 8
        assert pool.renew("a")
        assert pool.expire() == []
    clock.now += 8
    assert not pool.renew("a")
    assert (pool.stats.leases_renewed, pool.expire()) == (3, [])
    clock.now += 2
    assert pool.expire() == ["a"]


def test_renewals_that_follow_each_other_fast_count_once_and_the_unknown_get_nothing() -> None:
    clock = Clock()
    pool = StagingPool(1000, 10, clock=clock, renewals=3)
    stage(pool, "a", 0, 5)
    clock.now += 5
    assert [pool.renew("a") for _ in range(100)] == [True] + [False] * 99
    assert not pool.renew("never staged")
    pool.release("a")
    assert not pool.renew("a")
    assert (pool.stats.leases_renewed, len(pool)) == (1, 0)


def test_release_is_idempotent_and_remembered() -> None:
    pool = StagingPool(1000, 10)
    stage(pool, "a", 0, 5)
    assert pool.release("a")
    assert not pool.release("a")
    assert fault_of(pool, "a") is KvFault.RELEASED
    with pytest.raises(KvError):
        stage(pool, "a", 5, 9)
    assert pool.staged_bytes == 0


def test_the_last_importer_rank_releases() -> None:
    pool = StagingPool(1000, 10)
    stage(pool, "a", 0, 5)
    assert not pool.confirm("a", 0, 2)
    assert not pool.confirm("a", 0, 2)  # the same one again
    assert pool.confirm("a", 1, 2)
    assert pool.staged_bytes == 0


def test_a_confirmation_may_come_before_the_first_chunk() -> None:
    pool = StagingPool(1000, 10)
    assert not pool.confirm("a", 0, 2)
    assert pool.confirm("a", 1, 2)
    with pytest.raises(KvError):
        stage(pool, "a", 0, 5)


def test_a_release_while_the_copy_runs_wins_and_ends_the_transfer_when_it_is_over() -> None:
    ends: list[tuple[str, int]] = []
    pool = StagingPool(1000, 10, on_end=lambda *end: ends.append(end))
    pool.admit("a", 100)
    pool.admit("a", 50)
    pool.release("a")
    assert (pool.staged_bytes, ends) == (150, [])
    for size in (100, 50):
        with pytest.raises(KvError):
            pool.commit("a", [Segment(0, 5, torch.zeros(1))], size, last=True)
    assert (pool.staged_bytes, ends) == (0, [("a", 0)])
    assert not pool.release("a")
    assert len(ends) == 1


def test_what_was_staged_is_free_at_once_when_the_transfer_ends_during_a_later_copy() -> None:
    ends: list[tuple[str, int]] = []
    pool = StagingPool(1000, 10, on_end=lambda *end: ends.append(end))
    stage(pool, "a", 0, 5, last=False)
    pool.admit("a", 50)
    assert pool.release("a")
    assert (pool.staged_bytes, ends) == (50, [])
    pool.abandon("a", 50)
    assert ends == [("a", 0)]


def test_a_copy_that_fails_gives_its_room_back() -> None:
    ends: list[tuple[str, int]] = []
    pool = StagingPool(1000, 10, on_end=lambda *end: ends.append(end))
    pool.admit("a", 100)
    pool.abandon("a", 100)
    assert (pool.staged_bytes, ends) == (0, [("a", 0)])
    assert fault_of(pool, "a") is KvFault.INTERNAL
