"""The staging pool, and the host memory of staged KV."""

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv import KvError, KvFault
from services.worker.kv.shards import RankShape, Shards
from services.worker.kv.staging import HeapMemory, Part, Piece, PinnedMemory, Rows, Segment, StagingPool
from services.worker.kv.wire.protocol import FRAME_BYTES, checksum
from shared.domain.kv import Codec
from tests.services.worker.kv.rig import Clock


class Pool(StagingPool):
    """A pool of 1000 bytes and leases of 10 s, unless told otherwise, that notes the ends of transfers."""

    def __init__(self, limit_bytes: int = 1000, renewals: int = 3) -> None:
        self.clock = Clock()
        self.changes = 0
        self.ends: list[tuple[str, int]] = []
        super().__init__(limit_bytes, 10, self.clock, self._changed, lambda *end: self.ends.append(end), renewals)

    def _changed(self) -> None:
        self.changes += 1

    def stage(self, name: str, start: int = 0, end: int = 5, size: int = 100, last: bool = True, whole: int = 0) -> int:
        self.admit(name, size, whole)
        return self.commit(name, (start, end), [Segment(start, end, torch.zeros(1))], size, last)

    def fault_of(self, name: str) -> KvFault:
        with pytest.raises(KvError) as raised:
            self.open(name)
        return raised.value.fault


