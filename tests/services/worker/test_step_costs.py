"""What an instance learns of its speed: step rates, link rates, and the chunk size."""

import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from services.worker.engines.base import EngineInfo, StepLog
from services.worker.engines.emulated import EmulatedEngine
from services.worker.identity import instance_info
from services.worker.settings import WorkerSettings
from services.worker.step_costs import REPEAT_S, LiveRates, catalogue_steps
from shared.cost.library import Library
from shared.cost.rates_file import Calibration, ControlPlane
from shared.domain.instance import Compatibility, InstanceInfo, KvGeometry
from shared.domain.kv import Codec, KvHandle, TransferOutcome, TransferReport
from shared.domain.rates import UNKNOWN_STEPS, Rates, StepForm, StepRates, StepSource
from shared.errors import NotFound
from shared.policy.step_budget import SMALL, ChunkBounds, chunk_tokens
from tests.services.worker.engines.test_emulated import engine, finish, request, settings, steps
from tests.shared.cost.calibrations import FIT, calibrated


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


@pytest.fixture
def rates_file(tmp_path: Path) -> str:
    path = tmp_path / "calibration.yaml"
    path.write_text(Calibration("d", "c", ControlPlane(), (calibrated(),)).to_yaml())
    return str(path)


@pytest.mark.parametrize("calibrates", [False, True])
def test_an_instance_reports_the_rates_that_a_file_has_for_its_kind(rates_file: str, calibrates: bool) -> None:
    compatibility = Compatibility("abc", "vllm", "1", 2, KvGeometry(6, 2, 64))
    engine = EngineInfo(compatibility, 100, 2048, 32, Rates(price_per_hour=2.0))
    plain = {"model": "/models/demo", "dtype": "float32", "accelerator": "cpu", "weight": 4.0}
    configured = worker(**plain, rates_file=rates_file if calibrates else "")
    expected = Rates(FIT if calibrates else None, price_per_hour=2.0, weight=4.0)
    assert instance_info(configured, engine, 7).rates == expected
    if calibrates:
        with pytest.raises(NotFound, match=r"not calibrated: .*threads 2"):
            instance_info(worker(**plain, rates_file=rates_file, threads=2), engine, 7)


def info(rates: Rates = Rates(price_per_hour=2.0)) -> InstanceInfo:
    fits = Compatibility("f", "vllm", "1", 1, KvGeometry(32, 8, 128))
    return InstanceInfo(
        instance_id="p0",
        generation=1,
        model="m",
        compatibility=fits,
        accelerator="A10",
        dtype="bfloat16",
        tensor_parallel=1,
        block_size=16,
        total_blocks=100,
        max_model_len=4096,
        chunk_size=512,
        rpc="",
        http="",
        kv_endpoints=(),
        rates=rates,
    )


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
    assert (live.start.source, live.step.source) == (StepSource.CATALOGUE, StepSource.LEARNED)


def test_a_step_of_several_tokens_is_a_step_of_its_own_length_and_a_token_is_a_part_of_it() -> None:
    log = StepLog()
    live = LiveRates(worker(), info(), log)
    decodes(log, 0.03)
    live.learn()
    assert live.step.gain == 1.0
    assert live.step.token_s(8, 8000) == live.step.decode_s(8, 8000)
    log.drafted(800, 2400, 0)  # all rejected
    decodes(log, 0.03)
    live.learn()
    assert live.step.gain == 1.0
    for _ in range(20):
        decodes(log, 0.03)
        log.drafted(800, 2400, 1600)  # of 8 decodes in each of 100 steps, two each time
        live.learn()
    assert live.step.decode_s(8, 8000) == pytest.approx(0.03, rel=0.05)
    assert live.step.gain == pytest.approx(3.0, rel=0.1)
    assert live.step.token_s(8, 8000) == pytest.approx(0.01, rel=0.15)
    assert live.to_publish(time.time()).step.gain == live.step.gain


def test_an_accelerator_that_nobody_lists_is_learned_from_nothing() -> None:
    assert catalogue_steps(worker(accelerator="Abacus")) == UNKNOWN_STEPS
    log = StepLog()
    live = LiveRates(worker(accelerator="Abacus"), info(), log)
    decodes(log, 0.003)
    live.learn()
    assert live.step.decode_s(8, 8000) == pytest.approx(0.003, rel=0.05)


def test_a_calibration_is_the_start() -> None:
    start = catalogue_steps(worker(accelerator="A100-SXM-80"))
    live = LiveRates(worker(), info(Rates(start)), StepLog())
    live.learn()
    assert live.step == start


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
    assert live.to_publish(now) == live.current
    assert live.to_publish(now + 0.1) is None
    assert live.to_publish(now + REPEAT_S + 0.1) == live.current
    decodes(log, 1.0)
    live.learn()
    told = live.to_publish(now + REPEAT_S + 0.2)
    assert told is not None
    assert told.step == live.step


