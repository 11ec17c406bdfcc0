"""What the edge reads of a body."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from gateway.request_hints import RESPONSES, RequestHints, hints_of, parse, require_few_items
from shared.errors import InvalidRequest

CHAT, COMPLETIONS, BATCH = "/v1/chat/completions", "/v1/completions", "/v1/chat/completions/batch"


def read(body: bytes, path: str = COMPLETIONS) -> RequestHints:
    parsed = parse(body)
    return RequestHints() if parsed is None else hints_of(path, parsed.value)


@pytest.mark.parametrize(
    ("body", "jobs"),
    [
        (b'{"messages": [{}, {}]}', 1),
        (b'{"prompt": "a"}', 1),
        (b'{"prompt": null, "n": null}', 1),
        (b'{"prompt": [1, 2, 3]}', 1),
        (b'{"prompt": ["a", "b"]}', 2),
        (b'{"prompt": ["1", 2, 3]}', 1),
        (b'{"prompt": [ [1], [2, 3], [4] ], "n": 2}', 6),
        (b'{"prompt": []}', 1),
        (b'{"prompt_embeds": ["x", "y"]}', 2),
        (b'{"n": 7.0}', 7),
        (b'{"n": "7"}', 7),
        (b'{"n": "7.0"}', 7),
        (b'{"n": " 7 "}', 7),
        (b'{"n": "7_000"}', 7000),
        (b'{"n": true}', 1),
        (b'{"n": 1, "n": 7}', 7),
        (b'{"\\u006e": 7}', 7),
        (b'{"n": 7, "x": NaN}', 7),
        (b'{"n": 7, "x": -Infinity}', 7),
        (b'{"n": 7, "user": "\\ud800"}', 7),
        (b'{"n": 7, "user": "\xed\xa0\x80"}', 7),
        (b'\xef\xbb\xbf{"n": 7}', 7),
        ('{"n": 7}'.encode("utf-16"), 7),
        ('{"n": 7}'.encode("utf-16-be"), 7),
        ('{"n": 7}'.encode("utf-32"), 7),
        (b'{"n": 7, "x": 1' + b"0" * 4000 + b"}", 7),
        (b'{"n": NaN}', 1),
        (b'{"n": -3}', 1),
        (b'{"n": {}}', 1),
        (b'{"n": 1e400}', 1),
        (b"", 1),
        (b"[]", 1),
        (b"{", 1),
        (b'{"n": 7} 8', 1),
        (b"\xff\xfe", 1),
        (b'{"n": 7, "x": 1' + b"0" * 5000 + b"}", 1),
    ],
)
def test_jobs(body: bytes, jobs: int) -> None:
    assert read(body).jobs == jobs


@pytest.mark.parametrize(
    ("path", "body", "jobs"),
    [
        (BATCH, {"messages": [[{}], [{}], [{}]]}, 3),
        (BATCH, {"messages": [[{}], [{}]], "n": 4}, 8),
        (BATCH, {"messages": "x"}, 1),
        (CHAT, {"messages": [{}, {}], "n": 4, "prompt": ["a", "b"]}, 4),
        ("/generative_scoring", {"query": "q", "items": ["a", "b"], "n": 9}, 2),
        ("/invocations", {"prompt": ["a", "b"], "n": 4}, 8),
        (RESPONSES, {"n": 500}, 1),
        ("/tokenize", {"prompt": "a", "n": 500}, 1),
        ("/of/a/plugin", {"prompt": ["a", "b"], "n": 4}, 8),
    ],
)
def test_jobs_of_a_route(path: str, body: dict[str, Any], jobs: int) -> None:
    assert read(json.dumps(body).encode(), path).jobs == jobs


@pytest.mark.parametrize("body", [b"[" * 5000 + b"]" * 5000, b'{"n":' + b"[" * 5000 + b"]" * 5000 + b"}"])
def test_a_body_that_is_nested_too_deeply_is_refused_here(body: bytes) -> None:
    """How deep the parser gets depends on the stack below it, which differs between the edge and vLLM."""
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        read(body)


@pytest.mark.parametrize(
    ("body", "tier"),
    [
        (b'{"service_tier": "flex", "n": 2, "prompt": ["a", "b"]}', "flex"),
        (b'{"service_tier": "flex", "n": {}}', "flex"),
        (b'{"service_tier": "flex", "x": NaN}', "flex"),
        ('{"service_tier": "flex"}'.encode("utf-16"), "flex"),
        (b'{"service_tier": null}', None),
        (b'{"service_tier": 3}', 3),
        (b'{"prompt": "a"}', None),
        (b'{"service_tier": "flex"', None),
    ],
)
def test_tiers(body: bytes, tier: object) -> None:
    assert read(body).tier == tier
    assert read(b'{"service_tier": "flex", "n": 2, "prompt": ["a", "b"]}') == RequestHints(4, "flex")


def test_the_value_is_for_one_reader() -> None:
    parsed = parse(b'{"n": 7}')
    assert parsed is not None
    assert parsed.take() == {"n": 7}
    assert parsed.taken
    assert parsed.value is None


class _Completion(BaseModel):
    """The fields that count, as vLLM's request model has them."""

    prompt: list[int] | list[list[int]] | str | list[str] | None = None
    n: int | None = 1


