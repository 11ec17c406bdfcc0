import pytest

from shared.policy.decode_admission import DecodeMemory, Greedy
from tests.shared.policy.views import job


@pytest.mark.parametrize(("prompt", "free", "admitted"), [(16, 1, True), (17, 1, False), (17, 2, True), (1, 0, False)])
def test_greedy_admits_iff_the_prompt_fits_now(prompt: int, free: int, admitted: bool) -> None:
    memory = DecodeMemory(free_blocks=free, block_size=16, total_blocks=100)
    assert Greedy().admit(job(prompt, 100_000), memory, 0.0).admitted is admitted
