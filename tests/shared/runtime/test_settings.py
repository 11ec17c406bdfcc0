"""Settings keep secrets out of what is printed of them, and out of what is wrong with them."""

from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_settings import SettingsError

from gateway.settings import GatewaySettings
from predictor.settings import PredictorSettings
from services.cluster_monitor.settings import MonitorSettings
from services.global_scheduler.settings import SchedulerSettings
from services.planner.settings import PlannerSettings
from services.worker.settings import WorkerSettings
from shared.runtime.settings import ServiceSettings

KINDS: tuple[type[ServiceSettings], ...] = (
    GatewaySettings,
    PredictorSettings,
    MonitorSettings,
    SchedulerSettings,
    PlannerSettings,
    WorkerSettings,
)
SECRETS: dict[str, Any] = {
    "curve_secret": "planted-1",
    "cluster_token": "planted-2-and-long-enough",
    "database_url": "postgresql://user:planted-3@host/db",
    "tracing": {"endpoint": "http://user:planted-4@host:4318"},
}


def values_of(kind: type[ServiceSettings]) -> dict[str, Any]:
    """What must be given, and of the secrets those that it has."""
    needed: dict[str, Any] = {name: "1" for name, field in kind.model_fields.items() if field.is_required()}
    if kind is GatewaySettings:
        needed["schedulers"] = ("tcp://127.0.0.1:1",)
    return {**needed, **{name: value for name, value in SECRETS.items() if name in kind.model_fields}}


@pytest.mark.parametrize("kind", KINDS)
def test_no_secret_is_printed(kind: type[ServiceSettings]) -> None:
    assert "planted" not in repr(kind(**values_of(kind)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_environment_of_a_process_has_all_of_them(kind: type[ServiceSettings]) -> None:
    environment = str(kind(**values_of(kind)).to_environment())
    assert environment.count("planted") == len(SECRETS.keys() & kind.model_fields.keys())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_wrong_repeats_no_secret(kind: type[ServiceSettings]) -> None:
    for name, value in values_of(kind).items():
        with pytest.raises(ValidationError) as error:
            kind(**{**values_of(kind), name: [value], "log_level": ["planted-5"], "unknown": "planted-6"})
        assert "planted" not in str(error.value)


def test_what_is_wrong_with_several_settings_together_repeats_no_secret() -> None:
    with pytest.raises(ValidationError, match="process must be between 0 and 1, got 3") as error:
        GatewaySettings(schedulers=("tcp://127.0.0.1:1",), model="m", process=3, processes=2, curve_secret="planted")
    assert "planted" not in str(error.value)


@pytest.mark.parametrize(
    "endpoint", ["http//user:planted@h", "http://user:planted@h:port", "grpc://user:planted@h:4317", "user:planted@h"]
)
def test_an_endpoint_that_cannot_be_is_refused_and_not_repeated(endpoint: str) -> None:
    with pytest.raises(ValidationError, match=r"tracing\.endpoint") as error:
        GatewaySettings(schedulers=("tcp://127.0.0.1:1",), model="m", tracing={"endpoint": endpoint})
    assert "planted" not in str(error.value)


def test_a_variable_that_is_no_json_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYPHASE_SCHEDULER_TRACING", '{"endpoint": "http://user:planted@h')
    with pytest.raises((SettingsError, ValidationError), match="tracing") as error:
        SchedulerSettings.load()
    assert "planted" not in str(error.value)
