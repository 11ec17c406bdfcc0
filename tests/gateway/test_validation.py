"""Bad elements of vLLM's request models: the first one is told, and the others cost nothing."""

from typing import Any

import pytest

from tests.gateway.api import Api

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]
BAD = [{"a": 1}] * 1000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": BAD}),
        ("/v1/responses", {"input": "Hello", "tools": BAD}),
        ("/v1/chat/completions", {"messages": BAD}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "tools": BAD}),
        ("/v1/messages", {"messages": BAD, "max_tokens": 3}),
        ("/tokenize", {"messages": BAD}),
    ],
)
async def test_only_the_first_bad_element_is_validated(api: Api, path: str, body: dict[str, Any]) -> None:
    answer = await api.client.post(path, json={"model": "demo", **body})
    assert answer.status_code == 400, answer.text
    assert "0" in answer.text
    for later in (".1.", ", 1,", "'1'", ".999", " 999"):
        assert later not in answer.text


async def test_every_list_of_every_model_stops_at_its_first_bad_element(api: Api) -> None:
    from pydantic import ValidationError

    from gateway.vllm_patches import REQUEST_MODELS

    names = ("messages", "input", "tokens", "prompt")
    for model in REQUEST_MODELS:
        name = next(name for name in names if name in model.model_fields)
        body = {name: [object()] * 50}
        with pytest.raises(ValidationError) as wrong:
            model.model_validate({"model": "demo", **body})
        places = {error["loc"][-1] for error in wrong.value.errors() if isinstance(error["loc"][-1], int)}
        assert places <= {0}, model


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 1100}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 5000}),
        ("/v1/chat/completions", {"messages": [], "tools": [{"type": "function", "function": {"name": "a"}}] * 3000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 4500}]}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}] * 4500}),
    ],
)
async def test_too_many_items_are_refused_with_both_numbers(api: Api, path: str, body: dict[str, Any]) -> None:
    answer = await api.client.post(path, json={"model": "demo", **body})
    assert answer.status_code in (400, 413), answer.text
    assert "max_items_per_body allows 4096" in answer.json()["error"]["message"] or answer.status_code == 413


async def test_a_text_that_cannot_fit_the_model_is_not_tokenised(api: Api) -> None:
    fits = await api.client.post("/tokenize", json={"model": "demo", "prompt": "Hello"})
    assert fits.status_code == 200, fits.text
    longer = await api.client.post("/tokenize", json={"model": "demo", "prompt": "Hello" * 3000})
    assert (longer.status_code, longer.json()["count"] > 2048) == (200, True)
    chars = 2048 * api.app.state.engine_client.renderer.tokenizer.max_chars_per_token + 1
    for body in ({"prompt": "a" * chars}, {"messages": [{"role": "user", "content": "a" * chars}]}):
        answer = await api.client.post("/tokenize", json={"model": "demo", **body})
        assert answer.status_code == 400, answer.text
        assert f"the text has {chars} characters" in answer.text
    answer = await api.client.post("/detokenize", json={"model": "demo", "tokens": [5] * 2049})
    assert answer.status_code == 400, answer.text
    assert "maximum context length is 2048 tokens. However, a prompt has 2049 token ids" in answer.text
