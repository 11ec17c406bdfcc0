"""Prompt tokens that no instance had to compute for a request, as the APIs report them."""

import re
from typing import Any

import pytest

from shared.errors import EngineFailed
from shared.wire.messages import Reused
from tests.gateway.api import PROMPT as API_PROMPT
from tests.gateway.api import Api
from tests.gateway.cluster import Cluster, make_job, running_cluster

PROMPT = list(range(5, 25))


def holding(cluster: Cluster, prefill: int, *decodes: int) -> None:
    """So many tokens of every prompt are in the prefix caches of the instances."""
    cluster.prefill.held = prefill
    for worker, held in zip(cluster.decodes, decodes, strict=True):
        worker.held = held


@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize(
    ("split", "prefill", "decode", "cached"),
    [
        (None, 12, 0, 12),  # the KV that the decode instance gets was computed for this request
        (None, 0, 16, 0),  # what it holds besides was computed all the same
        (None, 16, 16, 16),
        (0, 16, 8, 8),  # the decode instance does it all
        (0, 16, 0, 0),
        (8, 4, 0, 4),  # its rest is computed at the decode instance
        (8, 8, 4, 8),
        (8, 4, 16, 4 + 8),  # of the rest the decode instance holds 8 tokens
    ],
)
async def test_what_nobody_computed_is_cached(
    split: int | None, prefill: int, decode: int, cached: int, carry: bool
) -> None:
    async with running_cluster() as cluster:
        cluster.split = lambda _: split
        holding(cluster, prefill, decode, decode)
        job, _ = make_job(PROMPT, 4, carry=carry)
        await cluster.pipeline.run(job)
        assert job.reused == Reused(cached, len(PROMPT) - cached)


@pytest.mark.parametrize("split", [None, 0, 8])
async def test_instances_that_say_nothing_are_taken_to_compute_all(split: int | None) -> None:
    async with running_cluster() as cluster:
        cluster.split = lambda _: split
        job, _ = make_job(PROMPT, 4)
        await cluster.pipeline.run(job)
        assert job.reused == Reused(0, 0)


@pytest.mark.parametrize("carry", [True, False])
async def test_what_a_lost_instance_had_computed_was_computed(carry: bool) -> None:
    """The second try finds in the prefix cache what the first one has left there."""
    async with running_cluster() as cluster:
        holding(cluster, 8, 0, 0)

        def lost(_: int) -> None:
            cluster.prefill.held = 16
            raise EngineFailed("the instance died")

        cluster.decodes[0].before_token = lost
        job, _ = make_job(PROMPT, 4, carry=carry)
        await cluster.pipeline.run(job)
        assert job.attempt == 2
        assert job.reused == Reused(8, 12)


async def test_a_decode_instance_that_refuses_changes_nothing() -> None:
    async with running_cluster() as cluster:
        holding(cluster, 12, 0, 0)
        cluster.has_room = lambda _: True
        cluster.binds = cluster.decodes[0].full = True
        job, _ = make_job(PROMPT, 4)
        await cluster.pipeline.run(job)
        assert job.decode_instance == "d1"
        assert job.reused.tokens == 12


HELD = 3  # of the four tokens of the prompt
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": API_PROMPT, "max_tokens": 4},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
}


def told(body: str) -> set[int]:
    names = r'"(?:cached_tokens|cache_read_input_tokens)":\s*(\d+)'
    return {int(number) for number in re.findall(names, body)}


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_every_api_reports_them(
    api: Api, path: str, streamed: bool, carry: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

    state = api.app.state
    for serving in (state.openai_serving_chat, state.openai_serving_completion, state.anthropic_serving_messages):
        monkeypatch.setattr(serving, "enable_prompt_tokens_details", True)
    # The plain streams of this gateway were chosen without that option.
    monkeypatch.setattr(
        state.openai_serving_chat,
        "chat_completion_stream_generator",
        OpenAIServingChat.chat_completion_stream_generator.__get__(state.openai_serving_chat),
    )
    body = {"model": "demo", **BODIES[path], "stream": streamed, "temperature": 0 if carry else 1}
    if path in ("/v1/completions", "/v1/chat/completions"):
        body |= {} if carry else {"seed": 1}
        if streamed:
            body |= {"stream_options": {"include_usage": True}, "return_token_ids": True}
    api.cluster.prefill.held = HELD
    for worker in api.cluster.decodes:
        worker.held = 0
    response = await api.client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert HELD in told(response.text), response.text
    assert told(response.text) <= {0, HELD}, response.text


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("seed", [None, 1])
async def test_a_loss_after_the_first_token_leaves_the_figure_as_it_is(
    api: Api, seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.app.state.openai_serving_completion, "enable_prompt_tokens_details", True)
    api.cluster.prefill.held = HELD
    for worker in api.cluster.decodes:
        worker.held = 0

    def lost(count: int) -> None:
        if count == 2:
            api.cluster.decodes[0].before_token = None
            api.cluster.prefill.held = 0
            raise EngineFailed("the instance died")

    api.cluster.decodes[0].before_token = lost
    response = await api.complete(seed=seed)
    assert response.status_code == 200, response.text
    assert len(api.cluster.prefill.prefills) == 2
    assert told(response.text) == {HELD}
