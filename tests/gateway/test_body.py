"""What a body asks for."""

import json
from contextlib import suppress
from typing import Any

import pytest

from gateway.asked import RESPONSES, Asked, asked_of, require_few_items
from shared.errors import InvalidRequest


@pytest.mark.parametrize(
    ("body", "jobs"),
    [
        (b'{"messages": [{}, {}]}', 1),
        (b'{"prompt": "a"}', 1),
        (b'{"prompt": null, "n": null}', 1),
        (b'{"prompt": [1, 2, 3]}', 1),
        (b'{"prompt": ["a", "b"]}', 2),
        (b'{"prompt": [ [1], [2, 3], [4] ], "n": 2}', 6),
        (b'{"prompt": []}', 1),
        (b'{"prompt_embeds": ["x", "y"]}', 2),
        (b'{"n": 7.0}', 7),
        (b'{"n": "7"}', 7),
        (b'{"n": 1, "n": 7}', 7),
        (b'{"\\u006e": 7}', 7),
        (b'{"n": -3}', 1),
        (b'{"n": {}}', 1),
        (b'{"n": 1e400}', 1),
        (b"", 1),
        (b"[]", 1),
        (b"{", 1),
        (b"\xff\xfe", 1),
        (b'{"n": ' + b"[" * 5000 + b"]" * 5000 + b"}", 1),
    ],
)
def test_jobs(body: bytes, jobs: int) -> None:
    assert asked_of(body).jobs == jobs


@pytest.mark.parametrize(
    ("body", "tier"),
    [
        (b'{"service_tier": "flex", "n": 2, "prompt": ["a", "b"]}', "flex"),
        (b'{"service_tier": "flex", "n": {}}', "flex"),
        (b'{"service_tier": null}', None),
        (b'{"service_tier": 3}', 3),
        (b'{"prompt": "a"}', None),
        (b'{"service_tier": "flex"', None),
    ],
)
def test_tiers(body: bytes, tier: object) -> None:
    assert asked_of(body).tier == tier
    assert asked_of(b'{"service_tier": "flex", "n": 2, "prompt": ["a", "b"]}') == Asked(4, "flex")


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
        with pytest.raises(InvalidRequest, match=r"at least [\d]+ items .*max_items_per_body allows 100"):
            require_few_items(path, text.encode(), 100, 500)


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
