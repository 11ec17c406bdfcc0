"""The emulated engine: tokens, batches, times, and imports that take theirs."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import fmean
from typing import Any, cast

import msgspec
import pytest

from services.worker.engines.base import EngineRequest, failure
from services.worker.engines.emulated import EmulatedEngine, EmulatedPort
from services.worker.engines.emulated_tokens import answer_tokens, token_at
from services.worker.jobs.decode import DecodeService
from services.worker.jobs.roles import RoleState
from services.worker.settings import WorkerSettings
from shared.cost.kinds import EngineKind, EngineModels, Stage
from shared.cost.library import Library, bundled_geometry
from shared.cost.step import Batch
from shared.domain.instance import InstanceInfo, Role
from shared.domain.job import Generation, JobView
from shared.domain.kv import KvHandle, TransferOutcome
from shared.domain.prompt import packed
from shared.errors import InvalidRequest
from shared.wire.messages import DecodeRequest, StepRecord, TokenStep
from shared.wire.rpc_server import ServerCall
from tests.services.fake_worker import make_info
from tests.services.worker.jobs.sides import Call

STEP_S = 0.002


def settings(**more: Any) -> WorkerSettings:
    values = {
        "instance_id": "d0",
        "model": "m",
        "engine": "emulated",
        "accelerator": "A100-SXM-80",
        "rpc_port": 1,
        "http_port": 2,
        "kv_port": 3,
        "monitor_url": "",
        "heartbeat_address": "",
        "broadcast_address": "",
        "kv_cache_bytes": 1 << 30,
        "chunk_size": 64,
        "max_seqs": 8,
        "emulated_step_s": STEP_S,
        **more,
    }
    return WorkerSettings(**values)


@asynccontextmanager
async def engine(**more: Any) -> AsyncIterator[EmulatedEngine]:
    running = EmulatedEngine(settings(**more))
    await running.start()
    try:
        yield running
    finally:
        await running.close()


def request(name: str, prompt: int, output: int, handle: KvHandle | None = None) -> EngineRequest:
    return EngineRequest(
        name, JobView(name, prompt, output), [1] * prompt, Generation(b"", 1.0), output, import_from=handle
    )


def handle(tokens: int) -> KvHandle:
    return KvHandle("t", "p0", 1, "f", (), tokens, "bfloat16")


async def finish(running: EmulatedEngine, *requests: EngineRequest) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {one.request_id: [] for one in requests}
    ended = {one.request_id: asyncio.Event() for one in requests}

    def sink(name: str) -> Any:
        def take(output: TokenStep) -> None:
            tokens[name] += output.tokens
            if output.finish_reason:
                ended[name].set()

        return take

    for one in requests:
        running.submit(one, sink(one.request_id))
    async with asyncio.timeout(60):
        await asyncio.gather(*(event.wait() for event in ended.values()))
    return tokens


def _unmeasured() -> InstanceInfo:
    return make_info("d0", "tcp://a:1")


def steps(running: EmulatedEngine) -> tuple[StepRecord, ...]:
    return running.steps.page("d0", 1, 0, 1000).steps


async def test_a_prompt_goes_in_chunks_and_then_token_by_token() -> None:
    async with engine() as running:
        tokens = await finish(running, request("a", 100, 3))
        assert len(tokens["a"]) == 3
        batches = [(s.prefill, s.decode_count, s.decode_context_tokens) for s in steps(running)]
        assert batches == [(((64, 0),), 0, 0), (((36, 64),), 0, 0), ((), 1, 100), ((), 1, 101)]
        assert running.stats().running == 0


async def test_what_is_computed_of_a_prompt_shows_between_its_chunks() -> None:
    async with engine() as running:
        lane, partly = running._lanes[0], list[dict[str, int]]()
        end_step = lane._end_step

        def ended(step: Any) -> None:
            end_step(step)
            partly.append(dict(running.stats().partly))

        lane._end_step = ended  # type: ignore[method-assign]
        await finish(running, request("a", 150, 2))
        assert partly == [{"a": 64}, {"a": 128}, {}, {}]


async def test_tokens_do_not_depend_on_who_gives_them() -> None:
    async with engine() as running:
        whole = await finish(running, request("a", 20, 4))
        later = await finish(running, request("b", 21, 3, handle(20)))
        assert whole["a"][1:] == later["b"]


async def test_a_chunk_shares_the_step_with_decodes() -> None:
    async with engine() as running:
        await finish(running, request("a", 10, 6), request("b", 200, 1))
        assert any(step.prefill and step.decode_count for step in steps(running))
        assert all(sum(n for n, _ in step.prefill) + step.decode_count <= 64 for step in steps(running))


async def test_steps_keep_to_the_model_on_average() -> None:
    """As far as the machine lets anybody sleep that long: what one step is late, the next ones make good."""
    slept: list[float] = []

    async def sleep_as_long() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.004)
            slept.append(time.perf_counter() - began)

    async with engine(emulated_step_s=0.004) as running:
        sleeping = asyncio.create_task(sleep_as_long())
        await finish(running, request("a", 10, 100))
        sleeping.cancel()
        took = [step.seconds for step in steps(running)]
        assert 0.003 < fmean(took) < max(0.005, 1.25 * fmean(slept))


async def test_an_import_takes_its_time_on_the_link() -> None:
    async with engine(emulated_link_gbps=1.0) as running:
        loop = asyncio.get_running_loop()
        began = loop.time()
        running.link.expect("t")
        await finish(running, request("a", 33, 1, handle(32)))
        # 32 tokens of Llama-3-8B, 128 KiB each, at 0.58 of 1 Gb/s, and a millisecond.
        expected_s = 32 * 131072 / (0.58 * 1.25e8) + 1e-3
        assert loop.time() - began >= expected_s
        report = running.link.known("t")
        assert report is not None
        assert report.outcome is TransferOutcome.PULLED
        assert (report.tokens, report.wire_bytes) == (32, 32 * 131072)
        assert report.ended_s - report.started_s == pytest.approx(expected_s, rel=0.01)
        assert [(s.prefill, s.decode_count) for s in steps(running)] == [((), 1)]


async def test_a_wait_for_room_is_no_part_of_a_transfer_over_a_link_that_takes_no_time() -> None:
    async with engine(kv_cache_bytes=4 * 32 * 131_072) as running:  # four blocks of 32 tokens
        kv = handle(50)
        service = DecodeService(
            running, EmulatedPort(kv, running.link), RoleState(Role.DECODE), lambda *_: None, _unmeasured
        )
        holds = asyncio.create_task(finish(running, request("holds all blocks", 70, 50)))
        while running.stats().free_blocks > 1:
            await asyncio.sleep(0)
        job = JobView("stream", 51, 5, started=True)
        asked = DecodeRequest(job, packed([2] * 51), Generation(b"", 1.0), kv)
        decoding = asyncio.create_task(service.decode(asked, cast(ServerCall, Call())))
        await holds
        last = steps(running)[50]  # of the one that held all blocks: two for its prompt, and one for each later token
        reply = await asyncio.wait_for(decoding, 10)
    transfer = reply.transfer
    assert transfer.started_s == transfer.ended_s, "the link takes no time"
    assert reply.queued_s < last.ended_s - last.seconds < transfer.started_s, "it waited for room before that"
    assert transfer.started_s <= reply.started_s


async def test_only_reports_of_expected_imports_are_kept() -> None:
    async with engine(emulated_link_gbps=1.0) as running:
        running.link.expect("t")
        running.link.pull(handle(32))
        running.link.forget("t")
        running.link.pull(handle(32))  # its decode has ended
        assert running.link._reports == {}


async def test_a_slowed_engine_takes_as_many_times_as_long_for_steps_and_imports() -> None:
    async with engine(emulated_step_s=0.004, emulated_link_gbps=1.0, emulated_slowdown=5.0) as running:
        await finish(running, request("a", 10, 20))
        assert fmean(step.seconds for step in steps(running)) > 0.019
        assert running.link.pull(handle(32)) == pytest.approx(5 * 32 * 131072 / (0.58 * 1.25e8) + 1e-3, rel=0.01)


async def test_imports_wait_for_each_other_and_work_goes_on_meanwhile() -> None:
    async with engine(emulated_link_gbps=1.0) as running:
        first = running.link.pull(handle(32))
        second = running.link.pull(handle(32))
        assert second > 1.5 * first
        await finish(running, request("a", 33, 1, handle(32)), request("b", 10, 20))
        assert steps(running)[0].prefill == ((10, 0),)


async def test_an_aborted_request_gives_its_blocks_back() -> None:
    async with engine() as running:
        free = running.stats().free_blocks
        running.submit(request("a", 10, 1000), lambda _: None)
        await finish(running, request("b", 10, 2))
        assert running.stats().free_blocks < free
        running.abort("a")
        async with asyncio.timeout(10):
            while running.stats().free_blocks < free:  # until the step under way has ended
                await asyncio.sleep(STEP_S)


async def test_a_pipeline_has_a_lane_for_each_stage() -> None:
    """Two requests are two batches of a pipeline of two: each steps on its own, and nobody shares the other's step."""
    async with engine(pipeline_parallel=2, emulated_step_s=0.02) as running:
        tokens = await finish(running, request("one", 32, 4), request("two", 32, 4))
        assert [len(each) for each in tokens.values()] == [4, 4]
        seen = steps(running)
        assert len(seen) == 8
        assert {step.decode_count for step in seen} == {0, 1}
        stats = running.stats()
        assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.total_blocks)


