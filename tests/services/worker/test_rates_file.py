"""An instance reports the rates that a calibration file has for its kind."""

from pathlib import Path
from typing import Any

import pytest

from services.worker.engines.base import EngineInfo
from services.worker.identity import instance_info
from services.worker.settings import WorkerSettings
from shared.cost.rates_file import CalibratedKind, Calibration, ControlPlane, Kind
from shared.domain.instance import Compatibility, KvGeometry
from shared.domain.rates import UNKNOWN_STEPS, Rates, StepSource
from shared.errors import NotFound

MEASURED = Rates(UNKNOWN_STEPS)


def info(rates_file: str, **more: Any) -> Any:
    values: dict[str, Any] = {
        "instance_id": "p0",
        "model": "/models/demo",
        "rpc_port": 1,
        "http_port": 2,
        "kv_port": 3,
        "monitor_url": "",
        "heartbeat_address": "",
        "broadcast_address": "",
        "dtype": "float32",
        "rates_file": rates_file,
        **more,
    }
    compatibility = Compatibility("abc", "vllm", "1", 2, KvGeometry(6, 2, 64))
    engine = EngineInfo(compatibility, 100, 2048, 32, Rates(price_per_hour=2.0))
    return instance_info(WorkerSettings(**values), engine, 7)


@pytest.fixture
def file(tmp_path: Path) -> str:
    kind = CalibratedKind(
        Kind("vllm", "cpu", "demo", "float32", 1, 1),
        "demo",
        ("p0",),
        100,
        5.0,
        50.0,
        0.0,
        1.0,
        1.0,
        0.0,
        0.0,
        1.0,
        0.0,
        (1.0,),
        512,
        MEASURED,
    )
    path = tmp_path / "calibration.yaml"
    path.write_text(Calibration("d", "c", ControlPlane(), (kind,)).to_yaml())
    return str(path)


def test_the_files_costs_and_the_instances_own_price(file: str) -> None:
    rates = info(file).rates
    assert rates.step is not None
    assert (rates.step.decode, rates.step.source) == (UNKNOWN_STEPS.decode, StepSource.FIT)
    assert rates.price_per_hour == 2.0


def test_without_a_file_what_the_engine_knows() -> None:
    assert info("").rates == Rates(price_per_hour=2.0)


@pytest.mark.parametrize("calibrated", [False, True])
def test_the_weight_is_the_settings(file: str, calibrated: bool) -> None:
    assert info(file if calibrated else "", weight=4.0).rates.weight == 4.0


def test_a_kind_that_is_not_in_the_file_is_an_error(file: str) -> None:
    with pytest.raises(NotFound, match=r"not calibrated: .*threads 2"):
        info(file, threads=2)
