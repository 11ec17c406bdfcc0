"""What goes wrong with the output of one request ends that request, with a typed error, and no other."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from gateway.job import JobSpec
from services.worker.engines.vllm import encode_logprobs, encode_prompt_logprobs
from shared.domain.job import Phase
from shared.wire.messages import TokenStep
from tests.gateway.api import Api, until
from tests.gateway.worker import answer

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]
OTHERS, TOKENS = 16, 6
Poison = Callable[[Any, str], None]  # of a request that has just started, by the core and the request's id


class Boom(Exception):
    """The fault."""


def boom(*_: Any, **__: Any) -> Any:
    raise Boom("secret detail")


def _state(core: Any, request_id: str) -> Any:
    return core._requests.request_states[request_id]


def _for_this_one(owner: Any, method: str, names: Callable[[Any], bool]) -> None:
    """`owner.method` raises once, when its first argument is of this request; then it is itself again."""
    usual = getattr(owner, method)

    def poisoned(first: Any, *rest: Any) -> Any:
        if not names(first):
            return usual(first, *rest)
        setattr(owner, method, usual)
        raise Boom("secret detail")

    setattr(owner, method, poisoned)


def bad_logprobs(core: Any, request_id: str) -> None:
    job = core._jobs[request_id].job
    emit = job.emit
    job.emit = lambda step: emit(TokenStep(step.tokens, step.finish_reason, step.stop_reason, logprobs=b"garbage"))


def bad_finish_reason(core: Any, request_id: str) -> None:
    job = core._jobs[request_id].job
    emit = job.emit
    job.emit = lambda step: emit(TokenStep(step.tokens, "of no kind"))


def statistics(core: Any, request_id: str) -> None:
    state = _state(core, request_id)
    _for_this_one(core._requests, "_update_stats_from_output", lambda one: one is state)


def detokeniser(core: Any, request_id: str) -> None:
    _state(core, request_id).detokenizer.update = boom


def logprobs_of_output(core: Any, request_id: str) -> None:
    _state(core, request_id).logprobs_processor.update_from_output = boom


def output_itself(core: Any, request_id: str) -> None:
    _state(core, request_id).make_request_output = boom  # which aborting calls, too


def collector(core: Any, request_id: str) -> None:
    queue = _state(core, request_id).queue
    _for_this_one(queue, "put", lambda output: not isinstance(output, Exception))


def end_of_request(core: Any, request_id: str) -> None:
    state = _state(core, request_id)
    _for_this_one(core._requests, "_finish_request", lambda one: one is state)


VLLMS: list[Poison] = [
    bad_logprobs,
    bad_finish_reason,
    statistics,
    detokeniser,
    logprobs_of_output,
    output_itself,
    collector,
    end_of_request,
]


def _of_stream(name: str) -> Poison:
    def poison(core: Any, request_id: str) -> None:
        setattr(core._jobs[request_id].stream, name, boom)

    poison.__name__ = f"stream.{name}"
    return poison


def events_of_stream(core: Any, request_id: str) -> None:
    chunks = core._jobs[request_id].stream._chunks
    chunks.text = chunks.last = boom


PLAIN: list[Poison] = [
    bad_finish_reason,
    detokeniser,
    end_of_request,
    events_of_stream,
    *map(_of_stream, ("accept", "advance", "_send", "new_events", "begin", "last", "_events")),
]
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "vllm's stream": {"stream": True, "return_token_ids": True},
    "two answers": {"stream": True, "n": 2, "temperature": 1},
    "plain stream": {"stream": True},
}
CASES = [
    pytest.param(WAYS[way], poison, id=f"{way}, {poison.__name__}")
    for way in WAYS
    for poison in (PLAIN if way == "plain stream" else VLLMS)
]


@asynccontextmanager
async def others(api: Api) -> AsyncIterator[None]:
    """16 streams that are in the middle of their answers within the block, and get all of them after it."""
    go = asyncio.Event()

    async def pause(count: int) -> None:
        if count >= 2:
            await go.wait()

    for worker in api.workers:
        worker.before_token = pause

    async def one(number: int) -> tuple[list[int], str]:
        """Its token ids, where they are told, and its text."""
        ids: list[int] = []
        text, told = "", number % 2 == 0
        body = {"model": "demo", "prompt": prompt_of(number), "max_tokens": TOKENS, "temperature": 0, "stream": True}
        async with api.client.stream("POST", "/v1/completions", json=body | {"return_token_ids": told}) as response:
            assert response.status_code == 200
            lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
        assert lines.pop() == "data: [DONE]"
        for line in lines:
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            text += choice["text"]
            ids += choice["token_ids"] or []
        return ids, text

    def prompt_of(number: int) -> list[int]:
        return [400 + number // 2, 401, 402, 403]

    tasks = [asyncio.create_task(one(number)) for number in range(OTHERS)]
    core = api.app.state.engine_client._core
    await until(lambda: sum(len(running.job.tokens) == 3 for running in core._jobs.values()) == OTHERS)
    try:
        yield
        assert not any(task.done() for task in tasks)
    finally:
        go.set()
    found = await asyncio.gather(*tasks)
    for number in range(0, OTHERS, 2):
        assert found[number][0] == answer(prompt_of(number), TOKENS)
        assert found[number + 1][1] == found[number][1]  # two ways of writing the same answer


@pytest.mark.parametrize(("way", "poison"), CASES)
async def test_a_fault_in_the_output_of_one_request_is_its_own(
    api: Api, monkeypatch: pytest.MonkeyPatch, way: dict[str, Any], poison: Poison
) -> None:
    llm = api.app.state.engine_client
    core, start = llm._core, llm._core._start
    poisoned: list[str] = []

    def started(spec: JobSpec, queued: Any) -> None:
        start(spec, queued)
        request_id = spec.job_id
        if "poison" in request_id and not poisoned:
            poisoned.append(request_id)
            poison(core, request_id)

    monkeypatch.setattr(core, "_start", started)
    async with others(api):
        response = await api.complete(request_id="poison", max_tokens=2, **way)
        assert poisoned
        said = response.json() if response.status_code != 200 else _error_of(response.text)
        assert said["error"]["code"] == 500
        assert said["error"]["message"].startswith("internal error: ")
        assert "secret" not in response.text
    await _idle(api)
    final = {report.job_id: report.phase for report in await api.final_reports(OTHERS + 1)}
    assert [phase for job_id, phase in final.items() if "poison" not in job_id] == [Phase.COMPLETED] * OTHERS
    assert (await api.complete()).status_code == 200


async def test_a_job_whose_output_failed_has_failed_and_its_engine_stops(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = api.app.state.engine_client._core
    start = core._start

    def started(spec: JobSpec, queued: Any) -> None:
        start(spec, queued)
        request_id = spec.job_id
        detokeniser(core, request_id)

    monkeypatch.setattr(core, "_start", started)
    response = await api.complete(max_tokens=1000)
    assert (response.status_code, response.json()["error"]["message"]) == (500, "internal error: Boom")
    (report,) = await api.final_reports(1)
    assert (report.phase, report.outcome) == (Phase.FAILED, "internal_error")
    await _idle(api)


@pytest.mark.parametrize("step", ["_spec", "_start", "add_request_async"])
async def test_a_job_that_does_not_start_leaves_nothing(api: Api, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    monkeypatch.setattr(api.app.state.engine_client._core, step, boom)
    async with asyncio.timeout(5):
        response = await api.complete()
    assert (response.status_code, response.json()["error"]["message"]) == (500, "internal error: Boom")
    await _idle(api)


async def test_what_an_ended_stop_string_aborts(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has its answer keeps it, whatever happens when its job is stopped."""
    core = api.app.state.engine_client._core
    first = (await api.complete(max_tokens=2)).json()["choices"][0]["text"]
    monkeypatch.setattr(core, "_stop", boom)
    async with others(api):
        response = await api.complete(max_tokens=2, stop=[first[:1]])
        assert (response.status_code, response.json()["choices"][0]["finish_reason"]) == (200, "stop")
    await _idle(api)


