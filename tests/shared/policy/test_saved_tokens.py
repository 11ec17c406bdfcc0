"""The tokens that a held prefix saves an instance."""

import pytest

from shared.domain.prompt import block_hashes
from shared.policy.prefix_index import PrefixIndex
from shared.policy.saved_tokens import saved_tokens
from tests.shared.policy import views


@pytest.mark.parametrize(
    ("block_size", "prompt_tokens", "computed", "saved"),
    [
        (16, 1000, None, 192),
        (48, 1000, None, 192),
        (128, 1000, None, 128),  # of three blocks of ours one and a half of the engine's
        (32, 192, None, 160),  # the last token is always computed, and with it its block
        (32, 1000, 100, 96),  # a part of the prompt is computed there
        (32, 1000, 0, 0),
        (256, 1000, None, 0),
    ],
)
def test_what_an_engine_saves_is_whole_blocks_of_its_own(
    block_size: int, prompt_tokens: int, computed: int | None, saved: int
) -> None:
    prefix = block_hashes(range(192))
    index = PrefixIndex()
    index.replace("p0", 1, prefix)
    job = views.job(prompt_tokens, prefix=prefix)
    assert saved_tokens(index, views.prefill("p0", block_size=block_size), job, computed) == saved
    assert saved_tokens(index, views.prefill("p1", block_size=block_size), job, computed) == 0
