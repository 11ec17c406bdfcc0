"""Plain streams, which the gateway writes itself, match vLLM's; the fast path matches vLLM's handlers."""

import asyncio
import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.admission import Admissions, current_request
from gateway.job import Job
from shared.domain.job import Phase
from shared.errors import Busy, EngineFailed, InvalidRequest, Overloaded
from shared.wire.messages import TokenStep
from tests.gateway.api import HELLO, PATHS, Api, Engine, events, listening, text_of
from tests.gateway.cluster import until

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]
# What happens next: a step of a job's engine, its failure, the abortion of its request, or a call beside it.
Act = TokenStep | Exception | None | Callable[[], None]
ABORT = None
USAGES: list[dict[str, bool] | None] = [
    None,
    {"include_usage": False},
    {"include_usage": True},
    {"include_usage": True, "continuous_usage_stats": True},
]
_ids = itertools.count()


class Script:
    """Runs jobs with the steps and errors that are put in."""

    def __init__(self) -> None:
        self.acts: asyncio.Queue[TokenStep | Exception] = asyncio.Queue()
        self.jobs: list[Job] = []

    async def run(self, job: Job) -> None:
        self.jobs.append(job)
        while not job.finished:
            act = await self.acts.get()
            if isinstance(act, Exception):
                raise act
            job.accept(TokenStep(list(act.tokens), act.finish_reason, act.stop_reason))


@dataclass
class FakeBody:
    """A connection that accepts `full_after` parts, and then no more until `make_room`."""

    parts: list[bytes]
    full_after: int | None = None
    open: bool = True
    full: bool = False
    on_room: Any = field(init=False)

    def __post_init__(self) -> None:
        self.on_room = lambda callback: setattr(self, "make_room", lambda: self._empty(callback))

    def _empty(self, callback: Callable[[], None]) -> None:
        assert self.full
        self.full = False
        callback()

    def write(self, part: bytes) -> None:
        assert self.open
        self.parts.append(part)
        if self.full_after is not None:
            self.full_after -= 1
            self.full = self.full or not self.full_after


@dataclass(frozen=True)
class Outcome:
    """What a client received, and the end of its job."""

    events: list[Any]
    finish_reason: str
    tokens: int


class Front:
    """vLLM's handlers over a script."""

    def __init__(self, api: Api, script: Script) -> None:
        self.api = api
        self.script = script
        self.servings = {"chat": api.state.openai_serving_chat, "completions": api.state.openai_serving_completion}
        self.tokenizer = self.servings["chat"].renderer.tokenizer
        self.cache_salt = ""  # of the client's key
        self._admissions = Admissions(api.settings, ())

    @contextmanager
    def with_vllms_generators(self) -> Iterator[None]:
        ours = {}
        for serving in self.servings.values():
            ours[serving] = {name: serving.__dict__.pop(name) for name in list(serving.__dict__) if "stream" in name}
            assert ours[serving]
        try:
            yield
        finally:
            for serving, methods in ours.items():
                serving.__dict__.update(methods)

    async def outcome(
        self,
        body: dict[str, Any],
        groups: Sequence[Sequence[Act]],
        *,
        writer: str = "_generate",
        direct: bool = False,
        full_after: int | None = None,
    ) -> Outcome:
        """Of a request whose job gets each group of acts within one turn of the event loop.

        writer: the name of the generator that is to write the stream. direct: there is a connection to write to.
        """
        self.script.__init__()
        parts: list[bytes] = []
        self.body = FakeBody(parts, full_after)
        with self._admissions.for_class("default").admit("") as state:
            state.arrived_s, state.connection, state.cache_salt = time.time(), None, self.cache_salt
            state.connection = self.body if direct else None
            current_request.set(state)
            stream = await self.generator(body)
            assert stream.__name__ == writer
            reading = asyncio.create_task(self._read(stream, parts))
            await settle()
            for group in groups:
                for act in group:
                    if act is ABORT:
                        name = body["request_id"]
                        await self.api.state.engine_client.abort(f"chatcmpl-{name}")
                        await self.api.state.engine_client.abort(f"cmpl-{name}-0")
                    elif isinstance(act, TokenStep | Exception):
                        self.script.acts.put_nowait(act)
                    else:
                        act()
                await settle()
            await asyncio.wait_for(reading, 20)
            await settle()
        (job,) = self.script.jobs
        return Outcome(parsed(parts), job.finish_reason, len(job.tokens))

    async def both(self, body: dict[str, Any], groups: list[list[Act]], *, direct: bool) -> tuple[Outcome, Outcome]:
        """The outcome with vLLM's generator, and with ours."""
        name = f"{'chat_' if 'messages' in body else ''}completion_stream_generator"
        with self.with_vllms_generators():
            theirs = await self.outcome(body, groups, writer=name)
        return theirs, await self.outcome(body, groups, direct=direct)

    async def generator(self, body: dict[str, Any]) -> Any:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        if "messages" in body:
            return await self.servings["chat"].create_chat_completion(ChatCompletionRequest(**body))
        return await self.servings["completions"].create_completion(CompletionRequest(**body))

    async def _read(self, stream: AsyncIterator[str | bytes], parts: list[bytes]) -> None:
        async for part in stream:
            parts.append(part.encode() if isinstance(part, str) else part)


