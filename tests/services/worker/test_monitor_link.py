"""Heartbeats, registration, and policies that follow the monitor's broadcasts."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from services.worker import app, monitor_link
from services.worker.engines.base import EnginePolicies, EngineStats
from services.worker.engines.emulated import EmulatedEngine
from services.worker.monitor_link import SAME_S, TRY_MAX_S, UNHEARD_S, UNREACHED_MAX_S, FollowedPolicies, Telemetry
from shared.domain.instance import InstanceInfo, Role
from shared.domain.policies import PolicySet
from shared.domain.rates import Rates, StepForm, StepRates
from shared.domain.route import PolicySpec
from shared.errors import Conflict, Incompatible, InvalidRequest, Unavailable
from shared.policy.decode_admission import Greedy, PredictedEnd
from shared.policy.papers.tetriinfer import ReserveDynamic
from shared.policy.prefill_order import Fcfs, Sjf
from shared.wire.messages import Heartbeat
from tests.ports import free_port
from tests.services.fake_worker import make_info
from tests.services.worker.engines.test_emulated import settings


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now + 1e9


class Monitor:
    def __init__(self) -> None:
        self.registered = 0
        self.attempts = 0
        self.refusal: Exception | None = None

    async def register(self, info: InstanceInfo, role: Role) -> None:
        self.attempts += 1
        if self.refusal is not None:
            raise self.refusal
        self.registered += 1


class Worker:
    """An instance's insides as telemetry sees them."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.monitor, self.beats = clock, Monitor(), list[Heartbeat]()
        self.stats = EngineStats(free_blocks=10, total_blocks=10)
        self.news: Rates | None = None
        self.roles = SimpleNamespace(role=Role.DECODE, draining=False, inflight=0, epoch=0, accepted=())
        self.decodes = SimpleNamespace(
            queued=0,
            queued_tokens=0,
            active=0,
            heavy=0,
            context_tokens=0,
            inbound_tokens=0,
            kv_ahead=lambda *_: (),
            promised=(),
        )
        parts: dict[str, Any] = {
            "engine": SimpleNamespace(
                stats=lambda: self.stats, steps=SimpleNamespace(prefill_share=0.0, busy_share=0.0)
            ),
            "kv": SimpleNamespace(staged_bytes=0),
            "prefills": SimpleNamespace(queued=0, queued_tokens=0),
            "decodes": self.decodes,
            "rates": SimpleNamespace(
                to_publish=lambda now: self.news, chunk=SimpleNamespace(tokens=512), with_rates=lambda info: info
            ),
            "policies": SimpleNamespace(revision=1, trouble=""),
            "adapters": SimpleNamespace(served={}),
            "publisher": SimpleNamespace(publish=self.beats.append),
        }
        info = make_info("d0", "tcp://127.0.0.1:9", generation=7)
        self.telemetry = Telemetry(info, cast(Any, self.roles), monitor=cast(Any, self.monitor), **parts)

    def beat_for(self, seconds: float) -> int:
        """Beats as the loop does, every tenth of a second; how many were sent."""
        before = len(self.beats)
        for _ in range(round(seconds * 10)):
            self.clock.now += 0.1
            self.telemetry.beat()
        return len(self.beats) - before


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    clock = Clock()
    monkeypatch.setattr(monitor_link, "time", clock)
    return Worker(clock)


def test_an_idle_instance_says_that_it_lives_often_enough_and_no_oftener(worker: Worker) -> None:
    assert worker.beat_for(0.1) == 1
    assert 8 <= worker.beat_for(3.0) <= 3.0 / SAME_S
    gaps = [b.load.time_s - a.load.time_s for a, b in zip(worker.beats, worker.beats[1:], strict=False)]
    assert max(gaps) < 0.8 / 2  # the monitor's patience: one may be lost


@pytest.mark.parametrize("what", ["load", "role", "draining", "rates", "epoch"])
def test_news_are_told_with_the_next_beat(worker: Worker, what: str) -> None:
    worker.beat_for(0.1)
    match what:
        case "load":
            worker.stats = EngineStats(running=3, free_blocks=10, total_blocks=10)
        case "role":
            worker.roles.role = Role.PREFILL
        case "draining":
            worker.roles.draining = True
        case "epoch":
            worker.roles.epoch = 5
        case "rates":
            worker.news = Rates(weight=2.0)
    assert worker.beat_for(0.1) == 1
    worker.news = None
    assert worker.beat_for(0.1) == 0


def test_a_load_that_slides_is_sent_as_often_as_an_idle_one_and_as_it_then_is(worker: Worker) -> None:
    worker.decodes.active = worker.decodes.context_tokens = 8
    assert worker.beat_for(0.1) == 1
    before, tokens = len(worker.beats), 0
    for _ in range(30):
        worker.decodes.context_tokens += 8  # of 32,000
        tokens = worker.decodes.context_tokens
        worker.beat_for(0.1)
    assert 8 <= len(worker.beats) - before <= 12
    gaps = [b.load.time_s - a.load.time_s for a, b in zip(worker.beats, worker.beats[1:], strict=False)]
    assert max(gaps) < 0.8 / 2
    assert tokens - worker.beats[-1].load.context_tokens <= 3 * 8


def test_a_load_that_slides_far_is_told_with_the_next_beat(worker: Worker) -> None:
    worker.beat_for(0.1)
    for _ in range(5):
        worker.decodes.context_tokens += 650  # of 32,000
        assert worker.beat_for(0.1) == 1


