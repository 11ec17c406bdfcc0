"""A real engine with n-gram speculation beside one without: equal tokens, also after known ones, and what it counts."""

from typing import Any

import pytest

from tests.services.worker.engines.drafts_run import DRAFTED, KNOWN, OWN, kinds
from tests.services.worker.engines.own_engine import found_by

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
Found = dict[str, Any]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return found_by("tests.services.worker.engines.drafts_run", tmp_path_factory.mktemp("plain"), False)


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return found_by("tests.services.worker.engines.drafts_run", tmp_path_factory.mktemp("drafting"), True)


@pytest.mark.parametrize("kind", kinds())
def test_known_tokens_are_repeated_and_the_answer_goes_on_as_without_drafts(
    plain: Found, drafting: Found, kind: str
) -> None:
    first, known, *_ = drafting["answers"][kind]
    assert drafting["answers"][kind] == plain["answers"][kind]
    assert len(known) > len(KNOWN)
    assert known == first if kind in OWN else known[: len(KNOWN)] == KNOWN != first[: len(KNOWN)]


@pytest.mark.parametrize("kind", kinds())
def test_an_answer_that_another_engine_has_begun_goes_on(plain: Found, drafting: Found, kind: str) -> None:
    """With drafts, and without the state of a thinking budget, its tokens are generated again, and not given out."""
    for found in (plain, drafting):
        _, known, ends, resumed, end = found["answers"][kind]
        assert resumed == known
        assert end == ends[1]


def test_drafts_are_counted_and_a_decode_with_drafts_is_no_prompt(plain: Found, drafting: Found) -> None:
    drafts, drafted, accepted = drafting["drafts"]
    assert plain["drafts"] == [0, 0, 0]
    assert 0 < accepted < drafted <= DRAFTED * drafts
    answers = [tokens for both in drafting["answers"].values() for tokens in both[:2]]
    later = sum(len(tokens) - 1 for tokens in answers)  # the first token of each comes from the step of its prompt
    assert plain["decodes"] == later
    assert later <= drafting["decodes"] + accepted <= later + DRAFTED * len(answers)
    assert drafting["decodes"] < later
    assert sum(tokens for tokens, _ in drafting["chunks"]) == drafting["prompt"] * len(answers)
    assert drafting["chunks"] == plain["chunks"]


def test_what_speculation_would_ignore_is_refused(plain: Found, drafting: Found) -> None:
    assert plain["refused"][0] == "length"
    assert drafting["refused"][0] == "refused"
    assert "logit_bias" in drafting["refused"][1]