async def settle() -> None:
    """The turns of the event loop in which all that follows from an act happens."""
    for _ in range(40):
        await asyncio.sleep(0)


def parsed(parts: list[bytes]) -> list[Any]:
    """The events, without their times; each part holds whole events."""
    found: list[Any] = []
    for part in parts:
        assert part.endswith(b"\n\n")
        for event in part[:-2].split(b"\n\n"):
            text = event.decode().removeprefix("data: ")
            found.append(text if text == "[DONE]" else json.loads(text))
            if isinstance(found[-1], dict) and "created" in found[-1]:
                assert abs(found[-1].pop("created") - time.time()) < 30
    return found


@pytest.fixture
def front(api: Api) -> Iterator[Front]:
    script = Script()
    with api.running_jobs(script):
        yield Front(api, script)


def body_of(kind: str, **more: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {"messages": HELLO} if kind == "chat" else {"prompt": [400, 401, 402]}
    return {"model": "demo", "stream": True, "max_tokens": 200, "request_id": f"r{next(_ids)}", **prompt, **more}


ENDS: list[Act] = [
    TokenStep([310], "length"),
    TokenStep([310, 311], "stop"),
    TokenStep([], "stop"),
    TokenStep([312], "stop", 312),
    TokenStep([305, 305], "repetition"),
    TokenStep([], "length"),
    EngineFailed("the engine \u2026 failed"),
    Busy("too much to do"),
    RuntimeError("a bug"),
    ABORT,
]


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[int], list[list[Act]]]:
    """Tokens of any kind, parts of characters among them, in steps and groups of steps of any size, and an end."""
    tokens = draw(st.lists(st.one_of(st.integers(300, 340), st.integers(0, 1023)), max_size=30))
    acts: list[Act] = []
    left = list(tokens)
    while left:
        size = draw(st.integers(1, 4))
        acts.append(TokenStep(left[:size]))
        left = left[size:]
    acts.append(draw(st.sampled_from(ENDS)))
    sizes = draw(st.lists(st.integers(1, 4), min_size=len(acts), max_size=len(acts)))
    groups: list[list[Act]] = []
    while acts:
        size = sizes.pop()
        groups.append(acts[:size])
        acts = acts[size:]
    if not isinstance(groups[-1][-1], TokenStep):  # at a moment of its own: vLLM's drops what came with it
        *steps, end = groups.pop()
        groups += [steps, [end]]
    return tokens, groups


