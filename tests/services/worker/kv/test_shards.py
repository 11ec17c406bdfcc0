from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv import KvError
from services.worker.kv.shards import RankShape, Shards, exporting, held_bytes, sources, without_importer
from shared.domain.instance import KvKind
from shared.domain.kv import Codec, KvHandle

DEGREES = st.sampled_from([1, 2, 4, 8])
LAYERS = 6
STAGES = st.sampled_from([(6,), (3, 3), (4, 2), (1, 5), (2, 2, 2), (1, 4, 1), (1, 1, 1, 1, 1, 1)])


def handle(ranks: int, stages: tuple[int, ...] = ()) -> KvHandle:
    return KvHandle("t", "p0", 1, "f", tuple(f"tcp://a:{rank}" for rank in range(ranks)), 10, "float32", stages=stages)


@given(STAGES, STAGES, DEGREES, DEGREES, DEGREES)
def test_every_rank_gets_its_layers_and_heads_once_and_consumers_are_counted(
    ours: tuple[int, ...], theirs: tuple[int, ...], importing: int, exporting: int, kv_heads: int
) -> None:
    importers, exporters = Shards(ours, kv_heads, importing), Shards(theirs, kv_heads, exporting)
    pairs = (importers,), (exporters,)
    asked: dict[int, int] = {}
    for rank in range(importers.ranks):
        got = sources(rank, *pairs)
        pulled = [
            place for s in got for place in product(range(s.layer_start, s.layer_end), range(s.head_start, s.head_end))
        ]
        assert len(pulled) == len(set(pulled))
        assert set(pulled) == set(product(range(*importers.layers_of(rank)), range(*importers.heads_of(rank))))
        for source in got:
            first, last = exporters.layers_of(source.rank)
            assert first <= source.layer_start < source.layer_end <= last
            first, last = exporters.heads_of(source.rank)
            assert first <= source.head_start < source.head_end <= last
            asked[source.rank] = asked.get(source.rank, 0) + 1
    for rank in range(importers.ranks):
        for source in sources(rank, *pairs):
            assert source.consumers == asked[source.rank]
    assert set(asked) | set(without_importer(*pairs)) == set(range(exporters.ranks))
    assert not set(asked) & set(without_importer(*pairs))


def test_ranks_are_numbered_stage_by_stage() -> None:
    shards = Shards((1, 2), 4, 2)
    assert [(shards.layers_of(rank), shards.heads_of(rank)) for rank in range(4)] == [
        ((0, 1), (0, 2)),
        ((0, 1), (2, 4)),
        ((1, 3), (0, 2)),
        ((1, 3), (2, 4)),
    ]
    (source,) = sources(0, (Shards((1, 2), 4),), (Shards((3,), 4),))
    assert (source.rank, source.layer_start, source.layer_end, source.consumers) == (0, 0, 1, 2)


