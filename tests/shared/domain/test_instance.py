"""What a model keeps for a request, in bytes and in words; which loads are news."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.instance import DRIFT, DRIFT_OF_FREE, InstanceLoad, KvComponent, KvGeometry, KvKind, Promised

WINDOWS = KvComponent(KvKind.HEADS, (0, 2, 4), sides=2, heads=4, head_dim=64, window=127)
FULL = KvComponent(KvKind.HEADS, (1, 3, 5), sides=2, heads=8, head_dim=32)
LATENT = KvComponent(KvKind.LATENT, (6, 7), sides=1, heads=1, head_dim=576)
STATE = KvComponent(KvKind.STATE, (8,), 3, 24, 1, window=1, part="state 0.2", dtype="bfloat16")


def test_a_token_takes_what_its_components_keep_without_states() -> None:
    geometry = KvGeometry(9, 4, 64, (WINDOWS, FULL, LATENT, STATE))
    assert geometry.bytes_per_token(2.0) == 2 * (3 * 2 * 4 * 64 + 3 * 2 * 8 * 32 + 2 * 576)
    assert KvGeometry(9, 0, 0, (STATE,)).bytes_per_token(2.0) == 0.0


def test_without_components_a_token_takes_k_and_v_of_all_layers() -> None:
    assert KvGeometry(9, 4, 64).bytes_per_token(0.5) == 2 * 9 * 4 * 64 / 2


def test_a_component_in_words() -> None:
    assert str(WINDOWS) == "heads of 2 x 4 x 64 within 127 tokens in layers 0, 2, 4"
    assert str(FULL) == "heads of 2 x 8 x 32 in layers 1, 3, 5"
    assert str(LATENT) == "latent of 1 x 1 x 576 in layers 6, 7"
    assert str(STATE) == "state 0.2 of 3 x 24 x 1 bfloat16 in layers 8"


def test_components_survive_the_wire() -> None:
    geometry = KvGeometry(9, 4, 64, (WINDOWS, LATENT, STATE))
    assert msgspec.json.decode(msgspec.json.encode(geometry), type=KvGeometry) == geometry
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(geometry), type=KvGeometry) == geometry
    earlier = msgspec.json.encode({"layers": 9, "kv_heads": 4, "head_dim": 64})  # of a release without components
    assert msgspec.json.decode(earlier, type=KvGeometry) == KvGeometry(9, 4, 64)


BLOCKS, SIZE = 1_000, 16
KNOWN = InstanceLoad(
    time_s=100.0,
    decoding=8,
    inflight=8,
    context_tokens=8_000,
    free_blocks=500,
    prefill_share=0.2,
    kv_ahead=(8_000, 9_000, 0),
    accepted=(1, 2, 3),
    busy_share=0.3,
)


def is_news(known: InstanceLoad = KNOWN, **changes: Any) -> bool:
    load = msgspec.structs.replace(known, time_s=known.time_s + 0.1, **changes)
    return load.is_news(known, BLOCKS, SIZE)


def test_time_alone_and_jobs_that_are_no_longer_listed_are_no_news() -> None:
    assert not is_news()
    assert not is_news(accepted=(3,))
    assert not is_news(accepted=())


@pytest.mark.parametrize(
    "field",
    [
        name
        for name in InstanceLoad.__struct_fields__
        if name
        not in {
            *("time_s", "context_tokens", "free_blocks", "prefill_share", "busy_share", "kv_ahead"),
            *("accepted", "promised"),
        }
    ],
)
def test_each_count_is_news(field: str) -> None:
    assert is_news(**{field: getattr(KNOWN, field) + 1})


def test_a_job_that_was_accepted_or_announced_is_news() -> None:
    assert is_news(accepted=(2, 3, 4))
    assert is_news(accepted=None)
    assert is_news(promised=(Promised(7, 100, 10),))


@pytest.mark.parametrize(
    ("field", "by"),
    [
        ("context_tokens", DRIFT * BLOCKS * SIZE),
        ("free_blocks", DRIFT * BLOCKS),
        ("prefill_share", 0.05),
        ("busy_share", 0.05),
    ],
)
def test_a_figure_that_slides_is_news_beyond_a_share_of_what_there_is(field: str, by: float) -> None:
    was = getattr(KNOWN, field)
    assert not is_news(**{field: was + 0.99 * by})
    assert not is_news(**{field: was - 0.99 * by})
    assert is_news(**{field: was + 1.01 * by})
    assert is_news(**{field: was - 1.01 * by})


def test_memory_ahead_is_news_where_any_stretch_moves() -> None:
    step = int(DRIFT * BLOCKS * SIZE)
    assert not is_news(kv_ahead=(8_000 + step, 9_000 - step, 0))
    assert is_news(kv_ahead=(8_000, 9_000, step + 1))
    assert is_news(kv_ahead=())


def test_an_instance_is_never_taken_for_one_with_room_when_it_is_full() -> None:
    for free in range(1, BLOCKS + 1):
        known = msgspec.structs.replace(KNOWN, free_blocks=free)
        assert is_news(known, free_blocks=0)
        most = min(DRIFT * BLOCKS, DRIFT_OF_FREE * free)
        assert not is_news(known, free_blocks=free - int(most))
    full = msgspec.structs.replace(KNOWN, free_blocks=0)
    assert is_news(full, free_blocks=1)


moves = st.lists(
    st.tuples(st.integers(-60, 60), st.integers(-900, 900), st.sampled_from([0, 0, 0, 1, -1])), min_size=1, max_size=60
)


@given(moves)
def test_what_schedulers_know_is_wrong_by_a_bound_at_most(moved: list[tuple[int, int, int]]) -> None:
    """An instance looks every 0.1 s, and repeats itself after 0.3 s; the monitor does after 0.5 s."""
    actual = published = sent = KNOWN
    published_at = sent_at = 0
    for tick, (blocks, tokens, jobs) in enumerate(moved, 1):
        actual = msgspec.structs.replace(
            actual,
            free_blocks=min(BLOCKS, max(0, actual.free_blocks + blocks)),
            context_tokens=max(0, actual.context_tokens + tokens),
            decoding=max(0, actual.decoding + jobs),
        )
        if actual.is_news(published, BLOCKS, SIZE) or tick - published_at >= 3:
            published, published_at = actual, tick
        if published.is_news(sent, BLOCKS, SIZE) or tick - sent_at >= 5:
            sent, sent_at = published, tick
        assert sent.decoding == actual.decoding
        assert abs(sent.free_blocks - actual.free_blocks) <= 2 * DRIFT * BLOCKS
        assert abs(sent.context_tokens - actual.context_tokens) <= 2 * DRIFT * BLOCKS * SIZE
        assert bool(sent.free_blocks) == bool(actual.free_blocks)