async def test_an_idle_pipeline_has_all_the_blocks_that_it_told_of() -> None:
    """Also where they do not divide by its lanes: it would never look idle."""
    running = EmulatedEngine(settings(pipeline_parallel=2, kv_cache_bytes=7 * 32 * 131_072))  # 7 blocks of Llama-3-8B
    told = await running.start()
    stats = running.stats()
    await running.close()
    assert (told.total_blocks, stats.total_blocks, stats.free_blocks) == (6, 6, 6)


async def test_unlike_stages_are_as_fast_as_the_simulator_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    models = EngineModels(Library.built_in(), bundled_geometry("Llama-3-8B"))
    kind = EngineKind((Stage("A10", 10), Stage("A100-SXM-80", 22)), dtype="bfloat16")
    told = {
        "pipeline_parallel": 2,
        "pipeline_layers": (10, 22),
        "stage_accelerators": ("A10", "A100-SXM-80"),
        "emulated_step_s": None,
    }
    planned, duration_s = list[float](), EmulatedEngine._duration_s

    def noted(running: EmulatedEngine, batch: Batch) -> float:
        step_s = duration_s(running, batch)
        planned.extend([step_s] * bool(batch.decode_count))
        return step_s

    monkeypatch.setattr(EmulatedEngine, "_duration_s", noted)
    async with engine(**told) as running:
        await finish(running, request("one", 32, 12))
        took = fmean(step.seconds for step in steps(running) if step.decode_count)
    assert fmean(planned) == pytest.approx(models.times(kind).decode_time_s(1, 40), rel=0.25)
    assert took > 0.75 * fmean(planned)  # a busy machine has it take longer