async def test_it_registers_until_the_monitor_knows_it_and_again_when_it_is_a_stranger(worker: Worker) -> None:
    worker.monitor.refusal = Unavailable("no monitor yet")
    await worker.telemetry.keep_registered()
    worker.monitor.refusal = Incompatible("another model")
    worker.clock.now += TRY_MAX_S
    await worker.telemetry.keep_registered()
    assert worker.telemetry.refused == "another model"
    worker.monitor.refusal = None
    worker.clock.now += TRY_MAX_S
    for _ in range(10):
        await worker.telemetry.keep_registered()
    assert (worker.monitor.registered, worker.telemetry.refused) == (1, "")
    worker.telemetry.unknown_to_monitor(6)  # a former process of it
    await worker.telemetry.keep_registered()
    assert worker.monitor.registered == 1
    worker.telemetry.unknown_to_monitor(7)
    await worker.telemetry.keep_registered()
    assert worker.monitor.registered == 2


async def test_a_silent_monitor_is_asked_now_and_then(worker: Worker) -> None:
    await worker.telemetry.keep_registered()
    for _ in range(100):
        worker.clock.now += 1.0
        worker.telemetry.monitor_seen()
        await worker.telemetry.keep_registered()
    assert worker.monitor.registered == 1
    for _ in range(round(2 * UNHEARD_S) + 1):
        worker.clock.now += 1.0
        await worker.telemetry.keep_registered()
    assert worker.monitor.registered == 3


async def test_it_is_ready_when_the_monitor_knows_it_and_it_does_not_drain(worker: Worker) -> None:
    assert "not registered yet" in worker.telemetry.unready
    worker.monitor.refusal = Incompatible("another model")
    await worker.telemetry.keep_registered()
    assert "another model" in worker.telemetry.unready
    worker.monitor.refusal = None
    worker.clock.now += TRY_MAX_S
    await worker.telemetry.keep_registered()
    assert worker.telemetry.unready == ""
    worker.roles.draining = True
    assert worker.telemetry.unready == "it is draining"


async def test_a_monitor_that_goes_away_takes_nobody_out_of_service(worker: Worker) -> None:
    await worker.telemetry.keep_registered()
    worker.monitor.refusal = Unavailable("it is away")
    worker.clock.now += UNHEARD_S + 1
    await worker.telemetry.keep_registered()
    assert worker.telemetry.unready == ""


@pytest.mark.parametrize(
    ("refusal", "pause_s"),
    [
        (Incompatible("another model"), TRY_MAX_S),
        (Conflict("the id is taken"), TRY_MAX_S),
        (Unavailable("no monitor"), UNREACHED_MAX_S),
    ],
)
async def test_a_refused_instance_waits_longer_each_time(worker: Worker, refusal: Exception, pause_s: float) -> None:
    """It looks ten times a second; without pauses each look is an attempt."""
    worker.monitor.refusal = refusal

    async def attempts(seconds: float) -> int:
        before = worker.monitor.attempts
        for _ in range(round(seconds * 10)):
            worker.clock.now += 0.1
            await worker.telemetry.keep_registered()
        return worker.monitor.attempts - before

    assert await attempts(1.0) >= 2  # the first pauses are short
    await attempts(20.0)
    assert 600.0 / pause_s - 1 <= await attempts(600.0) <= 2 * 600.0 / pause_s
    worker.roles.role = Role.PREFILL
    assert await attempts(0.1) == 1  # at once, and with short pauses again
    worker.monitor.refusal = None
    assert await attempts(1.0) == 1
    worker.telemetry.unknown_to_monitor(7)
    assert await attempts(0.1) == 1  # at once


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
    with pytest.raises(InvalidRequest, match="unknown prefill order policy 'best'; known: fcfs, ljf, sjf"):
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
    assert (followed.revision, followed.trouble) == (3, "")
    followed.hear(PolicySet(4, prefill_order=PolicySpec("sjf"), step_budget=OFF))
    assert (followed.revision, followed.trouble) == (3, "the engine has not come to its next step yet")
    engine.step()
    assert (followed.revision, followed.trouble) == (4, "")


def test_what_an_engine_cannot_do_is_said_once_and_the_former_policies_stay() -> None:
    engine = Slow()
    followed = FollowedPolicies(cast(Any, engine))
    budget = PolicySet(5, prefill_order=PolicySpec("sjf"), step_budget=PolicySpec("on"))
    with capture_logs() as logs:
        for _ in range(3):
            followed.hear(budget)
    assert [entry["event"] for entry in logs] == ["new policies cannot be followed"]
    assert (followed.revision, followed.trouble) == (0, "step_budget: not here")
    assert engine.given == EnginePolicies()
    followed.hear(PolicySet(6, prefill_order=PolicySpec("sjf"), step_budget=OFF))
    engine.step()
    assert (followed.revision, followed.trouble) == (6, "")
    assert engine.policies == EnginePolicies(Sjf())


async def test_a_worker_hands_its_engine_what_is_known_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.engines.emulated._rates", lambda *_: Rates(step=STEP))
    nobody = {"heartbeat_address": "tcp://127.0.0.1:1", "broadcast_address": "tcp://127.0.0.1:1"}
    made = settings(rpc_port=free_port(), monitor_url="http://127.0.0.1:1", chunk_size="auto", **nobody)
    async with app.running(made, CollectorRegistry()) as instance:
        assert isinstance(instance.engine, EmulatedEngine)
        assert instance.engine._rates() == instance.info.rates.step == STEP
        assert instance.telemetry.info.chunk_size == instance.chunk_size.tokens == 2048  # more tokens cost STEP nothing
