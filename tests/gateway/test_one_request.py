"""A failure in the output of one request ends that request alone; and the fate of each field of a request."""

import asyncio
import inspect
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM

from gateway.admission import Admissions
from gateway.core import PASSED, REQUEST, SAMPLING, ClusterCore, Fate, refuse_request
from gateway.job import JobSpec
from gateway.plain_stream import Pace
from gateway.settings import GatewaySettings
from services.worker.engines.base import EngineRequest
from services.worker.engines.vllm import CoreRequests, MediaFeatures, encode_logprobs, encode_prompt_logprobs
from shared.domain.job import Generation, JobView, Phase
from shared.errors import InvalidRequest
from shared.wire.messages import TokenStep
from tests.gateway.api import Api, events, text_of
from tests.gateway.cluster import answer, until

OTHERS, TOKENS = 16, 6
Poison = Callable[[Any, str], None]  # for a request that has just started, by the core and the request's id


def boom(*_: Any, **__: Any) -> Any:
    raise ArithmeticError("secret detail")


def state_of(core: Any, request_id: str) -> Any:
    return core._requests.request_states[request_id]


def poison_once(owner: Any, method: str, applies: Callable[[Any], bool]) -> None:
    """`owner.method` raises once, when its first argument is of this request; then it is itself again."""
    usual = getattr(owner, method)

    def poisoned(first: Any, *rest: Any) -> Any:
        if not applies(first):
            return usual(first, *rest)
        setattr(owner, method, usual)
        raise ArithmeticError("secret detail")

    setattr(owner, method, poisoned)


def replaced_steps(change: Callable[[TokenStep], TokenStep]) -> Poison:
    def poison(core: Any, request_id: str) -> None:
        job = core._jobs[request_id].job
        emit = job.emit
        job.emit = lambda step: emit(change(step))

    return poison


def state_attribute(path: str) -> Poison:
    *owners, name = path.split(".")

    def poison(core: Any, request_id: str) -> None:
        owner = state_of(core, request_id)
        for each in owners:
            owner = getattr(owner, each)
        setattr(owner, name, boom)

    return poison


def processor_method(name: str) -> Poison:
    def poison(core: Any, request_id: str) -> None:
        state = state_of(core, request_id)
        poison_once(core._requests, name, lambda first: first is state)

    return poison


def collector(core: Any, request_id: str) -> None:
    poison_once(state_of(core, request_id).queue, "put", lambda output: not isinstance(output, Exception))


def stream_method(name: str) -> Poison:
    return lambda core, request_id: setattr(core._jobs[request_id].stream, name, boom)


def events_of_stream(core: Any, request_id: str) -> None:
    chunks = core._jobs[request_id].stream._chunks
    chunks.text = chunks.last = boom


COMMON: dict[str, Poison] = {
    "finish reason": replaced_steps(lambda step: TokenStep(step.tokens, "of no kind")),
    "detokeniser": state_attribute("detokenizer.update"),
    "end of request": processor_method("_finish_request"),
}
VLLMS: dict[str, Poison] = {
    **COMMON,
    "logprobs": replaced_steps(lambda step: msgspec.structs.replace(step, logprobs=b"garbage")),
    "statistics": processor_method("_update_stats_from_output"),
    "logprobs of output": state_attribute("logprobs_processor.update_from_output"),
    "output": state_attribute("make_request_output"),  # which aborting calls, too
    "collector": collector,
}
STREAM_METHODS = ("accept", "advance", "_send", "new_events", "begin", "last", "_events")
PLAIN: dict[str, Poison] = {
    **COMMON,
    "events": events_of_stream,
    **{name: stream_method(name) for name in STREAM_METHODS},
}
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "vllm's stream": {"stream": True, "return_token_ids": True},
    "two answers": {"stream": True, "n": 2, "temperature": 1},
    "plain stream": {"stream": True},
}
CASES = [
    pytest.param(WAYS[way], poison, id=f"{way}, {name}")
    for way in WAYS
    for name, poison in (PLAIN if way == "plain stream" else VLLMS).items()
]


def on_start(api: Api, monkeypatch: pytest.MonkeyPatch, name: str, poison: Poison) -> None:
    """`poison` is called for the first job whose id contains `name`, when it has started."""
    core, start, done = api.core, api.core._start, list[str]()

    def started(spec: JobSpec, queued: Any) -> None:
        start(spec, queued)
        if name in spec.job_id and not done:
            done.append(spec.job_id)
            poison(core, spec.job_id)

    monkeypatch.setattr(core, "_start", started)


