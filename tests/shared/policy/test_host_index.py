"""The order in which blocks leave a full store."""

from hypothesis import given
from hypothesis import strategies as st

from shared.policy.host_index import Put, SlotIndex

BLOCK = 32


def slot(index: SlotIndex, key: bytes) -> int:
    held = index.get(key)
    assert held is not None
    return held.slot


def put(index: SlotIndex, key: bytes, depth_tokens: int = 0) -> tuple[int, bytes | None]:
    """Store a block for which there is room, or one that may leave. Returns its slot, and the key of that one."""
    found = index.put(key, None, depth_tokens)
    assert found is not None
    return found.slot, found.dropped.key if found.dropped is not None else None


def chain(index: SlotIndex, name: str, blocks: int) -> list[bytes]:
    """Store a prompt as vLLM's cache gives it away: its end first. Returns the keys, its beginning first."""
    keys = [f"{name}{at}".encode() for at in range(blocks)]
    for at in reversed(range(blocks)):
        index.put(keys[at], keys[at - 1] if at else None, at * BLOCK)
    return keys


def held(index: SlotIndex, keys: list[bytes]) -> int:
    """How many blocks of a prompt are found."""
    return next((at for at, key in enumerate(keys) if key not in index), len(keys))


def leave(index: SlotIndex, blocks: int) -> list[bytes]:
    """Which blocks leave for so many others, which cost more."""
    left = []
    for number in range(blocks):
        _, dropped = put(index, b"other%d" % number, 1 << 20)
        assert dropped is not None
        left.append(dropped)
    return left


def test_slots_are_given_until_there_are_none_and_then_again() -> None:
    index = SlotIndex(2, 1000)
    assert {index.put(b"a", None, 0), index.put(b"b", None, 0)} == {Put(0), Put(1)}
    first = slot(index, b"a")
    assert put(index, b"c") == (first, b"a")
    assert (b"a" in index, slot(index, b"c"), len(index)) == (False, first, 2)


def test_of_equal_blocks_the_least_recently_used_leaves() -> None:
    index = SlotIndex(3, 1000)
    for key in (b"a", b"b", b"c"):
        index.put(key, None, 64)
    index.use(b"a")
    assert [put(index, key, 64)[1] for key in (b"d", b"e")] == [b"b", b"c"]


def test_a_block_that_takes_less_time_to_recompute_leaves_first() -> None:
    index = SlotIndex(3, 1000)
    for key, depth in ((b"deep", 2000), (b"early", 0), (b"middle", 1000)):
        index.put(key, None, depth)
    assert leave(index, 3) == [b"early", b"middle", b"deep"]


def test_a_prompt_leaves_from_its_end() -> None:
    """Without its beginning nothing of it would be found."""
    index = SlotIndex(4, 1000)
    keys = chain(index, "p", 4)
    assert leave(index, 2) == [keys[3], keys[2]]
    assert held(index, keys) == 2


def test_the_end_of_a_shorter_prompt_leaves_before_that_of_a_longer_one() -> None:
    index = SlotIndex(12, 1000)
    long, short = chain(index, "long", 8), chain(index, "short", 4)
    leave(index, 4)
    assert (held(index, long), held(index, short)) == (8, 0)


def test_what_is_not_used_any_more_leaves_however_deep_it_is() -> None:
    index = SlotIndex(2, 1000)
    index.put(b"old", None, 5000)
    index.put(b"new", None, 0)
    for number in range(20):  # each is worth a sixth of the old one, and is used once
        index.put(b"next%d" % number, None, 0)
    assert b"old" not in index


def test_pinned_blocks_stay_and_a_store_of_them_takes_none() -> None:
    index = SlotIndex(2, 1000)
    index.put(b"a", None, 0)
    index.put(b"b", None, 0)
    first, second = index.pin(b"a"), index.pin(b"a")
    second_slot = slot(index, b"b")
    assert put(index, b"c") == (second_slot, b"b")
    index.pin(b"c")
    assert index.put(b"d", None, 0) is None
    index.unpin(first)
    assert index.put(b"d", None, 0) is None
    index.unpin(second)
    assert put(index, b"d")[1] == b"a"


def test_a_cleared_store_is_empty_and_gives_pinned_slots_away_later() -> None:
    index = SlotIndex(2, 1000)
    index.put(b"a", b"parent", 32)
    index.put(b"b", None, 0)
    pinned = index.pin(b"a")
    index.clear()
    assert len(index) == 0
    assert index.put(b"a", None, 0) == Put(1 - pinned.slot)
    assert put(index, b"c") == (1 - pinned.slot, b"a")
    index.unpin(pinned)
    assert index.put(b"d", None, 0) == Put(pinned.slot)


def test_a_pinned_block_that_is_dropped_is_not_found_and_gives_its_slot_away_later() -> None:
    index = SlotIndex(1, 1000)
    index.put(b"a", b"parent", 32)
    pinned = index.pin(b"a")
    assert index.drop(b"a") is pinned
    assert index.put(b"a", None, 0) is None
    index.unpin(pinned)
    assert index.put(b"b", None, 0) == Put(pinned.slot)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 6), st.booleans()), max_size=30), st.integers(1, 8))
def test_any_history_keeps_beginnings_and_slots_apart(history: list[tuple[str, int, bool]], slots: int) -> None:
    index = SlotIndex(slots, 1000)
    for name, blocks, pins in history:
        keys = [f"{name}{at}".encode() for at in range(blocks)]
        for at in reversed(range(blocks)):
            if keys[at] in index:
                index.use(keys[at])
            elif pins and keys[0] in index:
                pinned = index.pin(keys[0])
                index.put(keys[at], keys[at - 1] if at else None, at * BLOCK)
                assert keys[0] in index
                index.unpin(pinned)
            else:
                index.put(keys[at], keys[at - 1] if at else None, at * BLOCK)
    names = [f"{name}{at}".encode() for name in "abc" for at in range(6)]
    taken = [slot(index, key) for key in names if key in index]
    assert len(taken) == len(set(taken)) == len(index) <= slots
    for number in range(20 * slots):  # whatever it was, it leaves
        assert index.put(b"new%d" % number, None, 0) is not None
    assert not any(key in index for key in names)
