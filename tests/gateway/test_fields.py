"""Every field of a request reaches the engine, is dealt with in the front end, or is refused by name."""

import inspect
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM

from gateway.admission import Admissions
from gateway.core import PASSED, REQUEST, SAMPLING, ClusterCore, Fate, refuse_request
from gateway.plain_stream import Pace
from gateway.settings import GatewaySettings
from services.worker.engines.base import EngineRequest
from services.worker.engines.vllm import CoreRequests
from shared.domain.job import JobView
from shared.errors import InvalidRequest
from tests.gateway.api import Api

SETTINGS = GatewaySettings(schedulers=("tcp://127.0.0.1:1",), model="demo")
GRAMMAR = StructuredOutputsParams(json={"type": "object"})
CARRIED: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "temperature": 0.5,
    "top_p": 0.5,
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
    "mm_features": [object()],
    "pooling_params": PoolingParams(),
    "lora_request": LoRARequest("a", 1, "/a"),
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


def test_every_field_has_a_fate() -> None:
    """What a new vLLM adds is to be decided on: see gateway/core.py."""
    assert set(EngineCoreRequest.__struct_fields__) == set(REQUEST)
    assert set(SamplingParams.__struct_fields__) == set(SAMPLING)
    arguments = set(inspect.signature(AsyncLLM.add_request).parameters) - {"self", "request_id", "prompt", "params"}
    assert arguments <= PASSED | set(REQUEST)
    assert {name for name, field in SAMPLING.items() if field.fate is Fate.CARRIED} == set(CARRIED)
    assert {name for name, field in REQUEST.items() if field.fate is Fate.REFUSED} == set(REFUSED)
    assert {name for name, field in SAMPLING.items() if field.fate is Fate.REFUSED} == set(REFUSED_SAMPLING)


def of_client(params: SamplingParams, **more: Any) -> EngineCoreRequest:
    values: dict[str, Any] = dict.fromkeys(
        ("mm_features", "pooling_params", "lora_request", "cache_salt", "data_parallel_rank")
    )
    values |= {"request_id": "r", "prompt_token_ids": [5, 6], "sampling_params": params, "arrival_time": 0.0, **more}
    return EngineCoreRequest(**values)


