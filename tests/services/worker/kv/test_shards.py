from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv import KvError
from services.worker.kv.shards import Shards, exporting, sources, without_importer
from shared.domain.kv import KvHandle

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