async def test_paths_between_nodes_take_the_ports_place() -> None:
    links = {"near": {"gbps": 100.0, "latency_s": 0.0}, "far": {"gbps": 0.5, "latency_s": 0.0}}
    async with engine(emulated_link_gbps=10.0, emulated_links=links) as running:
        near, far, else_ = (running.link.pull(_from(name)) for name in ("near", "far", "elsewhere"))
        assert far == pytest.approx(200 * near, rel=0.05)
        assert near < else_ < far
        assert running.link.pull(_from("far")) == pytest.approx(2 * far, rel=0.05)  # they take turns


def _from(name: str) -> KvHandle:
    return KvHandle("t", name, 1, "f", (), 1000, "bfloat16")


async def test_a_stop_token_ends_an_answer_before_it_is_as_long_as_was_asked() -> None:
    asked = request("a", 20, 50)
    stops = Generation(msgspec.msgpack.encode({"max_tokens": 50, "stop_token_ids": [7, token_at(24)]}), 1.0)
    async with engine() as running:
        tokens = await finish(running, msgspec.structs.replace(asked, generation=stops))
    assert tokens["a"] == [token_at(at) for at in range(20, 25)]


@pytest.mark.parametrize("sampling", [b"", b"no sampling parameters", msgspec.msgpack.encode({})])
def test_without_stop_tokens_an_answer_is_as_long_as_was_asked(sampling: bytes) -> None:
    asked = msgspec.structs.replace(request("a", 20, 50), generation=Generation(sampling, 1.0))
    assert answer_tokens(asked) == (50, "length")


def test_why_an_answer_ends_is_said() -> None:
    stops = Generation(msgspec.msgpack.encode({"stop_token_ids": [token_at(22)]}), 1.0)
    assert answer_tokens(msgspec.structs.replace(request("a", 20, 50), generation=stops)) == (3, "stop")
    assert answer_tokens(msgspec.structs.replace(request("a", 20, 2), generation=stops)) == (2, "length")


@pytest.mark.parametrize(
    "wish", [{"logprobs": 0}, {"logprobs": 5}, {"prompt_logprobs": 20}, {"logprob_token_ids": [1]}]
)
async def test_log_probabilities_are_refused_with_the_reason(wish: dict[str, Any]) -> None:
    asked = msgspec.structs.replace(
        request("a", 20, 50), generation=Generation(msgspec.msgpack.encode({"max_tokens": 50, **wish}), 1.0)
    )
    steps: list[TokenStep] = []
    async with engine() as running:
        running.submit(asked, steps.append)
        (step,) = steps
        error = failure("job", step)
        assert isinstance(error, InvalidRequest)
        assert "an emulated engine has no model and no log probabilities" in error.message
        assert running.stats().waiting == 0


async def test_an_answer_begins_with_its_forced_tokens() -> None:
    async with engine() as running:
        forced = msgspec.structs.replace(request("again", 10, 6), forced_tokens=[7, 8, 9])
        tokens = await finish(running, forced)
        assert tokens["again"] == [7, 8, 9, *(token_at(at) for at in (13, 14, 15))]


async def test_a_request_that_outgrows_the_kv_memory_ends_and_a_prompt_that_does_not_fit_is_refused() -> None:
    async with engine(kv_cache_bytes=4 * 32 * 131_072) as running:  # 128 tokens
        tokens = await finish(running, request("grows", 100, 50))
        assert len(tokens["grows"]) == 28
        steps: list[TokenStep] = []
        running.submit(request("long", 128, 5), steps.append)
        assert [step.finish_reason for step in steps] == ["refused"]
        assert "must fit in 128 tokens of KV" in steps[0].stop_reason
