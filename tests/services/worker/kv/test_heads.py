import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv.errors import KvError
from services.worker.kv.heads import heads_of, sources, unasked

DEGREES = st.sampled_from([1, 2, 4, 8])


@given(DEGREES, DEGREES, DEGREES)
def test_every_rank_gets_its_heads_once_and_consumers_are_counted(
    importers: int, exporters: int, kv_heads: int
) -> None:
    asked: dict[int, int] = {}
    for rank in range(importers):
        start, end = heads_of(rank, importers, kv_heads)
        got = sources(rank, importers, exporters, kv_heads)
        assert [head for s in got for head in range(s.head_start, s.head_end)] == list(range(start, end))
        for source in got:
            first, last = heads_of(source.rank, exporters, kv_heads)
            assert first <= source.head_start < source.head_end <= last
            asked[source.rank] = asked.get(source.rank, 0) + 1
    for rank in range(importers):
        for source in sources(rank, importers, exporters, kv_heads):
            assert source.consumers == asked[source.rank]
    assert set(asked) | set(unasked(importers, exporters, kv_heads)) == set(range(exporters))


def test_replicated_heads() -> None:
    assert [heads_of(rank, 4, 2) for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert unasked(1, 4, 2) == [1, 3]


def test_uneven_splits_are_refused() -> None:
    with pytest.raises(KvError):
        heads_of(0, 3, 4)
