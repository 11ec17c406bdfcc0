"""One front end whose engine is a script, streamed once by vLLM's generators and once by ours."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gateway.admission import Admissions, current_request
from gateway.job import Job
from shared.wire.messages import TokenStep
from tests.gateway.api import Api

# What happens next: a step of a job's engine, its failure, that somebody aborts its request, or something beside it.
Act = TokenStep | Exception | None | Callable[[], None]
ABORT = None
TURNS = 40  # of the event loop, after which what follows from one act has happened


class Script:
    """Runs jobs as told: groups of acts, each group within one turn of the event loop."""

    def __init__(self) -> None:
        self.acts: asyncio.Queue[TokenStep | Exception] = asyncio.Queue()
        self.jobs: list[Job] = []

    async def run(self, job: Job) -> None:
        """Until its end or failure."""
        self.jobs.append(job)
        while not job.finished:
            act = await self.acts.get()
            if isinstance(act, Exception):
                raise act
            job.accept(TokenStep(list(act.tokens), act.finish_reason, act.stop_reason))

    def renew(self) -> None:
        self.acts = asyncio.Queue()
        self.jobs.clear()


@dataclass
class FakeBody:
    """A connection that takes all it is given. full_after: so many parts, after which its reader has to catch up."""

    parts: list[bytes]
    full_after: int | None = None
    open: bool = True
    full: bool = False
    told: Callable[[], None] = field(default=lambda: None)

    def write(self, part: bytes) -> None:
        assert self.open
        self.parts.append(part)
        if self.full_after is not None:
            self.full_after -= 1
            self.full = self.full or not self.full_after

    def make_room(self) -> None:
        assert self.full
        self.full = False
        self.told()

    def on_room(self, told: Callable[[], None]) -> None:
        self.told = told


@dataclass(frozen=True)
class Seen:
    """What a client saw, and what became of the job."""

    events: list[Any]
    finish_reason: str
    tokens: int


class Front:
    """vLLM's handlers over the script."""

    def __init__(self, api: Api, script: Script) -> None:
        self.state = api.app.state
        self.script = script
        self.tokenizer = self.state.openai_serving_chat.renderer.tokenizer
        self.plain = False  # whether ours wrote the last stream
        self.cache_salt = ""  # of the key of whoever sends the requests
        self._admissions = Admissions(api.settings, ())

    @contextmanager
    def vllms(self) -> Iterator[None]:
        """Streams are written by vLLM's own generators."""
        ours = {}
        for serving in (self.state.openai_serving_chat, self.state.openai_serving_completion):
            ours[serving] = {name: serving.__dict__.pop(name) for name in list(serving.__dict__) if "stream" in name}
            assert ours[serving]
        try:
            yield
        finally:
            for serving, methods in ours.items():
                serving.__dict__.update(methods)

    async def seen(
        self,
        body: dict[str, Any],
        groups: Sequence[Sequence[Act]],
        *,
        direct: bool = False,
        full_after: int | None = None,
    ) -> Seen:
        """Of one request whose job goes as told. `direct`: there is a connection to write to."""
        self.script.renew()
        parts: list[bytes] = []
        self.body = FakeBody(parts, full_after)
        with self._asking(self.body if direct else None):
            stream = await self._generator(body)
            self.plain = stream.__name__ == "_generate"
            reading = asyncio.create_task(self._read(stream, parts))
            await settle()
            for group in groups:
                for act in group:
                    if act is ABORT:
                        await self.state.engine_client.abort(self._id(body))
                    elif isinstance(act, TokenStep | Exception):
                        self.script.acts.put_nowait(act)
                    else:
                        act()
                await settle()
            await asyncio.wait_for(reading, 5)
            await settle()
        (job,) = self.script.jobs
        return Seen(parsed(parts), job.finish_reason, len(job.tokens))

    async def writer(self, **body: Any) -> str:
        """Whose generator would write such a stream."""
        with self._asking(None):
            return str((await self._generator(body)).__name__)

    @contextmanager
    def _asking(self, body: FakeBody | None) -> Iterator[None]:
        with self._admissions.for_class("default").admit("") as state:
            state.arrived_s, state.connection, state.cache_salt = time.time(), body, self.cache_salt
            current_request.set(state)
            yield

    async def _generator(self, body: dict[str, Any]) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        serving: Any
        if "messages" in body:
            serving = self.state.openai_serving_chat
            answer = await serving.create_chat_completion(ChatCompletionRequest(**body))
        else:
            serving = self.state.openai_serving_completion
            answer = await serving.create_completion(CompletionRequest(**body))
        assert hasattr(answer, "__anext__"), answer
        return answer

    def _id(self, body: dict[str, Any]) -> str:
        return f"chatcmpl-{body['request_id']}" if "messages" in body else f"cmpl-{body['request_id']}-0"

    async def _read(self, stream: AsyncIterator[str | bytes], parts: list[bytes]) -> None:
        async for part in stream:
            parts.append(part.encode() if isinstance(part, str) else part)


def text_of(events: list[Any]) -> str:
    """All of an answer."""
    choices = [choice for event in events if isinstance(event, dict) for choice in event["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


async def settle() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


def parsed(parts: list[bytes]) -> list[Any]:
    """The events, without the second at which they were created; each part holds whole ones."""
    found: list[Any] = []
    for part in parts:
        assert part.endswith(b"\n\n")
        for event in part[:-2].split(b"\n\n"):
            said = event.decode().removeprefix("data: ")
            found.append(said if said == "[DONE]" else json.loads(said))
            if isinstance(found[-1], dict) and "created" in found[-1]:
                assert abs(found[-1].pop("created") - time.time()) < 30
    return found
