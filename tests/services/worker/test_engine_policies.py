"""What an engine goes by, what an instance says of that, and what it learns of its own speed."""

from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from services.worker import app
from services.worker.engines.base import EnginePolicies
from services.worker.engines.emulated import EmulatedEngine
from services.worker.monitor_link import FollowedPolicies
from shared.domain.policies import PolicySet
from shared.domain.rates import Rates, StepForm, StepRates
from shared.domain.route import PolicySpec
from shared.errors import InvalidRequest
from shared.policy.decode_admission import Greedy, PredictedEnd, ReserveDynamic
from shared.policy.prefill_order import Fcfs, Sjf
from tests.ports import free_port
from tests.services.worker.engines.test_emulated import settings

STEP = StepRates(StepForm(0.01), StepForm(0.02), StepForm(0.03))


def test_an_engine_goes_by_its_three_of_a_set() -> None:
    assert EnginePolicies.of(PolicySet()) == EnginePolicies(Fcfs(), Greedy(), step_budget=True)
    said = PolicySet(
        7,
        prefill_order=PolicySpec("sjf", {"window": 3}),
        decode_admission=PolicySpec("reserve_dynamic", {"end": "upper"}),
        step_budget=PolicySpec("on"),
    )
    assert EnginePolicies.of(said) == EnginePolicies(Sjf(3), ReserveDynamic(PredictedEnd.UPPER), step_budget=True)
    with pytest.raises(InvalidRequest, match="unknown prefill order policy 'best'; known: fcfs, least_slack, ljf, sjf"):
        EnginePolicies.of(PolicySet(prefill_order=PolicySpec("best")))


OFF = PolicySpec("off")


class Slow:
    """An engine that comes to its next step when it is told to, and has no budgets."""

    policies = EnginePolicies()
    given: EnginePolicies | None = None

    def set_policies(self, policies: EnginePolicies) -> None:
        if policies.step_budget:
            raise InvalidRequest("step_budget: not here")
        self.given = policies

    def step(self) -> None:
        assert self.given is not None
        self.policies = self.given


def test_a_revision_is_followed_when_the_engine_says_so() -> None:
    engine = Slow()
    followed = FollowedPolicies(cast(Any, engine))
    followed.hear(PolicySet(3, placement=PolicySpec("single"), step_budget=OFF))  # nothing for an engine
    assert followed.describe() == {"revision": 3, "trouble": ""}
    followed.hear(PolicySet(4, prefill_order=PolicySpec("sjf"), step_budget=OFF))
    assert followed.describe() == {"revision": 3, "trouble": "the engine has not come to its next step yet"}
    engine.step()
    assert followed.describe() == {"revision": 4, "trouble": ""}


def test_what_an_engine_cannot_do_is_said_once_and_the_former_policies_stay() -> None:
    engine = Slow()
    followed = FollowedPolicies(cast(Any, engine))
    budget = PolicySet(5, prefill_order=PolicySpec("sjf"), step_budget=PolicySpec("on"))
    with capture_logs() as logs:
        for _ in range(3):
            followed.hear(budget)
    assert [entry["event"] for entry in logs] == ["new policies cannot be followed"]
    assert followed.describe() == {"revision": 0, "trouble": "step_budget: not here"}
    assert engine.given == EnginePolicies()
    followed.hear(PolicySet(6, prefill_order=PolicySpec("sjf"), step_budget=OFF))
    engine.step()
    assert followed.describe() == {"revision": 6, "trouble": ""}
    assert engine.policies == EnginePolicies(Sjf())


async def test_a_worker_hands_its_engine_what_is_known_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.engines.emulated._rates", lambda *_: Rates(step=STEP))
    nobody = {"heartbeat_address": "tcp://127.0.0.1:1", "broadcast_address": "tcp://127.0.0.1:1"}
    made = settings(rpc_port=free_port(), monitor_url="http://127.0.0.1:1", chunk_size="auto", **nobody)
    async with app.running(made, CollectorRegistry()) as instance:
        assert isinstance(instance.engine, EmulatedEngine)
        assert instance.engine._rates() == instance.info.rates.step == STEP
        assert instance.telemetry.info.chunk_size == instance.chunk_size.tokens == 2048  # more tokens cost STEP nothing
