"""compose.yaml: each service's environment is one that its process accepts, and who speaks ZeroMQ has the keys."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.settings import GatewaySettings
from predictor.settings import PredictorSettings
from services.cluster_monitor.settings import MonitorSettings
from services.global_scheduler.settings import SchedulerSettings
from services.planner.settings import PlannerSettings
from services.worker.settings import WorkerSettings
from shared.runtime.settings import ServiceSettings

SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parents[1] / "compose.yaml").read_text())[
    "services"
]
SETTINGS: dict[str, type[ServiceSettings]] = {
    "monitor": MonitorSettings,
    "scheduler": SchedulerSettings,
    "predictor": PredictorSettings,
    "planner": PlannerSettings,
    "prefill": WorkerSettings,
    "decode": WorkerSettings,
    "gateway": GatewaySettings,
}


def environment(name: str) -> dict[str, str]:
    found = SERVICES[name]["environment"]
    return {key: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value)) for key, value in found.items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_process_accepts_its_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in environment(name).items():
        monkeypatch.setenv(key, value)
    SETTINGS[name].load()
    assert any(volume.startswith("keys:/keys") for volume in SERVICES[name]["volumes"])


def test_who_asks_the_predictor_finds_it() -> None:
    port = environment("predictor")["POLYPHASE_PREDICTOR_RPC_ADDRESS"].rpartition(":")[2]
    assert json.loads(environment("gateway")["POLYPHASE_GATEWAY_PREDICTORS"]) == [f"tcp://predictor:{port}"]
    port = environment("predictor")["POLYPHASE_PREDICTOR_PORT"]
    assert json.loads(environment("scheduler")["POLYPHASE_SCHEDULER_PREDICTOR_URLS"]) == [f"http://predictor:{port}"]
