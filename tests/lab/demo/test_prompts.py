"""Prompts: right lengths, distinct, the same every time, and within the context."""

import pytest

from lab.demo.client import Prompts

TOKENS = [n * 7919 % 4093 for n in range(6000)]


@pytest.mark.parametrize("room", [12, 24, 200])
def test_the_ladder_reaches_from_1_to_over_1000_tokens(room: int) -> None:
    ladder = Prompts(TOKENS, 2048).ladder(room)
    lengths = [len(prompt) for prompt in ladder]
    assert len(ladder) == 25
    assert (min(lengths), max(lengths) >= 1000) == (1, True)
    assert len({tuple(prompt) for prompt in ladder}) == 25
    assert ladder == Prompts(TOKENS, 2048).ladder(room)


def test_a_short_context_shortens_the_ladder() -> None:
    assert max(len(prompt) for prompt in Prompts(TOKENS, 512).ladder(24)) == 488


def test_various_keeps_its_bounds() -> None:
    chosen = Prompts(TOKENS, 2048).various(200, 2, 50, seed=1)
    assert {len(prompt) for prompt in chosen} == set(range(2, 51))
