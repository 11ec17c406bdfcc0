"""When a reported load is broadcast: at once with news, else with the next broadcast. When heartbeats are read."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from services.cluster_monitor import broadcaster
from services.cluster_monitor.broadcaster import READ_S, REST_S, RESTED_S, SLICE, Broadcaster, Heartbeats
from services.cluster_monitor.registry import Record
from services.cluster_monitor.settings import MonitorSettings
from shared.domain.cluster import ClusterDelta
from shared.domain.instance import InstanceLoad, InstanceState, Role
from shared.domain.policies import PolicySet
from shared.wire.messages import Heartbeat
from tests.services.fake_worker import make_info

BUSY = InstanceLoad(time_s=1.0, decoding=4, inflight=4, context_tokens=1_000, free_blocks=900)


class Alarm:
    def __init__(self) -> None:
        self.rings = 0

    def by(self, _: float) -> None:
        self.rings += 1

    def cancel(self) -> None: ...


class Monitor:
    """A broadcaster whose broadcasts the test makes."""

    def __init__(self, count: int = 1) -> None:
        self.sent: list[ClusterDelta] = []
        infos = [make_info(f"d{number}", "tcp://127.0.0.1:9") for number in range(count)]
        self.records = [
            Record(info=info, role=Role.DECODE, connection=None, registered_s=0.0, registered_mono=0.0)
            for info in infos
        ]
        by_id = {record.instance_id: record for record in self.records}
        nothing = lambda *_: None  # noqa: E731
        parts: dict[str, Any] = {
            "registry": SimpleNamespace(
                on_change=nothing, on_renewed=nothing, on_gone=nothing, all=lambda: self.records, find=by_id.get
            ),
            "book": SimpleNamespace(policies=PolicySet()),
            "publisher": SimpleNamespace(change=self.sent.append, policies=nothing, sent_bytes=0),
            "memory": SimpleNamespace(empty=True),
            "term": SimpleNamespace(epoch=0, check=lambda: None),
        }
        self.broadcaster = Broadcaster(MonitorSettings(), **parts)
        self.alarm = Alarm()
        self.broadcaster._alarm = cast(Any, self.alarm)
        for record in self.records:
            record.state = InstanceState.READY
            self.report(record, BUSY)
        self.broadcast()

    def report(self, record: Record, load: InstanceLoad, **changes: Any) -> bool:
        """Whether the load that an instance reports causes a broadcast."""
        before = self.alarm.rings, self.broadcaster._due
        record.load = msgspec.structs.replace(load, **changes)
        self.broadcaster.loaded(record)
        return (self.alarm.rings, self.broadcaster._due) != before

    def broadcast(self) -> dict[str, InstanceLoad]:
        """The loads of the broadcast that is made now."""
        self.broadcaster._sent_mono = -60.0  # a sign of life is due
        self.broadcaster.publish()
        return self.sent[-1].loads


@pytest.fixture
async def monitor() -> Monitor:
    return Monitor()


async def test_a_load_with_news_causes_a_broadcast(monitor: Monitor) -> None:
    (record,) = monitor.records
    assert monitor.report(record, BUSY, decoding=5)
    assert monitor.broadcast() == {"d0": record.load}


async def test_a_load_that_slides_goes_with_the_next_broadcast(monitor: Monitor) -> None:
    (record,) = monitor.records
    for tokens in (1_004, 1_008, 1_012):
        assert not monitor.report(record, BUSY, context_tokens=tokens)
    assert monitor.broadcast() == {"d0": record.load}
    assert record.load.context_tokens == 1_012


async def test_drift_adds_up_from_what_listeners_know_not_from_the_last_report(monitor: Monitor) -> None:
    (record,) = monitor.records
    limit = 0.02 * record.info.total_blocks * record.info.block_size
    assert not monitor.report(record, BUSY, context_tokens=1_000 + int(0.6 * limit))
    assert monitor.report(record, BUSY, context_tokens=1_000 + int(1.2 * limit))


async def test_an_idle_load_is_repeated_only_now_and_then(monitor: Monitor) -> None:
    (record,) = monitor.records
    idle = InstanceLoad(time_s=1.0, free_blocks=1_000)
    monitor.report(record, idle)
    monitor.broadcast()
    assert not monitor.report(record, idle, time_s=2.0)
    assert monitor.broadcast() == {}
    record.sent_mono -= 1.5
    assert not monitor.report(record, idle, time_s=3.0)
    assert monitor.broadcast() == {"d0": record.load}


async def test_loads_that_slide_do_not_pile_up_beyond_a_slice() -> None:
    monitor = Monitor(SLICE)
    *others, last = monitor.records
    assert not any(monitor.report(record, BUSY, context_tokens=1_001) for record in others)
    assert monitor.report(last, BUSY, context_tokens=1_001)
    assert len(monitor.broadcast()) == SLICE


class Reading:
    """Heartbeats of one ready instance, read at times that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_mono = 100.0
        self.silence_mono = 1e9  # what the registry's `tick` returns
        self.ticks = 0
        self.monitor = Monitor()
        (self.record,) = self.monitor.records
        loop = SimpleNamespace(time=lambda: self.now_mono)
        monkeypatch.setattr(broadcaster, "asyncio", SimpleNamespace(get_running_loop=lambda: loop))
        registry = SimpleNamespace(find=lambda _: self.record, tick=self._tick, settle=lambda _: None)
        parts: dict[str, Any] = {"registry": registry, "memory": None, "broadcaster": self.monitor.broadcaster}
        self.beats = Heartbeats(**parts, settings=MonitorSettings())

    def _tick(self, _: float) -> float:
        self.ticks += 1
        return self.silence_mono

    def read_after(self, seconds: float, load: InstanceLoad | None = None) -> float:
        """Seconds until the next read."""
        self.now_mono += seconds
        if load is not None:
            info = self.record.info
            self.beats.handle(Heartbeat(info.instance_id, info.generation, self.record.role, False, load))
        return self.beats.was_read()


