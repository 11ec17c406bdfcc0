"""An OpenAI endpoint whose answers' lengths follow from prompt and seed, and which can misbehave."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from tests.ports import free_port


def length(prompt: str, seed: int) -> int:
    """Of the answer."""
    return 1 + (len(prompt) * 7 + seed) % 50


class Model:
    """fails: so many answers fail first; hangs: none comes. A prompt with TOO LONG in it is refused."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.fails = 0
        self.hangs = False
        self.pause_s = 0.0
        self.usage = True
        self.key = ""
        self.names = ["demo"]
        self.most = self._under_way = 0
        self.app = FastAPI()
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/chat/completions")(self.chat)
        self.app.post("/v1/completions")(self.completion)

    async def models(self) -> dict[str, Any]:
        return {"data": [{"id": name} for name in self.names]}

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        return await self._answer(request, body, body["messages"][0]["content"])

    async def completion(self, request: Request) -> Response:
        body = await request.json()
        return await self._answer(request, body, body["prompt"])

    async def _answer(self, request: Request, body: dict[str, Any], prompt: str) -> Response:
        self.bodies.append(body)
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "no such key"}}, 401)
        if self.hangs:
            await asyncio.sleep(3600)
        if self.fails:
            self.fails -= 1
            return PlainTextResponse("the engine is away", 503)
        if "TOO LONG" in prompt:
            return JSONResponse({"error": {"message": "the prompt is longer than 4096 tokens"}}, 400)
        self._under_way += 1
        self.most = max(self.most, self._under_way)
        await asyncio.sleep(self.pause_s)
        self._under_way -= 1
        seed = body["seed"]
        self.requests[prompt, seed] += 1
        wanted = length(prompt, seed)
        tokens = min(wanted, body["max_tokens"])
        answer: dict[str, Any] = {"choices": [{"finish_reason": "length" if tokens < wanted else "stop"}]}
        if self.usage:
            answer["usage"] = {"prompt_tokens": len(prompt.split()), "completion_tokens": tokens}
        return JSONResponse(answer)


@contextmanager
def served(model: Model) -> Iterator[str]:
    """Its URL, in a thread of its own."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(model.app, port=port, log_level="error", timeout_graceful_shutdown=1))
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            thread.join(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)