@pytest.mark.parametrize("kind", PATHS)
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data(), answer=answers())
async def test_plain_streams_and_vllms_say_the_same(front: Front, kind: str, data: st.DataObject, answer: Any) -> None:
    tokens, groups = answer
    text = front.tokenizer.decode(tokens)
    cuts = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 6))
    stops = [text[at : at + size] for at, size in data.draw(st.lists(cuts, max_size=2))] if text else []
    body = body_of(
        kind,
        stream_options=data.draw(st.sampled_from(USAGES)),
        stop=[stop for stop in stops if stop],
        include_stop_str_in_output=data.draw(st.booleans()),
        skip_special_tokens=data.draw(st.booleans()),
        spaces_between_special_tokens=data.draw(st.booleans()),
        min_tokens=data.draw(st.sampled_from([0, 0, 3])),
    )
    theirs, ours = await front.both(body, groups, direct=data.draw(st.booleans()))
    if ours.finish_reason == "stop" and theirs.finish_reason in ("length", "repetition"):
        # The engine's last step completes a stop string. vLLM finds it when that step has ended the job already: its
        # client reads "stop" all the same, and only the job's record differs.
        theirs = replace(theirs, finish_reason="stop")
    assert ours == theirs


def one_by_one(front: Front, text: str) -> list[list[Act]]:
    tokens = front.tokenizer.encode(text, add_special_tokens=False)
    return [[TokenStep([token], "length" if at == len(tokens) - 1 else "")] for at, token in enumerate(tokens)]


@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize("kind", PATHS)
async def test_a_plain_stream_has_text_a_reason_and_counts(front: Front, kind: str, usage: Any) -> None:
    text = "Grüße, 世界! \U0001f600 done"
    steps = one_by_one(front, text)
    theirs, ours = await front.both(body_of(kind, stream_options=usage), steps, direct=bool(usage))
    assert ours == theirs
    assert (text_of(ours.events), ours.events[-1]) == (text, "[DONE]")
    chunks = [event for event in ours.events[:-1] if event["choices"]]
    assert len(chunks) == len(steps) + (kind == "chat")
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert ours.events[-2]["system_fingerprint"]
    if usage and usage["include_usage"]:
        assert ours.events[-2]["usage"]["completion_tokens"] == len(steps)
        assert all(("usage" in event) == bool(usage.get("continuous_usage_stats")) for event in chunks)


@pytest.mark.parametrize("kind", PATHS)
async def test_an_aborted_stream_ends_with_that_reason(front: Front, kind: str) -> None:
    theirs, ours = await front.both(body_of(kind), [[TokenStep([300])], [ABORT]], direct=False)
    assert ours == theirs
    assert ours.events[-2]["choices"][0]["finish_reason"] == "abort"


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        *((kind, more) for kind in PATHS for more in ({"n": 2}, {"logprobs": 1}, {"echo": True})),
        *((kind, {"return_token_ids": True}) for kind in PATHS),
        ("completions", {"stream_interval": 3}),
        ("completions", {"prompt": [[400, 401], [402]]}),
        ("chat", {"tools": [TOOL], "tool_choice": "none"}),
    ],
)
async def test_other_streams_are_written_by_vllm(front: Front, kind: str, more: dict[str, Any]) -> None:
    more = more | ({"add_generation_prompt": False} if kind == "chat" and "echo" in more else {})
    with front._admissions.for_class("default").admit("") as state:
        state.arrived_s, state.connection, state.cache_salt = time.time(), None, ""
        current_request.set(state)
        stream = await front.generator(body_of(kind) | more)
    assert stream.__name__ == f"{'chat_' if kind == 'chat' else ''}completion_stream_generator"


@pytest.mark.parametrize("room", [True, False])
async def test_tokens_that_a_slow_reader_has_no_room_for_become_one_event(front: Front, room: bool) -> None:
    text = "one two three four five six seven"
    steps = one_by_one(front, text)
    if room:
        steps.insert(-1, [lambda: front.body.make_room()])
    outcome = await front.outcome(body_of("completions"), steps, direct=True, full_after=2)
    assert text_of(outcome.events) == text
    assert len(outcome.events) == 1 + 2 + room + 1 + 1  # its own first one, two, all that waited, the end, [DONE]