HANDLE = KvHandle("t", "other", 1, "f", (), 100, "bfloat16")


def test_what_loading_from_host_memory_takes_is_reported_as_it_is_measured() -> None:
    measured = [0.0]
    engine = EngineInfo(Compatibility("abc", "vllm", "1", 2, KvGeometry(6, 2, 64)), 100, 2048, 32)
    info = instance_info(worker(), engine, 7)
    rates = LiveRates(worker(), info, StepLog(), host_token_s=lambda: measured[0])
    rates.learn()
    before = rates.to_publish(0.0)
    assert before is not None
    assert before.host_token_s == 0.0
    measured[0] = 2e-6
    rates.learn()
    published = rates.to_publish(0.1)
    assert published is not None
    assert published.host_token_s == 2e-6
    measured[0] *= 1.01
    rates.learn()
    assert rates.to_publish(0.2) is None


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


SHORT = StepForm(0.001, 1e-4)  # 90 tokens saturate it


START = Rates(step=StepRates(SHORT, SHORT, SHORT))


AUTO = {"chunk_size": "auto", "max_chunk_size": 512, "max_seqs": 8, "block_size": 32, "emulated_prefix_cache": False}


BOUNDS = ChunkBounds.for_seats(512, 8, 32)


def learn(live: LiveRates, log: StepLog, looks: int = 20) -> None:
    """From 16 prompts at each look, whose steps take 4 ms and 0.1 ms a token: 360 tokens saturate it."""
    for _ in range(looks):
        for tokens in (32, 64, 128, 256) * 4:
            log.add(0.004 + 1e-4 * tokens, 0.0, ((tokens, 0),), 0, 0)
        live.learn()


def chunks(running: EmulatedEngine) -> list[int]:
    return [tokens for step in steps(running) for tokens, _ in step.prefill]


async def test_it_changes_between_steps_once_the_steps_say_else() -> None:
    log = StepLog()  # the engine's own would have this machine's delays in it
    async with engine(**AUTO) as running:
        live = LiveRates(settings(**AUTO), info(START), log, running.set_chunk_size)
        assert live.with_rates(info()).chunk_size == live.chunk.tokens == 96
        await finish(running, request("a", 200, 1))
        assert chunks(running) == [96, 96, 8]
        with capture_logs() as logs:
            learn(live, log)
        assert {entry["event"] for entry in logs} == {"another chunk size"}
        assert (logs[0]["before"], logs[-1]["tokens"]) == (96, live.chunk.tokens)
        assert live.step is not None
        assert live.chunk.tokens == pytest.approx(chunk_tokens(live.step.prefill, BOUNDS), rel=SMALL)
        assert live.chunk.tokens > 2 * 96
        assert live.with_rates(info()).chunk_size == live.chunk.tokens
        assert live.chunk.why.startswith("auto: 90% of the best prefill throughput, by ")
        await finish(running, request("b", 600, 1))
        assert chunks(running)[3:] == [min(live.chunk.tokens, left) for left in range(600, 0, -live.chunk.tokens)]


def test_few_steps_change_nothing() -> None:
    log, used = StepLog(), list[int]()
    live = LiveRates(settings(**AUTO), info(START), log, used.append)
    learn(live, log, looks=1)
    assert used == [96]
    learn(live, log)
    assert used[-1] == live.chunk.tokens > 96


def test_a_number_stays_whatever_is_learned() -> None:
    log, used = StepLog(), list[int]()
    live = LiveRates(settings(chunk_size=64), info(START), log, used.append)
    learn(live, log)
    assert used == [64]
    assert (live.chunk.tokens, live.chunk.why) == (64, "as the settings say")


def test_the_engine_is_started_for_the_most() -> None:
    assert settings(**AUTO).step_tokens == 512
    assert settings(chunk_size=64, max_chunk_size=32).step_tokens == 64
    assert WorkerSettings(**{**settings().model_dump(), "chunk_size": "128"}).chunk_size == 128  # an environment's


@pytest.mark.parametrize("said", ["many", 0, -3, True, 1.5, "", None])
def test_what_is_neither_is_an_error_that_says_so(said: object) -> None:
    with pytest.raises(ValidationError, match="expected a number of tokens, 1 or more, or auto"):
        settings(chunk_size=said)


def test_without_chunked_prefill_a_prompt_has_to_fit_a_step() -> None:
    with pytest.raises(ValidationError, match="`engine_args` turn chunked prefill off"):
        settings(chunk_size="auto", engine_args={"enable_chunked_prefill": False})