_NUMBERS = st.one_of(st.integers(-3, 300), st.floats(width=16), st.none(), st.booleans(), st.sampled_from(["7", "7.0"]))
_PROMPTS = st.recursive(st.one_of(_NUMBERS, st.text(max_size=3)), lambda part: st.lists(part, max_size=4), max_leaves=8)


@given(_PROMPTS, _NUMBERS)
def test_jobs_are_those_that_the_request_model_finds(prompt: object, n: object) -> None:
    body = {"prompt": prompt, "n": n}
    try:
        seen = TypeAdapter(_Completion).validate_python(body)
    except ValidationError:
        return
    several = isinstance(seen.prompt, list) and bool(seen.prompt) and not isinstance(seen.prompt[0], int)
    prompts = len(seen.prompt) if several and seen.prompt is not None else 1
    assert hints_of(COMPLETIONS, body).jobs == prompts * max(1, 1 if seen.n is None else seen.n)


MESSAGE = {"role": "user", "content": 'a, "b" [c] \\\\'}
TOOL = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [MESSAGE] * 60}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 'a,[{"' * 10_000}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [MESSAGE] * 60}]}),
        ("/v1/chat/completions", {"messages": [MESSAGE], "tools": [TOOL] * 32}),
        ("/v1/completions", {"prompt": [1] * 500}),
        ("/v1/completions", {"prompt": [[1] * 500] * 60}),
        ("/v1/completions", {"prompt": ["a"] * 60}),
        ("/detokenize", {"tokens": [1] * 500}),
        (RESPONSES, {"input": [MESSAGE] * 19}),
        (RESPONSES, {"input": "a" * 10_000}),
    ],
)
def test_bodies_with_few_items_pass(path: str, body: dict[str, Any]) -> None:
    for text in (json.dumps(body), json.dumps(body, indent=2)):
        require_few_items(path, text.encode(), 100, 500)
    odd = {**body, "x": float("nan"), "user": "\ud800 \\ud800"}
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32-be"):
        require_few_items(path, json.dumps(odd).encode(encoding), 100, 500)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [MESSAGE] * 101}),
        ("/v1/chat/completions", {"messages": [1] * 101}),
        ("/v1/chat/completions", {"messages": [[]] * 101}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [MESSAGE] * 101}]}),
        ("/v1/chat/completions", {"messages": [MESSAGE], "tools": [TOOL] * 34}),
        ("/v1/chat/completions", {"messages": [MESSAGE], "logit_bias": {str(n): 1 for n in range(150)}}),
        ("/v1/chat/completions", {"messages": [MESSAGE], "stop": [""] * 101}),
        ("/v1/chat/completions", {"messages": [MESSAGE], "response_format": {"json": {"enum": ["a"] * 101}}}),
        ("/v1/completions", {"prompt": ["a"] * 101}),
        ("/v1/completions", {"prompt": [[1]] * 101}),
        ("/v1/completions", {"prompt": [[]] * 101}),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": [1] * 101}),
        (RESPONSES, {"input": [MESSAGE] * 21}),
        (RESPONSES, {"input": [{}] * 5000}),
    ],
)
def test_bodies_with_many_items_are_refused_with_both_numbers(path: str, body: dict[str, Any]) -> None:
    for text in (json.dumps(body), json.dumps(body, indent=2)):
        for encoding in ("utf-8", "utf-8-sig", "utf-16"):
            with pytest.raises(InvalidRequest, match=r"at least [\d]+ items .*max_items_per_body allows 100"):
                require_few_items(path, text.encode(encoding), 100, 500)


@pytest.mark.parametrize("body", [{"prompt": [1] * 501}, {"prompt": [[1], [1] * 501, [1]]}, {"tokens": [1] * 501}])
def test_token_ids_are_bounded_by_the_context(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"context length is 500 tokens\. However, a prompt has 501 token ids"):
        require_few_items("/v1/completions", json.dumps(body).encode(), 100, 500)


def test_a_prompt_that_is_to_be_truncated_may_have_more_ids_than_the_context() -> None:
    body = {"prompt": [1] * 501, "truncate_prompt_tokens": 400}
    require_few_items("/v1/completions", json.dumps(body).encode(), 100, 500)


@pytest.mark.parametrize("body", [b"[" * 5000, b'{"a":' + b'"",' * 5000, b'"' * 5001, b"{" * 5000, b"\\" * 5001])
def test_what_is_no_json_is_counted_without_an_error_of_its_own(body: bytes) -> None:
    with suppress(InvalidRequest):
        require_few_items("/v1/completions", body, 100, 500)
