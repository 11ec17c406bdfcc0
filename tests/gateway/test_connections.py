"""Plain streams on real connections, and how long their tokens wait for others under load."""

import asyncio
import gc
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from starlette.requests import Request

from gateway.job import Job
from gateway.plain_stream import MIN_INTERVAL_S, PERIOD_S, Pace, StreamPass
from shared.wire.messages import TokenStep
from tests.gateway.api import HELLO, Api, Engine, events, listening, text_of
from tests.gateway.cluster import until

LONG = 40_000  # tokens
SMALL = 4096  # bytes, of the kernel's buffers at either end


class Server:
    """A front end on a port whose connections buffer little."""

    def __init__(self, engine: Engine, port: int, connections: set[Any]) -> None:
        self.engine = engine
        self.port = port
        self.connections = connections
        self.writers: list[asyncio.StreamWriter] = []
        self.url = f"http://127.0.0.1:{port}/v1/completions"

    async def request(self, **more: Any) -> asyncio.StreamReader:
        """Send a request; nothing of its answer is read."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=SMALL)
        body = json.dumps({"model": "demo", "stream": True, "prompt": [400, 401], **more}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-length: %d\r\n" % len(body)
        writer.write(head + b"content-type: application/json\r\n\r\n" + body)
        self.writers.append(writer)
        return reader

    async def answer(self, reader: asyncio.StreamReader) -> list[Any]:
        """The events of an answer, read to its end."""
        head, _, rest = (await asyncio.wait_for(reader.read(-1), 20)).partition(b"\r\n\r\n")
        assert b" 200 " in head
        text = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            text += rest[: int(size, 16)]
            rest = rest[int(size, 16) + 2 :]
        *parts, done = [part.removeprefix(b"data: ") for part in text.removesuffix(b"\n\n").split(b"\n\n")]
        assert done == b"[DONE]"
        return [json.loads(part) for part in parts]


@pytest_asyncio.fixture(loop_scope="session")
async def server(api: Api) -> AsyncIterator[Server]:
    async with listening(api.edge, lifespan="off") as running:  # the application's has begun
        running.buffer_little(SMALL)
        engine = Engine()
        with api.running_jobs(engine):
            server = Server(engine, running.port, running.server.server_state.connections)
            yield server
        for writer in server.writers:
            writer.close()


class TestStreams:
    pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

    async def test_a_reader_that_stops_in_a_long_stream_costs_bounded_memory_and_no_time_of_others(
        self, server: Server, api: Api
    ) -> None:
        """Its stream gets 16 tokens a step, of which only the first are read until 16 others have all of theirs."""
        reader = await server.request(max_tokens=1900, request_id="stops")
        await until(lambda: reader._buffer)
        buffered: list[int] = []
        (connection,) = (each for each in server.connections if not each.cycle.response_complete)

        async def flood(job: Job) -> None:
            if "stops" in job.spec.job_id:
                left = LONG - len(job.tokens)
                tokens = [300 + at % 90 for at in range(min(16, left))]
                job.accept(TokenStep(tokens, "length" if left <= 16 else ""))
                buffered.append(connection.transport.get_write_buffer_size())

        server.engine.before = flood
        others = [await server.request(max_tokens=200) for _ in range(16)]
        answers = await asyncio.gather(*map(server.answer, others))
        assert all(len(answer) == 200 for answer in answers)  # each token an event
        await until(lambda: any("stops" in job.spec.job_id for job in server.engine.ended), 60)
        assert max(buffered) < 128 << 10
        slow = await server.answer(reader)
        assert len(slow) < 2000  # the tokens that did not fit into the buffers are one event
        (tokens,) = (job.tokens for job in server.engine.ended if "stops" in job.spec.job_id)
        assert len(tokens) == LONG
        assert text_of(slow) == api.state.openai_serving_completion.renderer.tokenizer.decode(tokens)

    async def test_a_client_that_leaves_ends_its_job(self, server: Server) -> None:
        reached = asyncio.Event()

        async def hang(job: Job) -> None:
            if len(job.tokens) == 5:
                reached.set()
                await asyncio.Event().wait()

        server.engine.before = hang
        reader = await server.request(max_tokens=50)
        await asyncio.wait_for(reached.wait(), 20)
        await until(lambda: reader._buffer)
        server.writers[0].close()
        await until(lambda: server.engine.ended)
        assert not server.engine.ended[0].finished

    async def test_answers_follow_each_other_on_one_connection(self, server: Server) -> None:
        async with httpx.AsyncClient() as client:
            texts = []
            for stream in (True, False, True):
                body = {"model": "demo", "stream": stream, "prompt": [400], "max_tokens": 7}
                response = await client.post(server.url, json=body)
                texts.append(text_of(events(response) if stream else [response.json()]))
        assert texts[0]
        assert len(set(texts)) == 1

    @pytest.mark.parametrize("kind", ["completions", "chat/completions"])
    async def test_a_stream_keeps_no_bytes_of_its_body(self, server: Server, api: Api, kind: str) -> None:
        go = asyncio.Event()
        server.engine.before = lambda _: go.wait()
        prompt = {"prompt": [400], "logprobs": 1} if kind == "completions" else {"messages": HELLO, "logprobs": True}
        body = {"stream": True, "max_tokens": 3, **prompt, "padding": "p" * 100_000}
        running = asyncio.create_task(api.post(f"/v1/{kind}", body))
        await until(lambda: server.engine.jobs)
        requests = [each for each in gc.get_objects() if type(each) is Request]
        assert not [each for each in requests if getattr(each, "_body", None) or getattr(each, "_json", None)]
        assert api.admission.held_bytes.total == len(json.dumps({"model": "demo", **body}))
        go.set()
        assert (await running).status_code == 200
        assert api.admission.held_bytes.total == 0


# Passes over the streams that have tokens


class Stream:
    """Counts how often it is served."""

    def __init__(self, max_delay_s: float, *, urgent: bool = False) -> None:
        self.queued = self.held = False
        self.served_mono = asyncio.get_running_loop().time()
        self.max_delay_s = max_delay_s
        self.urgent = urgent
        self.served: list[float] = []
        self.events = 0
        self.failed: Exception | None = None
        self.error: Exception | None = None

    def queue(self) -> None:
        self.queued, self.held = True, False
        self.events += 1

    def advance(self) -> None:
        self.served.append(time.monotonic())
        if self.error is not None:
            raise self.error

    def fail(self, error: Exception) -> None:
        self.failed = error


def passes(interval_s: float) -> Any:
    pace = Pace()
    pace.interval_s = interval_s
    return StreamPass(pace)


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_tokens_of_a_turn_leave_together_and_a_stream_that_crashes_fails_alone() -> None:
    serving, stream, bad = passes(0.0), Stream(1.0), Stream(0.0)
    bad.error = RuntimeError("a bug")
    for _ in range(5):
        serving.add(bad)
        serving.add(stream)
    await turns()
    assert bad.failed is bad.error
    serving.add(stream)
    await turns()
    assert (len(stream.served), stream.events) == (2, 2)


async def test_under_load_tokens_wait_for_others_as_long_as_their_class_allows() -> None:
    serving, began = passes(interval_s=60.0), time.monotonic()
    quick, slow = Stream(max_delay_s=0.4), Stream(max_delay_s=0.8)
    for _ in range(4):
        serving.add(quick)
        serving.add(slow)
        await turns()
    assert not quick.served
    assert not slow.served
    await until(lambda: slow.served)
    assert (len(quick.served), len(slow.served), quick.events, slow.events) == (1, 1, 1, 1)
    assert quick.served[0] - began >= 0.4
    assert slow.served[0] - began >= 0.8


async def test_the_first_and_the_last_tokens_do_not_wait_and_are_served_once() -> None:
    serving = passes(interval_s=60.0)
    first, last, other = Stream(30.0, urgent=True), Stream(0.5), Stream(0.5)
    for stream in (first, last, other):
        serving.add(stream)
    await turns()
    assert (len(first.served), len(last.served)) == (1, 0)
    last.urgent = True
    serving.add(last)
    await turns()
    assert (len(last.served), last.held) == (1, False)
    await until(lambda: other.served)
    await turns()
    assert (len(last.served), len(other.served)) == (1, 1)


async def test_the_pace_is_measured_while_there_are_tokens_and_then_forgotten() -> None:
    serving, stream = passes(0.4), Stream(1.0, urgent=True)
    pace, looks = serving._pace, list[int]()
    pace.measure = lambda: not looks.append(1)
    async with asyncio.timeout(10):
        while not looks:
            serving.add(stream)
            await asyncio.sleep(0.01)
    await until(lambda: pace.interval_s == 0.0)
    count = len(looks)
    await turns()
    assert len(looks) == count


async def test_a_process_that_computes_little_has_no_timer_for_its_pace() -> None:
    clock, stream = Clock(), Stream(1.0)
    serving = StreamPass(clock.pace)

    async def serve(busy: float) -> bool:
        clock.pass_period(busy, 0.01)
        serving.add(stream)
        await turns()
        return serving._measuring

    assert not any([await serve(0.2) for _ in range(5)])
    assert await serve(0.3)
    clock.pass_period(0.3, 0.01)
    serving._measure()
    assert serving._measuring, "it goes on while the process computes as much"
    clock.pass_period(0.2, 0.01)
    serving.add(stream)
    await turns()
    serving._measure()
    assert not serving._measuring
    assert await serve(0.9)


class Clock:
    """The time and the process's CPU time, and a pace that reads them."""

    def __init__(self) -> None:
        self.now_s = self.used_s = 100.0
        self.pace = Pace(lambda: self.now_s, lambda: self.used_s)

    def intervals(self, count: int, busy: float, late_s: float = 0.0) -> list[float]:
        """The interval after each of so many periods."""
        found = []
        for _ in range(count):
            self.pass_period(busy, late_s)
            self.pace.measure()
            found.append(self.pace.interval_s)
        return found

    def pass_period(self, busy: float, late_s: float = 0.0) -> None:
        self.now_s += PERIOD_S + late_s
        self.used_s += PERIOD_S * busy


def test_the_interval_grows_while_the_process_is_busy() -> None:
    clock = Clock()
    assert not any(clock.intervals(50, 0.5))
    grown = clock.intervals(30, 0.9)
    assert (grown[0], grown[-1], grown) == (MIN_INTERVAL_S, 1.0, sorted(grown))
    assert clock.intervals(20, 0.2)[-1] == 0.0
    (*_, held) = clock.intervals(6, 0.9)
    assert set(clock.intervals(20, 0.65)) == {held}, "in between it stays as it is"


@pytest.mark.parametrize(("busy", "late", "waits"), [(0.7, 1, True), (0.1, 5, False)])
def test_a_process_that_gets_no_core_is_busy_if_it_has_work(busy: float, late: int, waits: bool) -> None:
    assert bool(Clock().intervals(1, busy, late * PERIOD_S)[0]) == waits