@pytest.mark.parametrize("wish", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}])
async def test_the_prompt_of_one_token_has_no_log_probabilities(
    api: Api, monkeypatch: pytest.MonkeyPatch, wish: dict[str, Any]
) -> None:
    core = api.app.state.engine_client._core
    start = core._start

    def started(spec: JobSpec, queued: Any) -> None:
        start(spec, queued)
        request_id = spec.job_id
        if "alone" not in request_id:
            return
        job = core._jobs[request_id].job
        emit = job.emit

        def with_logprobs(step: TokenStep) -> None:
            rows = encode_prompt_logprobs(_Tensors(0, 2))
            logprobs = encode_logprobs(_Lists(1, 2, step.tokens[0])) if "logprobs" in wish else b""
            emit(msgspec.structs.replace(step, prompt_logprobs=rows, logprobs=logprobs))

        job.emit = with_logprobs

    monkeypatch.setattr(core, "_start", started)
    async with others(api):
        response = await api.complete(request_id="alone", prompt=[300], max_tokens=1, **wish)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        if "logprobs" in wish:
            assert choice["logprobs"]["token_logprobs"][0] is None
            assert len(choice["logprobs"]["tokens"]) == 2
        else:
            assert choice["prompt_logprobs"] == [None]
    await _idle(api)


