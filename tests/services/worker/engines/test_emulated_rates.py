from typing import Any

import pytest

from services.worker.engines.emulated import EmulatedEngine
from services.worker.settings import WorkerSettings
from shared.cost.library import Library
from shared.domain.rates import Rates, StepForm, StepRates


async def rates(**changes: Any) -> Rates:
    fields: dict[str, Any] = {
        "instance_id": "e0",
        "engine": "emulated",
        "model": "m",
        "rpc_port": 1,
        "http_port": 2,
        "kv_port": 3,
        "monitor_url": "http://h:1",
        "heartbeat_address": "tcp://127.0.0.1:1",
        "accelerator": "A100",
        "broadcast_address": "tcp://127.0.0.1:2",
        "kv_cache_bytes": 1 << 30,
        "chunk_size": 512,
        **changes,
    }
    engine = EmulatedEngine(WorkerSettings(**fields))
    try:
        return (await engine.start()).rates
    finally:
        await engine.close()


async def test_an_emulated_instance_reports_what_its_cost_model_says() -> None:
    library = Library.built_in()
    model, found = library.step_model("A100", "Llama-3-8B", dtype="bf16"), await rates()
    assert found.step is not None
    assert found.step.prefill_s(512, 1024) == pytest.approx(model.prefill_time_s(512, 1024), rel=0.1)
    assert found.step.decode_s(16, 16_000) == pytest.approx(model.decode_time_s(16, 16_000), rel=0.15)
    assert found.price_per_hour == model.accelerator.price_usd_hour
    slower = (await rates(accelerator="A10")).step
    assert slower is not None
    assert slower.prefill_s(512, 0) > 1.5 * found.step.prefill_s(512, 0)


async def test_one_with_a_fixed_step_reports_that() -> None:
    found = await rates(emulated_step_s=0.01, emulated_prefill_s_per_token=1e-4)
    assert found == Rates(StepRates(StepForm(0.01, 1e-4), StepForm(0.01), StepForm(0.01, 1e-4)))


async def test_a_slowed_one_reports_that_everything_takes_as_many_times_as_long() -> None:
    plain, slow = await rates(), await rates(emulated_slowdown=3.0)
    assert plain.step is not None
    assert slow.step == plain.step.scaled(3.0)
    fixed = await rates(emulated_step_s=0.01, emulated_slowdown=3.0)
    assert fixed.step is not None
    assert fixed.step.decode.fixed_s == pytest.approx(0.03)