@pytest.fixture
async def reading(monkeypatch: pytest.MonkeyPatch) -> Reading:
    return Reading(monkeypatch)


IDLE = InstanceLoad(time_s=1.0, free_blocks=1_000)


async def test_heartbeats_without_news_are_read_less_often(reading: Reading) -> None:
    assert reading.read_after(0.1, IDLE) == READ_S
    reading.monitor.broadcast()
    while reading.now_mono - 100.1 < RESTED_S - 0.15:
        assert reading.read_after(0.1) == READ_S
    assert reading.read_after(0.2) == REST_S
    assert reading.read_after(0.25, IDLE) == REST_S  # a repetition
    assert reading.read_after(0.25, msgspec.structs.replace(IDLE, waiting=1)) == READ_S


async def test_heartbeats_of_instances_with_work_are_read_often(reading: Reading) -> None:
    reading.read_after(0.1, BUSY)
    for _ in range(20):
        assert reading.read_after(0.1, BUSY) == READ_S


async def test_where_an_instance_may_be_silent_heartbeats_are_read_often(reading: Reading) -> None:
    reading.read_after(0.25)
    while reading.read_after(0.25) != REST_S:
        pass
    reading.silence_mono = reading.now_mono + 0.3
    reading.beats._silence_mono = reading.silence_mono
    assert reading.read_after(0.1) == READ_S


async def test_after_a_stall_silence_is_not_judged_before_the_next_read(reading: Reading) -> None:
    reading.read_after(0.1)
    reading.silence_mono = reading.beats._silence_mono = reading.now_mono + 0.5
    before = reading.ticks
    assert reading.read_after(5.0) == READ_S
    assert reading.ticks == before
    reading.read_after(READ_S)
    assert reading.ticks == before + 1
