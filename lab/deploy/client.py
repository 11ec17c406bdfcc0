"""A client of the suite's API."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from shared.errors import EngineFailed

PROMPT = "Tell me about the sea, and about all that lives in it."


@dataclass(frozen=True, slots=True)
class Client:
    """By its base URL and an API key."""

    url: str
    key: str

    def chat(self, max_tokens: int = 16, **more: Any) -> str:
        """One whole answer. Raises EngineFailed."""
        with self._http() as http:
            answer = http.post("/v1/chat/completions", json=_body(max_tokens, **more))
        if answer.status_code != 200:
            raise EngineFailed(f"HTTP {answer.status_code}: {answer.text[:300]}")
        return str(answer.json()["choices"][0]["message"]["content"])

    def stream(self, max_tokens: int, on_token: Callable[[int], None] | None = None) -> str:
        """A streamed answer's text; `on_token(n)` is called after the n-th piece. Raises EngineFailed."""
        text, pieces, ended = "", 0, False
        with (
            self._http() as http,
            http.stream("POST", "/v1/chat/completions", json=_body(max_tokens, stream=True)) as lines,
        ):
            if lines.status_code != 200:
                raise EngineFailed(f"HTTP {lines.status_code}: {lines.read().decode()[:300]}")
            for line in lines.iter_lines():
                said = line.removeprefix("data: ")
                if not line.startswith("data: "):
                    continue
                if said == "[DONE]":
                    ended = True
                    break
                event = json.loads(said)
                if "error" in event:
                    raise EngineFailed(f"the stream says: {event['error']}")
                if piece := event["choices"][0]["delta"].get("content"):
                    text, pieces = text + piece, pieces + 1
                    if on_token is not None:
                        on_token(pieces)
        if not ended:
            raise EngineFailed(f"the stream was cut after {pieces} pieces")
        return text

    def _http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {self.key}"}, timeout=120.0)


@dataclass(slots=True)
class Load:
    """Requests one after the other from a few threads, until it is closed: use as a context manager."""

    client: Client
    threads: int = 2
    whole: int = 0
    failed: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    _end: threading.Event = field(default_factory=threading.Event)
    _running: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> "Load":
        self._running = [threading.Thread(target=self._go) for _ in range(self.threads)]
        for each in self._running:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for each in self._running:
            each.join()

    def _go(self) -> None:
        while not self._end.is_set():
            began = time.monotonic()
            try:
                self.client.chat(8)
            except (EngineFailed, httpx.HTTPError) as error:
                self.failed.append(f"{type(error).__name__}: {error}"[:200])
            else:
                self.whole += 1
            self.longest_s = max(self.longest_s, time.monotonic() - began)


def _body(max_tokens: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": PROMPT}]
    return {
        "model": "demo",
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }
