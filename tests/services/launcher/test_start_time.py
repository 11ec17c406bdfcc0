"""How long a start may take: by the size of the model, unless the file says."""

from pathlib import Path
from typing import Any

import pytest

from services.launcher.cluster_file import Cluster
from services.launcher.plan import CAPTURE_S, FETCH_S, READ_BYTES_S, make_plan, start_s_of
from tests.services.worker.test_settings import settings


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    with (folder / "pytorch_model.bin").open("wb") as file:
        file.truncate(141_000_000_000)  # a 70B model's in bfloat16; the file is sparse
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 300 + 141e9 / READ_BYTES_S),
        ({"accelerator": "H100-SXM"}, 300 + 141e9 / READ_BYTES_S + CAPTURE_S),
        ({"accelerator": "H100-SXM", "engine_args": {"enforce_eager": True}}, 300 + 141e9 / READ_BYTES_S),
        ({"engine": "emulated"}, 300),
    ],
)
def test_it_grows_with_the_weights(model: str, changes: dict[str, Any], expected: float) -> None:
    assert start_s_of(settings(model=model, **changes)) == pytest.approx(expected)


def test_a_model_that_has_to_be_fetched_has_half_an_hour() -> None:
    assert start_s_of(settings(model="org/model")) == FETCH_S


@pytest.mark.parametrize("said", [None, 77.0])
def test_what_the_file_says_holds_for_every_process(model: str, tmp_path: Path, said: float | None) -> None:
    launcher = {} if said is None else {"launcher": {"start_s": said}}
    instances = [{"id": "d", "role": "decode"}, {"id": "e", "role": "decode", "engine": "emulated"}]
    cluster = Cluster.model_validate({"name": "c", "model": model, "instances": instances, **launcher})
    plan = make_plan(cluster, tmp_path)
    found = {spec.name: spec.start_s for spec in plan.processes}
    assert found["d"] == plan.start_s == (said or pytest.approx(1005))
    assert found["e"] == (said or 300)
    assert found["gateway"] == found["dashboard"] == (said or 0)  # 0: as usual
    assert [(spec.name, spec.role) for spec in plan.processes if spec.may_be_late] == [("d", "decode"), ("e", "decode")]
