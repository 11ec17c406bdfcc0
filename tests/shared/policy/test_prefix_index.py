"""The prefix index against a plain table, lost deltas, and its bounds."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.domain.prompt import PrefixDelta, block_hashes
from shared.policy.prefix_index import PrefixIndex, run_length

TOKENS = 4
PROMPTS = [block_hashes(list(text.encode()), block_tokens=1) for text in ("aaaaaa", "aaabbb", "aaabbc", "bbbbbb", "ab")]
INSTANCES = ("i0", "i1", "i2")
# Each step tells of one instance: prompts that it holds from now on, and to how many blocks it cuts one.
steps = st.lists(
    st.tuples(st.sampled_from(INSTANCES), st.sampled_from(PROMPTS), st.integers(0, 6), st.sampled_from("+++--ls")),
    max_size=40,
)


class Teller:
    def __init__(self) -> None:
        self.generation, self.sequence = 1, -1
        self.held: dict[int, None] = {}

    def delta(self, wanted: dict[int, None]) -> PrefixDelta:
        added, removed = [b for b in wanted if b not in self.held], [b for b in self.held if b not in wanted]
        self.held, self.sequence = wanted, self.sequence + 1
        return PrefixDelta(self.generation, self.sequence, added, removed, starts=not self.sequence)

    def snapshot(self) -> PrefixDelta:
        wanted, self.held, self.sequence = self.held, {}, -1
        return self.delta(wanted)


def without(held: dict[int, None], prompt: Sequence[int], count: int) -> dict[int, None]:
    """Hold no block of `prompt` from `count` on, nor what follows one of those."""
    lost = set(prompt[count:])
    for other in PROMPTS:
        at = next((at for at, block in enumerate(other) if block in lost), len(other))
        lost |= set(other[at:])
    return {block: None for block in held if block not in lost}


def run(held: dict[int, None], prompt: Sequence[int]) -> int:
    return next((at for at, block in enumerate(prompt) if block not in held), len(prompt))


@pytest.mark.parametrize("end", range(4))
@pytest.mark.parametrize("held", range(4))
def test_the_length_of_a_run_is_found_among_the_first_blocks(held: int, end: int) -> None:
    a_b_c, length = (11, 22, 33), min(held, end)
    for known in range(length + 1):
        assert run_length(a_b_c, lambda block: block not in a_b_c[:held], known, end) == length


@given(steps, st.integers(1, 4))
def test_it_knows_what_was_told(told: list[tuple[str, tuple[int, ...], int, str]], limit: int) -> None:
    index = PrefixIndex(block_tokens=TOKENS)
    tellers = {name: Teller() for name in INSTANCES}
    known: dict[str, dict[int, None]] = {}
    for name, prompt, count, what in told:
        teller = tellers[name]
        wanted = without(teller.held, prompt, count) if what == "-" else teller.held | dict.fromkeys(prompt[:count])
        if what == "s":  # it is asked anew
            teller.held = wanted
            assert index.apply(name, teller.snapshot())
            known[name] = wanted
            continue
        delta = teller.delta(wanted)
        if what == "l" or (name not in known and not delta.starts):  # lost, or of an account whose beginning was lost
            known.pop(name, None)
            assert not index.apply(name, teller.delta(wanted) if what == "l" else delta)
            continue
        assert index.apply(name, delta)
        known[name] = wanted
    assert index.known == known.keys()
    assert len(index) == sum(len(held) for held in known.values())
    for prompt in PROMPTS:
        runs = {name: run(held, prompt) * TOKENS for name, held in known.items()}
        for name in INSTANCES:
            assert index.held_tokens(name, prompt) == runs.get(name, 0)
        found = index.holders(prompt, limit)
        assert [tokens for _, tokens in found] == sorted(filter(None, runs.values()), reverse=True)[:limit]
        assert all(runs[name] == tokens for name, tokens in found)


@given(steps, st.integers(1, 12))
def test_with_too_many_blocks_it_knows_less_and_nothing_wrong(
    told: list[tuple[str, tuple[int, ...], int, str]], most: int
) -> None:
    indices = [PrefixIndex(block_tokens=TOKENS, max_blocks=most) for _ in range(2)]
    tellers = {name: Teller() for name in INSTANCES}
    for name, prompt, count, what in told:
        teller = tellers[name]
        wanted = without(teller.held, prompt, count) if what == "-" else teller.held | dict.fromkeys(prompt[:count])
        delta = teller.delta(wanted)
        for index in indices:
            assert index.apply(name, delta)
            assert len(index) <= most
    for prompt in PROMPTS:
        for index in indices:
            for name, teller in tellers.items():
                assert index.held_tokens(name, prompt) <= run(teller.held, prompt) * TOKENS
            assert all(tokens <= run(tellers[name].held, prompt) * TOKENS for name, tokens in index.holders(prompt, 3))
        assert indices[0].holders(prompt, 3) == indices[1].holders(prompt, 3)
    for index in indices:
        for name in INSTANCES:
            index.forget(name)
        assert len(index) == 0
        assert not index.holders(PROMPTS[0], 9)
        assert len(index._table) == 0


def test_a_delta_that_comes_twice_or_from_another_life_is_a_lost_one() -> None:
    for wrong in (PrefixDelta(1, 0), PrefixDelta(2, 1), PrefixDelta(1, -1)):
        index = PrefixIndex(block_tokens=TOKENS)
        index.replace("i0", 1, PROMPTS[0])
        assert not index.apply("i0", wrong)
        assert index.held_tokens("i0", PROMPTS[0]) == 0


def test_holders_of_a_block_come_and_go_in_any_number() -> None:
    block = (1,)
    index, names = PrefixIndex(), [f"i{number}" for number in range(12)]
    for number, name in enumerate(names):
        index.replace(name, 1, block)
        assert [holder for holder, _ in index.holders(block, 99)] == names[: number + 1]
    for number, name in enumerate(names):
        assert index.apply(name, PrefixDelta(1, 1, removed=list(block)))
        assert [holder for holder, _ in index.holders(block, 99)] == names[number + 1 :]
    assert (len(index), len(index._table)) == (0, 0)