async def _with_prompt_logprobs(api: Api, monkeypatch: pytest.MonkeyPatch, at_once: int) -> tuple[Any, list[int]]:
    """The prompt log probabilities of an answer, and how many were made into objects in each turn."""
    core = api.app.state.engine_client._core
    start = core._start
    sizes: list[int] = []

    def started(spec: JobSpec, queued: Any) -> None:
        start(spec, queued)
        request_id = spec.job_id
        if "alone" not in request_id:
            return
        job, processor = core._jobs[request_id].job, _state(core, request_id).logprobs_processor
        emit, update = job.emit, processor._update_prompt_logprobs
        rows = _Tensors(len(spec.prompt_token_ids) - 1, 3)
        rows.logprob_token_ids[:, 0] = spec.prompt_token_ids[1:]
        rows.logprob_token_ids[:, 1:] = np.random.default_rng(7).integers(256, 900, (len(rows.logprobs), 2))
        rows.logprobs[:] = np.random.default_rng(7).normal(size=rows.logprobs.shape)

        def first(step: TokenStep) -> None:
            job.emit = emit
            emit(msgspec.structs.replace(step, prompt_logprobs=encode_prompt_logprobs(rows)))

        def counted(part: Any) -> None:
            sizes.append(part.logprobs.numel())
            update(part)

        job.emit, processor._update_prompt_logprobs = first, counted

    with monkeypatch.context() as patch:
        patch.setattr(core, "_start", started)
        patch.setattr("gateway.core.LOGPROBS_AT_ONCE", at_once)
        response = await api.complete(
            request_id="alone", prompt=[300 + at % 200 for at in range(1000)], max_tokens=3, prompt_logprobs=2
        )
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return (choice["prompt_logprobs"], choice["text"], choice["finish_reason"]), sizes


async def test_log_probabilities_of_a_long_prompt_are_read_in_slices(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice a turn of the event loop; the answer is the same as in one piece, and comes after them."""
    whole, sizes = await _with_prompt_logprobs(api, monkeypatch, 1 << 30)
    assert sizes == [999 * 3]
    sliced, sizes = await _with_prompt_logprobs(api, monkeypatch, 90)
    assert sizes == [90] * 33 + [27]
    assert sliced == whole
    assert len(whole[0]) == 1000
    await _idle(api)


async def test_what_fails_in_a_slice_is_its_request_s(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.v1.engine.logprobs.LogprobsProcessor._update_prompt_logprobs", boom)
    async with others(api):
        with pytest.raises(AssertionError, match="internal error: Boom"):
            await _with_prompt_logprobs(api, monkeypatch, 90)
    await _idle(api)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": [300] * 100, "prompt_logprobs": 9}, "100 tokens with 10 candidates each bring it to 1000"),
        ({"prompt": [[300] * 40] * 3, "prompt_logprobs": 9}, "40 tokens with 10 candidates each bring it to 1200"),
        ({"prompt": [300] * 300, "echo": True, "logprobs": 2, "max_tokens": 1}, "300 tokens with 3 candidates"),
    ],
)
async def test_a_body_may_want_so_many_of_them(
    api: Api, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], said: str
) -> None:
    core = api.app.state.engine_client._core
    monkeypatch.setattr(core, "_settings", api.settings.model_copy(update={"max_prompt_logprobs": 899}))
    response = await api.complete(**body)
    assert response.status_code == 400, response.text
    assert said in response.json()["error"]["message"]
    assert "the limit is 899" in response.json()["error"]["message"]
    await _idle(api)


async def test_a_dead_output_handler_ends_the_process() -> None:
    """At once and with an error: what it answered would be errors alone."""
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "tests.gateway.dying_gateway"],
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == os.EX_SOFTWARE, done.stderr.decode()[-2000:]
    assert b"answered 500" not in done.stdout
    assert b"output handler died" in done.stdout  # where logs go that nobody has configured


class _Tensors:
    """vLLM's LogprobsTensors, as far as it matters."""

    def __init__(self, positions: int, candidates: int, token: int = 300) -> None:
        self.logprob_token_ids = np.full((positions, candidates), token, dtype=np.int64)
        self.logprobs = np.full((positions, candidates), -1.0, dtype=np.float32)
        self.selected_token_ranks = np.ones(positions, dtype=np.int64)


class _Lists(_Tensors):
    @property
    def sampled_token_ranks(self) -> np.ndarray:
        return self.selected_token_ranks


def _error_of(text: str) -> Any:
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    (error,) = [event for event in events if "error" in event]
    return error


async def _idle(api: Api) -> None:
    """No job, no seat, nothing in vLLM's books, and its output handler lives."""
    llm = api.app.state.engine_client
    await until(lambda: not llm._core._jobs and not api.admission.own_jobs)
    processor = llm.output_processor
    assert not processor.request_states
    assert not processor.external_req_ids
    assert not processor.parent_requests
    assert not llm.errored