async def test_requests_of_keys_with_different_salts_share_no_prefix(front: Front) -> None:
    salts = []
    for front.cache_salt, own in (("", None), ("a", None), ("b", None), ("a", "own"), ("", "own"), ("a", None)):
        more = {"cache_salt": own} if own else {}
        await front.outcome(body_of("chat", **more), [[TokenStep([300], "length")]])
        salts.append(front.script.jobs[0].spec.generation.cache_salt)
    assert (salts[0], salts[4], salts[1]) == ("", "own", salts[5])
    assert len(set(salts)) == 5
    assert not any(salt in ("a", "b") for salt in salts), "workers see no key's salt"


# Stop strings and clients that leave, through the whole gateway


async def text_to_stop_in(api: Api, kind: str) -> str:
    response = await (api.chat if kind == "chat" else api.complete)(max_tokens=40)
    await api.final_reports(1)
    api.reset()
    return text_of([response.json()])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("n", [1, 2])
async def test_a_stop_string_ends_the_job_at_its_instances(api: Api, kind: str, stream: bool, n: int) -> None:
    full = await text_to_stop_in(api, kind)
    stop = full[len(full) // 2 :][:6]
    decode = api.cluster.decodes[0]
    decode.before_token = lambda count: asyncio.sleep(0.002) if count < 38 else asyncio.Event().wait()
    send = api.chat if kind == "chat" else api.complete
    response = await send(max_tokens=40, stop=[stop], stream=stream, **({"n": n, "temperature": 1} if n > 1 else {}))
    messages = events(response) if stream else [response.json()]
    for index in range(n):
        chunks = [{"choices": [c for c in each["choices"] if c["index"] == index]} for each in messages]
        assert text_of(chunks) == full[: full.index(stop)]
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        assert reasons[-1] == "stop"
    for report in await api.final_reports(n):
        assert (report.phase, report.outcome, report.slo_met is None) == (Phase.COMPLETED, "stop", False)
        assert 0 < report.output_tokens < 40
        assert report.timeline().outcome == "stop"
    await asyncio.wait_for(decode.cancelled.wait(), 20)
    transfers = {each.transfer_id for each in api.cluster.prefill.prefills}
    await until(lambda: transfers <= set(api.cluster.prefill.released))


async def test_a_client_that_leaves_cancels_its_job(api: Api) -> None:
    decode = api.cluster.decodes[0]
    reached = decode.hang_at(2)
    running = asyncio.create_task(api.complete(max_tokens=40, stop=["never"]))
    await reached.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    (report,) = await api.final_reports(1)
    assert (report.phase, report.outcome, report.slo_met) == (Phase.CANCELLED, "cancelled", None)
    await asyncio.wait_for(decode.cancelled.wait(), 20)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/v1/completions", "/v1/messages"])
@pytest.mark.parametrize("error", [InvalidRequest("it cannot be"), Overloaded("full", retry_after_s=3.0)])
async def test_an_error_before_the_first_token_is_the_status_of_a_stream(
    front: Front, path: str, error: InvalidRequest | Overloaded
) -> None:
    """Except for Responses, whose first event says that the job was submitted."""
    body = {"input": "x"} if "responses" in path else {"prompt": "x", "messages": HELLO, "max_tokens": 4}
    front.script.acts.put_nowait(error)
    front.script.acts.put_nowait(error)
    plain = await front.api.post(path, body)
    streamed = await front.api.post(path, {**body, "stream": True})
    assert plain.status_code == error.http_status
    if path == "/v1/responses":
        assert streamed.status_code == 200
        for text in ("response.created", error.message, f'"code": "{error.code}"'):
            assert text in streamed.text
    elif isinstance(error, Overloaded):
        assert (streamed.status_code, streamed.headers["retry-after"]) == (429, "3")
    else:
        assert (streamed.status_code, streamed.json()) == (plain.status_code, plain.json())


# The fast path

JSON = "content-type: application/json\r\n"
CHAT = {"messages": HELLO, "stream": True}


class Ways:
    """One server, whose requests may or may not use the fast path."""

    def __init__(self, api: Api, port: int) -> None:
        self.edge, self.port, self.taken = api.edge, port, 0

    async def raw(self, kind: str, fields: Any, headers: str, *, fast: bool) -> list[bytes]:
        """The lines of the answer, without what differs between any two."""
        path, self.taken = self.edge.fast_path, 0
        assert path is not None

        def counting(*arguments: Any) -> Any:
            found = path(*arguments)
            self.taken += found is not None
            return found

        if not isinstance(fields, bytes):
            fields = json.dumps({"model": "demo", "max_tokens": 5, **fields}).encode()
        self.edge.fast_path = counting if fast else None
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            head = f"POST {PATHS[kind]} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n{headers}"
            writer.write(f"{head}content-length: {len(fields)}\r\n\r\n".encode() + fields)
            text = await asyncio.wait_for(reader.read(-1), 20)
            writer.close()
        finally:
            self.edge.fast_path = path
        for differs in (rb'"created":\d+', rb'"id":"[^"]*"', rb"date: [^\r]*", rb"\r\n[0-9a-f]+\r\n"):
            text = re.sub(differs, b"", text)
        return text.splitlines()


@pytest_asyncio.fixture(loop_scope="session")
async def ways(api: Api) -> AsyncIterator[Ways]:
    async with listening(api.edge, lifespan="off") as server:  # the application's has begun
        with api.running_jobs(Engine()):
            yield Ways(api, server.port)


STREAM = {"stream": True, "prompt": "Hello"}
MORE = ({}, {"stop": ["x"]}, {"stream_options": {"include_usage": True}}, {"temperature": 0})


@pytest.mark.parametrize(
    ("kind", "fields", "headers", "taken"),
    [
        *(("chat", {**CHAT, **more}, JSON, True) for more in MORE),
        *(("completions", {**STREAM, **more}, JSON, True) for more in MORE),
        ("chat", {**CHAT, "model": "unknown"}, JSON, True),  # vLLM's own errors
        ("chat", {**CHAT, "max_tokens": -1}, JSON, True),
        ("chat", {**CHAT, "max_tokens": 1_000_000}, JSON, True),
        ("completions", {**STREAM, "prompt": ["a", "b"]}, JSON, True),
        ("completions", {**STREAM, "request_id": "no such\u00e9 thing"}, JSON, True),
        ("chat", {"messages": HELLO}, JSON, False),
        ("chat", {**CHAT, "n": 2}, JSON, False),
        ("chat", {**CHAT, "logprobs": True}, JSON, False),
        ("chat", {**CHAT, "chat_template": "{{ messages }}"}, JSON, False),
        ("chat", {**CHAT, "messages": "wrong"}, JSON, False),
        ("chat", {**CHAT, "messages": [{"role": "user", "content": "a" * 20_000}]}, JSON, False),
        ("completions", {"stream": True}, JSON, False),
        ("completions", {**STREAM, "echo": True}, JSON, False),
        ("completions", b"{no json", JSON, False),
        ("completions", b"[]", JSON, False),
        ("chat", CHAT, "content-type: text/plain\r\n", False),
        ("chat", CHAT, "", False),
        ("chat", CHAT, f"{JSON}origin: http://a\r\n", False),
    ],
)
async def test_the_fast_path_gives_the_same_bytes(
    ways: Ways, kind: str, fields: Any, headers: str, taken: bool
) -> None:
    usual = await ways.raw(kind, fields, headers, fast=False)
    fast = await ways.raw(kind, fields, headers, fast=True)
    assert ways.taken == taken
    assert sorted(fast) == sorted(usual) if fields == {**STREAM, "prompt": ["a", "b"]} else fast == usual
