"""What an instance learns of its own speed from its step log and its imports, and when it tells."""

import time
from typing import Any

import pytest

from services.worker.engines.base import StepLog
from services.worker.settings import WorkerSettings
from services.worker.step_costs import REPEAT_S, LiveRates, catalogue_steps
from shared.cost.library import Library
from shared.domain.instance import Compatibility, InstanceInfo, KvGeometry
from shared.domain.kv import Codec, KvHandle, TransferOutcome, TransferReport
from shared.domain.rates import UNKNOWN_STEPS, PartialPrefillCost, Rates


def worker(**more: Any) -> WorkerSettings:
    values: dict[str, Any] = {
        "instance_id": "p0",
        "model": "Llama-3-8B",
        "accelerator": "A10",
        "rpc_port": 1,
        "http_port": 2,
        "kv_port": 3,
        "monitor_url": "",
        "heartbeat_address": "",
        "broadcast_address": "",
        **more,
    }
    return WorkerSettings(**values)


def info(rates: Rates = Rates(price_per_hour=2.0)) -> InstanceInfo:
    fits = Compatibility("f", "vllm", "1", 1, KvGeometry(32, 8, 128))
    return InstanceInfo("p0", 1, "m", fits, "A10", "bfloat16", 1, 16, 100, 4096, 512, "", "", (), rates=rates)


def decodes(log: StepLog, seconds: float, count: int = 100) -> None:
    for _ in range(count):
        log.add(seconds, 0.0, (), 8, 8000)


def test_it_begins_with_the_catalogue_and_goes_on_with_its_steps() -> None:
    log = StepLog()
    live = LiveRates(worker(), info(), log)
    said = Library.built_in().step_model("A10", "Llama-3-8B").decode_time_s(8, 8000)
    assert live.step.decode_s(8, 8000) == pytest.approx(said, rel=0.1)
    decodes(log, 3 * said)
    live.learn()
    assert live.step.decode_s(8, 8000) == pytest.approx(3 * said, rel=0.05)
    assert live.step.decode.steps > 0
    assert live.current.price_per_hour == 2.0
    assert live.current.batch is not None
    assert live.current.batch.decode_step_s(8, 1000) == pytest.approx(3 * said, rel=0.1)


def test_an_accelerator_that_nobody_lists_is_learned_from_nothing() -> None:
    assert catalogue_steps(worker(accelerator="Abacus")) == UNKNOWN_STEPS
    log = StepLog()
    live = LiveRates(worker(accelerator="Abacus"), info(), log)
    decodes(log, 0.003)
    live.learn()
    assert live.step.decode_s(8, 8000) == pytest.approx(0.003, rel=0.05)


def test_a_calibration_is_the_start() -> None:
    start = catalogue_steps(worker(accelerator="A100-SXM-80"))
    live = LiveRates(worker(), info(Rates(prefill=PartialPrefillCost(1e-4, 0.01), step=start)), StepLog())
    live.learn()
    assert live.step == start
    assert live.current.prefill == PartialPrefillCost(1e-4, 0.01)  # until a step says else


def test_steps_are_learned_from_once() -> None:
    log = StepLog()
    live = LiveRates(worker(), info(), log)
    decodes(log, 0.05, 30)
    live.learn()
    live.learn()
    assert live.step.decode.steps == 30


def test_it_tells_what_has_changed_and_the_same_again_after_a_while() -> None:
    log, now = StepLog(), time.time()
    live = LiveRates(worker(), info(), log)
    assert live.news(now) == live.current
    assert live.news(now + 0.1) is None
    assert live.news(now + REPEAT_S + 0.1) == live.current
    decodes(log, 1.0)
    live.learn()
    told = live.news(now + REPEAT_S + 0.2)
    assert told is not None
    assert told.step == live.step


HANDLE = KvHandle("t", "other", 1, "f", (), 100, "bfloat16")


def test_imports_show_the_link() -> None:
    live = LiveRates(worker(), info(), StepLog())
    pulled = TransferReport(TransferOutcome.PULLED, 100, 100 << 20, 10.0, 10.5)
    for report in (
        pulled,
        TransferReport(TransferOutcome.CACHED),
        TransferReport(TransferOutcome.RECOMPUTED, 9, 9, 1, 2),
    ):
        live.transferred(HANDLE, report)
    live.learn()
    assert live.current.link is not None
    assert live.current.link.bytes_s == pytest.approx((100 << 20) / 0.5)
    coded = KvHandle("t", "other", 1, "f", (), 100, "bfloat16", Codec.INT8)
    live.transferred(coded, TransferReport(TransferOutcome.PULLED, 100, 2 << 20, 10.0, 10.5))
    live.learn()
    assert live.current.link is not None
    assert live.current.link.coded == {"int8": pytest.approx(100 * info().kv_bytes_per_token / 0.5)}