@asynccontextmanager
async def others(api: Api) -> AsyncIterator[None]:
    """16 streams that are in the middle of their answers within the block, and get the rest after it."""
    go = asyncio.Event()
    for worker in api.cluster.workers:
        worker.before_token = lambda count: go.wait() if count >= 2 else asyncio.sleep(0)

    def prompt_of(number: int) -> list[int]:
        return [400 + number // 2, 401, 402, 403]

    async def stream(number: int) -> tuple[list[int], str]:
        """The token ids, where there are to be any, and the text: two ways of writing the same answer."""
        more = {"return_token_ids": number % 2 == 0, "stream": True, "max_tokens": TOKENS}
        chunks = events(await api.complete(prompt=prompt_of(number), **more))
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        return [token for choice in choices for token in choice["token_ids"] or ()], text_of(chunks)

    tasks = [asyncio.create_task(stream(number)) for number in range(OTHERS)]
    await until(lambda: sum(len(running.job.tokens) == 3 for running in api.core._jobs.values()) == OTHERS)
    try:
        yield
        assert not any(task.done() for task in tasks)
    finally:
        go.set()
    found = await asyncio.gather(*tasks)
    for number in range(0, OTHERS, 2):
        assert found[number][0] == answer(prompt_of(number), TOKENS)
        assert found[number + 1][1] == found[number][1]


class Tensors:
    """vLLM's LogprobsTensors or LogprobsLists, as far as it matters."""

    def __init__(self, positions: int, candidates: int, token: int = 300) -> None:
        self.logprob_token_ids = np.full((positions, candidates), token, dtype=np.int64)
        self.logprobs = np.full((positions, candidates), -1.0, dtype=np.float32)
        self.selected_token_ranks = self.sampled_token_ranks = np.ones(positions, dtype=np.int64)


async def prompt_logprobs(api: Api, monkeypatch: pytest.MonkeyPatch, at_once: int) -> tuple[Any, list[int]]:
    """An answer with log probabilities of its prompt, and how many were made into objects in each turn."""
    sizes: list[int] = []

    def add(core: Any, request_id: str) -> None:
        job, processor = core._jobs[request_id].job, state_of(core, request_id).logprobs_processor
        emit, update, prompt = job.emit, processor._update_prompt_logprobs, job.spec.prompt_token_ids
        rows, random = Tensors(len(prompt) - 1, 3), np.random.default_rng(7)
        rows.logprob_token_ids[:, 0] = prompt[1:]
        rows.logprob_token_ids[:, 1:] = random.integers(256, 900, (len(prompt) - 1, 2))
        rows.logprobs[:] = random.normal(size=rows.logprobs.shape)

        def first(step: TokenStep) -> None:
            job.emit = emit
            emit(msgspec.structs.replace(step, prompt_logprobs=encode_prompt_logprobs(rows)))

        def counted(part: Any) -> None:
            sizes.append(part.logprobs.numel())
            update(part)

        job.emit, processor._update_prompt_logprobs = first, counted

    prompt = [300 + at % 200 for at in range(1000)]
    with monkeypatch.context() as patch:
        on_start(api, patch, "alone", add)
        patch.setattr("gateway.core.LOGPROBS_AT_ONCE", at_once)
        response = await api.complete(request_id="alone", prompt=prompt, max_tokens=3, prompt_logprobs=2)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return (choice["prompt_logprobs"], choice["text"], choice["finish_reason"]), sizes


class TestOutput:
    pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

    @pytest.mark.parametrize(("way", "poison"), CASES)
    async def test_a_fault_in_the_output_of_a_request_is_its_own(
        self, api: Api, monkeypatch: pytest.MonkeyPatch, way: dict[str, Any], poison: Poison
    ) -> None:
        on_start(api, monkeypatch, "poison", poison)
        async with others(api):
            response = await api.complete(request_id="poison", max_tokens=2, **way)
            errors = [event for event in events(response) if "error" in event] if way else [response.json()]
            (error,) = [event["error"] for event in errors]
            assert (error["code"], error["message"][:16]) == (500, "internal error: ")
            assert "secret" not in response.text
        await api.idle()
        final = {report.job_id: report.phase for report in await api.final_reports(OTHERS + 1)}
        assert [phase for job_id, phase in final.items() if "poison" not in job_id] == [Phase.COMPLETED] * OTHERS
        assert (await api.complete()).status_code == 200

    async def test_a_job_whose_output_failed_has_failed(self, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        on_start(api, monkeypatch, "", state_attribute("detokenizer.update"))
        response = await api.complete(max_tokens=1000)
        assert (response.status_code, response.json()["error"]["message"]) == (500, "internal error: ArithmeticError")
        (report,) = await api.final_reports(1)
        assert (report.phase, report.outcome) == (Phase.FAILED, "internal_error")
        await api.idle()

    @pytest.mark.parametrize("step", ["_spec", "_start", "add_request_async"])
    async def test_a_job_that_does_not_start_leaves_nothing(
        self, api: Api, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        monkeypatch.setattr(api.core, step, boom)
        async with asyncio.timeout(20):
            response = await api.complete()
        assert (response.status_code, response.json()["error"]["message"]) == (500, "internal error: ArithmeticError")
        await api.idle()

    async def test_an_answer_with_a_stop_string_survives_a_failed_abort(
        self, api: Api, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = (await api.complete(max_tokens=2)).json()["choices"][0]["text"]
        monkeypatch.setattr(api.core, "_stop", boom)
        async with others(api):
            response = await api.complete(max_tokens=2, stop=[first[:1]])
            assert (response.status_code, response.json()["choices"][0]["finish_reason"]) == (200, "stop")
        await api.idle()

    @pytest.mark.parametrize("more", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}])
    async def test_a_prompt_of_one_token_has_no_log_probabilities(
        self, api: Api, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
    ) -> None:
        def with_logprobs(step: TokenStep) -> TokenStep:
            logprobs = encode_logprobs(Tensors(1, 2, step.tokens[0])) if "logprobs" in more else b""
            rows = encode_prompt_logprobs(Tensors(0, 2))
            return msgspec.structs.replace(step, prompt_logprobs=rows, logprobs=logprobs)

        on_start(api, monkeypatch, "alone", replaced_steps(with_logprobs))
        response = await api.complete(request_id="alone", prompt=[300], max_tokens=1, **more)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        if "logprobs" in more:
            assert (choice["logprobs"]["token_logprobs"][0], len(choice["logprobs"]["tokens"])) == (None, 2)
        else:
            assert choice["prompt_logprobs"] == [None]
        await api.idle()

    async def test_log_probabilities_of_a_long_prompt_are_read_in_slices(
        self, api: Api, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole, sizes = await prompt_logprobs(api, monkeypatch, 1 << 30)
        assert (sizes, len(whole[0])) == ([999 * 3], 1000)
        sliced, sizes = await prompt_logprobs(api, monkeypatch, 90)
        assert (sizes, sliced) == ([90] * 33 + [27], whole)
        monkeypatch.setattr("vllm.v1.engine.logprobs.LogprobsProcessor._update_prompt_logprobs", boom)
        async with others(api):
            with pytest.raises(AssertionError, match="internal error: ArithmeticError"):
                await prompt_logprobs(api, monkeypatch, 90)
        await api.idle()

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ({"prompt": [300] * 100, "prompt_logprobs": 9}, "100 tokens with 10 candidates each bring it to 1000"),
            ({"prompt": [[300] * 40] * 3, "prompt_logprobs": 9}, "40 tokens with 10 candidates each bring it to 1200"),
            ({"prompt": [300] * 300, "echo": True, "logprobs": 2, "max_tokens": 1}, "300 tokens with 3 candidates"),
        ],
    )
    async def test_log_probabilities_of_prompts_are_limited(
        self, api: Api, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], message: str
    ) -> None:
        monkeypatch.setattr(api.core, "_settings", api.settings.model_copy(update={"max_prompt_logprobs": 899}))
        response = await api.complete(**body)
        assert response.status_code == 400, response.text
        assert message in response.json()["error"]["message"]
        assert "the limit is 899" in response.json()["error"]["message"]
        await api.idle()

    async def test_a_dead_output_handler_ends_the_process(self) -> None:
        """At once and with an error: all its answers would be errors."""
        command = [sys.executable, "-m", "tests.gateway.processes"]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=280, check=False)
        assert done.returncode == os.EX_SOFTWARE, done.stderr.decode()[-2000:]
        assert b"answered 500" not in done.stdout
        assert b"output handler died" in done.stdout  # where logs without configuration go


