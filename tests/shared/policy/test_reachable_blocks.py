"""What of a cache can be hit, against counting it anew each time."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.policy.reachable_blocks import ReachableBlocks

BLOCKS = 7  # a binary tree: block n follows (n - 1) // 2, and 0 begins a prompt


def parent(block: int) -> int | None:
    return (block - 1) // 2 if block else None


def reachable(held: set[int]) -> set[int]:
    found: set[int] = set()
    for block in sorted(held):
        before = parent(block)
        if before is None or before in found:
            found.add(block)
    return found


kinds = st.sampled_from(["hold", "hold", "hold", "drop", "drop", "take", "clear"])


@settings(max_examples=300)
@given(st.lists(st.tuples(kinds, st.integers(0, BLOCKS - 1)), min_size=20, max_size=60))
def test_a_block_counts_while_all_before_it_are_held(steps: list[tuple[str, int]]) -> None:
    blocks, held, told = ReachableBlocks(), set[int](), set[int]()
    for what, block in steps:
        if what == "hold":
            blocks.hold(block, parent(block))
            held.add(block)
        elif what == "drop":
            blocks.drop(block)
            held.discard(block)
        elif what == "clear" and not block:
            blocks.clear()
            held.clear()
        else:
            _take(blocks, told)
            assert told == reachable(held)
        assert set(blocks.blocks) == reachable(held)
        order = list(blocks.blocks)
        assert all(parent(one) in (None, *order[:at]) for at, one in enumerate(order))
    _take(blocks, told)
    assert told == reachable(held)
    assert not blocks.changed


def _take(blocks: ReachableBlocks, told: set[int]) -> None:
    added, removed = blocks.take_changes()
    assert not set(added) & told
    assert set(removed) <= told
    told.difference_update(removed)
    for block in added:
        assert parent(block) is None or parent(block) in told
        told.add(block)