def at_the_engine(request: EngineCoreRequest, *, parser: str = "any", wants_token: bool = True) -> EngineCoreRequest:
    """The same as an instance's vLLM gets it."""
    core = ClusterCore(SETTINGS, SimpleNamespace(run=None), Pace())
    with Admissions(SETTINGS, ()).for_class("default").admit("") as state:
        state.arrived_s = 12.5
        spec = core._spec(request, state)
    generation = msgspec.msgpack.decode(msgspec.msgpack.encode(spec.generation), type=type(spec.generation))
    model = SimpleNamespace(max_model_len=100, get_vocab_size=lambda: 1000, max_logprobs=20)
    config = SimpleNamespace(
        model_config=model,
        structured_outputs_config=SimpleNamespace(reasoning_parser=parser),
        reasoning_config=SimpleNamespace(enabled=bool(parser)),
    )
    view = JobView("r", len(spec.prompt_token_ids), spec.max_tokens)
    made = EngineRequest("r", view, spec.prompt_token_ids, generation, spec.max_tokens, wants_token=wants_token)
    return CoreRequests(config).make(made)


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own checks need its own model."""
    monkeypatch.setattr(SamplingParams, "verify", lambda *_: None)


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("wants_token", [True, False])
def test_a_grammar_is_compiled_only_where_a_token_is_wanted(wants_token: bool) -> None:
    grammar = StructuredOutputsParams(regex="a+")
    made = at_the_engine(of_client(SamplingParams(structured_outputs=grammar)), wants_token=wants_token)
    assert (made.sampling_params.structured_outputs is not None) == wants_token


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("name", CARRIED)
def test_what_is_carried_arrives(name: str) -> None:
    params = SamplingParams()
    setattr(params, name, CARRIED[name])
    assert getattr(at_the_engine(of_client(params)).sampling_params, name) == CARRIED[name]


@pytest.mark.usefixtures("unverified")
def test_what_a_request_says_beside_them_arrives() -> None:
    params = SamplingParams(structured_outputs=GRAMMAR)
    arguments = {"chat_template_kwargs": {"enable_thinking": True}}
    request = of_client(params, cache_salt="s", reasoning_ended=False, reasoning_parser_kwargs=arguments)
    arrived = at_the_engine(request)
    assert (arrived.prompt_token_ids, arrived.cache_salt, arrived.arrival_time) == ([5, 6], "s", 12.5)
    assert (arrived.reasoning_ended, arrived.reasoning_parser_kwargs) == (False, arguments)
    assert at_the_engine(of_client(params, reasoning_ended=True)).reasoning_ended is True


@pytest.mark.usefixtures("unverified")
def test_structured_output_after_reasoning_needs_a_parser_at_the_engine() -> None:
    """Without one the grammar would hold from the first token: all of the output would be reasoning, and no content."""
    params = SamplingParams(structured_outputs=GRAMMAR)
    reasons: dict[str, Any] = {"reasoning_parser_kwargs": {}}
    with pytest.raises(ValueError, match=r"reasoning parser.*engine_args: \{reasoning_parser"):
        at_the_engine(of_client(params, reasoning_ended=False, **reasons), parser="")
    with pytest.raises(ValueError, match="reasoning parser"):
        at_the_engine(of_client(params, **reasons), parser="")
    at_the_engine(of_client(params, reasoning_ended=True, **reasons), parser="")
    at_the_engine(of_client(params), parser="")
    with pytest.raises(ValueError, match="thinking_token_budget 5"):
        at_the_engine(of_client(SamplingParams(thinking_token_budget=5)), parser="")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(name: str) -> None:
    refuse_request(of_client(SamplingParams()))
    with pytest.raises(InvalidRequest, match=f"^{name}.* cannot be served: .+"):
        refuse_request(of_client(SamplingParams(), **{name: REFUSED[name]}))


@pytest.mark.parametrize("name", REFUSED_SAMPLING)
def test_so_are_sampling_parameters(name: str) -> None:
    params = SamplingParams()
    setattr(params, name, REFUSED_SAMPLING[name])
    with pytest.raises(InvalidRequest, match=f"^{name}.* cannot be served: .+"):
        refuse_request(of_client(params))


PICTURE = "data:image/png;base64,aGVsbG8="
PARTS: dict[str, dict[str, Any]] = {
    "image": {"type": "image_url", "image_url": {"url": PICTURE}},
    "image of the net": {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}},
    "audio": {"type": "input_audio", "input_audio": {"data": "aGVsbG8=", "format": "wav"}},
    "audio of the net": {"type": "audio_url", "audio_url": {"url": "http://127.0.0.1:9/a.wav"}},
    "video": {"type": "video_url", "video_url": {"url": "http://127.0.0.1:9/a.mp4"}},
    "embeddings of an image": {"type": "image_embeds", "image_embeds": "aGVsbG8="},
    "embeddings": {"type": "prompt_embeds", "data": "aGVsbG8="},
    "a file": {"type": "file", "file": {"file_data": "aGVsbG8="}},
}


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("part", PARTS)
async def test_a_chat_with_a_picture_is_a_400(api: Api, part: str, stream: bool) -> None:
    said = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, PARTS[part]]}]
    response = await api.chat(messages=said, stream=stream)
    assert response.status_code == 400, response.text
    if part not in ("a file", "embeddings", "embeddings of an image"):  # vLLM has reasons of its own for these
        assert "processes only text" in response.json()["error"]["message"]
    assert not api.cluster.prefill.prefills


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PICTURE, "detail": "auto"}]}]},
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 5,
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "image",
                                "source": {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="},
                            }
                        ],
                    }
                ],
            },
        ),
    ],
)
async def test_so_is_one_on_the_other_apis(api: Api, path: str, body: dict[str, Any]) -> None:
    response = await api.client.post(path, json={"model": "demo", **body})
    assert (response.status_code, "processes only text" in response.text) == (400, True), response.text
    assert not api.cluster.prefill.prefills


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("path", ["chat", "completions"])
@pytest.mark.parametrize(
    ("wish", "headers"),
    [
        ({"priority": -9}, {}),
        ({}, {"X-Vllm-Priority": "-9"}),
        ({}, {"X-Data-Parallel-Rank": "0"}),
        ({"routed_experts_prompt_start": 1}, {}),
        ({"watermarking": True}, {}),
    ],
)
async def test_wishes_that_the_cluster_cannot_fulfil_are_400s(
    api: Api, path: str, wish: dict[str, Any], headers: dict[str, str]
) -> None:
    said = [{"role": "user", "content": "Hello"}]
    body: dict[str, Any] = {"messages": said} if path == "chat" else {"prompt": [400, 401]}
    url = "/v1/chat/completions" if path == "chat" else "/v1/completions"
    response = await api.client.post(url, json={"model": "demo", "max_tokens": 3, **body, **wish}, headers=headers)
    assert (response.status_code, "cannot be served" in response.text) == (400, True), response.text
    assert not api.cluster.prefill.prefills


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_embeddings_in_the_place_of_a_prompt_are_a_400(api: Api) -> None:
    response = await api.client.post("/v1/completions", json={"model": "demo", "prompt_embeds": "aGVsbG8="})
    assert response.status_code == 400
