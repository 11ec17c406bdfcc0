"""Made workloads by their words."""

import pytest

from shared.errors import InvalidRequest
from shared.sim.workload import is_made, made


@pytest.mark.parametrize(
    "words", ["azure-conv", "LPHD", "Mixed", "prompt=100,output=20", "prompt=9,output=9,longest=12"]
)
def test_words_and_a_seed_say_it_all(words: str) -> None:
    one, other = made(words, 30, 7), made(words, 30, 7)
    assert is_made(words)
    assert len(one) == 30
    assert not one.arrival_s.any()
    assert (one.prompt_tokens == other.prompt_tokens).all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("/etc/passwd", "no synthetic workload '/etc/passwd'; known: azure-conv"),
        ("prompt=1e300,output=1", "prompt must be at most 1e\\+07"),
        ("prompt=nan,output=1", "prompt must be at most 1e\\+07, not nan"),
        ("prompt=1,output=1,prompt_cv=inf", "prompt_cv must be at most 100"),
        ("prompt=1,output=1,longest=-inf", "longest_tokens must be at least 2"),
    ],
)
def test_what_nobody_can_make(words: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        made(words, 30, 1)
