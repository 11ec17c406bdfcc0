"""A gateway that answers chats, word by word."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

WORDS = ("Prefill ", "and ", "decode ", "part ", "ways.")
WAIT_S = 20.0


@dataclass
class Answers:
    """What it was asked, and when it goes on after its second word."""

    asked: list[tuple[dict[str, Any], dict[str, str]]] = field(default_factory=list)  # body, headers
    go: threading.Event = field(default_factory=threading.Event)
    key: str = ""  # that it wants

    def __post_init__(self) -> None:
        self.go.set()


def routes(app: FastAPI, answers: Answers) -> None:
    """The chat route."""

    @app.post("/v1/chat/completions")
    def chat(body: dict[str, Any], request: Request) -> Response:
        headers = dict(request.headers)
        if answers.key and headers.get("authorization") != f"Bearer {answers.key}":
            error = {"error": {"message": "this server needs an API key", "code": "invalid_api_key"}}
            return Response(json.dumps(error), status_code=401, media_type="application/json")
        answers.asked.append((body, headers))
        return StreamingResponse(_words(answers), media_type="text/event-stream")


def _words(answers: Answers) -> Iterator[str]:
    for place, word in enumerate(WORDS):
        if place == 2:
            answers.go.wait(WAIT_S)
        yield f"data: {json.dumps({'id': 'chatcmpl-x', 'choices': [{'delta': {'content': word}}]})}\n\n"
    yield f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': len(WORDS)}})}\n\n"
    yield "data: [DONE]\n\n"
