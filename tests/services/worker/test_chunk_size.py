"""The chunk size that an instance sets itself: learned from its steps, in force from the next step on, and told."""

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from services.worker.engines.base import StepLog
from services.worker.engines.emulated import EmulatedEngine
from services.worker.settings import WorkerSettings
from services.worker.step_costs import LiveRates
from shared.domain.rates import Rates, StepForm, StepRates
from shared.policy.chunk_size import SMALL, ChunkBounds, chunk_tokens
from tests.services.worker.engines.test_emulated import engine, finish, request, settings, steps
from tests.services.worker.test_live_rates import info

SHORT = StepForm(0.001, 1e-4)  # 90 tokens saturate it
START = Rates(step=StepRates(SHORT, SHORT, SHORT))
AUTO = {"chunk_size": "auto", "max_chunk_size": 512, "max_seqs": 8, "block_size": 32, "emulated_prefix_cache": False}
BOUNDS = ChunkBounds.of(512, 8, 32)


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
        assert live.of(info()).chunk_size == live.chunk.tokens == 96
        await finish(running, request("a", 200, 1))
        assert chunks(running) == [96, 96, 8]
        with capture_logs() as logs:
            learn(live, log)
        assert {entry["event"] for entry in logs} == {"another chunk size"}
        assert (logs[0]["before"], logs[-1]["tokens"]) == (96, live.chunk.tokens)
        assert live.step is not None
        assert live.chunk.tokens == pytest.approx(chunk_tokens(live.step.prefill, BOUNDS), rel=SMALL)
        assert live.chunk.tokens > 2 * 96
        assert live.of(info()).chunk_size == live.chunk.tokens
        assert str(live.chunk.describe()["why"]).startswith("auto: 90% of the best prefill throughput, by ")
        await finish(running, request("b", 600, 1))
        assert chunks(running)[3:] == [min(live.chunk.tokens, left) for left in range(600, 0, -live.chunk.tokens)]


def test_what_is_told_is_that_of_these_chunks() -> None:
    log = StepLog()
    live = LiveRates(settings(**AUTO), info(START), log)
    learn(live, log)
    assert live.current.prefill is not None
    assert live.step is not None
    form = live.step.prefill
    token_s = form.token_s + form.position_s * 1024.0 + form.fixed_s / live.chunk.tokens
    assert live.current.prefill.k_p == pytest.approx(token_s)


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
    assert live.chunk.describe() == {"tokens": 64, "why": "as the settings say"}


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