# Fields: each one reaches the engine, is handled in the front end, or is refused by name

SETTINGS = GatewaySettings(schedulers=("tcp://127.0.0.1:1",), model="demo")
GRAMMAR = StructuredOutputsParams(json={"type": "object"})
CARRIED: dict[str, Any] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "temperature", "top_p"), 0.5),
    "repetition_penalty": 1.5,
    "top_k": 5,
    "min_p": 0.25,
    "seed": 7,
    "stop_token_ids": [5, 6],
    "ignore_eos": True,
    "min_tokens": 2,
    "logprobs": 3,
    "prompt_logprobs": 2,
    "logprob_token_ids": [4, 5],
    "_eos_token_id": 9,
    "_all_stop_token_ids": {5, 9},
    "structured_outputs": GRAMMAR,
    "logit_bias": {5: 1.0},
    "allowed_token_ids": [5, 6, 7],
    "extra_args": {"mine": 1},
    "bad_words": ["no"],
    "_bad_words_token_ids": [[8]],
    "skip_reading_prefix_cache": True,
    "thinking_token_budget": 11,
    "repetition_detection": RepetitionDetectionParams(max_pattern_size=4, min_count=2),
    "trace_decode_token_ids": [3, 4],
    "max_tokens": 12,
}
REFUSED: dict[str, Any] = {
    "pooling_params": PoolingParams(),
    "data_parallel_rank": 0,
    "prompt_embeds": np.zeros((2, 2)),
    "prompt_is_token_ids": [True],
    "priority": 3,
    "resumable": True,
    "abort_immediately": True,
    "kv_hints": object(),
}
REFUSED_SAMPLING: dict[str, Any] = {
    "watermarking": True,
    "prompt_logprob_token_ids": np.zeros((1, 1), dtype=np.int64),
    "prompt_logprob_start": 0,
    "routed_experts_prompt_start": 2,
}


