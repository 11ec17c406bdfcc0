"""Promise 5: bad input gets the right 4xx in OpenAI's shape, and harms nobody."""

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from lab.demo.client import ApiClient
from lab.demo.findings import Section

_CHAT, _COMPLETE = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True)
class Bad:
    """A request that must be refused with one of `want`."""

    name: str
    path: str
    want: Collection[int]
    body: dict[str, Any] | None = None
    content: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)


def cases(model: str, max_model_len: int, max_body_bytes: int) -> tuple[Bad, ...]:
    """Every kind of bad input."""
    said = [{"role": "user", "content": "Hello!"}]
    chat, plain = {"model": model, "messages": said}, {"model": model, "prompt": "Hello"}
    return (
        Bad("malformed JSON", _CHAT, (400,), content=b'{"model": '),
        Bad("an empty body", _CHAT, (400, 422), content=b""),
        Bad("no messages", _CHAT, (400, 422), {"model": model}),
        Bad("messages of a wrong type", _CHAT, (400, 422), {"model": model, "messages": "Hello"}),
        Bad("an unknown role", _CHAT, (400, 422), {"model": model, "messages": [{"role": 7}]}),
        Bad("temperature as a word", _CHAT, (400, 422), {**chat, "temperature": "warm"}),
        Bad("temperature below zero", _CHAT, (400, 422), {**chat, "temperature": -1}),
        Bad("top_p over one", _CHAT, (400, 422), {**chat, "top_p": 1.5}),
        Bad("n = 0", _CHAT, (400, 422), {**chat, "n": 0}),
        Bad("negative max_tokens", _COMPLETE, (400, 422), {**plain, "max_tokens": -1}),
        Bad("huge max_tokens", _COMPLETE, (400, 422), {**plain, "max_tokens": 10**9}),
        Bad("a prompt beyond the context", _COMPLETE, (400,), {**plain, "prompt": [5] * (max_model_len + 1)}),
        Bad("token ids that do not exist", _COMPLETE, (400,), {**plain, "prompt": [10**9]}),
        Bad("negative token ids", _COMPLETE, (400, 422), {**plain, "prompt": [-5]}),
        Bad("an unknown model", _CHAT, (404,), {**chat, "model": "no-such-model"}),
        Bad("a body over the limit", _CHAT, (413,), content=b" " * (max_body_bytes + 1)),
        Bad("an unknown SLO class", _CHAT, (400,), chat, headers={"x-polyphase-slo": "no-such-class"}),
        Bad("an unknown path", "/v1/no-such-thing", (404,), chat),
    )


async def check_bad_input(api: ApiClient, max_body_bytes: int = 4 << 20) -> Section:
    """Send all of it; then a good request must be answered as before."""
    section = Section("Bad input is refused, with the right status")
    rows: list[tuple[str, ...]] = []
    for case in cases(api.model, await api.max_model_len(), max_body_bytes):
        headers = {"content-type": "application/json", **case.headers}
        content = json.dumps(case.body).encode() if case.content is None else case.content
        response = await api.post(case.path, headers=headers, content=content)
        message = _message(response.content, response.headers.get("content-type", ""))
        right = response.status_code in case.want and (message is not None or case.want == (404,))
        section.check(case.name, right, " or ".join(map(str, case.want)), response.status_code)
        rows.append((case.name, str(response.status_code), (message or "(not OpenAI's shape)")[:90]))
    section.table = (("sent", "status", "message"), rows)
    answer = await api.chat("Hello!", max_tokens=8)
    section.check("a good request afterwards", bool(answer["choices"]), "answered", "answered")
    return section


def _message(content: bytes, kind: str) -> str | None:
    """The message of an error in OpenAI's shape, in one line; None for another shape."""
    if "json" not in kind:
        return None
    try:
        return " ".join(str(json.loads(content)["error"]["message"]).split())
    except (ValueError, KeyError, TypeError):
        return None
