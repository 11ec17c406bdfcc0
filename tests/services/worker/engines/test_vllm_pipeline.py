"""The real engine with pipeline stages: the same answers, every step in its log once, nothing left behind."""

from typing import Any

import pytest

from tests.services.worker.engines.own_engine import found_by
from tests.services.worker.engines.pipeline_run import LENGTHS, TOKENS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
RUN = "tests.services.worker.engines.pipeline_run"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by(RUN, tmp_path_factory.mktemp("whole"), ())


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return found_by(RUN, tmp_path_factory.mktemp("divided"), (4, 2))


def test_the_settings_divide_the_layers(whole: dict[str, Any], divided: dict[str, Any]) -> None:
    assert (whole["stages"], whole["rank"]) == ((), True)
    assert (divided["stages"], divided["rank"]) == ((4, 2), False)


def test_the_same_answers(whole: dict[str, Any], divided: dict[str, Any]) -> None:
    assert divided["answers"] == whole["answers"]
    for answers in whole["answers"].values():
        assert [len(answer) for answer in answers] == [TOKENS] * len(LENGTHS)


def test_every_step_is_logged_once_though_others_are_under_way(whole: dict[str, Any], divided: dict[str, Any]) -> None:
    for found in (whole, divided):
        assert found["logged"]["prefill"] == sum(LENGTHS)
        assert found["logged"]["decodes"] == (TOKENS - 1) * len(LENGTHS)
        assert found["logged"]["least_s"] > 0


def test_an_abort_leaves_nothing_behind(divided: dict[str, Any]) -> None:
    left = divided["left"]
    assert (left["free"], left["waiting"]) == (left["total"], 0)