def test_each_field_has_a_fate() -> None:
    """The fields of a new vLLM are to be decided on: see gateway/core.py."""
    assert set(EngineCoreRequest.__struct_fields__) == set(REQUEST)
    assert set(SamplingParams.__struct_fields__) == set(SAMPLING)
    arguments = set(inspect.signature(AsyncLLM.add_request).parameters) - {"self", "request_id", "prompt", "params"}
    assert arguments <= PASSED | set(REQUEST)

    def of_fate(fields: Any, fate: Fate) -> set[str]:
        return {name for name, field in fields.items() if field.fate is fate}

    assert of_fate(SAMPLING, Fate.CARRIED) == set(CARRIED)
    assert (of_fate(REQUEST, Fate.REFUSED), of_fate(SAMPLING, Fate.REFUSED)) == (set(REFUSED), set(REFUSED_SAMPLING))


def engine_request(params: SamplingParams, **more: Any) -> EngineCoreRequest:
    unset = ("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank")
    values: dict[str, Any] = dict.fromkeys(unset)
    values |= {"request_id": "r", "prompt_token_ids": [5, 6], "sampling_params": params, "arrival_time": 0.0, **more}
    return EngineCoreRequest(**values)


def sampling(**values: Any) -> SamplingParams:
    params = SamplingParams()
    for name, value in values.items():
        setattr(params, name, value)
    return params


def at_the_engine(request: EngineCoreRequest, *, parser: str = "any", wants_token: bool = True) -> EngineCoreRequest:
    """The request as an instance's vLLM receives it."""
    core = ClusterCore(SETTINGS, SimpleNamespace(run=None), Pace())
    with Admissions(SETTINGS, ()).for_class("default").admit("") as state:
        state.arrived_s = 12.5
        spec = core._spec(request, state)
    generation = msgspec.msgpack.decode(msgspec.msgpack.encode(spec.generation), type=type(spec.generation))
    view = JobView("r", len(spec.prompt_token_ids), spec.max_tokens)
    made = EngineRequest("r", view, spec.prompt_token_ids, generation, spec.max_tokens, wants_token=wants_token)
    return core_requests(parser).make(made)