def test_replicated_heads() -> None:
    assert [Shards((3,), 2, 4).heads_of(rank) for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert without_importer((Shards((3,), 2),), (Shards((3,), 2, 4),)) == (1, 3)
    assert without_importer((Shards((3,), 2),), (Shards((1, 2), 2, 4),)) == (1, 3, 5, 7)


def test_uneven_splits_are_refused() -> None:
    with pytest.raises(KvError):
        Shards((3,), 4, 3).heads_of(0)


def test_how_an_exporter_shares_stands_in_its_handle() -> None:
    ours = (Shards((1, 2), 4, 2),)
    assert exporting(handle(1), ours) == (Shards((3,), 4),)
    assert exporting(handle(2), ours) == (Shards((3,), 4, 2),)
    assert exporting(handle(2, (2, 1)), ours) == (Shards((2, 1), 4),)
    assert exporting(handle(6, (1, 1, 1)), ours) == (Shards((1, 1, 1), 4, 2),)


@pytest.mark.parametrize(
    ("ranks", "stages"),
    [(0, ()), (0, (3,)), (2, (2, 2)), (2, (1, 1)), (3, (2, 1)), (2, (3, 0)), (2, (4, -1)), (1, (1, 2))],
)
def test_handles_that_do_not_add_up_are_refused(ranks: int, stages: tuple[int, ...]) -> None:
    with pytest.raises(KvError):
        exporting(handle(ranks, stages), (Shards((3,), 4),))


@given(STAGES, STAGES, DEGREES, DEGREES, st.sets(st.integers(0, LAYERS - 1), min_size=1, max_size=LAYERS - 1))
def test_of_several_components_each_layer_comes_once_and_a_rank_counts_once(
    ours: tuple[int, ...], theirs: tuple[int, ...], importing: int, exporting_ranks: int, windowed: set[int]
) -> None:
    full = tuple(sorted(set(range(LAYERS)) - windowed))
    heads = {tuple(sorted(windowed)): 8, full: 1}  # the second is a latent, which all ranks have

    def shared(stages: tuple[int, ...], ranks: int) -> tuple[Shards, ...]:
        bounds = [(sum(stages[:at]), sum(stages[: at + 1])) for at in range(len(stages))]
        return tuple(
            Shards(tuple(sum(first <= number < last for number in numbers) for first, last in bounds), heads[numbers],
                   ranks, numbers)
            for numbers in heads
        )  # fmt: skip

    importers = shared(ours, importing)
    exporters = exporting(handle(len(theirs) * exporting_ranks, theirs), importers)
    assert exporters == shared(theirs, exporting_ranks)
    askers: dict[int, set[int]] = {}
    for rank in range(importers[0].ranks):
        got = sources(rank, importers, exporters)
        for component, each in enumerate(importers):
            pulled = [
                place
                for s in got
                if s.component == component
                for place in product(range(s.layer_start, s.layer_end), range(s.head_start, s.head_end))
            ]
            assert sorted(pulled) == sorted(product(range(*each.layers_of(rank)), range(*each.heads_of(rank))))
        for source in got:
            askers.setdefault(source.rank, set()).add(rank)
    for rank in range(importers[0].ranks):
        assert all(len(askers[source.rank]) == source.consumers for source in sources(rank, importers, exporters))
    assert set(askers) | set(without_importer(importers, exporters)) == set(range(exporters[0].ranks))


def test_what_is_kept_of_a_transfer_and_what_is_read_of_it() -> None:
    """A windowed layer that computes token 100 next reads tokens 90 to 99, and when it computes 99 again, 89 to 98."""
    shards = Shards((1,), 1)
    full, windowed = RankShape(shards, 8, torch.float32), RankShape(shards, 8, torch.float32, window=10)
    state = RankShape(shards, 8, torch.float32, sides=1, kind=KvKind.STATE, window=1)
    assert full.kept(0, 64, 100) == full.read(0, 64) == (0, 64)
    assert windowed.kept(64, 100, 100) == (89, 100)
    assert windowed.read(0, 100) == (90, 100)
    assert windowed.read(95, 100) == (95, 100)
    assert windowed.read(0, 99) == (89, 99)
    assert state.kept(64, 100, 100) == state.read(0, 100) == (99, 100)
    first, past = windowed.kept(0, 64, 100)
    assert first >= past  # nothing of that chunk
    assert held_bytes((full, windowed, state), 100) == 4 * (100 * 2 * 8 + 11 * 2 * 8 + 8)
    assert held_bytes((full, windowed, state), 5) == 4 * (5 * 2 * 8 + 5 * 2 * 8 + 8)


def test_lossy_codecs_are_for_k_and_v() -> None:
    shards = Shards((1,), 1)
    assert RankShape(shards, 8, torch.float32).codec(Codec.INT8) is Codec.INT8
    for other in ({"sides": 1}, {"sides": 2, "kind": KvKind.STATE, "window": 1}, {"sides": 1, "kind": KvKind.LATENT}):
        assert RankShape(shards, 8, torch.float32, **other).codec(Codec.INT8) is Codec.RAW  # type: ignore[arg-type]
