"""The group advances its members as if each were stepped alone."""

from hypothesis import given
from hypothesis import strategies as st

from shared.domain.job import JobView
from shared.sim.group import DecodeGroup
from shared.sim.request import Leg, SimRequest

BLOCK = 4


def member(context: int, left: int) -> Leg:
    return Leg(SimRequest(0, JobView("0", context, left), left, ()), context + 1, left, context)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20), st.integers(0, 10)), min_size=1, max_size=12),
    st.integers(0, 12),
)
def test_group_equals_members_one_by_one(plan: list[tuple[int, int, int]], leaves_at: int) -> None:
    group = DecodeGroup(BLOCK)
    alone: dict[Leg, list[int]] = {}  # leg → [context, left]
    for step in range(40):
        for context, left, joins_at in plan:
            if joins_at == step:
                leg = member(context, left)
                group.join(leg)
                alone[leg] = [context, left]
        if step == leaves_at and alone:
            leg = next(iter(alone))
            group.leave(leg)
            assert [leg.computed, leg.left] == alone.pop(leg)
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
        assert set(done) == {leg for leg, (_, left) in alone.items() if left == 0}
        for leg in done:
            assert [leg.computed, leg.left] == alone.pop(leg)


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