def core_requests(parser: str = "any") -> CoreRequests:
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=100, get_vocab_size=lambda: 1000, max_logprobs=20),
        structured_outputs_config=SimpleNamespace(reasoning_parser=parser),
        reasoning_config=SimpleNamespace(enabled=bool(parser)),
        speculative_config=None,
    )
    media = MediaFeatures(("image",), max_item_tokens=2)
    return CoreRequests(config, {"a": LoRARequest("a", 7, "/here/a")}, {"a": "digest"}, media)


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own checks need its own model."""
    monkeypatch.setattr(SamplingParams, "verify", lambda *_: None)


@pytest.mark.usefixtures("unverified")
def test_a_parameter_that_the_engines_release_of_vllm_lacks_is_refused_by_name() -> None:
    def request(sampling: dict[str, object]) -> EngineRequest:
        return EngineRequest("r", JobView("r", 2, 5), [5, 6], Generation(msgspec.msgpack.encode(sampling), 0.0), 5)

    assert core_requests().make(request({"top_k": 3})).sampling_params.top_k == 3
    with pytest.raises(ValueError, match="the vLLM of this instance has no of_a_newer_release"):
        core_requests().make(request({"top_k": 3, "of_a_newer_release": 1}))


@pytest.mark.usefixtures("unverified")
def test_carried_fields_reach_the_engine() -> None:
    for name, value in CARRIED.items():
        received = at_the_engine(engine_request(sampling(**{name: value}))).sampling_params
        assert getattr(received, name) == value, name
    arguments = {"chat_template_kwargs": {"enable_thinking": True}}
    params = sampling(structured_outputs=GRAMMAR)
    reasoning = {"reasoning_ended": False, "reasoning_parser_kwargs": arguments}
    received = at_the_engine(engine_request(params, cache_salt="s", **reasoning))
    assert (received.prompt_token_ids, received.cache_salt, received.arrival_time) == ([5, 6], "s", 12.5)
    assert (received.reasoning_ended, received.reasoning_parser_kwargs) == (False, arguments)
    assert at_the_engine(engine_request(params, reasoning_ended=True)).reasoning_ended is True
    for wants_token in (True, False):  # else no grammar is compiled
        received = at_the_engine(engine_request(params), wants_token=wants_token)
        assert (received.sampling_params.structured_outputs is not None) == wants_token


@pytest.mark.usefixtures("unverified")
def test_an_instance_has_its_own_number_and_folder_for_an_adapter() -> None:
    received = at_the_engine(engine_request(SamplingParams(), lora_request=LoRARequest("a", 1, "/a"))).lora_request
    assert (received.lora_name, received.lora_int_id, received.lora_path) == ("a", 7, "/here/a")
    assert at_the_engine(engine_request(SamplingParams())).lora_request is None
    with pytest.raises(ValueError, match="this instance does not serve the adapter 'b'"):
        at_the_engine(engine_request(SamplingParams(), lora_request=LoRARequest("b", 1, "/b")))


@pytest.mark.usefixtures("unverified")
def test_media_items_reach_the_engine() -> None:
    pixels = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    data = MultiModalKwargsItem({"pixels": MultiModalFieldElem(pixels, MultiModalBatchedField())})
    item = MultiModalFeatureSpec(data, "image", "digest", PlaceholderRange(offset=0, length=2))
    (received,) = at_the_engine(engine_request(SamplingParams(), mm_features=[item])).mm_features
    assert (received.modality, received.identifier, received.mm_position) == ("image", "digest", item.mm_position)
    assert torch.equal(received.data["pixels"].data, pixels)
    assert at_the_engine(engine_request(SamplingParams(), mm_features=[])).mm_features is None


@pytest.mark.usefixtures("unverified")
def test_structured_output_after_reasoning_needs_a_parser_at_the_engine() -> None:
    """Without one the grammar would hold from the first token: all of the output would be reasoning, and no content."""
    params, arguments = sampling(structured_outputs=GRAMMAR), dict[str, Any](reasoning_parser_kwargs={})
    for more in ({"reasoning_ended": False}, {}):
        with pytest.raises(ValueError, match=r"reasoning parser.*engine_args: \{reasoning_parser"):
            at_the_engine(engine_request(params, **more, **arguments), parser="")
    at_the_engine(engine_request(params, reasoning_ended=True, **arguments), parser="")
    at_the_engine(engine_request(params), parser="")
    with pytest.raises(ValueError, match="thinking_token_budget 5"):
        at_the_engine(engine_request(sampling(thinking_token_budget=5)), parser="")


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_SAMPLING])
def test_other_fields_are_refused_by_name(name: str) -> None:
    refuse_request(engine_request(SamplingParams()))
    params = sampling(**{name: REFUSED_SAMPLING[name]}) if name in REFUSED_SAMPLING else SamplingParams()
    with pytest.raises(InvalidRequest, match=f"^{name}.* cannot be served: .+"):
        refuse_request(engine_request(params, **{name: REFUSED[name]} if name in REFUSED else {}))
