"""What the settings say an engine goes by, and what it learns of its own speed."""

import socket
from typing import Any

import pytest

from services.worker import app
from services.worker.engines.emulated import EmulatedEngine
from services.worker.engines.policies import EnginePolicies, policies_of
from shared.domain.rates import Rates, StepForm, StepRates
from shared.errors import InvalidRequest
from shared.policy.decode_admission import Greedy, ReserveDynamic
from shared.policy.lengths import PredictedEnd
from shared.policy.prefill_order import Fcfs, Sjf
from tests.services.worker.engines.test_emulated import settings

STEP = StepRates(StepForm(0.01), StepForm(0.02), StepForm(0.03))


def test_settings_name_the_policies_and_their_parameters() -> None:
    assert policies_of(settings()) == EnginePolicies(Fcfs(), Greedy(), step_budget=False)
    said = settings(
        prefill_order="sjf",
        prefill_order_parameters={"window": 3},
        decode_admission="reserve_dynamic",
        decode_admission_parameters={"end": "upper"},
        step_budget=True,
    )
    assert policies_of(said) == EnginePolicies(Sjf(3), ReserveDynamic(PredictedEnd.UPPER), step_budget=True)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"prefill_order": "fastest"}, "unknown prefill order policy 'fastest'; known: fcfs, least_slack, ljf, sjf"),
        ({"prefill_order_parameters": {"window": 3}}, "prefill order policy 'fcfs' has no parameter 'window'"),
        ({"decode_admission": "all"}, "unknown decode admission policy 'all'"),
        (
            {"decode_admission": "reserve_static", "decode_admission_parameters": {"end": "best"}},
            "reserve_static.end must be one of lower, middle, upper",
        ),
    ],
)
def test_a_wrong_setting_ends_the_start_and_names_the_choices(said: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidRequest, match=error):
        EmulatedEngine(settings(**said))


async def test_a_worker_hands_its_engine_what_is_known_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "WorkerMetrics", lambda *_: None)
    monkeypatch.setattr("services.worker.engines.emulated._rates", lambda *_: Rates(step=STEP))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nobody = {"heartbeat_address": "tcp://127.0.0.1:1", "broadcast_address": "tcp://127.0.0.1:1"}
    made = settings(rpc_port=port, monitor_url="http://127.0.0.1:1", step_budget=True, **nobody)
    async with app.running(made) as instance:
        assert isinstance(instance.engine, EmulatedEngine)
        assert instance.engine._rates() == instance.info.rates.step == STEP
        assert instance.engine.policies.names()["step_budget"] is True
