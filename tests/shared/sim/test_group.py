"""The group advances its members as if each were stepped alone."""

from hypothesis import given
from hypothesis import strategies as st

from shared.domain.job import JobView
from shared.sim.entry import Entry
from shared.sim.flight import Flight
from shared.sim.group import DecodeGroup

BLOCK = 4


def member(context: int, left: int) -> Entry:
    return Entry(Flight(0, JobView("0", context, left), left, ()), context + 1, left, context)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20), st.integers(0, 10)), min_size=1, max_size=12),
    st.integers(0, 12),
)
def test_group_equals_members_one_by_one(plan: list[tuple[int, int, int]], leaves_at: int) -> None:
    group = DecodeGroup(BLOCK)
    alone: dict[Entry, list[int]] = {}  # entry → [context, left]
    for step in range(40):
        for context, left, joins_at in plan:
            if joins_at == step:
                entry = member(context, left)
                group.join(entry)
                alone[entry] = [context, left]
        if step == leaves_at and alone:
            entry = next(iter(alone))
            group.leave(entry)
            assert [entry.computed, entry.left] == alone.pop(entry)
        assert group.count == len(alone)
        assert group.context_tokens == sum(context for context, _ in alone.values())
        assert group.blocks_for(1) == sum(context % BLOCK == 0 for context, _ in alone.values())
        if not alone:
            continue
        assert group.steps_to_finish() == min(left for _, left in alone.values())
        done = group.advance(1)
        for state in alone.values():
            state[0] += 1
            state[1] -= 1
        assert set(done) == {entry for entry, (_, left) in alone.items() if left == 0}
        for entry in done:
            assert [entry.computed, entry.left] == alone.pop(entry)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=10), st.integers(1, 60), st.integers(0, 40))
def test_affordable_steps_are_the_most(contexts: list[int], most: int, free: int) -> None:
    group = DecodeGroup(BLOCK)
    for context in contexts:
        group.join(member(context, 100))

    def naive(steps: int) -> int:
        return sum(-(-(c + steps) // BLOCK) - -(-c // BLOCK) for c in contexts)

    assert group.blocks_for(most) == naive(most)
    steps = group.affordable(free, most)
    assert naive(steps) <= free
    assert steps == most or naive(steps + 1) > free