def test_a_segment_holds_the_checksums_of_the_frames_of_a_whole_pull() -> None:
    shape = RankShape(Shards((5,), 4), 8, torch.float32)
    tokens = FRAME_BYTES // (2 * shape.token_bytes)  # two layers a frame
    segment = Segment(0, tokens, torch.randn(shape.chunk_shape(tokens)))
    assert shape.layers_a_frame(tokens, 4, Codec.RAW) == segment.frame_layers == 2
    layer_bytes = tokens * shape.token_bytes
    for start, end in [(0, 2), (2, 4), (4, 5)]:
        assert segment.digest(start, end) == checksum(segment.data[start * layer_bytes : end * layer_bytes])
    assert [segment.digest(*layers) for layers in [(0, 1), (1, 3), (0, 4), (3, 5), (2, 3)]] == [None] * 5
    state = Segment(0, 1, torch.randn(3, 1, 1, 1, 2 * FRAME_BYTES))  # layers larger than a frame
    assert state.frame_layers == 1
    assert state.digest(1, 2) == checksum(state.data[len(state.data) // 3 : 2 * len(state.data) // 3])


def test_chunks_add_up_until_the_last() -> None:
    pool = Pool()
    assert pool.open("t") is None
    assert pool.stage("t", last=False) == 100
    assert pool.stage("t", 5, 9) == 200
    transfer = pool.open("t")
    assert transfer is not None
    assert (transfer.token_end, transfer.complete, len(transfer.segments[0])) == (9, True, 2)
    assert pool.changes == 2


def test_the_bound_refuses_and_the_transfer_has_failed_for_good() -> None:
    pool = Pool(250)
    pool.stage("a")
    pool.stage("b", last=False)
    for _ in range(2):  # also when there is room again
        with pytest.raises(KvError) as raised:
            pool.stage("b", 5, 9)
        assert raised.value.fault is KvFault.REFUSED
    assert pool.fault_of("b") is KvFault.REFUSED
    assert (pool.staged_bytes, pool.stats.staging_failed) == (100, 1)
    with pytest.raises(KvError, match="100 of 300 bytes"):
        pool.stage("never fits", last=False, whole=300)
    assert pool.fault_of("never fits") is KvFault.REFUSED
    assert pool.staged_bytes == 100


def test_the_end_of_a_transfer_is_reported_once_whatever_ended_it() -> None:
    pool = Pool(350)
    for name in ("released", "confirmed", "expired"):
        pool.stage(name)
    assert pool.release("released")
    assert not pool.release("released")
    pool.confirm("confirmed", 0, 1)
    pool.clock.now += 11
    assert pool.expire() == ["expired"]
    with pytest.raises(KvError):
        pool.stage("refused", size=400)
    assert pool.ends == [("released", 200), ("confirmed", 100), ("expired", 0), ("refused", 0)]
    assert [pool.fault_of(name) for name, _ in pool.ends] == [
        KvFault.RELEASED,
        KvFault.RELEASED,
        KvFault.EXPIRED,
        KvFault.REFUSED,
    ]
    for name, _ in pool.ends:
        with pytest.raises(KvError):
            pool.stage(name, 5, 9)
    assert pool.staged_bytes == 0


def test_a_later_chunk_of_a_transfer_whose_failure_is_forgotten_is_never_pulled_as_its_first() -> None:
    pool = Pool(250)
    with pytest.raises(KvError):
        pool.stage("a", size=300, last=False)
    for number in range(10_000):
        pool.release(f"another {number}")
    with pytest.raises(KvError, match="before token 5"):
        pool.stage("a", 5, 9)
    assert pool.fault_of("a") is KvFault.INTERNAL
    assert (pool.staged_bytes, len(pool)) == (0, 0)


def test_leases_are_renewed_by_readers_and_so_often_by_importers_that_wait() -> None:
    pool = Pool()
    for name in ("a", "b", "c"):
        pool.stage(name)
    for turn in range(3):
        pool.clock.now += 8
        pool.open("b")
        assert [pool.renew("c") for _ in range(100)] == [True] + [False] * 99  # one that has just begun is fresh
        assert pool.expire() == (["a"] if turn == 1 else [])
    pool.clock.now += 8
    pool.open("b")
    assert not pool.renew("c")
    pool.clock.now += 2
    assert pool.expire() == ["c"]
    assert (pool.staged_bytes, pool.stats.leases_expired, pool.stats.leases_renewed) == (100, 2, 3)
    assert not pool.renew("never staged")
    pool.release("b")
    assert not pool.renew("b")
    assert len(pool) == 0


def test_the_last_importer_rank_releases_also_before_the_first_chunk() -> None:
    pool = Pool()
    pool.stage("a")
    for name in ("a", "early"):
        assert not pool.confirm(name, 0, 2)
        assert not pool.confirm(name, 0, 2)  # the same rank again
        assert pool.confirm(name, 1, 2)
    assert pool.staged_bytes == 0
    with pytest.raises(KvError):
        pool.stage("early")
    for number in range(10_000):
        pool.confirm(f"t{number}", 0, 2)
    assert len(pool) < 5000  # confirmations of unknown transfers are bounded


def test_a_release_while_copies_run_wins_and_ends_the_transfer_when_they_are_over() -> None:
    pool = Pool()
    pool.stage("a", last=False)
    pool.admit("a", 70)
    pool.admit("a", 50)
    assert pool.release("a")
    assert (pool.staged_bytes, pool.ends) == (120, [])  # what was staged before is free at once
    with pytest.raises(KvError):
        pool.commit("a", (5, 9), [Segment(5, 9, torch.zeros(1))], 70, last=True)
    pool.abandon("a", 50)
    assert not pool.release("a")
    assert (pool.staged_bytes, pool.ends) == (0, [("a", 0)])


def test_a_copy_that_fails_gives_its_room_back() -> None:
    pool = Pool()
    pool.admit("a", 100)
    pool.abandon("a", 100)
    assert (pool.staged_bytes, pool.ends) == (0, [("a", 0)])
    assert pool.fault_of("a") is KvFault.INTERNAL


TOKEN_BYTES = 2 * 3 * 2 * 4  # K and V, three layers, a head of two float32


def shape(tokens: int) -> tuple[int, ...]:
    return 3, 2, tokens, 1, 2


def zeros(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def pinned(tokens: int, segment: int = 8) -> PinnedMemory:
    """Of exactly so many tokens, in host memory that is not pinned."""
    return PinnedMemory([Rows(shape, torch.float32, segment)], tokens * TOKEN_BYTES, zeros)


def coded(share: int, more: int = 0) -> SimpleNamespace:
    """A coding of so many bytes for each of `share` that tokens have, and some `more` for each part."""
    return SimpleNamespace(size=lambda tokens: more + tokens * TOKEN_BYTES // share)


def piece(start: int, end: int, coding: Any = None) -> Piece:
    return Piece(start, end, lambda *_: None, coding)


def sizes(parts: list[Part]) -> list[int]:
    return [part.end - part.start for part in parts]


def test_parts_follow_each_other_in_segments() -> None:
    parts = HeapMemory([Rows(shape, torch.float16, 4)]).take(piece(5, 15))
    assert [(part.start, part.end) for part in parts] == [(5, 9), (9, 13), (13, 15)]
    assert all(part.host.is_contiguous() and part.host.dtype == torch.float16 for part in parts)
    assert [part.host.shape[2] for part in parts] == sizes(parts)


@pytest.mark.parametrize("coding", [None, coded(3, more=8)], ids=["raw", "coded"])
@given(st.lists(st.tuples(st.integers(1, 150), st.booleans()), max_size=30))
def test_places_belong_to_one_part_at_a_time_and_none_is_lost(
    coding: SimpleNamespace | None, steps: list[tuple[int, bool]]
) -> None:
    memory, held, number = pinned(64, segment=64 if coding else 8), list[tuple[int, list[Part]]](), 0
    parts: list[Part] = []
    for tokens, drop in steps:
        if drop and held:
            value, parts = held.pop(tokens % len(held))
            assert all(bool((part.host == value).all()) for part in parts)
            parts = []
            continue
        parts, free = [], memory.free_places
        with suppress(KvError):
            parts = memory.take(piece(0, tokens, coding))
        if not parts:
            assert memory.free_places == free
            assert free < 64 if coding else free < tokens
            continue
        number = (number + 1) % 256
        assert sum(sizes(parts)) == tokens
        for part in parts:
            assert part.host.is_contiguous()
            if coding is None:
                assert part.host.shape == shape(part.end - part.start)
            else:
                assert part.host.numel() == coding.size(part.end - part.start)
            part.host.fill_(number)
        if coding is None:
            assert memory.free_places == free - tokens
        held.append((number, parts))
        del part
    held.clear()
    parts.clear()
    assert memory.free_places == 64


def test_where_holes_are_small_parts_have_fewer_tokens_coded_ones_in_whole_groups() -> None:
    memory = pinned(64, segment=96)
    held = [memory.take(piece(0, 8)) for _ in range(8)]
    del held[1], held[3]  # two holes of eight places
    with pytest.raises(KvError):
        memory.take(piece(0, 96, coded(2)))
    assert memory.free_places == 16
    assert sizes(memory.take(piece(0, 70, coded(5)))) == [32, 38]  # type: ignore[arg-type]
    memory = pinned(9)
    parts = [memory.take(piece(0, size)) for size in (2, 1, 3, 1, 2)]
    del parts[4], parts[2], parts[0]
    assert sizes(memory.take(piece(0, 7))) == [3, 2, 2]  # the largest hole first where none is large enough


def test_a_view_keeps_its_places() -> None:
    memory = pinned(16)
    (part,) = memory.take(piece(0, 8))
    frame = part.host[1:2, :, 2:4].numpy().data
    del part
    assert memory.free_places == 8
    del frame
    assert memory.free_places == 16


@pytest.mark.parametrize("limit", [1, 100 * TOKEN_BYTES + 1, (64 << 20) + 1])
def test_memory_is_as_large_as_requested_in_slabs_of_at_most_a_power_of_two(limit: int) -> None:
    memory = PinnedMemory([Rows(shape, torch.float32, 8)], limit, zeros)
    slabs = [slab.nbytes for slab in memory.slabs]
    assert limit <= memory.free_places * TOKEN_BYTES == sum(slabs)
    assert max(slabs) <= 64 << 20
